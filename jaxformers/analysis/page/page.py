"""One HTML page of tables and figures, and the files beside it."""

from __future__ import annotations

import base64
import dataclasses
import html
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.plotting.figures import Figure
from jaxformers.analysis.tables import published
from jaxformers.analysis.tables import results as tables


@dataclasses.dataclass
class Page:
  """What is on the page.

  Attributes:
    figures: in the order of the page, by the title of their section.
    notes: what is left out, and why.
    rows: of the table of results.
    speeds: parameters and speed of every line, see `speeds`.
    papers: of `published.tables`: the papers' tables with our runs in them.
  """

  figures: dict[str, list[Figure]] = dataclasses.field(default_factory=dict)
  notes: list[str] = dataclasses.field(default_factory=list)
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  speeds: str = ""
  papers: dict[str, Any] = dataclasses.field(default_factory=dict)

  def add(self, section: str, figure: Figure | None) -> None:
    """Puts a figure at the end of a section; one without numbers is noted."""
    if figure is None or not figure.rows:
      return
    if all(_void(row[-1]) for row in figure.rows):
      self.notes.append(f"{figure.title}: there is no number to draw.")
      return
    self.figures.setdefault(section, []).append(figure)


def _void(value: Any) -> bool:
  return isinstance(value, float) and not math.isfinite(value)


def write(page: Page, out: Path) -> Path:
  """index.html and the files of every figure; the path of the page."""
  out.mkdir(parents=True, exist_ok=True)
  for one in itertools.chain(*page.figures.values()):
    one.write(out)
  if page.rows:
    (out / "results.md").write_text(tables.markdown(page.rows) + "\n")
  for title, (tasks, own) in page.papers.items():
    name = _file(title)
    reasons = published.notes(own)
    for kind, form, mark in (
      ("md", published.markdown, "\n"),
      ("tex", published.latex, "% "),
    ):
      lines = [form(own, tasks), *(mark + reason for reason in reasons)]
      (out / f"{name}.{kind}").write_text("\n".join(lines) + "\n")
  path = out / "index.html"
  path.write_text(_html(page, out), encoding="utf-8")
  return path


CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0; padding: 1rem;
  color: #111; background: #fff; overflow-wrap: anywhere; }
body > * { max-width: 64rem; margin-left: auto; margin-right: auto; }
table { overflow-wrap: normal; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
figure { margin: 1.5rem auto; break-inside: avoid; }
figure img { width: 100%; height: auto; }
figcaption { font-size: .875rem; color: #333; }
/* As wide as text, or as a wider table needs and the window has. */
.scroll { overflow-x: auto; width: min-content; min-width: min(64rem, 100%);
  max-width: 100%; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .75rem .25rem 0;
  text-align: left; vertical-align: top; }
@media print { nav { display: none; } body > * { max-width: none; }
  table { font-size: .5625rem; } }
"""


def _html(page: Page, out: Path) -> str:
  def text(value: object) -> str:
    return html.escape(str(value))

  sections = ["Results", *page.figures, *(["Left out"] if page.notes else [])]
  links = "".join(
    f'<a href="#s{k}">{text(name)}</a>' for k, name in enumerate(sections)
  )
  parts = [
    '<!doctype html><html lang="en"><head><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    '<link rel="icon" href="data:,">',
    f"<title>jaxformers: report</title><style>{CSS}</style></head><body>",
    f"<h1>Report of runs</h1><nav>{links}</nav>",
    '<h2 id="s0">Results</h2>',
    *_tables(page.rows),
    *(_blocks(page.speeds) if page.speeds else ()),
    *_papers(page.papers),
  ]
  for k, (name, own) in enumerate(page.figures.items(), 1):
    parts.append(f'<h2 id="s{k}">{text(name)}</h2>')
    for one in own:
      picture = (out / f"{one.name}.svg").read_bytes()
      data = base64.b64encode(picture).decode()
      files = ", ".join(
        f'<a href="{one.name}.{kind}">{kind.upper()}</a>'
        for kind in ("png", "svg", "csv")
      )
      wide = round(110 * one.size[0])  # Pixels: a little above its size.
      parts.append(
        f'<figure id="{one.name}"><h3>{text(one.title)}</h3>'
        f'<img alt="{text(one.title)}" style="max-width:{wide}px" '
        f'src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text(one.caption)} {files}</figcaption></figure>"
      )
  if page.notes:
    items = "".join(f"<li>{text(note)}</li>" for note in page.notes)
    parts.append(f'<h2 id="s{len(sections) - 1}">Left out</h2><ul>{items}</ul>')
  return "\n".join([*parts, "</body></html>\n"])


def _file(title: str) -> str:
  """ "Table 1, ..." is kept in table_1."""
  return "table_" + re.sub(r"\D", "", title)


def _papers(papers: Mapping[str, Any]) -> list[str]:
  found = []
  for title, (tasks, own) in papers.items():
    name = _file(title)
    files = ", ".join(
      f'<a href="{name}.{kind}">{kind.upper()}</a>' for kind in ("md", "tex")
    )
    found += [
      f"<h3>TransJect, {html.escape(title)}</h3>",
      *_blocks(published.markdown(own, tasks)),
      "<p>Accuracy on test in percent; in brackets ours less theirs, in points "
      "and in standard errors of our seeds and of as many examples. Mind sizes "
      f"and protocol. {files}</p>",
      *(f"<p>{html.escape(reason)}</p>" for reason in published.notes(own)),
    ]
  return found


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  if not rows:
    return ["<p>No run has ended.</p>"]
  return [
    *_blocks(tables.markdown(rows)),
    "<p>Mean and sample deviation over seeds, on the test split, of the "
    "checkpoint chosen on the split that is named. Trivial: rules without a "
    "model.</p>",
  ]


def _blocks(markdown: str) -> list[str]:
  """Tables in Markdown as HTML."""
  found = []
  for block in markdown.split("\n\n"):
    lines = [
      [cell.strip() for cell in line.strip("|").split("|")]
      for line in block.splitlines()
    ]
    head, body = lines[0], lines[2:]
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    out = [f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>']
    for line in body:
      cells = "".join(
        f"<td>{html.escape(cell).replace('+-', '±')}</td>" for cell in line
      )
      out.append(f"<tr>{cells}</tr>")
    found.append("".join([*out, "</tbody></table></div>"]))
  return found
