"""The names of models, and what they stand for.

JAXFORMERS_WRITE_DOCS=1 pytest -n 0 tests/models/test_variants.py writes the
table of docs/mixers.md anew.
"""

import dataclasses
import inspect
import os
import re

from jaxformers.models.attention import Attention
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from jaxformers.models.variants import MODELS, Variant
from tests.assertions import assert_all


def check_variant(name):
  """Fails unless a model's mixer has its options, and its block exists."""
  variant = MODELS[name]
  assert variant.block in BLOCKS
  options = {**variant.fixed, **variant.defaults}
  if variant.mixer:
    make = MIXERS[variant.mixer]
    assert options.keys() <= {*getattr(make, "options", options)}
  else:
    assert not options


def test_variants_name_a_registered_mixer_and_block():
  assert_all(check_variant, zip(MODELS), least=20)


def test_variants_cover_every_mixer():
  mixers = {variant.mixer for variant in MODELS.values()}
  assert mixers - {""} == {*MIXERS}


def test_variants_of_papers_have_their_options():
  assert MODELS["transformer"] == Variant("softmax", "pre_norm", {}, {}, "")
  assert MODELS["transformer_rezero"].block == "rezero"
  assert MODELS["transformer_orthogonal"].fixed == {"orthogonal": True}
  assert MODELS["neutreno"].defaults == {"fidelity": 0.6}
  assert MODELS["symmetric_transformer"].fixed == {"symmetric": True}
  assert MODELS["linearized"].block == "attention_only"
  assert MODELS["linear_transformer"].mixer == "linear"
  assert MODELS["transject"].block == "injective"
  assert MODELS["random_transject"].block == "injective"
  assert MODELS["random_transject"].fixed == {"sigma": "learned"}


TITLES = (
  "`model=`",
  "mixer",
  "block",
  "source",
  "options of `model.mixer`",
  "causal",
  "memory grows as",
  "equals softmax attention",
)
# Attributes of `Attention` that are an option of some mixers only.
TOOL_OPTIONS = ("dropout_rate", "seed", "redraw")
WIRING = {"residual", "orthogonal_map", "dtype", "max_len", "parent", "name"}


def find(pattern, make):
  """Returns what a mixer's docstring says by a pattern, on one line."""
  text = " ".join(inspect.getdoc(make).split())
  match = re.search(pattern, text)
  return match[1] if match else ""


def options_of(make):
  """Returns the options that a mixer does not share with all, by name."""
  mixer = make()
  if isinstance(mixer, Attention):
    shared = {n for n in TOOL_OPTIONS if n in make.options} | {*make.defaults}
    return mixer.options | {name: getattr(mixer, name) for name in shared}
  fields = (f for f in dataclasses.fields(make) if f.name not in WIRING)
  return {field.name: field.default for field in fields}


def row(name):
  variant = MODELS[name]
  make = MIXERS[variant.mixer] if variant.mixer else BLOCKS[variant.block]
  changed = {**variant.fixed, **variant.defaults}
  values = (options_of(make) if variant.mixer else {}) | variant.defaults
  listed = {k: values[k] for k in sorted(values) if k not in variant.fixed}
  causal = "yes"
  if "causal" not in listed:
    reason = find(r"No causal form: ([^.]*)\.", make)
    causal = f"no: {reason}" if reason else "no"
  equal = find(r"Equals softmax attention ([^.]*)\.", make) or "never"
  if variant.mixer == "softmax":
    equal = f"without {', '.join(changed)}" if changed else "always"
  cells = (
    f"`{name}`",
    ", ".join([variant.mixer, *(f"{k}={v}" for k, v in changed.items())]),
    variant.block,
    variant.source or find(r"Source: (.*? \d{4})", make),
    ", ".join(f"`{k}` {v}" for k, v in listed.items() if k != "causal"),
    causal,
    getattr(make, "growth", "n"),
    equal,
  )
  return f"| {' | '.join(cells)} |"


def test_mixers_page_lists_all_variants(request):
  path = request.config.rootpath / "docs" / "mixers.md"
  lines = path.read_text().splitlines()
  header = f"| {' | '.join(TITLES)} |"
  start = lines.index(header)
  stop = lines.index("", start)
  rule = f"| {' | '.join(['---'] * len(TITLES))} |"
  table = [header, rule, *(row(name) for name in sorted(MODELS))]
  if os.environ.get("JAXFORMERS_WRITE_DOCS"):
    path.write_text("\n".join([*lines[:start], *table, *lines[stop:], ""]))
    return
  assert lines[start:stop] == table, f"Write it anew: {__doc__}"


def check_docstring(name):
  """Fails unless a mixer has a source, and a reason for no causal form."""
  cells = row(name).split(" | ")
  assert cells[3], "Write `Source: AUTHORS YEAR` into the docstring."
  if MODELS[name].mixer != "transject":  # docs/theory.md has its reason.
    assert cells[5] != "no", "Write `No causal form: REASON.` there."


def test_mixer_docstrings_have_source_and_reason_for_no_causal_form():
  assert_all(check_docstring, zip(MODELS), least=20)
