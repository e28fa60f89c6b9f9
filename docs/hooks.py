"""Generates pages of the site: a page for each model, and the lists.

The lists name all configs, tasks and commands.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Fields of modules that the package sets, so that no config sets them.
WIRING = {
  "parent",
  "name",
  "mixer",
  "residual",
  "layer",
  "dtype",
  "max_len",
  "orthogonal_map",
}
sys.path.insert(0, str(ROOT))

from docs import tables  # noqa: E402


def _published(name: str) -> Iterator[str]:
  """Yields the published scores of a model, one line for each table row."""
  from jaxformers.analysis.tables import papers

  for table in papers.TABLES:
    # Rows with the name of the model, or with another title for it.
    rows = {
      row: scores
      for row, scores in table.scores.items()
      if row == name or table.rows.get(row, {}).get("model.name") == name
    }
    for row, scores in rows.items():
      # Leave out columns for which the paper has no score.
      titles = [column.title for column in table.columns]
      cells = [
        f"{title} {score}"
        for title, score in zip(titles, scores, strict=False)
        if score is not None
      ]
      yield f"- {table.title}, row {row}: {', '.join(cells)}"


def _measured(name: str) -> Iterator[str]:
  """Yields the rows on a model of the tables of results, with headings."""
  for page in tables.PAGES:
    if not page.startswith("docs/"):
      continue
    shown = set()  # A page may name a table several times.
    for table, title, part in tables.titled_tables(page):
      records = [r for r in tables.read(table) if r["model"] == name]
      if records and table not in shown:
        shown.add(table)
        link = f"[{title}](..{page.removeprefix('docs')}#{slugify(title, '-')})"
        yield f"\nFrom {link}{part and f', {part}'}:\n"
        yield tables.markdown(records)


def _options(make: Any, fixed: Mapping[str, Any]) -> Iterator[str]:
  """Yields a table row for each option of a mixer or block, with its default.

  Options that the variant fixes are left out.
  """
  # A function of heads lists its options; a module has them as fields.
  options = getattr(make, "options", None)
  if options is None:
    parameters = inspect.signature(make).parameters
    options = {
      key: p.default
      for key, p in parameters.items()
      if key not in WIRING and p.default is not p.empty
    }
  elif not isinstance(options, Mapping):
    options = make().options
  for key in sorted(options):
    if key not in fixed and key not in WIRING:
      yield f"| `{key}` | `{options[key]!r}` |"


def model_page(name: str) -> str:
  """Returns the Markdown page of a model."""
  from jaxformers.models import BLOCKS, MIXERS, MODELS

  variant = MODELS[name]
  block = BLOCKS[variant.block]
  make = MIXERS[variant.mixer] if variant.mixer else block
  # Title, docstring, and the settings of the variant.
  lines = [f"# {name}", "", "```", inspect.getdoc(make), "```", ""]
  if variant.mixer:
    lines += [
      f"The mixer `{variant.mixer}` in the block `{variant.block}`.",
      *(f"`{key}` is {value!r}." for key, value in variant.fixed.items()),
      *(f"`{k}` is {v!r} by default." for k, v in variant.defaults.items()),
      "",
    ]
  # A command that trains the model.
  command = "    python -m jaxformers.main --config lra/listops:size=tiny"
  lines += [f"{command},model={name} --workdir runs/{name}", ""]
  # Options of the mixer and of the block.
  for title, owner in (("mixer", make), ("block", block)):
    if title == "block" or variant.mixer:
      rows = list(_options(owner, variant.fixed))
      head = [f"| `model.{title}` | default |", "| --- | --- |"]
      lines += [*head, *rows, ""] if rows else []
  # Numbers of the papers, and of our tables.
  published = list(_published(name))
  lines += ["## Published numbers", "", *published, ""] if published else []
  measured = list(_measured(name))
  lines += ["## Our numbers", *measured] if measured else []
  lines += [
    "",
    "[Results](../results.md) has all numbers. Time and memory compared with",
    "PyTorch: [performance](../performance.md#encoders).",
  ]
  return "\n".join(lines)


def lists() -> str:
  """Returns the Markdown page of configs, tasks and commands."""
  from jaxformers.commands import (
    configs as list_configs,
  )
  from jaxformers.commands import console
  from jaxformers.commands import (
    tasks as list_tasks,
  )
  from jaxformers.config import packaged_names
  from jaxformers.foundations.tables import markdown_table
  from jaxformers.tasks import TASKS

  # The first line of a docstring describes a config or a task.
  configs = [
    (f"`{name}`", list_configs.document(path).splitlines()[0])
    for name, path in packaged_names().items()
  ]
  tasks = [
    (
      f"`{name}`",
      ", ".join(list_tasks.protocols(name)),
      inspect.getdoc(loader).splitlines()[0],
    )
    for name, loader in sorted(TASKS.items())
  ]
  return "\n\n".join(
    [
      "# Configs, tasks and commands",
      "## Commands",
      f"```\n{console.overview()}\n```",
      "## Configs",
      markdown_table(("`--config`", "short description"), configs),
      "## Tasks",
      markdown_table(("task", "protocols", "short description"), tasks),
    ]
  )


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the generated pages to the site and to its navigation."""
  from jaxformers.models import MODELS

  pages = {"commands.md": lists()}
  pages |= {f"models/{name}.md": model_page(name) for name in sorted(MODELS)}
  for path, content in pages.items():
    files.append(File.generated(config, path, content=content))
  # List the page of every model under "Models", after the general pages.
  for section in config.nav:
    if "Models" in section:
      section["Models"] = [
        *section["Models"],
        {"By name": [{n: f"models/{n}.md"} for n in sorted(MODELS)]},
      ]
  return files
