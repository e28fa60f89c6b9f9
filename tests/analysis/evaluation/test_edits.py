"""Certificates of edits, against the enumeration of all texts and deletions."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest
import scipy.stats

from jaxformers import tasks
from jaxformers.analysis.certificates import certified
from jaxformers.analysis.evaluation import edits
from jaxformers.commands import certified as command
from jaxformers.foundations.errors import UserError
from jaxformers.tasks import arrays
from jaxformers.training import loop
from tests.marks import long_except
from tests.models.test_certificates import build
from tests.trained import on_task


def shares_of(text, rate):
  """Returns the probability of what random deletion leaves, by text."""
  left = collections.Counter()
  for kept in itertools.product((0, 1), repeat=len(text)):
    part = tuple(itertools.compress(text, kept))
    count = sum(kept)
    left[part] += (1 - rate) ** count * rate ** (len(text) - count)
  return left


def worst_share(share, text, edited, rate):
  """Returns the least share of votes after edits, over all classifiers.

  The worst one says yes first where it counts least after the edits (Neyman and
  Pearson), and may say yes to a part of the draws of one text.
  """
  before, after = shares_of(text, rate), shares_of(edited, rate)
  order = sorted(before, key=lambda z: after[z] / before[z])
  total, missing = 0.0, share
  for z in order:
    taken = min(before[z], missing)
    total += after[z] * taken / before[z]
    missing -= taken
  return total


def common(a, b):
  """Returns the length of the longest common subsequence."""
  table = np.zeros((len(a) + 1, len(b) + 1), int)
  for i, x in enumerate(a):
    for j, y in enumerate(b):
      best = max(table[i, j + 1], table[i + 1, j])
      table[i + 1, j + 1] = table[i, j] + 1 if x == y else best
  return table[-1, -1]


PAIRS = [(2, 4, 0.6), (2, 5, 0.8), (3, 3, 0.5), (3, 4, 0.9)]


@pytest.mark.parametrize("pair", long_except(PAIRS[::2], PAIRS), ids=str)
def test_the_bound_of_votes_is_never_crossed_and_is_attained(pair):
  vocabulary, longest, rate = pair
  by_length = [
    list(itertools.product(range(vocabulary), repeat=n))
    for n in range(longest + 1)
  ]
  rng = np.random.default_rng(0)
  gaps = {}
  all_texts = [t for group in by_length for t in group]
  texts = [t for group in by_length for t in group if len(t) >= longest - 1]
  for text in rng.permutation(len(texts))[:24]:
    text = texts[text]
    for edited in all_texts:
      kept = common(text, edited)
      gone, new = len(text) - kept, len(edited) - kept
      # Replace as many as possible: the bound is the same for any split.
      replaced = min(gone, new)
      kinds = {
        "replaced": replaced,
        "deleted": gone - replaced,
        "inserted": new - replaced,
      }
      for share in (0.7, 0.95, 1.0):
        bound = edits.least_share(share, rate, **kinds)
        worst = worst_share(share, text, edited, rate)
        assert worst >= bound - 1e-12
        if bound > 0:
          key = tuple(kinds.values())
          gaps[key] = min(gaps.get(key, 1.0), worst - bound)
  assert len(gaps) >= 5
  # For one kind of edits some classifier attains it.
  for kinds in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
    assert gaps[kinds] < 1e-12, (kinds, gaps)


def test_replacements_are_the_worst_of_all_edits():
  for rate in (0.5, 0.7, 0.9, 0.95):
    for share in (0.501, 0.6, 0.8, 0.95, 0.999, 1.0):
      most = int(edits.radius(share, rate))
      for r in range(most + 3):
        left = [
          edits.least_share(
            share, rate, replaced=s, inserted=i, deleted=r - s - i
          )
          for s in range(r + 1)
          for i in range(r + 1 - s)
        ]
        assert (min(left) > 0.5) == (r <= most), (rate, share, r)


def test_radius_follows_the_table_of_unanimous_votes():
  """At 1 - 1e-3, about the bound of 4,000 unanimous draws."""
  found = [int(edits.radius(1 - 1e-3, p)) for p in (0.5, 0.7, 0.9, 0.95, 0.99)]
  assert found == [0, 1, 6, 13, 68]
  np.testing.assert_array_equal(edits.radius([0.5, 0.4, 0.0], 0.9), [-1] * 3)
  # A share of exactly one half after the edit is no majority.
  assert int(edits.radius(1.0, 0.5)) == 0


def test_lower_bound_is_that_of_clopper_and_pearson():
  """The least probability under which so many votes are not too rare."""
  for votes, draws in ((0, 10), (7, 10), (10, 10), (3_990, 4_000)):
    bound = float(edits.lower_bound(votes, draws))
    tail = scipy.stats.binom.sf(votes - 1, draws, bound)
    assert bound == 0 if not votes else abs(tail - 0.05) < 1e-9
  assert edits.lower_bound(10, 10, 0.99) < edits.lower_bound(10, 10, 0.9)


def neighbours(texts, vocabulary):
  """Returns all texts one edit away from some texts, and the texts."""
  found = set(texts)
  for text in texts:
    for i in range(len(text) + 1):
      for v in range(1, vocabulary):
        found.add((*text[:i], v, *text[i:]))
        if i < len(text):
          found.add((*text[:i], v, *text[i + 1 :]))
      if i < len(text):
        found.add((*text[:i], *text[i + 1 :]))
  return found


@pytest.mark.parametrize("seed", long_except((0, 1), range(8)))
def test_the_exact_answer_is_that_of_all_edits(seed):
  """No text within so many edits has another class; one edit more has one."""
  rng = np.random.default_rng(seed)
  vocabulary, classes = 4, 2 + seed % 2
  logits = rng.normal(size=(vocabulary, classes)) + 0.4
  logits[:, 0] += rng.uniform(0, 1.2)
  seen = set()
  for n in (1, 2, 3, 4):
    for text in rng.integers(1, vocabulary, (6, n)):
      label = int(logits[text].mean(0).argmax())
      most = edits.exact_edits(logits, text, label)
      assert most >= 0
      ball = {tuple(text)}
      for r in range(1, n):
        ball = neighbours(ball, vocabulary)
        found = {int(logits[list(t)].mean(0).argmax()) for t in ball if t}
        assert (found == {label}) == (r <= most), (text, r, most)
      seen.add(most)
  assert len(seen) > 1


@pytest.mark.parametrize("seed", range(4))
def test_an_edit_of_a_cut_text_counts_once(seed):
  """All edits of the whole text, of which the model reads the beginning."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(4, 2)) + np.array([0.6, 0])
  for _ in range(12):
    read = int(rng.integers(2, 5))
    text = tuple(rng.integers(1, 4, read + rng.integers(3)))
    label = int(logits[list(text[:read])].mean(0).argmax())
    most = edits.exact_edits(logits, np.array(text[:read]), label)
    ball = {text}
    for r in range(1, 3):
      ball = neighbours(ball, 4)
      found = {int(logits[list(t[:read])].mean(0).argmax()) for t in ball if t}
      assert r > most or found == {label}


def test_exact_edits_of_a_worked_example():
  logits = np.array([[0.0, 0], [1, 0], [0, 1]])
  # Each replacement lowers the sum of nine by two.
  assert edits.exact_edits(logits, np.array([1] * 9), 0) == 4
  assert edits.exact_edits(logits, np.array([1, 2, 2]), 0) == -1


def test_logits_are_means_of_those_of_single_tokens():
  """For the encoders that `is_token_wise`, and not for others."""
  rng = np.random.default_rng(0)
  ids = rng.integers(1, 12, (5, 9)).astype(np.int32)
  ids[3, 4:] = 0
  one = {"num_experts": 1}
  cases = [
    ({"mixer": one, "positions": "none"}, True),
    ({"mixer": one}, False),
    ({"mixer": {"num_experts": 2}, "positions": "none"}, False),
    ({"mixer": one, "positions": "none", "head_dim": 8}, False),
    ({"mixer": one, "positions": "none", "pool_norm": "running"}, True),
    ({"mixer": one, "positions": "none", "pool_norm": "layer"}, False),
    ({"mixer": one, "positions": "none", "pool": "max"}, False),
  ]
  for options, is_alone in cases:
    model, params = build("random_transject", **options)
    assert edits.is_token_wise(model) == is_alone, options
    vote = edits.Vote(model, params, 0.5)
    means = np.stack([vote.single[row[row > 0]].mean(0) for row in ids])
    error = np.abs(means - vote.logits(ids)).max()
    assert (error < 1e-5) == is_alone, (options, error)


def run_of(name, rate=0.0, **options):
  """Returns a trained model on texts that its initial weights tell apart."""
  rng = np.random.default_rng(1)
  model, params = build(name, **options)
  rows = [rng.integers(1, 12, n).astype(np.int32) for n in range(2, 26)]
  # Padding changes no logits; with it, one length is compiled.
  ids = np.stack([np.pad(row, (0, 25 - len(row))) for row in rows])
  labels = edits.Vote(model, params, 0.5).logits(ids).argmax(-1)
  labels[:3] = np.arange(3)
  task = arrays.from_arrays((rows, labels), vocab_size=12, max_len=9)
  task = tasks.delete(task, rate) if rate else task
  return on_task(task, model, params, 0)


MEASURE = {"counts": [0, 1, 2], "samples": 6, "draws": (40, 300)}


def test_certified_votes_survive_the_attack():
  run = run_of("isometric", 0.8)
  found = edits.measure_edits(run, split="train", **MEASURE)
  assert found["deletion"] == 0.8
  assert (found["examples"], found["attacked"]) == (6, 6)
  for row in found["edits"]:
    assert row["certified"] <= row["attacked"]
  shares = [row["certified"] for row in found["edits"]]
  assert shares[0] > 0
  assert shares[0] >= shares[1] >= shares[2]
  again = edits.measure_edits(run, split="train", **MEASURE)
  assert again == found
  assert "Deletion with p = 0.8; 40 draws" in "\n".join(edits.lines(found))


def test_a_vote_of_texts_longer_than_the_model_reads_is_no_error():
  run = run_of("isometric")
  found = edits.measure_edits(run, split="train", deletion=0.1, **MEASURE)
  assert found["deletion"] == 0.1


def test_votes_are_those_of_drawn_texts():
  """The share of a class is the sum over all deletions."""
  model, params = build("isometric")
  vote = edits.Vote(model, params, 0.6)
  text = np.array([3, 1, 7, 7, 2])
  want = np.zeros(3)
  for part, share in shares_of(tuple(text), 0.6).items():
    ids = np.zeros((1, 8), np.int32)
    ids[0, : len(part)] = part
    want[vote.classes(ids)[0]] += share
  votes = vote.count(text, 3_000, np.random.default_rng(0))
  assert votes.sum() == 3_000
  deviation = np.sqrt(want * (1 - want) / 3_000)
  assert (np.abs(votes / 3_000 - want) < 4 * deviation + 1e-9).all()


def test_certificates_use_other_draws_than_predictions():
  """Each draw counts once: a class that wins by chance is not certain."""

  class Coin(edits.Vote):
    """Classifier that ignores the text."""

    def __init__(self):
      self.rate = 0.9
      self.asked = []

    def count(self, ids, draws, rng):
      self.asked.append(draws)
      heads = int(rng.binomial(draws, 0.5))
      return np.array([heads, draws - heads])

  coin = Coin()
  texts = [np.array([1])] * 300
  found = edits.certify_vote(
    coin, texts, np.zeros(300, int), draws=(11, 200), seed=0
  )
  assert coin.asked == [11, 200] * 300
  # At most the allowed share of false certificates, five percent.
  assert (found.edits >= 0).mean() < 0.05 + 4 * (0.05 * 0.95 / 300) ** 0.5
  assert 0.4 < found.accuracy(-1) < 0.6


def test_the_exact_answer_is_measured_without_deletion():
  run = run_of("random_transject", mixer={"num_experts": 1}, positions="none")
  found = edits.measure_edits(run, split="train", counts=[0, 1, 2])
  assert "draws" not in found
  assert found["edits"][0]["certified"] == found["accuracy"] > 0.5
  assert "Exact" in "\n".join(edits.lines(found))
  unused = r"draws=\(1, 2\), samples=3, confidence=0.5: no effect"
  with pytest.raises(UserError, match=unused):
    options = {"draws": (1, 2), "samples": 3, "confidence": 0.5}
    edits.measure_edits(run, split="train", **MEASURE | options)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({}, "num_experts=1"),
    ({"deletion": 1.5}, r"deletion=1.5.*\[0, 1\)"),
    ({"deletion": 0.5, "counts": [-1]}, r"edits=\[-1\]"),
    ({"deletion": 0.5, "counts": []}, r"edits=\[\]"),
    ({"deletion": 0.5, "samples": 0}, "samples=0"),
    ({"deletion": 0.5, "split": "tst"}, "'tst'.*'test'"),
  ],
)
def test_what_has_no_certificate_is_refused(options, message):
  options = {"split": "train", "counts": [1]} | options
  with pytest.raises(UserError, match=message):
    edits.measure_edits(run_of("isometric"), **options)


def test_other_inputs_are_refused():
  run = run_of("isometric")
  splits = {
    name: dataclasses.replace(split, end=3)
    for name, split in run.task.splits.items()
  }
  marked = dataclasses.replace(run.task, splits=splits)
  with pytest.raises(UserError, match="open or close"):
    edits.measure_edits(
      dataclasses.replace(run, task=marked), deletion=0.5, counts=[1]
    )


def test_the_command_writes_the_scores_of_a_run(smoke, tmp_path, capsys):
  loop.run(smoke("lru"), tmp_path)
  arguments = [str(tmp_path), "--samples=2", "--deletion=0.5"]
  command.main([*arguments, "--edits=0,1", "--draws=9,40"])
  assert "Written to" in capsys.readouterr().out
  content = json.loads((tmp_path / "edits.json").read_text())
  assert content["draws"] == [9, 40]
  assert [row["edits"] for row in content["edits"]] == [0, 1]
  with pytest.raises(SystemExit, match="give two numbers"):
    command.main([*arguments, "--edits=1", "--draws=9"])


def test_the_command_gives_the_exact_answer(monkeypatch, capsys):
  run = run_of("random_transject", mixer={"num_experts": 1}, positions="none")
  monkeypatch.setattr(command.states, "load", lambda *_, **__: run)
  # The weights of another model are not written.
  command.main(["here", "--edits=0,1", "--split=train", "--model=other"])
  assert "Exact" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"samples": 0}, "samples=0"),
    ({"examples": -1}, "examples=-1"),
    ({"steps": -1}, "steps=-1"),
    ({"seed": -1}, "seed=-1"),
    ({"counts": [-1]}, r"tokens=\[-1\]"),
    ({"radii": [-0.5]}, r"radii=\[-0.5\]"),
    ({}, "task.deletion=0.8.*--edits=1,2,4"),
  ],
)
def test_other_certificates_refuse_numbers_and_deleted_texts(options, message):
  numbers = {"samples": 2, "examples": 2, "steps": 1, "seed": 0}
  values = {"counts": [1], "radii": [0.1], "split": "train", **numbers}
  with pytest.raises(UserError, match=message):
    certified.measure_certified(run_of("isometric", 0.8), **values | options)


def test_the_command_refuses_options_without_effect():
  unused = "--tokens=1, --radii=2, --steps=3: no effect with --edits"
  with pytest.raises(SystemExit, match=unused):
    command.main(["run", "--edits=1", "--tokens=1", "--radii=2", "--steps=3"])
  unused = "--deletion=0.9, --draws=1,2: no effect without --edits"
  with pytest.raises(SystemExit, match=unused):
    command.main(["run", "--deletion=0.9", "--draws=1,2"])
