"""Widths at size=matched follow from numbers of parameters in closed form."""

import itertools

import jax.numpy as jnp
import pytest

from jaxformers import config as c
from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models import heads
from jaxformers.recipes import lra, matched, recurrences, traits
from tests.configs.test_lra import PROTOCOLS, READINGS, SIZES
from tests.marks import long_except

# Model, task, and its width under each of `PROTOCOLS`. A change here changes
# the comparison with the Transformer.
WIDTHS = """
s5 listops 212 1928 212 228 212
s5 text 264 1094 264 298 264
s5 retrieval 252 388 228 204 228
s5 image 146 206 146 176 146
s5 pathfinder 146 34 146 176 146
s5 pathx 584 360 584 654 584
s4d listops 156 1374 156 164 156
s4d text 202 794 202 218 202
s4d retrieval 194 312 182 168 182
s4d image 114 158 114 126 114
s4d pathfinder 114 28 114 126 114
s4d pathx 432 270 432 466 432
lru listops 138 1344 138 144 138
lru text 182 768 182 196 182
lru retrieval 176 294 166 156 166
lru image 100 142 100 108 100
lru pathfinder 100 22 100 108 100
lru pathx 406 250 406 438 406
linoss listops 138 1344 138 144 138
linoss text 182 768 182 196 182
linoss retrieval 176 294 166 156 166
linoss image 100 142 100 108 100
linoss pathfinder 100 22 100 108 100
linoss pathx 406 250 406 438 406
damped_linoss listops 138 1344 138 144 138
damped_linoss text 182 768 182 196 182
damped_linoss retrieval 176 294 166 156 166
damped_linoss image 100 142 100 108 100
damped_linoss pathfinder 100 22 100 108 100
damped_linoss pathx 406 250 406 438 406
mega listops 78 582 78 80 78
mega text 100 350 100 104 100
mega retrieval 100 164 98 96 98
mega image 64 84 64 64 64
mega pathfinder 64 18 64 64 64
mega pathx 194 124 194 200 194
rglru listops 106 722 106 108 106
rglru text 134 436 134 138 134
rglru retrieval 132 206 128 124 128
rglru image 86 110 86 88 86
rglru pathfinder 86 30 86 88 86
rglru pathx 254 170 254 262 254
mamba listops 112 808 112 116 112
mamba text 144 486 144 150 144
mamba retrieval 140 222 136 130 136
mamba image 90 118 90 94 90
mamba pathfinder 90 28 90 94 90
mamba pathx 278 184 278 288 278
deltanet listops 106 722 106 108 106
deltanet text 134 438 134 138 134
deltanet retrieval 132 206 128 124 128
deltanet image 86 110 86 88 86
deltanet pathfinder 86 30 86 90 86
deltanet pathx 254 170 254 262 254
gated_deltanet listops 86 590 86 90 86
gated_deltanet text 110 358 110 114 110
gated_deltanet retrieval 110 174 108 106 108
gated_deltanet image 72 92 72 72 72
gated_deltanet pathfinder 72 26 72 72 72
gated_deltanet pathx 208 140 208 214 208
deltaproduct listops 78 526 78 78 78
deltaproduct text 98 322 98 102 98
deltaproduct retrieval 98 156 98 96 98
deltaproduct image 64 82 64 64 64
deltaproduct pathfinder 64 24 64 64 64
deltaproduct pathx 186 126 186 190 186
mamba2 listops 102 806 102 106 102
mamba2 text 132 480 132 140 132
mamba2 retrieval 132 212 128 124 128
mamba2 image 80 108 80 82 80
mamba2 pathfinder 80 22 80 82 80
mamba2 pathx 266 176 266 280 266
gla listops 106 720 106 108 106
gla text 134 436 134 138 134
gla retrieval 132 206 128 124 128
gla image 86 110 86 88 86
gla pathfinder 86 30 86 88 86
gla pathx 252 170 252 262 252
retnet listops 88 590 88 90 88
retnet text 112 358 112 116 112
retnet retrieval 110 174 110 106 110
retnet image 72 94 72 74 72
retnet pathfinder 72 28 72 74 72
retnet pathx 210 142 210 214 210
hgrn2 listops 106 722 106 110 106
hgrn2 text 134 438 134 140 134
hgrn2 retrieval 132 206 130 124 130
hgrn2 image 86 112 86 90 86
hgrn2 pathfinder 86 32 86 90 86
hgrn2 pathx 254 170 254 262 254
mlstm listops 116 826 116 120 116
mlstm text 148 496 148 154 148
mlstm retrieval 144 226 140 134 140
mlstm image 92 120 92 96 92
mlstm pathfinder 92 30 92 96 92
mlstm pathx 284 190 284 296 284
lstm listops 66 436 66 66 66
lstm text 84 266 84 84 84
lstm retrieval 82 132 82 82 82
lstm image 54 70 54 54 54
lstm pathfinder 54 20 54 54 54
lstm pathx 156 106 156 158 156
gru listops 72 482 72 72 72
gru text 92 294 92 94 92
gru retrieval 92 144 90 88 90
gru image 60 76 60 60 60
gru pathfinder 60 22 60 60 60
gru pathx 172 116 172 174 172
mingru listops 96 646 96 98 96
mingru text 120 392 120 124 120
mingru retrieval 120 188 116 114 116
mingru image 78 100 78 80 78
mingru pathfinder 78 28 78 80 78
mingru pathx 228 154 228 234 228
"""
COUNTED = [k for k, v in sorted(models.MODELS.items()) if v.count_layers]


def test_widths_of_recurrences():
  listed = set()
  for line in WIDTHS.strip().splitlines():
    model, task, *widths = line.split()
    listed.add((model, task))
    for protocol, width in zip(PROTOCOLS, widths, strict=True):
      arguments = f"model={model},size=matched,protocol={protocol}"
      config = c.load(f"configs/lra/{task}.py:{arguments}")
      assert config.model.d_model == int(width), (task, arguments)
  assert listed == {*itertools.product(COUNTED, SIZES)}


@pytest.mark.parametrize("name", long_except(("mamba", "mega"), COUNTED))
def test_layers_are_counted_where_the_model_is_registered(name):
  variant = models.MODELS[name]
  fields = {"pool": "mean", "head_dim": 0}
  for width, length, num_layers in ((32, 9, 1), (38, 20, 2), (6, 20, 3)):
    has_feed_forward = "mlp_dim" in traits.find_traits(name).block_options
    model = models.build(
      name,
      vocab_size=7,
      max_len=length,
      num_classes=3,
      d_model=width,
      num_layers=num_layers,
      positions="none",
      block={"mlp_dim": 2 * width} if has_feed_forward else {},
    )
    inputs = matched.Inputs(7, length, 3)
    count = variant.count_layers(width, length, num_layers)
    count += matched.count_outside(fields, inputs, width)
    assert count == models.size(model)


@pytest.mark.parametrize(
  "case",
  long_except(
    [("retrieval", "lra"), ("image", "s4"), ("listops", "jaxformers")],
    list(itertools.product(sorted(SIZES), PROTOCOLS)),
  ),
  ids="-".join,
)
def test_the_transformer_is_counted(case):
  task, protocol = case
  sizes = SIZES[task] | READINGS.get((task, protocol), {})
  reference = c.plain(c.load(f"configs/lra/{task}.py:protocol={protocol}"))
  model = models.build(**reference["reference"], **sizes)
  names = ("vocab_size", "max_len", "num_classes")
  inputs = matched.Inputs(*(sizes[name] for name in names))
  count = matched.count_transformer(reference["reference"], inputs)
  assert count == models.size(model)


def test_interactions_have_the_widths_of_the_head():
  ones = jnp.ones((1, 1))
  for name, factor in matched.INTERACTIONS.items():
    if name:
      assert heads.INTERACTIONS[name](ones, ones).shape == (1, factor)


def test_the_widest_even_width_within_a_limit():
  assert matched.find_width(lambda width: width**2, 99) == 8
  assert matched.find_width(lambda width: width**2, 100) == 10
  with pytest.raises(UserError, match=r"width of 2 has 4 .*Transformer's 3:"):
    matched.find_width(lambda width: width**2, 3)


def test_what_cannot_be_matched_says_so(monkeypatch):
  variant = models.Variant("lru", "one_branch", recurrence="linear")
  monkeypatch.setitem(models.MODELS.data, "mine", variant)
  with pytest.raises(UserError, match=r"'mine'.*Variant\(count_layers="):
    c.load("configs/lra/text.py:model=mine,size=matched")
  pools = {"jaxformers": "mean"}
  with pytest.raises(UserError, match="sizes of the task: give inputs="):
    lra.model_fields(
      "lru", pools=pools, protocol="jaxformers", size="matched", matched=pools
    )
  with pytest.raises(UserError, match="size=published is for"):
    c.load("configs/lra/text.py:model=mine,size=published")
  assert "mine" not in recurrences.PUBLISHED
