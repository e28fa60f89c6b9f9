"""The page of runs: what is on it, what is left out, and how it opens."""

import csv
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxformers.analysis.page import report
from jaxformers.analysis.page.measured import Options
from jaxformers.analysis.page.page import write
from jaxformers.analysis.tokens import isometry
from jaxformers.commands import report as report_command
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.training import loop
from tests.marks import BROWSER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workdir(smoke, tmp_path_factory):
  """Two seeds of TransJect, a Transformer, and a run that has not ended."""
  folder = tmp_path_factory.mktemp("runs")
  for seed in (0, 1):
    seed_folder = folder / "transject" / f"seed_{seed}"
    results = loop.run(smoke(seed=seed), seed_folder)
    workdirs.write(
      seed_folder, "results.json", {**results, "accuracy": seed / 10}
    )
  loop.run(smoke("transformer"), folder / "transformer")
  begun = folder / "begun"
  begun.mkdir()
  content = workdirs.read_config(folder / "transformer")
  content["model"]["d_model"] = 8
  workdirs.write(begun, "config.json", content)
  (folder / "foreign").mkdir()
  (folder / "foreign" / "config.json").write_text('{"model_type": "bert"}')
  return folder


@pytest.fixture(scope="module")
def page(workdir):
  options = Options(samples=4, length=40)
  return report.build_page([workdir, workdir / "nothing"], options)


@pytest.fixture(scope="module")
def out(page, tmp_path_factory):
  folder = tmp_path_factory.mktemp("report")
  write(page, folder / "deep")
  return folder / "deep"


def test_report_has_figures_of_both_models(page):
  by_name = {
    figure.name: figure
    for section in page.figures.values()
    for figure in section
  }
  assert {*by_name} == {
    "training",
    "over_minutes",
    "activation_factors",
    "entropy",
    "shape",
    "parts",
    "experts",
    "pairs",
    "isomap",
    "smoothness",
    "attention",
    "attention_heads",
    "factors_sizes",
    "entropy_sizes",
    "isometry",
    "dot_factors",
    "head_pairs",
  }
  runs = {row[0] for row in by_name["entropy"].rows}
  assert runs == {
    "transject",
    "transject, untrained",
    "transformer, d_model=16",
    "transformer, d_model=16, untrained",
  }
  assert {row[1] for row in by_name["activation_factors"].rows} == {0, 1}
  assert {row[0] for row in by_name["experts"].rows} == {"transject"}
  # The embedding and both layers, four samples.
  rows = [r for r in by_name["entropy"].rows if r[:2] == ("transject", 0)]
  assert len(rows) == 3 * 4
  named = [
    r for r in by_name["isomap"].rows if r[4] and r[:2] == ("transject", 0)
  ]
  assert len(named) == 4
  # Two test samples more, at least one of which is long enough.
  labels = {row[0] for row in by_name["isomap"].rows}
  assert labels & {"transject, sample 1", "transject, sample 2"}


@pytest.mark.long
def test_report_figures_clip_no_label(page):
  for figure in (
    figure for section in page.figures.values() for figure in section
  ):
    canvas = figure.draw()
    box, (width, height) = canvas.get_tightbbox(), canvas.get_size_inches()
    assert min(box.x0, box.y0) >= 0, figure.name
    assert box.x1 <= width, figure.name
    assert box.y1 <= height, figure.name


def test_report_notes_folders_it_leaves_out(page, workdir):
  notes = "\n".join(page.notes)
  assert f"{workdir / 'nothing'}" in notes
  assert f"{workdir / 'foreign'}" in notes
  assert f"{workdir / 'begun'} has no results.json" in notes
  assert f"{workdir / 'begun'}: no figures of its layers" in notes
  rows = {row["model"]: row for row in page.rows}
  assert rows["transject"]["seeds"] == "0 1"
  assert rows["transject"]["score"][1] == pytest.approx(10 / 2**0.5)
  assert rows["transformer"]["seeds"] == "0"


def test_report_draws_the_others_if_one_measurement_is_refused(
  workdir, monkeypatch
):
  def refuse(*_):
    raise UserError("streams=2")

  monkeypatch.setattr(isometry, "measure_spectra", refuse)
  options = Options(samples=4, length=40)
  page = report.build_page([workdir / "transformer"], options)
  (note, *_) = [note for note in page.notes if "singular values" in note]
  assert "no singular values. streams=2" in note
  names = {figure.name for each in page.figures.values() for figure in each}
  assert "activation_factors" in names and "isometry" not in names


def test_report_notes_damaged_metrics_records(workdir, tmp_path):
  """Of a damaged file the other lines are drawn, if there are any."""
  folder = tmp_path / "run"
  shutil.copytree(workdir / "transformer", folder)
  path = folder / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join([lines[0], "damaged\n", *lines[2:]]))
  page = report.build_page([folder], Options(), checkpoints=False)
  damaged = f"{path}: lines [2] are damaged."
  assert page.notes == [f"{damaged} Curves show the lines that remain."]
  path.write_text("damaged\n")
  page = report.build_page([folder], Options(), checkpoints=False)
  assert page.notes == [f"{path}: lines [1] are damaged."]


@pytest.mark.long
def test_report_page_loads_nothing_from_the_network(page, out):
  text = (out / "index.html").read_text()
  for figure in (
    figure for section in page.figures.values() for figure in section
  ):
    assert f'id="{figure.name}"' in text
    assert html.escape(figure.caption) in text
    for kind in ("png", "svg", "csv"):
      assert f'href="{figure.name}.{kind}"' in text
      assert (out / f"{figure.name}.{kind}").stat().st_size > 100
    rows = list(
      csv.reader((out / f"{figure.name}.csv").read_text().splitlines())
    )
    assert len(rows) == 1 + len(figure.rows)
  assert not re.search(r'(src|href)="(https?:)?//', text)
  for note in page.notes:
    assert html.escape(note) in text
  assert ">Notes</h2>" in text
  assert "± 7.07" in text
  assert "| transject |" in (out / "results.md").read_text()
  assert "examples/s in training" in text
  assert "TransJect, table 2: Long Range Arena" in text
  assert "TransJect, table 1" not in text
  table = (out / "transject_2.md").read_text()
  assert "| transject | L=2 d=16, jaxformers |" in table
  # A star, and its reason below every form of the table.
  reason = "* ListOps (transformer): protocol jaxformers, not paper or "
  assert " * |" in table
  assert f"\n\n{reason}" in table
  assert f"\n% {reason}" in (out / "transject_2.tex").read_text()
  assert f"<p>{reason}" in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [400, 1600])
def test_report_page_fits_the_window_of_a_browser(out, tmp_path, width):
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
      BROWSER,
      "--headless",
      "--no-sandbox",
      "--disable-gpu",
      "--dump-dom",
      f"--user-data-dir={tmp_path / 'profile'}",
      "--enable-logging=stderr",
      f"--window-size={width},900",
      f"file://{tmp_path}/index.html",
    ],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert "CONSOLE" not in ran.stderr
  title = re.search("<title>(.*?)</title>", ran.stdout, re.S)[1]
  seen = json.loads(html.unescape(title))
  assert seen["images"] == seen["drawn"] == 16
  assert not seen["wide"]
  assert not seen["over"], seen


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--estimator=shannon", "'shannon'.*vasicek"),
    ("--axis=heads", "'heads'.*units"),
    ("--samples=0", "--samples=0"),
    ("--length=64", "there is no run in it"),
  ],
)
def test_report_command_refuses_wrong_arguments(argument, message, tmp_path):
  out = tmp_path / "page"
  with pytest.raises(SystemExit, match=message):
    report_command.main([str(tmp_path), argument, f"--out={out}"])
  assert not out.exists()


def test_report_command_without_checkpoints_draws_training(
  workdir, tmp_path, capsys
):
  runs = [str(workdir / name) for name in ("transject", "begun")]
  report_command.main([*runs, f"--out={tmp_path}", "--no_checkpoints"])
  printed, progress = capsys.readouterr()
  assert "drawing training" in progress
  assert "drawing over_minutes: 100%" in progress
  assert "drawing" not in printed
  assert "| transject |" in printed
  assert f"Note: {workdir / 'begun'} has no results.json" in printed
  assert (tmp_path / "training.svg").exists()
  assert not (tmp_path / "entropy.svg").exists()


BERT = Path(__file__).parents[2] / "models" / "pretrained" / "bert"
PIECES = "[PAD] [UNK] [CLS] [SEP] this movie is terrible but it has some"


@pytest.mark.long
def test_report_command_reads_a_folder_of_bert_weights(tmp_path, capsys):
  """TransJect, figure 1: distances over layers, and inside each head."""
  folder = tmp_path / "bert"
  shutil.copytree(BERT, folder)
  vocabulary = folder / "vocab.txt"
  arguments = [f"--pretrained={folder}", f"--out={tmp_path / 'report'}"]
  with pytest.raises(SystemExit, match="There is no vocabulary"):
    report_command.main(arguments)
  vocabulary.write_text("\n".join(PIECES.split()))
  report_command.main([*arguments, "--tokens=movie,terrible"])
  assert "Written to" in capsys.readouterr().out
  table = (tmp_path / "report" / "pairs.csv").read_text()
  rows = list(csv.reader(table.splitlines()))[1:]
  assert [row[:3] for row in rows] == [
    ["bert", "movie - terrible", str(layer)] for layer in range(3)
  ]
  table = (tmp_path / "report" / "head_pairs.csv").read_text()
  heads = [row[1] for row in csv.reader(table.splitlines())][1:]
  assert heads == [f"head {number}" for number in (1, 1, 2, 2, 3, 3)]
  page = (tmp_path / "report" / "index.html").read_text()
  assert "[CLS] this movie is terrible" in page
  vocabulary.write_text("\n".join([*PIECES.split(), *map(str, range(99))]))
  with pytest.raises(SystemExit, match="has 111 pieces, and the weights 30"):
    report_command.main(arguments)
  vocabulary.write_text(PIECES.replace(" ", "\n").replace("[SEP]\n", ""))
  with pytest.raises(SystemExit, match=r"no line \[SEP\]"):
    report_command.main(arguments)
  with pytest.raises(SystemExit, match="reads images"):
    report_command.main([f"--pretrained={BERT.parent / 'vit'}", *arguments[1:]])
