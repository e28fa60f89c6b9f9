"""Pages of the site that are made from the package: models, and lists."""

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
# Fields of modules that the package sets by itself.
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
  """Yields the published numbers of a model, a line for each table."""
  from jaxformers.analysis.tables import papers

  for table in papers.TABLES:
    rows = {
      row: scores
      for row, scores in table.scores.items()
      if row == name or table.rows.get(row, {}).get("model.name") == name
    }
    for row, scores in rows.items():
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
    for table, title in tables.titled_tables(page):
      records = [r for r in tables.read(table) if r["model"] == name]
      if records:
        anchor = slugify(title, "-")
        yield f"\nFrom [{title}](../{page}.md#{anchor}):\n"
        yield tables.markdown(records)


def _options(make: Any, fixed: Mapping[str, Any]) -> Iterator[str]:
  """Yields the options of a mixer or block with their defaults."""
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
  """Returns the page of a model, in Markdown."""
  from jaxformers.models import BLOCKS, MIXERS, MODELS

  variant = MODELS[name]
  block = BLOCKS[variant.block]
  make = MIXERS[variant.mixer] if variant.mixer else block
  lines = [f"# {name}", "", "```", inspect.getdoc(make), "```", ""]
  if variant.mixer:
    lines += [
      f"The mixer `{variant.mixer}` in the block `{variant.block}`.",
      *(f"`{key}` is {value!r}." for key, value in variant.fixed.items()),
      *(f"`{k}` is {v!r} by default." for k, v in variant.defaults.items()),
      "",
    ]
  command = "    python -m jaxformers.main --config lra/listops:size=tiny"
  lines += [f"{command},model={name} --workdir runs/{name}", ""]
  for title, owner in (("mixer", make), ("block", block)):
    if title == "block" or variant.mixer:
      rows = list(_options(owner, variant.fixed))
      head = [f"| `model.{title}` | default |", "| --- | --- |"]
      lines += [*head, *rows, ""] if rows else []
  published = list(_published(name))
  lines += ["## Published numbers", "", *published, ""] if published else []
  measured = list(_measured(name))
  lines += ["## Our numbers", *measured] if measured else []
  lines += [
    "",
    "All numbers: [results](../results.md). Time and memory beside softmax",
    "attention: [all encoders](../mixers.md#speed-and-memory).",
  ]
  return "\n".join(lines)


def lists() -> str:
  """Returns the page of configs, tasks and commands, in Markdown."""
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
      markdown_table(("`--config`", "what it is"), configs),
      "## Tasks",
      markdown_table(("task", "protocols", "what it is"), tasks),
    ]
  )


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the pages that are made here."""
  from jaxformers.models import MODELS

  pages = {"commands.md": lists()}
  pages |= {f"models/{name}.md": model_page(name) for name in sorted(MODELS)}
  for path, content in pages.items():
    files.append(File.generated(config, path, content=content))
  # Every model has a page below those of all.
  for section in config.nav:
    if "Models" in section:
      section["Models"] = [
        *section["Models"],
        {"By name": [{n: f"models/{n}.md"} for n in sorted(MODELS)]},
      ]
  return files
