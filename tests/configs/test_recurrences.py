"""Configs of recurrent models on Long Range Arena."""

import itertools

import jax
import pytest

from jaxformers import config as c
from jaxformers import models
from jaxformers.recipes import recurrences
from jaxformers.training import optim
from tests.configs.test_lra import PROTOCOLS, READINGS, SIZES
from tests.marks import long_except


def load(task, **arguments):
  text = ",".join(f"{key}={value}" for key, value in arguments.items())
  return c.plain(c.load(f"configs/lra/{task}.py:{text}"))


@pytest.mark.parametrize(
  "case",
  long_except(
    [("pathfinder", "lra"), ("text", "jaxformers")],
    list(itertools.product(sorted(SIZES), PROTOCOLS)),
  ),
  ids="-".join,
)
def test_a_matched_recurrence_has_no_more_parameters(case):
  """And at most a tenth less: two more channels would be more."""
  task, protocol = case
  sizes = SIZES[task] | READINGS.get((task, protocol), {})
  for name in recurrences.MODELS:
    config = load(task, model=name, size="matched", protocol=protocol)
    model, reference = (
      models.size(models.build(**config[which], **sizes))
      for which in ("model", "reference")
    )
    assert 0.9 * reference < model <= reference, name


@pytest.mark.parametrize("name", recurrences.PUBLISHED)
@pytest.mark.parametrize("task", sorted(SIZES))
def test_published_sizes_are_a_run(task, name):
  config = load(task, model=name, size="published", protocol="s4")
  sizes = SIZES[task] | READINGS.get((task, "s4"), {})
  model = models.build(**config["model"], **sizes)
  optim.build(
    config["optimizer"], config["schedule"], config["total_steps"], model.kinds
  )
  row = recurrences.PUBLISHED[name][task]
  assert config["batch_size"] == row.batch_size
  assert config["model"]["d_model"] == row.d_model
  assert config["model"]["positions"] == "none"


def test_rows_by_hand():
  listops = load("listops", model="s5", size="published", protocol="s4")
  # S5's run_lra_listops.sh: 40 epochs of 96,000 in batches of 50.
  assert listops["total_steps"] == 76_800
  assert listops["schedule"]["warmup_steps"] == 1_920
  assert listops["schedule"]["learning_rate"] == pytest.approx(3e-3)
  assert listops["optimizer"]["groups"]["input"] == {
    "factor": 1.0,
    "decay": True,
  }
  image = load("image", model="s4d", size="published", protocol="s4")
  assert image["optimizer"]["groups"]["step"]["factor"] == pytest.approx(0.1)
  assert image["model"]["block"]["norm_first"] is False
  pathx = load("pathx", model="lru", size="published")
  assert pathx["model"]["mixer"]["causal"] is False
  text = load("text", model="mega", size="published")
  assert text["optimizer"]["clip_norm"] == 1.0
  assert text["model"]["block"]["norm_type"] == "scale"


def test_groups_are_those_of_the_code():
  """Names of S5's parameters: rate and decay that its `opt_config` gives."""
  slow = {"factor": 0.25}
  assert recurrences.s5_groups("standard", 4) == {
    "eigenvalues": slow,
    "step": slow,
    "input": {"factor": 0.25, "decay": False},
  }
  assert recurrences.s5_groups("BandCdecay", 4)["input"] == {
    "factor": 0.25,
    "decay": True,
  }
  assert recurrences.s5_groups("noBCdecay", 4)["output"] == {"decay": False}
  shared = recurrences.s5_groups("standard", 4, share_step=True)
  assert shared["step"] == {"factor": 1.0, "decay": True}
  with pytest.raises(ValueError, match="opt_config 'fast'.*BandCdecay"):
    recurrences.s5_groups("fast", 4)


def test_a_baseline_has_no_published_size():
  with pytest.raises(
    ValueError, match="size=published is for.*mega.*linformer"
  ):
    load("text", model="linformer", size="published")


def test_groups_train_apart():
  """Kinds of an S5 move by their factor, and decay as their group says."""
  config = load("text", model="s5", size="published", protocol="s4")
  model = models.build(
    "s5", vocab_size=9, max_len=8, num_classes=2, d_model=8, num_layers=1
  )
  init = jax.jit(lambda key: model.init(key, model.example(), train=False))
  params = init(jax.random.key(0))["params"]
  schedule = {"name": "constant", "learning_rate": 0.1}
  optimizer = config["optimizer"] | {"weight_decay": 0.0}
  tx, _ = optim.build(optimizer, schedule, 10, model.kinds)
  ones = jax.tree.map(lambda p: 0 * p + 1.0, params)
  moved, _ = tx.update(ones, tx.init(params), params)
  mixer = moved["encoder"]["layer_0"]["mixer"]
  # Adam's first step is the rate.
  for name, rate in (("B", 0.025), ("Lambda_re", 0.025), ("log_step", 0.1)):
    assert float(abs(mixer[name]).max()) == pytest.approx(rate, rel=1e-3)
  assert float(abs(mixer["C1"]).max()) == pytest.approx(0.1, rel=1e-3)
  # With weight decay alone, what decays moves towards 0.
  groups = config["optimizer"]["groups"]
  optimizer = {"name": "sgd", "weight_decay": 0.5, "groups": groups}
  tx, _ = optim.build(optimizer, schedule, 10, model.kinds)
  zeros = jax.tree.map(lambda p: 0 * p, params)
  moved, _ = tx.update(zeros, tx.init(params), params)
  mixer = moved["encoder"]["layer_0"]["mixer"]
  is_moved = {
    name: bool(abs(leaf).max() > 0)
    for name, leaf in mixer.items()
    if name != "gate"
  }
  assert is_moved == {
    **{"B": False, "C1": True, "C2": True, "D": False},
    **{"Lambda_re": False, "Lambda_im": False, "log_step": True},
  }


@pytest.mark.parametrize(
  ("groups", "message"),
  [
    ({"eigenvalue": {}}, "kind of config.optimizer.groups 'eigenvalue'"),
    ({"step": {"rate": 1}}, "option of .*groups.step 'rate'.*decay, factor"),
    ({"step": {"factor": 0}}, "groups.step.factor=0 is not in"),
  ],
)
def test_wrong_groups(groups, message):
  schedule = {"name": "constant", "learning_rate": 0.1}
  with pytest.raises(ValueError, match=message):
    optim.build({"name": "adam", "groups": groups}, schedule, 10)
