"""Plans of the papers' tables: their runs, and where their data are."""

import functools
from pathlib import Path

import pytest

from jaxformers import models, tasks
from jaxformers.analysis.tables import papers, published
from jaxformers.recipes import recurrences
from jaxformers.sweep import plans
from jaxformers.sweep.runs import Sweep

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
  """A sweep without runs, which loads the config of a cell once."""
  sweep = Sweep(tmp_path_factory.mktemp("sweep"), [])
  sweep.load_config = functools.cache(sweep.load_config)
  return sweep


@pytest.mark.parametrize("name", sorted(plans.PLANS))
def test_plan_cells_are_runs_of_their_table(name, sweep):
  """Its config loads, its task is known, and it has a row of the table."""
  plan = plans.PLANS[name]
  # All encoders of MAD have the same 396 cells, which are much alike.
  chosen = ("mamba",) if name == "mad" else ()
  cells = plans.make_cells(plan, None, models=chosen)
  assert len({cell.folder for cell in cells}) == len(cells)
  cells = cells[::7] if name == "mad" else cells
  assert sweep.check(cells, [0], open_data=False) == cells
  tables = {table.name: table for table in papers.TABLES}
  rows = set()
  for cell in cells:
    config = sweep.load_config(cell, 0)
    assert config.task.name in tasks.TASKS
    assert Path(cell.path).stem in plans.DATA
    if name in tables:
      run = {"model": config.model.name, "config": config.as_dict()}
      rows.add(published.row_name(run, tables[name]))
  if name in tables:
    left_out = {"NeuTRENO, adapted"}  # It needs a finished run.
    assert rows == {*tables[name].scores} - left_out


def test_plan_cells_have_the_protocol_of_their_table(sweep):
  for table in papers.TABLES:
    if table.name in plans.PLANS:
      for cell in plans.make_cells(plans.PLANS[table.name], None):
        config = sweep.load_config(cell, 0)
        assert config.task.protocol in table.protocols


def test_plan_cells_train_and_measure_as_their_table(sweep):
  """No run of a plan differs from its table in a config's field."""
  begun = {"begins without trained weights"}  # Their note says how to begin.
  for table in papers.TABLES:
    for cell in (
      plans.make_cells(plans.PLANS[table.name], None)
      if (table.name in plans.PLANS)
      else []
    ):
      config = sweep.load_config(cell, 0)
      task = config.task
      run = {
        "config": config.as_dict(),
        "model": config.model.name,
        "protocol": task.protocol,
        "max_len": 10**6,
        "data": {"source": "wikitext-103"},
        "examples": 0,
      }
      reasons = {
        published.mismatch(run, column, table)
        for column in table.columns
        if column.task == task.name
      }
      remark = table.remarks.get(published.row_name(run, table), "")
      assert reasons <= {"", *begun, remark}, (table.name, cell.title)


def test_plan_trainings_of_state_spaces_are_the_published_ones():
  table = papers.STATE_SPACES
  for row, trainings in table.trainings.items():
    for column in table.columns:
      fields = recurrences.published_training(row.split(",")[0], column.task)
      training = trainings[column.title]
      assert training.steps == fields["total_steps"]
      assert training.batch_size == fields["batch_size"]


@pytest.mark.long
def test_plan_cells_build_their_models(tmp_path):
  sweep = Sweep(tmp_path, [])
  for plan in plans.PLANS.values():
    for cell in plans.make_cells(plan, None)[-1:]:
      sizes = plans.DATA[Path(cell.path).stem].sizes
      models.shapes(
        models.build(**vars(sweep.load_config(cell, 0).model), **sizes)
      )


def test_data_settings_find_archives_by_their_published_names(tmp_path):
  for name in ("aclImdb_v1.tar.gz", "vocab.txt", "lra_release.gz"):
    (tmp_path / name).touch()
  (tmp_path / "ag_news").mkdir()
  found = {
    task: dict(plans.data_settings(task, tmp_path)) for task in plans.DATA
  }
  text = {"task.archive": f"{tmp_path}/aclImdb_v1.tar.gz"}
  assert found["text"] == text
  assert found["imdb"] == text | {"task.vocabulary": f"{tmp_path}/vocab.txt"}
  assert found["ag_news"]["task.archive"] == f"{tmp_path}/ag_news"
  for task in ("listops", "retrieval", "pathfinder"):
    assert found[task] == {"task.archive": f"{tmp_path}/lra_release.gz"}
  assert found["image"] == found["ade20k"] == {}
  cells = plans.make_cells(plans.PLANS["transject_1"], tmp_path)
  assert all("task.archive" in dict(cell.settings) for cell in cells)


def test_make_cells_of_chosen_models_at_size_tiny(tmp_path):
  plan = plans.find_plan("2")
  cells = plans.make_cells(plan, None, size="tiny", models=["bigbird"])
  assert [cell.spec for cell in cells] == [
    f"configs/lra/{task}.py:protocol=paper,size=tiny,model=bigbird"
    for task in ("listops", "text", "retrieval", "pathfinder", "image")
  ]


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: plans.find_plan("4"), "table.*'4'.*transject_1"),
    (
      lambda: plans.make_cells(plans.PLANS["neutreno_2"], None, size="tiny"),
      "--size=tiny.*one size",
    ),
    (
      lambda: plans.make_cells(plans.find_plan("1"), None, models=["bigbird"]),
      "model.*'bigbird'.*linformer",
    ),
    (
      lambda: plans.make_cells(plans.find_plan("1"), Path("nowhere")),
      "--archives=nowhere",
    ),
  ],
)
def test_plans_refuse_wrong_arguments(call, message):
  with pytest.raises(ValueError, match=message):
    call()
