"""MAD: splits, settings and refusals."""

import numpy as np
import pytest

import jaxformers as jf
from jaxformers import config as c
from jaxformers import tasks
from jaxformers.foundations.errors import UserError
from jaxformers.tasks import mad

SIZES = dict(num_train=40, num_validation=10, num_test=10)


def load(folder, **options):
  return tasks.get("mad", data_dir=str(folder), **(SIZES | options))


def options_of(problem):
  """Options of the first setting of a problem, with few examples."""
  config = c.load(f"configs/diagnostics/mad.py:problem={problem}")
  options = c.plain(config.task)
  del options["name"]
  return options | SIZES


@pytest.mark.parametrize("problem", mad.VARIED)
@pytest.mark.slow
def test_first_settings_make_splits_that_share_nothing(tmp_path, problem):
  task = load(tmp_path, **options_of(problem))
  assert task.objective == "token_classification"
  assert task.num_classes == task.vocab_size - 1
  seen = set()
  for split in task.splits.values():
    batch = split.batch(np.arange(len(split)), task.max_len)
    assert (batch["inputs"] > 0).all()
    assert (batch["weights"].sum(1) > 0).all()
    rows = {row.tobytes() for row in batch["inputs"]}
    assert len(rows) == len(split) and not rows & seen
    seen |= rows


def test_recall_trains_on_every_token_or_on_values(tmp_path):
  for protocol, share in (("paper", 1.0), ("jaxformers", 0.5)):
    task = load(tmp_path, length=32, protocol=protocol)
    sums = {
      name: split.batch(np.arange(10), 31)["weights"].mean()
      for name, split in task.splits.items()
    }
    assert (sums["train"] == 1.0) == (share == 1.0)
    assert sums["test"] < 0.5
  assert task.baselines()["random value"] == 0.125


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"problem": "recall"}, "problem"),
    ({"noise": 0.2}, "does not have"),
    ({"problem": "noisy_recall"}, "noise_tokens=0.*needs"),
    (
      {"problem": "compression", "protocol": "jaxformers"},
      "problems of recall",
    ),
    ({"problem": "selective_copying", "num_copied": 90}, "2 num_copied"),
  ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
  with pytest.raises(UserError, match=message):
    load(tmp_path, **options)
  assert not (tmp_path / "packed").exists()


@pytest.mark.slow
def test_same_bytes_on_every_machine(tmp_path):
  """Prepared data of other machines and versions must stay the same."""
  digests = {
    problem: load(tmp_path / problem, **options_of(problem))
    .splits["test"]
    .digest()
    for problem in mad.VARIED
  }
  assert digests == DIGESTS


DIGESTS = {
  "in_context_recall": "e95e53518af9c14a5e1029dfb55fb1aa",
  "noisy_recall": "694ecc214cb12247ea757d0bed55a6f4",
  "fuzzy_recall": "6a1e081ca5f625b7ad0b592103731e54",
  "selective_copying": "927083ed36d606bea0b09b62df147af5",
  "compression": "65ced56fc2634c3c63c8d992a65bff6c",
  "memorization": "2f2a022a86beb689942ae65af0952d37",
}


def test_settings_are_those_of_the_paper():
  counts = [len(mad.settings(problem)) for problem in mad.VARIED]
  assert counts == [11, 14, 11, 13, 11, 6]
  for problem in mad.VARIED:
    first = c.load(f"configs/diagnostics/mad.py:problem={problem}").task
    assert {name: first[name] for name in mad.FIRST[problem]} == mad.FIRST[
      problem
    ]
    for setting in mad.settings(problem):
      arguments = "".join(f",{k}={v}" for k, v in setting.items())
      config = c.load(
        f"configs/diagnostics/mad.py:problem={problem}{arguments}"
      )
      assert c.plain(config.task) == c.plain(first) | setting


@pytest.mark.slow
def test_compression_decodes_all_tokens_from_the_last(tmp_path):
  options = {
    "total_steps": 2,
    "eval_steps": 2,
    "checkpoint_steps": 2,
    "task.num_validation": 8,
    "task.num_test": 8,
    "data_dir": str(tmp_path / "data"),
  }
  spec = "diagnostics/mad:problem=compression,model=mamba,num_train=16,width=8"
  model = jf.train(spec, tmp_path / "run", options=options)
  ids = np.array([[1, 2, 3, 4, 16]])
  whole = model.outputs(ids)
  assert whole.shape == (1, 5, 16)
  # Padding changes nothing, and the last token changes all logits.
  padded = model.outputs(np.array([[0, 1, 2, 0, 3, 4, 16, 0]]))
  np.testing.assert_allclose(
    padded[:, [1, 2, 4, 5, 6]], whole, rtol=1e-4, atol=1e-5
  )
  other = model.outputs(np.array([[1, 2, 3, 4, 5]]))
  assert (np.abs(other - whole).max(-1) > 1e-6).all()


def test_a_bottleneck_is_for_token_classifiers():
  with pytest.raises(UserError, match="token classifiers"):
    jf.build(
      "s5",
      d_model=8,
      num_layers=1,
      vocab_size=8,
      max_len=8,
      num_classes=2,
      head={"bottleneck": True},
    )
