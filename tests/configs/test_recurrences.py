"""Configs of recurrent models on Long Range Arena."""

import itertools

import jax
import pytest

from jaxformers import config as c
from jaxformers import models
from jaxformers.recipes import recurrences
from tests import initial, optimizers
from tests.assertions import assert_all
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
@pytest.mark.slow
def test_matched_recurrences_have_no_more_parameters_than_the_reference(case):
  """And a tenth less at most, or as much as two channels make."""
  task, protocol = case
  sizes = SIZES[task] | READINGS.get((task, protocol), {})
  for name in (k for k, v in models.MODELS.items() if v.recurrence):
    config = load(task, model=name, size="matched", protocol=protocol)
    model, reference = (
      models.size(models.build(**config[which], **sizes))
      for which in ("model", "reference")
    )
    # Numbers of parameters grow with the square of the width at most.
    width = config["model"]["d_model"]
    least = min(0.9, (width / (width + 2)) ** 2)
    assert least * reference < model <= reference, name


def check_published_sizes(task, name):
  """Fails unless the published sizes of a model are those of its config."""
  config = load(task, model=name, size="published", protocol="s4")
  sizes = SIZES[task] | READINGS.get((task, "s4"), {})
  model = models.build(**config["model"], **sizes)
  optimizers.build(
    config["optimizer"], config["schedule"], config["total_steps"], model.kinds
  )
  row = recurrences.PUBLISHED[name][task]
  assert config["batch_size"] == row.batch_size
  assert config["model"]["d_model"] == row.d_model
  assert config["model"]["positions"] == "none"


@pytest.mark.slow
def test_published_recurrences_have_their_published_sizes():
  cases = itertools.product(SIZES, recurrences.PUBLISHED)
  assert_all(check_published_sizes, cases, least=24)


def test_tiny_recurrences_have_their_sizes_and_pool():
  listops = load("listops", model="lru", size="tiny")
  assert listops["model"]["pool"] == "max"
  assert listops["model"]["mixer"]["r_min"] == 0.9
  assert listops["schedule"]["learning_rate"] == 4e-3
  mega = load("retrieval", model="mega", size="tiny")
  assert mega["model"]["mixer"]["attention_chunk"] == 128
  # Another protocol keeps its pooling, and other tasks the default ring.
  s4 = load("listops", model="lru", size="tiny", protocol="s4")
  assert s4["model"]["pool"] == "mean"
  text = load("text", model="lru", size="tiny")
  assert text["model"]["pool"] == "mean"
  assert text["model"]["mixer"]["r_max"] == 0.95
  image = load("image", model="lru", size="tiny")
  assert image["model"]["mixer"] == {"state_size": 32, "dropout_rate": 0.0}


def test_published_recurrences_have_the_training_of_their_code():
  listops = load("listops", model="s5", size="published", protocol="s4")
  # S5's run_lra_listops.sh: 40 epochs of 96,000 in batches of 50.
  assert listops["total_steps"] == 76_800
  assert listops["schedule"]["warmup_steps"] == 1_920
  assert listops["schedule"]["learning_rate"] == pytest.approx(3e-3)
  assert listops["optimizer"]["groups"]["input"] == {
    "factor": 1.0,
    "decay": True,
  }
  # S4's s4-cifar.yaml and s4-listops.yaml: one rate for all, or for A and B.
  slow = {"factor": pytest.approx(0.1), "decay": False}
  image, words = (
    load(task, model="s4d", size="published", protocol="s4")
    for task in ("image", "listops")
  )
  assert image["optimizer"]["groups"] == {
    "eigenvalues": slow,
    "input": slow,
    "step": slow,
    "output": {"factor": pytest.approx(0.1)},
  }
  assert words["optimizer"]["groups"] == {
    "eigenvalues": slow,
    "input": slow,
    "step": {"factor": 1.0, "decay": False},
  }
  assert image["model"]["block"] == {
    "dropout_rate": 0.1,
    "norm_type": "batch",
    "norm_first": False,
    "final_norm": False,
  }
  pathfinder = load("pathfinder", model="s4d", size="published", protocol="s4")
  assert pathfinder["model"]["mixer"]["num_ssm"] == 0
  assert pathfinder["total_steps"] == 500_000
  # Table 9 of the LRU's paper.
  pathx = load("pathx", model="lru", size="published")
  assert pathx["model"]["mixer"] == {
    "dropout_rate": 0.0,
    "state_size": 256,
    "causal": False,
    "r_min": 0.999,
    "r_max": 0.9999,
    "glu": "half1",
    "max_phase": pytest.approx(0.3141592653589793),
  }
  assert pathx["optimizer"]["groups"]["input"] == {
    "factor": 0.25,
    "decay": False,
  }
  # Table 8 of Mega's paper.
  text = load("text", model="mega", size="published")
  assert text["model"]["block"] == {
    "dropout_rate": 0.1,
    "mlp_dim": 256,
    "norm_type": "scale",
    "norm_first": False,
  }
  assert text["optimizer"]["clip_norm"] == 1.0
  assert text["optimizer"]["b2"] == 0.98
  assert (text["schedule"]["name"], text["total_steps"]) == ("linear", 25_000)


def test_s5_groups_are_those_of_the_code():
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
  assert recurrences.s5_groups("noBCdecay", 4)["output"] == {
    "factor": 0.25,
    "decay": False,
  }
  shared = recurrences.s5_groups("standard", 4, share_step=True)
  assert shared["step"] == {"factor": 1.0, "decay": True}
  with pytest.raises(ValueError, match="opt_config.*'fast'.*BandCdecay"):
    recurrences.s5_groups("fast", 4)


def test_published_size_is_refused_for_baselines():
  with pytest.raises(ValueError, match="size=published.*mega.*linformer"):
    load("text", model="linformer", size="published")


@pytest.mark.slow
def test_s5_groups_train_with_their_own_rate_and_decay():
  """Kinds of an S5 move by their factor, and decay as their group says."""
  config = load("text", model="s5", size="published", protocol="s4")
  model = models.build(
    "s5", vocab_size=9, max_len=8, num_classes=2, d_model=8, num_layers=1
  )
  params = initial.params(model, model.example())
  schedule = {"name": "constant", "learning_rate": 0.1}
  optimizer = config["optimizer"] | {"weight_decay": 0.0}
  tx, _ = optimizers.build(optimizer, schedule, 10, model.kinds)
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
  tx, _ = optimizers.build(optimizer, schedule, 10, model.kinds)
  zeros = jax.tree.map(lambda p: 0 * p, params)
  moved, _ = tx.update(zeros, tx.init(params), params)
  mixer = moved["encoder"]["layer_0"]["mixer"]
  is_moved = {
    name: bool(abs(leaf).max() > 0)
    for name, leaf in mixer.items()
    if name != "gate"
  }
  assert is_moved == {
    "B": False,
    "C1": True,
    "C2": True,
    "D": False,
    "Lambda_re": False,
    "Lambda_im": False,
    "log_step": True,
  }


@pytest.mark.parametrize(
  ("groups", "message"),
  [
    ({"eigenvalue": {}}, "config.optimizer.groups.*'eigenvalue'"),
    ({"step": {"rate": 1}}, "groups.step.*'rate'.*decay, factor"),
    ({"step": {"factor": 0}}, "groups.step.factor=0"),
    ({"step": {}}, "kind of parameter.*'step'"),
  ],
)
def test_optimizer_refuses_wrong_groups(groups, message):
  schedule = {"name": "constant", "learning_rate": 0.1}
  with pytest.raises(ValueError, match=message):
    tx, _ = optimizers.build({"name": "adam", "groups": groups}, schedule, 10)
    tx.init({"w": jax.numpy.zeros(2)})


def test_load_with_sets_a_group_by_a_flag():
  path = "configs/lra/listops.py:model=s5,size=matched"
  flags = ["--config.optimizer.groups.step.factor=0.1"]
  config = c.plain(c.load_with(path, flags))
  assert config["optimizer"]["groups"] == {"step": {"factor": 0.1}}


@pytest.mark.parametrize("name", ["lru", "mamba"])
def test_class_token_is_refused_before_a_causal_mixer(name):
  """It would read nothing: the recipe pools otherwise, the build refuses."""
  config = load("listops", model=name, size="matched", protocol="lra")
  assert config["model"]["pool"] == "mean"
  mixer = {"causal": True} if name == "lru" else {}
  with pytest.raises(ValueError, match='pool="cls".*causal'):
    models.build(
      name,
      vocab_size=9,
      max_len=8,
      num_classes=2,
      d_model=8,
      num_layers=1,
      pool="cls",
      mixer=mixer,
    )
