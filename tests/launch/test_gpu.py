"""launch/gpu.sh: parts that end within their limit, and what they leave."""

import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "launch" / "gpu.sh"


@pytest.fixture
def run(tmp_path):
  """Runs the script with a program in place of python."""
  program = tmp_path / "bin" / "python"
  program.parent.mkdir()

  def start(*arguments, body='echo "$@"', **variables):
    program.write_text(f"#!/usr/bin/env bash\n{body}\n")
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    work = str(tmp_path / "work")
    return subprocess.run(
      [SCRIPT, *arguments],
      env={**os.environ, "PATH": path, "WORK": work, **variables},
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )

  return start


@pytest.mark.parametrize(
  ("arguments", "status"),
  [
    (("speed", ""), 2),
    (("table_2", "OUT", "--dry_run"), 2),
    (("table_2", "OUT", "/no/such/folder"), 2),
    (("table_2", "/dev/null/out"), 1),
  ],
)
def test_gpu_script_runs_nothing_without_its_folders(
  run, tmp_path, arguments, status
):
  out = str(tmp_path / "out")
  done = run(*(out if name == "OUT" else name for name in arguments))
  assert done.returncode == status
  assert not done.stdout
  assert done.stderr


PARTS = {
  "check": "-m pytest -n 0 -q -x tests/orthogonal tests/models",
  "speed": "-m benchmarks.gpu --out {out}/gpu.json --seconds 450",
  "table_1": "launch/tables.py 1 --models random_transject,transject",
  "table_2": "launch/tables.py 2 --models transject,transformer",
  "neutreno": "launch/sweep.py --workdir {work}/neutreno --config configs/",
}


@pytest.mark.parametrize("part", PARTS)
def test_gpu_script_runs_the_command_of_each_part(run, tmp_path, part):
  out = tmp_path / "out"
  (tmp_path / "archives").mkdir()
  done = run(part, str(out), str(tmp_path / "archives"))
  assert done.returncode == 0
  wanted = PARTS[part].format(out=out, work=tmp_path / "work")
  assert done.stdout.startswith(wanted)
  assert (out / f"{part}.log").read_text() == done.stdout
  if part not in ("check", "speed"):
    assert f"{tmp_path}/archives" in done.stdout


def test_gpu_script_stops_a_part_at_its_limit_and_keeps_its_curves(
  run, tmp_path
):
  body = (
    'mkdir -p "$WORK/table_1/b"; echo 1 > "$WORK/table_1/b/metrics.jsonl"\n'
    "trap 'echo saved; exit 75' TERM; sleep 30 & wait"
  )
  began = time.monotonic()
  done = run("table_1", str(tmp_path / "out"), body=body, LIMIT="62")
  assert time.monotonic() - began < 20
  assert done.returncode != 0
  assert "saved" in done.stdout
  with tarfile.open(tmp_path / "out" / "table_1.tar.gz") as runs:
    assert runs.getnames() == ["./b/metrics.jsonl"]


@pytest.mark.parametrize("arguments", [(), ("speed",), ("nothing", "out")])
def test_gpu_script_prints_usage_for_wrong_arguments(run, arguments, tmp_path):
  arguments = [str(tmp_path / a) if a == "out" else a for a in arguments]
  done = run(*arguments)
  assert done.returncode == 2
  assert "launch/gpu.sh PART OUT" in done.stderr
  assert not (tmp_path / "out").exists()


def test_gpu_script_refuses_a_limit_that_is_no_number(run, tmp_path):
  assert run("speed", str(tmp_path / "out"), LIMIT="1+1").returncode == 2
