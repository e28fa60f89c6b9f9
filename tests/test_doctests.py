"""The examples of docstrings run and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
  path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
  for path in sorted((ROOT / "jaxformers").rglob("*.py"))
  if ">>> " in path.read_text()
]
# Public functions and classes: `docs/python.md` shows each of them.
SHOWN = (
  "api.train",
  "config.run_config.RunConfig",
  "inference.TrainedModel",
  "inference.load",
  "models.attention.attention",
  "models.config.ModelConfig",
  "models.decode.generate",
  "models.model.build",
  "models.model.encoder",
  "models.variants.Variant",
  "orthogonal.maps.cayley",
  "orthogonal.maps.expm",
  "orthogonal.maps.householder",
  "scan.linear_scan",
)


# They train a model, or compile one.
SLOW = ("api", "inference", "models.model", "models.decode")


@pytest.mark.parametrize(
  "module",
  [
    pytest.param(
      name,
      marks=[pytest.mark.slow] * (name.partition(".")[2] in SLOW),
    )
    for name in MODULES
  ],
)
def test_examples_of_docstrings_print_what_they_say(
  module, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  results = doctest.testmod(
    importlib.import_module(module), optionflags=doctest.ELLIPSIS
  )
  assert results.attempted > 0
  assert results.failed == 0


@pytest.mark.parametrize("name", SHOWN)
def test_public_function_has_an_example(name):
  module, _, attribute = name.rpartition(".")
  target = getattr(importlib.import_module(f"jaxformers.{module}"), attribute)
  assert ">>> " in target.__doc__
