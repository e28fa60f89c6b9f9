"""The matrix of diagnostics: its cells, and what theory says."""

import pytest

from jaxformers import config as configs
from jaxformers.analysis.tables import diagnostics
from jaxformers.config import RunConfig
from jaxformers.models import MODELS
from jaxformers.sweep import plans
from jaxformers.sweep.runs import Sweep
from jaxformers.tasks import mad
from tests import results as made


def run(seed, model, problem, scores, task="state_tracking", **fields):
  """The results of a run; scores are shares of right sequences by length."""
  section = {"name": task, "problem": problem, "causal": True}
  model_fields = {"name": model, "num_layers": 2} | fields
  if task == "recall":
    model_fields |= {"mixer": {"rotary": True}}
  config = {"seed": seed, "task": section, "model": model_fields}
  return made.make(
    config,
    task=task,
    model=model,
    seed=seed,
    by_length={
      str(n): {"accuracy": 1.0, "sequence_accuracy": share}
      for n, share in scores.items()
    },
  )


def test_the_matrix_has_median_and_best_over_seeds():
  finished = [
    run(seed, "mamba", "Z2", {64: short, 256: long}, mixer={"signed": True})
    for seed, (short, long) in enumerate([(1, 0.5), (0.9, 0.25), (0.2, 0)])
  ]
  finished.append(run(0, "mamba", "Z2", {64: 0, 256: 0}))
  finished.append(run(0, "transformer", "mqar", {64: 0}, task="recall"))
  text = diagnostics.matrix(finished)
  assert "| encoder | Z2, 64 tokens | mqar, 64 tokens |" in text
  assert "| mamba, signed | 90 (100); 25 (50); can |" in text
  assert "| mamba | 0; 0; cannot |" in text
  # Recall is scored by tokens.
  assert "| 100; can |" in text
  assert "(Grazzi et al. 2025): mamba on Z2." in text
  assert "- can: a factor of -1" in text
  assert diagnostics.matrix([]) == ""


@pytest.mark.parametrize(
  ("model", "problem", "says"),
  [
    ({"name": "mamba"}, "Z2", "cannot"),
    ({"name": "rglru", "mixer": {"signed": True}}, "Z2", "can"),
    ({"name": "mamba", "mixer": {"signed": True}}, "Z3", "cannot"),
    ({"name": "mamba", "mixer": {"signed": True}}, "A5", "cannot"),
    ({"name": "s5"}, "Z2", "cannot"),
    ({"name": "s5", "coupled": True}, "Z2", "unknown"),
    ({"name": "transformer"}, "Z2", "unknown"),
    ({"name": "neutreno"}, "A5", "cannot"),
    ({"name": "isometric"}, "A5", "unknown"),
    ({"name": "linear_transformer"}, "Z2", "cannot"),
    ({"name": "mamba2"}, "Z2", "cannot"),
    ({"name": "retnet"}, "Z3", "cannot"),
    ({"name": "lstm"}, "A5", "can"),
    # One reflection per token counts modulo 2, and two turn.
    ({"name": "deltanet"}, "Z2", "cannot"),
    ({"name": "deltanet", "mixer": {"signed": True}}, "Z2", "can"),
    ({"name": "deltanet", "mixer": {"signed": True}}, "Z3", "unknown"),
    ({"name": "deltaproduct"}, "S3", "can"),
    ({"name": "deltaproduct"}, "A5", "can"),
    ({"name": "deltaproduct"}, "S5", "unknown"),
    ({"name": "deltaproduct", "mixer": {"signed": False}}, "Z2", "cannot"),
    ({"name": "deltaproduct", "mixer": {"reflect": True}}, "Z2", "unknown"),
    # Other problems are not in the table of theory.
    ({"name": "mamba", "mixer": {"signed": True}}, "Z6", "unknown"),
    ({"name": "mamba"}, "even_pairs", "unknown"),
    ({"name": "of_the_user"}, "Z2", "unknown"),
  ],
)
def test_theory_depends_on_the_factors_of_the_recurrence(model, problem, says):
  config = {
    "model": model,
    "task": {"name": "state_tracking", "problem": problem},
  }
  found, reason = diagnostics.expected(config)
  assert found == says
  assert reason == "" or reason in diagnostics.REASONS


def test_recall_by_attention_needs_two_causal_layers():
  def says(name, **fields):
    model = {"name": name, "num_layers": 2, "positions": "none"}
    model |= {"mixer": {"rotary": True}} | fields
    task = {"name": "recall", "problem": "mqar", "causal": name != "bigbird"}
    return diagnostics.expected({"model": model, "task": task})[0]

  assert says("transformer") == says("neutreno") == "can"
  assert says("transformer", num_layers=1) == "unknown"
  assert says("transformer", mixer={}) == "unknown"
  assert says("transformer", coupled=True) == "unknown"
  assert says("symmetric_transformer") == says("mamba") == "unknown"


def test_recipes_that_differ_have_separate_rows():
  finished = [
    run(0, "mamba", "Z2", {8: 1.0, 32: 0.5}, num_layers=layers)
    for layers in (1, 2)
  ]
  finished.append(run(0, "mamba", "Z2", {16: 1.0, 64: 0.25}, num_layers=3))
  text = diagnostics.matrix(finished)
  assert text.count("| 100; 50; cannot |") == 2
  assert text.count("| 100; 25; cannot |") == 1
  # Nor do two problems mix the recipes, in any order.
  finished = [
    run(0, "mamba", problem, {8: share}, num_layers=layers)
    for problem, layers, share in [
      ("Z2", 1, 0.1),
      ("A5", 8, 0.9),
      ("A5", 1, 0.2),
      ("Z2", 8, 0.8),
    ]
  ]
  text = diagnostics.matrix(finished)
  assert "| 10; cannot | 20; cannot |" in text
  assert "| 80; cannot | 90; cannot |" in text
  # Width and positions depend on the task.
  finished = [
    run(0, "mamba", "Z2", {8: 0.1}, d_model=32),
    run(0, "mamba", "mqar", {8: 0}, task="recall", d_model=64),
  ]
  assert "| 10; cannot | 100; unknown |" in diagnostics.matrix(finished)


def test_tasks_of_the_package_share_the_row_of_an_encoder():
  """Attention has positions in recall only, and widths differ."""
  finished = []
  for task, problem in (("state_tracking", "Z2"), ("recall", "mqar")):
    name = f"diagnostics/{task}:problem={problem},model=transformer"
    config = RunConfig.from_dict(configs.load_with(name, [])).as_dict()
    scores = {"64": {"accuracy": 1.0, "sequence_accuracy": 0.0}}
    finished.append(made.make(config, task=task, by_length=scores))
  ((name, cells),) = diagnostics.rows_of(finished)
  assert (name, len(cells)) == ("transformer", 2)


@pytest.mark.slow
def test_the_plan_has_every_encoder_with_every_problem(tmp_path):
  plan = plans.find_plan("diagnostics")
  cells = plans.make_cells(plan, None)
  assert {*plans.ENCODERS} == {*MODELS}
  assert len(cells) == 6 * (len(MODELS) + 5)
  sweep = Sweep(tmp_path, [])
  names = set()
  # A prime, which does not divide the number of rows.
  for cell in cells[::11]:
    config = sweep.load_config(cell, 0).as_dict()
    names.add(diagnostics.row_name(config))
    assert diagnostics.expected(config)[0] in ("can", "cannot", "unknown")
  assert len(names) > 20


def mad_run(
  model, problem, accuracy, rate=1e-3, seed=0, fields=None, **setting
):
  fields = fields or {}
  task = {"name": "mad", "problem": problem, "causal": True}
  task["protocol"] = "paper"
  task |= mad.FIRST[problem] | setting
  config = {
    "seed": seed,
    "task": task,
    "model": {"name": model, "num_layers": 2, "d_model": 128} | fields,
    "total_steps": 200 * task["num_train"] // 128,
    "batch_size": 128,
    "schedule": {"name": "cosine", "learning_rate": rate},
  }
  return made.make(
    config, task="mad", model=model, seed=seed, accuracy=accuracy
  )


def test_mad_takes_the_best_training_of_each_setting():
  finished = [
    mad_run("s5", "memorization", 0.5),
    mad_run("s5", "memorization", 0.75, rate=1e-4),
    mad_run("s5", "memorization", 0.25, vocab_size=512),
    # Two seeds of one training count by their mean.
    mad_run("mamba", "compression", 0.25),
    mad_run("mamba", "compression", 0.75, seed=1),
    # Other sizes are another row; other settings and protocols do not count.
    mad_run("s5", "compression", 1.0, fields={"d_model": 64}),
    mad_run("s5", "memorization", 1.0, vocab_size=300),
    mad_run("s5", "memorization", 1.0, protocol="jaxformers"),
  ]
  lines = diagnostics.mad_scores(finished).splitlines()
  assert (
    "| s5, 2 x 128, 200 epochs |  |  |  |  |  | 50.0 (2 of 6) |  |" in lines
  )
  assert (
    "| s5, 2 x 64, 200 epochs |  |  |  |  | 100.0 (1 of 11) |  |  |" in lines
  )
  assert (
    "| mamba, 2 x 128, 200 epochs |  |  |  |  | 50.0 (1 of 11) |  |  |" in lines
  )
  # Only learning rate and weight decay are chosen.
  finished = [
    mad_run("s5", "compression", share, fields={"mixer": {"state_size": size}})
    for size, share in ((4, 0.4), (256, 0.9))
  ]
  text = diagnostics.mad_scores(finished)
  assert "| s5, 2 x 128, 200 epochs |  |  |  |  | 40.0 (1 of 11) |" in text
  assert "| s5, 2 x 128, 200 epochs [2] |  |  |  |  | 90.0 (1 of 11)" in text
  assert diagnostics.mad_scores([]) == ""


def test_mad_has_the_mean_of_six_complete_problems():
  finished = [
    mad_run("s5", problem, 0.1 * (1 + k), **setting)
    for k, problem in enumerate(mad.VARIED)
    for setting in mad.settings(problem)
  ]
  (line,) = diagnostics.mad_scores(finished).splitlines()[-1:]
  scores = "10.0 | 20.0 | 30.0 | 40.0 | 50.0 | 60.0 | 35.0"
  assert line == f"| s5, 2 x 128, 200 epochs | {scores} |"


def test_a_row_has_the_arguments_of_its_name():
  options = {"forget": False, "conv_width": 0}
  config = {"model": {"name": "deltaproduct", "mixer": options}, "task": {}}
  name = "deltaproduct, no decay or convolution"
  assert diagnostics.row_name(config) == name
  assert diagnostics.overrides(config) == [
    "--config.model.mixer.forget=False",
    "--config.model.mixer.conv_width=0",
  ]
  # One of the two options does not make the row.
  config["model"]["mixer"] = {"forget": False}
  assert diagnostics.overrides(config) == []
