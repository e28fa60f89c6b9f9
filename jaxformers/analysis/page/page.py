"""The HTML page of a report, and the files of its tables and figures."""

from __future__ import annotations

import base64
import dataclasses
import html
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxformers.analysis.plotting.figures import Figure
from jaxformers.analysis.tables import published
from jaxformers.analysis.tables import results as tables
from jaxformers.foundations import requirements
from jaxformers.foundations.tables import split_cells


@dataclasses.dataclass
class Page:
  """Contents of the page.

  Attributes:
    figures: figures by the title of their section, in the order of the page.
    notes: sentences on runs and figures that are missing, incomplete or
      damaged.
    rows: rows of the table of results, see `results.summarise`.
    speeds: Markdown table of parameters and speeds, see `overview.speeds`.
    entropies: Markdown table of mean entropies, ours and the paper's.
    papers: tables of the papers with our runs, see `published.tables`.
  """

  figures: dict[str, list[Figure]] = dataclasses.field(default_factory=dict)
  notes: list[str] = dataclasses.field(default_factory=list)
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  speeds: str = ""
  entropies: str = ""
  papers: dict[str, Any] = dataclasses.field(default_factory=dict)

  def add(self, section: str, figure: Figure | None) -> None:
    """Adds a figure at the end of a section.

    Skips None and figures without rows. A figure without a finite number is
    skipped with a note.
    """
    if figure is None or not figure.rows:
      return
    # The last column of a row is the number that is drawn.
    if not any(math.isfinite(row[-1]) for row in figure.rows):
      self.notes.append(f"{figure.title}: there is no number to draw.")
      return
    self.figures.setdefault(section, []).append(figure)


def write(page: Page, out: Path) -> Path:
  """Writes index.html and the files of every figure and table.

  Returns:
    Path of index.html.
  """
  requirements.require("plots", "The page of a report")
  # Write the figures first, because the page embeds their SVG files.
  out.mkdir(parents=True, exist_ok=True)
  figures = [*itertools.chain(*page.figures.values())]
  # tqdm prints the progress bar on stderr; stdout has only the tables.
  with tqdm(figures, unit="figure") as bar:
    for figure in bar:
      bar.set_description(f"drawing {figure.name}")
      figure.write(out)
  if page.rows:
    text = tables.markdown(page.rows) + "\n"
    (out / "results.md").write_text(text, encoding="utf-8")
  if page.entropies:
    text = page.entropies + "\n"
    (out / "entropies.md").write_text(text, encoding="utf-8")
  # Write the papers' tables as Markdown and as LaTeX.
  for filled in page.papers.values():
    for kind, form, mark in (
      ("md", published.markdown, "\n"),
      ("tex", published.latex, "% "),
    ):
      reasons = [f"{mark}{reason}\n" for reason in published.notes(filled)]
      path = out / f"{filled.table.name}.{kind}"
      text = "".join([form(filled), "\n", *reasons])
      path.write_text(text, encoding="utf-8")
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
/* At least as wide as the text; wider for a wide table, up to the window. */
.scroll { overflow-x: auto; width: min-content; min-width: min(64rem, 100%);
  max-width: 100%; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .75rem .25rem 0;
  text-align: left; vertical-align: top; }
@media print { nav { display: none; } body > * { max-width: none; }
  table { font-size: .5625rem; } }
"""


def _text(value: object) -> str:
  """Returns a value as text with HTML's special characters escaped."""
  return html.escape(str(value))


def _html(page: Page, out: Path) -> str:
  """Returns the page as HTML.

  Args:
    page: contents of the page.
    out: folder with the SVG files of the figures.
  """
  # Collect the content of each section.
  notes = "".join(f"<li>{_text(note)}</li>" for note in page.notes)
  sections = {
    "Results": [
      *_results_html(page.rows),
      *(_tables_html(page.speeds) if page.speeds else ()),
      *_entropies_html(page.entropies),
      *_papers_html(page.papers),
    ],
    **{
      name: [_figure_html(figure, out) for figure in figures]
      for name, figures in page.figures.items()
    },
    **({"Notes": [f"<ul>{notes}</ul>"]} if notes else {}),
  }
  # Link to the sections by the ids s0, s1, ...
  links = "".join(
    f'<a href="#s{k}">{_text(name)}</a>' for k, name in enumerate(sections)
  )
  parts = [
    '<!doctype html><html lang="en"><head><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    '<link rel="icon" href="data:,">',
    f"<title>jaxformers: report</title><style>{CSS}</style></head><body>",
    f"<h1>Report of runs</h1><nav>{links}</nav>",
  ]
  # Append the sections.
  for k, (name, content) in enumerate(sections.items()):
    parts += [f'<h2 id="s{k}">{_text(name)}</h2>', *content]
  return "\n".join([*parts, "</body></html>\n"])


def _figure_html(figure: Figure, out: Path) -> str:
  """Returns a figure as HTML, with an embedded picture and links to files."""
  picture = (out / f"{figure.name}.svg").read_bytes()
  # Embed the picture, so that the page needs no other file.
  data = base64.b64encode(picture).decode()
  # Limit the width in pixels to slightly above the width of the picture.
  width = round(110 * figure.size[0])
  return (
    f'<figure id="{figure.name}"><h3>{_text(figure.title)}</h3>'
    f'<img alt="{_text(figure.title)}" style="max-width:{width}px" '
    f'src="data:image/svg+xml;base64,{data}">'
    f"<figcaption>{_text(figure.caption)} "
    f"{_links(figure.name, ('png', 'svg', 'csv'))}</figcaption></figure>"
  )


def _links(name: str, kinds: Sequence[str]) -> str:
  """Returns links to the files of a figure or table."""
  return ", ".join(f'<a href="{name}.{k}">{k.upper()}</a>' for k in kinds)


def _papers_html(papers: Mapping[str, Any]) -> list[str]:
  """Returns the papers' tables as HTML, with explanation and notes."""
  parts = []
  for title, filled in papers.items():
    parts += [
      f"<h3>{_text(title)}</h3>",
      *_tables_html(published.markdown(filled)),
      "<p>Test scores; shares are in percent. In brackets: our score minus the "
      "paper's, and this difference in standard errors. The standard error "
      "accounts for our seeds, for the paper's runs if the paper prints a "
      "deviation, and for the size of the test set. "
      "Compare only rows of the same sizes and protocol. "
      f"{_links(filled.table.name, ('md', 'tex'))}</p>",
      *(f"<p>{_text(reason)}</p>" for reason in published.notes(filled)),
    ]
  return parts


def _entropies_html(entropies: str) -> list[str]:
  """Returns the table of entropies as HTML, with an explanation."""
  if not entropies:
    return []
  return [
    "<h3>Entropy</h3>",
    *_tables_html(entropies),
    "<p>Mean over the layers after the embedding; mean and sample deviation "
    "over samples and seeds. The paper's numbers are TransJect's for IMDb "
    "(section 6), from an estimator that the paper does not name. See "
    "docs/report.md.</p>",
  ]


def _results_html(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the table of results as HTML, with an explanation."""
  if not rows:
    return ["<p>No run has ended.</p>"]
  return [
    *_tables_html(tables.markdown(rows)),
    "<p>Mean and sample deviation of the test score over seeds. The column "
    "<i>chosen on</i> names the split that selected the checkpoint. The "
    "column <i>trivial</i> has the scores of rules without a model.</p>",
  ]


def _tables_html(markdown: str) -> list[str]:
  """Returns Markdown tables and lines, separated by blank lines, as HTML."""
  return [
    _table_html(block) if block.startswith("|") else f"<p>{_text(block)}</p>"
    for block in markdown.split("\n\n")
  ]


def _table_html(markdown: str) -> str:
  """Returns a Markdown table as HTML."""
  # Skip the second line of the Markdown table, the rule below the header.
  header, _, *body = [
    [_text(cell) for cell in split_cells(line)] for line in markdown.split("\n")
  ]
  # Write the header and the rows.
  titles = "".join(f"<th>{cell}</th>" for cell in header)
  lines = ("".join(f"<td>{cell}</td>" for cell in line) for line in body)
  rows = "".join(f"<tr>{line}</tr>" for line in lines)
  # Replace the "+-" of Markdown by the sign.
  return (
    f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>'
    f"{rows.replace('+-', '±')}</tbody></table></div>"
  )
