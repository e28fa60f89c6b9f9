"""The list of the tasks."""

from jaxformers.commands import tasks as list_tasks
from jaxformers.tasks import TASKS


def test_list_tasks_has_a_line_for_every_task(capsys):
  list_tasks.main([])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 + len(TASKS)
  assert any(
    line.startswith("| listops | jaxformers, lra, skyformer, s4, paper | ")
    for line in lines
  )
  assert list_tasks.protocols("ag_news") == (
    "jaxformers",
    "paper",
    "test_only",
  )
  assert list_tasks.protocols("imagenet2012") == ("jaxformers", "paper")
  assert list_tasks.protocols("language") == ("jaxformers",)
