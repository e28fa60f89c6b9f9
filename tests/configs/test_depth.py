"""The grid of figure 2 of the depth paper."""

import pytest

from jaxformers import config as c
from jaxformers import models, tasks
from tests import optimizers
from tests.marks import long_except

# Parameters beside the embedding that the widths were chosen for, in millions.
SIZES = (1.18, 2.23, 4.72, 9.33, 18.9, 37.7)


@pytest.mark.parametrize("size", long_except((1,), range(1, 7)))
@pytest.mark.slow
def test_depth_configs_have_equal_parameters(size):
  for depth in (1, 2, 3, 4, 5, 6, 12, 24):
    config = c.load(f"configs/depth/figure2.py:depth={depth},size={size}")
    model = config.model
    assert model.num_layers == depth
    count = 12 * depth * model.d_model**2
    assert count == pytest.approx(SIZES[size - 1] * 1e6, rel=0.04)
    built = models.build(
      **c.plain(model),
      vocab_size=1_000,
      max_len=256,
      num_classes=0,
      objective="language_model",
    )
    layers = models.shapes(built)["encoder"]
    kernels = sum(
      leaf.size
      for k in range(depth)
      for part in layers[f"layer_{k}"].values()
      for name, leaf in _leaves(part)
      if name == "kernel"
    )
    assert kernels == count
    assert model.mixer_defaults.num_heads == 2
    assert not model.dropout_rate + model.mixer_defaults.dropout_rate
    assert not model.block.dropout_rate


def _leaves(tree):
  for name, value in tree.items():
    if hasattr(value, "items"):
      yield from _leaves(value)
    else:
      yield name, value


def test_depth_config_trains_for_its_tokens():
  config = c.load("configs/depth/figure2.py:tokens=1e6,length=128,batch=8")
  assert config.total_steps == 977
  assert config.schedule.warmup_steps == 97
  assert config.schedule.learning_rate == pytest.approx(0.1 / 128)
  assert c.load("configs/depth/figure2.py").total_steps == 61_035
  assert config.select == "loss"
  accepted = tasks.TASKS["language"].__kwdefaults__
  assert {*config.task} - {"name"} == accepted.keys() - {"data_dir"}
  optimizers.build(
    c.plain(config)["optimizer"], c.plain(config)["schedule"], 977
  )
  rate = c.load("configs/depth/figure2.py:rate=2e-3").schedule.learning_rate
  assert rate == pytest.approx(2e-3)


@pytest.mark.parametrize(
  ("arg", "message"),
  [
    ("depth=7", "depth.*7.*12"),
    ("size=7", "size.*7.*1, 2, 3"),
    ("size=0", "size.*0.*1, 2, 3"),
    ("tokens=100", "tokens=100.*1e15"),
    ("tokens=nan", "tokens=nan.*1e15"),
    ("tokens=inf", "tokens=inf.*1e15"),
    ("length=0", "length=0"),
    ("batch=0", "batch=0"),
    ("rate=-1", "rate=-1"),
  ],
)
def test_depth_config_refuses_arguments_outside_the_grid(arg, message):
  with pytest.raises(ValueError, match=message):
    c.load(f"configs/depth/figure2.py:{arg}")
