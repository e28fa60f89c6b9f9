"""The tables are of tasks and models that there are."""

from jaxformers import models
from jaxformers.analysis.tables import papers
from jaxformers.tasks import TASKS


def test_paper_tables_name_registered_tasks_and_models():
  for table in papers.TABLES:
    assert {column.task for column in table.columns} <= {*TASKS}
    assert {len(row) for row in table.scores.values()} == {len(table.columns)}
    assert not table.rows or table.rows.keys() == table.scores.keys()
  assert len({table.name for table in papers.TABLES}) == len(papers.TABLES)
  for table in (papers.TRANSJECT_1, papers.TRANSJECT_2, papers.LRA):
    assert {*table.scores} <= {*models.MODELS}
