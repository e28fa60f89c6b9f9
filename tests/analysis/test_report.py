"""The page of runs: what is on it, what is left out, and how it opens."""

import csv
import html
import json
import re
import shutil
import subprocess
import types

import numpy as np
import pytest

from jaxformers.analysis import report
from jaxformers.training import loop

BROWSER = next(
  filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))),
  None,
)


@pytest.fixture(scope="module")
def workdir(smoke, tmp_path_factory):
  """Two seeds of TransJect, a Transformer, and a run that has not ended."""
  folder = tmp_path_factory.mktemp("runs")
  first = folder / "transject" / "seed_0"
  loop.run(smoke(), first)
  loop.run(smoke("transformer"), folder / "transformer")
  # The second seed is the first under another number: training takes long.
  second = folder / "transject" / "seed_1"
  shutil.copytree(first, second)
  for name in ("config", "results"):
    path = second / f"{name}.json"
    content = json.loads(path.read_text())
    content["seed"] = 1
    if name == "results":
      content["config"]["seed"] = 1
      content["accuracy"] += 0.1
    path.write_text(json.dumps(content))
  begun = folder / "begun"
  begun.mkdir()
  shutil.copy(folder / "transformer" / "config.json", begun)
  content = json.loads((begun / "config.json").read_text())
  content["model"]["d_model"] = 8
  (begun / "config.json").write_text(json.dumps(content))
  (folder / "foreign").mkdir()
  (folder / "foreign" / "config.json").write_text('{"model_type": "bert"}')
  return folder


@pytest.fixture(scope="module")
def page(workdir):
  options = report.Options(samples=4, length=40)
  return report.build([workdir, workdir / "nothing"], options)


@pytest.fixture(scope="module")
def out(page, tmp_path_factory):
  folder = tmp_path_factory.mktemp("report")
  report.write(page, folder / "deep")
  return folder / "deep"


def test_figures_of_both_models(page):
  found = {one.name: one for own in page.figures.values() for one in own}
  assert {*found} == {
    *("training", "activation_factors", "entropy", "shape", "parts"),
    *("experts", "pairs", "isomap", "smoothness", "attention"),
    *("factors_sizes", "entropy_sizes"),
  }
  runs = {row[0] for row in found["entropy"].rows}
  assert runs == {
    *("transject", "transject, untrained"),
    *("transformer, d_model=16", "transformer, d_model=16, untrained"),
  }
  assert {row[1] for row in found["activation_factors"].rows} == {0, 1}
  assert {row[0] for row in found["experts"].rows} == {"transject"}
  # The embedding and both layers, four samples.
  rows = [r for r in found["entropy"].rows if r[:2] == ("transject", 0)]
  assert len(rows) == 3 * 4
  named = [
    r for r in found["isomap"].rows if r[4] and r[:2] == ("transject", 0)
  ]
  assert len(named) == 4


def test_what_is_left_out_is_said(page, workdir):
  notes = "\n".join(page.notes)
  assert f"{workdir / 'nothing'}: there is no run" in notes
  assert f"{workdir / 'foreign'} is no run of this package" in notes
  assert f"{workdir / 'begun'} has no results.json" in notes
  assert f"{workdir / 'begun'}: no figures of its layers" in notes
  rows = {row["model"]: row for row in page.rows}
  assert rows["transject"]["seeds"] == "0 1"
  assert rows["transject"]["score"][1] == pytest.approx(10 / 2**0.5)
  assert rows["transformer"]["seeds"] == "0"


def test_the_page_is_whole_without_a_network(page, out):
  text = (out / "index.html").read_text()
  for one in (one for own in page.figures.values() for one in own):
    assert f'id="{one.name}"' in text
    assert html.escape(one.caption) in text
    for kind in ("png", "svg", "csv"):
      assert f'href="{one.name}.{kind}"' in text
      assert (out / f"{one.name}.{kind}").stat().st_size > 100
    rows = list(csv.reader((out / f"{one.name}.csv").read_text().splitlines()))
    assert len(rows) == 1 + len(one.rows)
  assert not re.search(r'(src|href)="(https?:)?//', text)
  for note in page.notes:
    assert html.escape(note) in text
  assert "± 7.07" in text
  assert "| transject |" in (out / "results.md").read_text()
  assert "examples/s in training" in text
  assert "TransJect, Table 2, Long Range Arena" in text
  assert "TransJect, Table 1" not in text
  table = (out / "table_2.md").read_text()
  assert re.search(r"\| transject \| L=2 d=16, jaxformers, \d+ long \|", table)
  assert (out / "table_2.tex").exists()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_opens_it(out, tmp_path, width):
  """All pictures are drawn, nothing is wider than the window, no error."""
  text = (out / "index.html").read_text()
  script = """<script>addEventListener("load", () => {
    const images = [...document.images];
    const right = i => i.getBoundingClientRect().right;
    document.title = JSON.stringify({
      images: images.length,
      drawn: images.filter(i => i.complete && i.naturalWidth > 0).length,
      wide: images.filter(i => right(i) > innerWidth).length,
      over: document.documentElement.scrollWidth > innerWidth,
      width: innerWidth,
    });
  });</script>"""
  text = text.replace("</body>", script + "</body>")
  (tmp_path / "index.html").write_text(text)
  ran = subprocess.run(
    [
      *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
      *(f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"),
      *(f"--window-size={width},900", f"file://{tmp_path}/index.html"),
    ],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert "CONSOLE" not in ran.stderr
  title = re.search("<title>(.*?)</title>", ran.stdout, re.S)[1]
  seen = json.loads(html.unescape(title))
  assert seen["images"] == seen["drawn"] == 12
  assert not seen["wide"]
  assert not seen["over"], seen


def test_labels_say_what_differs():
  def one(name, seed=0, **config):
    model = {"name": "local", "num_layers": 2} | config
    content = {"seed": seed, "task": {"name": name}, "model": model}
    return report.One(report.Path(f"runs/{len(config)}"), content, {})

  runs = [one("text"), one("text", 1), one("text", num_layers=4)]
  found = report.groups(runs)
  labels = [g.label for g in found]
  assert labels == ["local, num_layers=2", "local, num_layers=4"]
  assert [len(g.runs) for g in found] == [2, 1]
  labels = [g.label for g in report.groups([one("text"), one("image")])]
  assert labels == ["text local", "image local"]


def test_every_recipe_has_a_label_of_its_own():
  """Also those that differ in more than three fields, all of seed_0."""

  def one(rate, depth, width, mlp_dim, folder="seed_0"):
    model = {"name": "local", "num_layers": depth, "d_model": width}
    model["block"] = {"mlp_dim": mlp_dim}
    config = {"seed": 0, "task": {"name": "text"}, "model": model}
    config["schedule"] = {"learning_rate": rate}
    return report.One(report.Path(folder), config, {})

  runs = [
    one(rate, depth, width, 4 * width)
    for rate in (1, 2)
    for depth in (2, 4)
    for width in (8, 16)
  ]
  labels = [group.label for group in report.groups(runs)]
  assert len({*labels}) == 8
  assert "local, mlp_dim=32, d_model=8, num_layers=2, learning_rate=1" in labels
  # Of other data, which only the results know.
  data = [{"task_description": {"data": k}} for k in (1, 2)]
  first = one(1, 2, 8, 32)
  runs = [
    report.One(report.Path(f"run_{k}"), first.config, found)
    for k, found in enumerate(data)
  ]
  labels = [group.label for group in report.groups(runs)]
  assert labels == ["local (run_0)", "local (run_1)"]
  # What has not ended counts to the others of its config.
  begun = report.One(report.Path("run_2"), {**first.config, "seed": 2}, {})
  twice = report.One(report.Path("run_3"), first.config, {})
  found = report.groups([begun, twice, runs[0]])
  assert [[one.folder.name for one in g.runs] for g in found] == [
    ["run_0", "run_2"]
  ]


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("config", '{"seed": 0, "task": "x", "model": "bert"}', "no 'task'"),
    ("config", '{"seed": 0, "task": {}, "model": {}}', "no name of the task"),
    ("results", "[1]", "results.json is no table"),
    ("results", '{"accuracy": 0.5}', "no 'seed'"),
    ("config", "{", "is no run of this package"),
  ],
)
def test_what_is_no_run_is_named(name, content, message, tmp_path):
  (tmp_path / "checkpoints" / "one").mkdir(parents=True)
  (tmp_path / "checkpoints" / "one" / f"{name}.json").write_text(content)
  runs, notes = report.discover([tmp_path / "checkpoints"])
  assert not runs
  assert message in "\n".join(notes)
  # Beside a checkpoint of a run there may be files of these names.
  assert report.discover([tmp_path])[1] == [
    f"{tmp_path}: there is no run in it or below it."
  ]


def test_a_text_is_read_as_its_task_reads_it():
  def task(vocabulary, **fields):
    own = {name: k for k, name in enumerate(vocabulary)}

    def encode(text, length):
      return np.array([own.get(word, 1) for word in text.split()])[:length]

    about = {"name": "t", "image": (), "encode": encode}
    return types.SimpleNamespace(**about | fields, vocabulary=vocabulary)

  words = task(("<pad>", "<unk>", "good", "bad", "or"))
  run = types.SimpleNamespace(
    task=words, sample=lambda count, length: np.array([[4, 2, 3, 2, 0]])
  )
  ids, names = report.example(run, report.Options(text="or bad good or new"))
  assert ids.tolist() == [4, 3, 2, 4, 1]
  assert names == ["or", "bad", "good", "or", "<unk>"]
  with pytest.raises(ValueError, match="'good' has 1 tokens.*--text"):
    report.example(run, report.Options(text="good"))
  # Of the paper's sentence it knows one word: the task's own is taken.
  ids, names = report.example(run, report.Options())
  assert names == ["or", "good", "bad", "good"]
  run.task = task((), image=(2, 2, 3))
  with pytest.raises(ValueError, match="no tokens"):
    report.example(run, report.Options())


def test_a_figure_without_numbers_is_noted():
  page = report.Page()
  rows = [("a", 0, 1, 0, float("nan"))]
  page.add("S", report.figures.over_layers("n", "Title", "c", rows, "q"))
  assert page.figures == {}
  assert page.notes == ["Title: there is no number to draw."]


def test_scores_against_sizes():
  def one(seed, d_model, accuracy):
    config = {
      "seed": seed,
      "task": {"name": "text"},
      "model": {"name": "local", "num_layers": 2, "d_model": d_model},
    }
    results = {"accuracy": accuracy, "config": config}
    return report.One(report.Path("run"), config, results)

  runs = [one(0, 8, 0.5), one(1, 8, 0.6), one(0, 16, 0.7)]
  figure = report.sizes(report.groups(runs))
  assert {row[0] for row in figure.rows} == {"text local (num_layers=2)"}
  assert [row[2:] for row in figure.rows] == [
    ("d_model", 8, 50.0),
    ("d_model", 8, 60.0),
    ("d_model", 16, 70.0),
  ]
  assert report.sizes(report.groups(runs[:2])) is None
  # Another learning rate is another line.
  other = one(0, 16, 0.9)
  changed = {**other.config, "schedule": {"learning_rate": 2}}
  runs = [
    *(
      report.One(
        r.folder, {**r.config, "schedule": {"learning_rate": 1}}, r.results
      )
      for r in runs
    ),
    report.One(other.folder, changed, other.results),
  ]
  figure = report.sizes(report.groups(runs))
  assert {row[0] for row in figure.rows} == {
    "text local (num_layers=2), learning_rate=1"
  }
  assert report.deep(report.groups(runs)) is None


def test_what_is_measured_of_the_last_layer_against_sizes():
  def one(seed, num_layers):
    model = {"name": "local", "num_layers": num_layers, "d_model": 8}
    config = {"seed": seed, "task": {"name": "text"}, "model": model}
    return report.One(report.Path("run"), config, {})

  found = report.groups([one(0, 1), one(1, 1), one(0, 2)])
  rows = report._Rows(report.Options())
  few, many = (group.label for group in found)
  rows.of["factors"] = [
    *((few, seed, 1, k, 2.0 + seed + k) for seed in (0, 1) for k in (0, 2)),
    *((many, 0, layer, k, 10.0 * layer) for layer in (0, 1, 2) for k in (0, 1)),
  ]
  line = "text local (d_model=8)"
  assert report._at_the_end(found, rows, "factors") == [
    (line, 0, "num_layers", 1, 3.0),
    (line, 1, "num_layers", 1, 4.0),
    (line, 0, "num_layers", 2, 20.0),
  ]
  assert report._at_the_end(found[:1], rows, "factors") == []
  # Over layers, without the embedding; where nothing varies there is none.
  rows.of["entropy"] = [(*row[:4], -row[4]) for row in rows.of["factors"]]
  assert report._correlations(rows) == f"{few} -1.00, {many} -1.00"
  rows.of["factors"] = rows.of["factors"][:1]
  assert report._correlations(rows) == "none"


def test_tokens_are_named_without_their_marks():
  names = ["\u0120the", "##ing", "a", "\u0120movie", "was", "good", "."]
  read = [report.readable(name) for name in names]
  assert read == ["the", "ing", "a", "movie", "was", "good", "."]
  assert list(map(report.readable, ("0x61", "0x0a"))) == ["a", "0x0a"]
  assert report.name_tokens(read, ("was", "a")) == [2, 4]
  assert report.name_tokens(read, ()) == [1, 3, 4, 5]
  with pytest.raises(ValueError, match="'bad' is not among the ing"):
    report.name_tokens(read, ("bad",))


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--estimator=shannon", "'shannon'.*vasicek"),
    ("--axis=heads", "'heads'.*units"),
    ("--samples=0", "--samples=0"),
    ("--length=64", "there is no run in it"),
  ],
)
def test_a_wrong_argument(argument, message, tmp_path):
  with pytest.raises(SystemExit, match=message):
    report.main([str(tmp_path), argument])


def test_the_command_without_checkpoints(workdir, tmp_path, capsys):
  report.main(
    [str(workdir / "transject"), f"--out={tmp_path}", "--no_checkpoints"]
  )
  assert "| transject |" in capsys.readouterr().out
  assert (tmp_path / "training.svg").exists()
  assert not (tmp_path / "entropy.svg").exists()


def test_speeds_are_medians_over_what_was_logged(tmp_path):
  runs = []
  for seed, rates in enumerate(((1.0, 9.0), (5.0,))):
    folder = tmp_path / f"{seed}"
    folder.mkdir()
    lines = [{"step": 1, "validation/loss": 2.0}]
    lines += [{"step": 1, "examples_per_second": rate} for rate in rates]
    text = "\n".join(map(json.dumps, lines))
    (folder / "metrics.jsonl").write_text(text + '\n{"cut sh')
    config = {"seed": seed, "task": {"name": "t"}, "model": {"name": "m"}}
    hardware = {"devices": 2, "device_kind": "cpu"}
    ended = {"parameters": 1_234, "parameter_ratio": 0.5, "hardware": hardware}
    runs.append(report.One(folder, config, ended))
  (group,) = report.groups(runs)
  text = report.speeds([group])
  assert text.endswith("| m | 1,234 | 0.50 | 5 | 2 cpu |")
  assert report.speeds([]) == ""
