"""The papers' tables with our runs beside them."""

import functools
import math

import pytest

from jaxformers.analysis.tables import papers
from jaxformers.analysis.tables import published as p
from jaxformers.commands import published as published_command
from jaxformers.foundations import workdirs
from tests import results as made

COLUMNS = {
  column.task: column
  for table in reversed(papers.TABLES)
  for column in table.columns
}
# Tokens of the longest example of every task, under protocol=paper.
LENGTHS = {
  "listops": 1_999,
  "text": 4_000,
  "retrieval": 4_000,
  "image": 1_024,
  "pathfinder": 1_024,
  "imdb": 512,
  "ag_news": 512,
}


def run(task, model, seed, accuracy, d_model=64, protocol="paper", **config):
  sizes = {"num_layers": 2, "d_model": d_model, "name": model}
  column = COLUMNS.get(task)
  return made.make(
    {"seed": seed, "task": {}, "model": sizes} | config,
    task=task,
    model=model,
    protocol=protocol,
    max_len=LENGTHS.get(task, 0),
    parameters=1_000,
    seed=seed,
    accuracy=accuracy,
    examples=column.examples if column else 2_000,
  )


def scored(command, scores, examples=10, step=1, split="test", **how):
  """A record of scores.json."""
  how = {"split": split, **how}
  record = {"command": command, "how": how, "step": step}
  return {**record, "examples": examples, "scores": scores}


@pytest.mark.parametrize(
  ("table", "averages"),
  [
    (papers.TRANSJECT_2, {"transject": 59.6, "skyformer": 59.4}),
    (papers.LRA, {"transformer": 54.4, "local": 46.1, "bigbird": 55.0}),
    (papers.STATE_SPACES, {"s5": 87.5, "mega": 88.2}),
  ],
)
def test_table_averages_are_those_of_the_papers(table, averages):
  filled = p.fill(table, [])
  found = {row.name: p._average(row, filled)[0] for row in filled.rows}
  assert averages == {name: float(found[name]) for name in averages}


def test_score_difference_is_in_standard_errors_of_seeds_and_examples():
  score = p.Score(40.0, 1.2, 3, 2_000)
  gap, errors = score.difference(38.0)
  assert gap == 2
  want = math.sqrt(1.2**2 / 3 + (40 * 60 + 38 * 62) / 2_000)
  assert errors == pytest.approx(2 / want)
  one_seed = p.Score(40.0, math.nan, 1, 2_000)
  assert one_seed.difference(42.0)[1] == pytest.approx(
    -2 / math.sqrt((40 * 60 + 42 * 58) / 2_000)
  )
  # A perplexity has the spread of seeds alone.
  assert p.Score(30.0, 0.3, 9, 0).difference(31.0)[1] == pytest.approx(-10)
  one_run = p.Score(30.0, math.nan, 1, 0)
  assert math.isnan(one_run.difference(31.0)[1])
  # One run varies as the paper's runs do, and its mean is over five.
  want = -1 / (0.5 * math.sqrt(1 + 1 / 5))
  assert one_run.difference(31.0, 0.5)[1] == pytest.approx(want)


def test_fill_keeps_published_rows_with_ours_beside_them():
  runs = [
    *(run("listops", "transject", s, a) for s, a in enumerate((0.4, 0.42))),
    run("text", "transject", 0, 0.65),
    run("listops", "transject", 0, 0.2, batch_size=4),
    run("listops", "transject", 0, 0.3, d_model=512),
    run("listops", "local", 0, 0.35),
    run("imdb", "local", 0, 0.8),
  ]
  runs.append(run("listops", "transject", 5, 9.0))
  runs[-1]["perplexity"] = runs[-1].pop("accuracy")
  filled = p.fill(papers.TRANSJECT_2, runs)
  table_rows = filled.rows
  assert [row.name for row in table_rows[:3]] == [*papers.TRANSJECT_2.scores][
    :3
  ]
  assert all(not row.ours for row in table_rows[:3])
  ours = [row for row in table_rows if row.name == "transject"]
  assert [row.label for row in ours] == [
    "L=2 d=64, paper",
    "L=2 d=64, paper",
    "L=2 d=512, paper",
  ]
  assert ours[0].ours["ListOps"].mean == pytest.approx(41)
  assert ours[0].ours["ListOps"].deviation == pytest.approx(2**0.5)
  assert {*ours[0].ours} == {"ListOps", "Text"}
  assert ours[1].ours["ListOps"].mean == pytest.approx(20)
  assert table_rows[-1].name == "local"
  assert table_rows[-1].theirs == {}
  text = p.markdown(filled)
  assert "| transject | L=2 d=64, paper | 42.2 | 41.0 +- 1.4 (-1." in text
  assert "| 35.0 |" in text
  assert {line.count("|") for line in text.splitlines()} == {15}
  table = p.latex(filled)
  assert r"random\_transject &" in table
  assert r"41.0 $\pm$ 1.4 (-1.2" in table
  assert {line.count("&") for line in table.splitlines()[4:-2]} == {13}
  names = {f.table.name for f in p.tables(runs).values()}
  assert names == {"transject_1", "transject_2"}
  names = [f.table.name for f in p.tables(runs[:3]).values()]
  assert names == ["transject_2"]


def test_fill_puts_all_tasks_of_a_model_in_one_row():
  long = ("listops", "text", "retrieval", "image", "pathfinder")
  runs = [run(task, "skyformer", 0, 0.5) for task in long]
  filled = p.fill(papers.TRANSJECT_2, runs)
  (row,) = [row for row in filled.rows if row.name == "skyformer"]
  assert len(row.ours) == 5
  assert p.notes(filled) == []
  assert p._average(row, filled) == ("59.4", "50.0")
  # Under LRA's protocol a model has other sizes on every task.
  runs = [
    run(task, "local", 0, 0.5, d_model=32 * k, protocol="lra")
    for k, task in enumerate(long, 1)
  ]
  filled = p.fill(papers.LRA, runs)
  (row,) = [row for row in filled.rows if row.name == "local"]
  assert len(row.ours) == 5
  # A star is not lost in the average.
  runs[0]["examples"] = 10
  filled = p.fill(papers.LRA, runs)
  (row,) = [row for row in filled.rows if row.name == "local"]
  assert p._average(row, filled)[1] == "50.0 *"


def test_fill_mixes_no_recipes_of_one_task():
  first, second = (
    run("language", "transformer", 0, 0, batch_size=size) for size in (1, 2)
  )
  for result, perplexities in ((first, [34.0]), (second, [52.0, 50.0])):
    splits = zip(("test", "validation"), perplexities, strict=False)
    result["scores"] = [
      scored("perplexity", {"perplexity": p}, split=split, stride=1)
      for split, p in splits
    ]
    del result["accuracy"]
  filled = p.fill(papers.NEUTRENO_3, [first, second])
  ours = [
    sorted(score.mean for score in row.ours.values())
    for row in filled.rows
    if row.ours
  ]
  assert ours == [[50.0, 52.0], [34.0]] or ours == [[34.0], [50.0, 52.0]]
  # The recipes of several tasks may belong together in several ways.
  long = ("listops", "text", "retrieval", "image", "pathfinder")
  runs = [run(task, "skyformer", 0, 0.5) for task in long]
  runs += [run(task, "skyformer", 0, 0.6, batch_size=2) for task in long]
  filled = p.fill(papers.TRANSJECT_2, runs)
  rows = [row for row in filled.rows if row.name == "skyformer"]
  assert [p._average(row, filled) for row in rows] == 2 * [("59.4", "")]
  assert p.notes(filled)[-1].startswith("No average of ours: several recipes")


@pytest.mark.parametrize(
  ("task", "options", "fields", "reason"),
  [
    ("retrieval", {}, {"examples": 1_000}, "1,000 test examples, not 17,437"),
    ("ag_news", {}, {"examples": 1_000}, "1,000 test examples, not 7,600"),
    ("pathfinder", {"difficulty": "easy"}, {}, "difficulty=easy, not hard"),
    ("pathfinder", {"resolution": 64}, {}, "resolution=64, not 32"),
    ("listops", {"max_length": 400}, {}, "max_length=400, not 2000"),
    ("listops", {"test_max_length": 4_000}, {}, "test_max_length=4000"),
    ("listops", {}, {"protocol": "jaxformers"}, "jaxformers, not paper"),
    ("listops", {}, {"protocol": "skyformer"}, "skyformer, not paper"),
    ("imdb", {}, {"protocol": "jaxformers"}, "jaxformers, not paper"),
    ("text", {}, {"max_len": 2_000}, "cut to 2,000 tokens, not 4,000"),
    ("listops", {}, {"pretrained": "runs/a"}, "begins with trained weights"),
  ],
)
def test_fill_shows_no_difference_for_other_test_examples(
  task, options, fields, reason
):
  other = run(task, "transject", 0, 0.8) | fields
  begin = {"pretrained": fields.get("pretrained", "")}
  other["config"] = other["config"] | {"task": options, **begin}
  is_short = task in ("imdb", "ag_news")
  table = papers.TRANSJECT_1 if is_short else papers.TRANSJECT_2
  filled = p.fill(table, [other])
  text = p.markdown(filled)
  assert "80.0 *" in text
  assert "s.e." not in text
  (note,) = p.notes(filled)
  assert note.startswith(f"* {COLUMNS[task].title} (transject): ")
  assert reason in note


def test_fill_compares_baselines_under_skyformers_protocol():
  runs = [run("listops", "bigbird", 0, 0.4, protocol="skyformer")]
  assert "40.0 (+0.7, 0.5 s.e.)" in p.markdown(p.fill(papers.TRANSJECT_2, runs))


def test_tables_show_a_run_only_where_it_compares():
  def shown(protocol):
    runs = [run("listops", "performer", 0, 0.3, protocol=protocol)]
    return [filled.table.name for filled in p.tables(runs).values()]

  assert shown("lra") == ["lra"]
  assert shown("paper") == ["transject_2"]
  assert shown("jaxformers") == ["transject_2"]  # With the reason.


def test_neutreno_rows_follow_from_config_fields():
  def image(model, **fields):
    made = run("imagenet2012", model, 0, 0.7, d_model=192)
    made["config"]["model"]["mixer"] = fields
    return made | {"accuracy_top5": 0.9}

  adapted = image("neutreno")
  adapted["config"]["pretrained"] = "elsewhere"
  runs = [image("transformer"), image("neutreno", feat_scale=True), adapted]
  filled = p.fill(papers.NEUTRENO_1, runs)
  ours = {row.name: row.ours for row in filled.rows if row.ours}
  assert {*ours} == {"DeiT", "NeuTRENO + FeatScale", "NeuTRENO, adapted"}
  assert ours["DeiT"]["top-5"].mean == pytest.approx(90)
  symmetric = [image("symmetric_transformer", fidelity=0.6)]
  filled = p.fill(papers.NEUTRENO_5, symmetric)
  assert [r.name for r in filled.rows if r.ours] == ["Sym-NeuTRENO"]
  # Perplexities are no shares, and have no binomial deviation.
  words = {"tokens": "words", "max_len": 256, "vocab_size": 0}
  made = [
    run("language", "neutreno", seed, 0.0, protocol="jaxformers")
    | {"perplexity": 33.5 + seed, "data": {"source": "wikitext-103"}}
    for seed in (0, 1)
  ]
  for one in made:
    one["config"]["task"] = words
    one["scores"] = [
      scored("perplexity", {"perplexity": one["perplexity"]}, stride=1)
    ]
  filled = p.fill(papers.NEUTRENO_3, made)
  assert "34.0 +- 0.7 (+0.3, 0.6 s.e.)" in p.markdown(filled)
  made[0]["data"] = {"source": "wikitext-2"}
  (note, *_) = p.notes(p.fill(papers.NEUTRENO_3, made[:1]))
  assert "wikitext-2, not 103" in note


def test_published_command_prints_markdown_and_latex(tmp_path, capsys):
  folder = tmp_path / "run"
  folder.mkdir()
  write = functools.partial(workdirs.write, folder, "results.json")
  write(run("imdb", "transject", 0, 0.876))
  published_command.main([str(folder)])
  assert "87.6 (-0.5, 1.7 s.e.)" in capsys.readouterr().out
  published_command.main([str(folder), "--latex"])
  assert r"\toprule" in capsys.readouterr().out
  write(run("cifar10", "transject", 0, 0.5))
  with pytest.raises(SystemExit, match="no run has a task.*imdb"):
    published_command.main([str(folder)])
  with pytest.raises(SystemExit, match=r"no results\.json"):
    published_command.main([str(tmp_path / "nothing")])


def score_of(table, result, row, title):
  filled = p.fill(table, result)
  (shown,) = [r for r in filled.rows if r.name == row and r.ours]
  return shown.ours.get(title)


def scenes(model="neutreno", fidelity=0.6, **fields):
  result = run("ade20k", model, 0, 0.0, pretrained="runs/deit")
  mixer = {"fidelity": fidelity} if model == "neutreno" else {}
  result["config"]["model"]["mixer"] = mixer
  result["config"] |= fields
  crop = {"split": "test", "crop": "centre", "scales": [1.0], "flip": False}
  return result | {"mean_iou": 0.3, "metric": "mean_iou", "scored": crop}


SLIDING = {"stride": 480, "scales": [1.0], "flip": False}
SS, MS = (column.title for column in papers.MEAN_IOUS)


def test_score_of_a_crop_is_marked_beside_sliding_windows():
  """The score of a run, and the two of `segmentation`."""
  result = scenes()
  crop = score_of(papers.NEUTRENO_2, [result], "neutreno", SS)
  assert crop.mean == pytest.approx(30)
  assert crop.mismatch == "scored with crop=centre, not stride=480"
  assert score_of(papers.NEUTRENO_2, [result], "neutreno", MS) is None
  several = {**SLIDING, "scales": list(papers.SCALES), "flip": True}
  result["scores"] = [
    scored("segmentation", {"mean_iou": 0.37}, 2_000, **SLIDING),
    scored("segmentation", {"mean_iou": 0.38}, 2_000, **several),
  ]
  for title, mean in ((SS, 37), (MS, 38)):
    score = score_of(papers.NEUTRENO_2, [result], "neutreno", title)
    assert (score.mean, score.mismatch) == (pytest.approx(mean), "")
  # Fewer scenes, another stride, and an earlier checkpoint.
  result["scores"][0]["examples"] = 5
  score = score_of(papers.NEUTRENO_2, [result], "neutreno", SS)
  assert score.mismatch == "5 test examples, not 2,000"
  result["scores"][0]["how"]["stride"] = 100
  score = score_of(papers.NEUTRENO_2, [result], "neutreno", SS)
  assert score.mismatch == "scored with crop=centre, not stride=480"
  result["best_step"] = 2
  assert score_of(papers.NEUTRENO_2, [result], "neutreno", MS) is None


def test_score_of_adjacent_windows_is_marked_beside_stride_1():
  result = run("language", "neutreno", 0, 0.0, protocol="jaxformers")
  result |= {"perplexity": 40.0, "max_len": 256, "scored": {"stride": 256}}
  result["data"] = {"source": "wikitext-103"}
  test, valid = "test perplexity", "valid perplexity"
  score = score_of(papers.NEUTRENO_3, [result], "neutreno", test)
  assert score.mismatch == "scored with stride=256, not stride=1"
  assert score_of(papers.NEUTRENO_3, [result], "neutreno", valid) is None
  result["scores"] = [
    scored("perplexity", {"perplexity": 33.0}, stride=1, split="validation")
  ]
  score = score_of(papers.NEUTRENO_3, [result], "neutreno", valid)
  assert (score.mean, score.mismatch) == (33, "")
  # The printed deviation of five runs counts for their mean and for our run.
  gap, errors = score.difference(32.6, 0.08)
  assert errors == pytest.approx(gap / (0.08 * (1 + 1 / 5) ** 0.5))
  text = p.markdown(p.fill(papers.NEUTRENO_3, [result]))
  assert "| 32.60 +- 0.08 | 33.0 (+0.4, 4.6 s.e.) |" in text


@pytest.mark.parametrize(
  ("fields", "reason"),
  [
    ({"total_steps": 1_564, "batch_size": 32}, "1,564 steps of 32, not 23,460"),
    ({"total_steps": 46_920, "batch_size": 16}, ""),
    ({"mixer": {"num_experts": 1}}, "num_experts=1, not 4"),
    ({"mixer": {"num_experts": 4}}, ""),
  ],
)
def test_score_mismatch_names_training_length_and_experts(fields, reason):
  result = run("imdb", "transject", 0, 0.8)
  result["config"]["model"] |= {"mixer": fields.pop("mixer", {})}
  result["config"] |= fields
  score = score_of(papers.TRANSJECT_1, [result], "transject", "IMDb")
  assert score.mismatch.startswith(reason) and bool(score.mismatch) == bool(
    reason
  )


def test_score_mismatch_names_a_segmenter_without_pretrained_encoder():
  score = score_of(papers.NEUTRENO_2, [scenes(pretrained="")], "neutreno", SS)
  assert "begins without trained weights" in score.mismatch


def test_fill_compares_each_lambda_with_its_own_row():
  """Table 13; table 2 has only 0.6."""
  result = [scenes(fidelity=at) for at in (0.1, 0.6, 2.0)]
  for one in result:
    one["scores"] = [
      scored("segmentation", {"mean_iou": 0.36}, 2_000, **SLIDING)
    ]
  filled = p.fill(papers.NEUTRENO_13, [*result, scenes("transformer")])
  gaps = {
    row.name: row.ours[SS].difference(row.theirs[SS])[0]
    for row in filled.rows
    if row.ours
  }
  assert gaps == pytest.approx(
    {
      "softmax": 30 - 35.72,
      "lambda = 0.1": 36 - 34.94,
      "lambda = 0.6": 36 - 37.24,
      "lambda = 2.0": 36 - 26.25,
    }
  )
  # A lambda that the paper has not is no row of it.
  (row,) = (
    r for r in p.fill(papers.NEUTRENO_13, [scenes(fidelity=0.3)]).rows if r.ours
  )
  assert not row.theirs
  reasons = {
    score.mismatch
    for row in p.fill(papers.NEUTRENO_2, result).rows
    for score in row.ours.values()
  }
  assert reasons == {"", "fidelity=0.1, not 0.6", "fidelity=2.0, not 0.6"}


def test_fill_takes_image_scores_from_their_commands():
  """Tables 4, 8 and 12."""
  result = run("imagenet2012", "transformer", 0, 0.7, d_model=192)
  result["scores"] = [
    scored("robustness", {"mce": 72.0}, 50_000, split=None, set="imagenet_c"),
    scored("robustness", {"accuracy": 0.1}, 7_500, set="imagenet_a"),
    scored("smoothness", {"gradient_cosine": 0.9}, 1_000, samples=1_000),
  ]
  for record in result["scores"][:2]:
    del record["how"]["split"]
  text = p.markdown(p.fill(papers.NEUTRENO_12, [result]))
  assert "| 71.6 | 72.0 (+0.4) | 6.9 | 10.0 (+3.1, 6.8 s.e.) | 32.8 |" in text
  text = p.markdown(p.fill(papers.NEUTRENO_4, [result]))
  assert "| 0.973 |  | 0.964 | 0.900 (-0.064) |" in text
  # Sym-DeiT's queries are its keys.
  result["config"]["model"]["name"] = result["model"] = "symmetric_transformer"
  (note,) = p.notes(p.fill(papers.NEUTRENO_4, [result]))
  assert note.startswith("* test data (Sym-DeiT): 1 by construction")
  kernel = run("cifar10", "kernelized", 0, 0.75, protocol="jaxformers")
  kernel["examples"] = 10_000
  kernel["config"]["model"] |= {
    "num_layers": 12,
    "mixer": {"normalize": True, "fidelity": 0.6},
  }
  text = p.markdown(p.fill(papers.NEUTRENO_8, [kernel]))
  assert "| 76.8 | 75.0 (-1.8, 2.9 s.e.) |" in text


def test_latex_escapes_special_letters():
  assert r"50 % & a_b #1 $x$ {c}".translate(p._TEX) == (
    r"50 \% \& a\_b \#1 \$x\$ \{c\}"
  )
  assert "\\input{x}~^".translate(p._TEX) == (
    r"\textbackslash{}input\{x\}\textasciitilde{}\textasciicircum{}"
  )
