import contextlib
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.commands import prepare
from tests.data.archives import aan, write_folder, write_tar

COUNTS = ["--num_train", "20", "--num_validation", "5", "--num_test", "6"]
LENGTHS = ["--min_length", "5", "--max_length", "60"]
LISTOPS = ["listops", *COUNTS, *LENGTHS]


def test_prepare_prints_the_counts_of_splits(tmp_path, capsys):
  for _ in range(2):  # Doing it again does nothing.
    prepare.main([*LISTOPS, "--data_dir", str(tmp_path)])
    said = capsys.readouterr()
    assert "train examples        20" in said.out
    assert "source                generated" in said.out
  assert said.err == ""


def test_prepare_exports_and_reads_its_export(tmp_path, capsys):
  out = tmp_path / "out"
  prepare.main(
    [*LISTOPS, "--data_dir", str(tmp_path / "a"), "--export", str(out)]
  )
  options = ["listops", *COUNTS]
  prepare.main(
    [*options, "--data_dir", str(tmp_path / "b"), "--archive", str(out)]
  )
  assert "(the authors published none)" in capsys.readouterr().out
  kw = dict(num_train=20, num_validation=5, num_test=6)
  generated = tasks.get(
    "listops", data_dir=str(tmp_path / "a"), min_length=5, max_length=60, **kw
  )
  read = tasks.get(
    "listops", data_dir=str(tmp_path / "b"), archive=str(out), **kw
  )
  np.testing.assert_array_equal(
    generated.splits["test"].tokens, read.splits["test"].tokens
  )
  again = [*options, "--data_dir", str(tmp_path / "b"), "--archive", str(out)]
  with pytest.raises(SystemExit, match="--export.*--archive"):
    prepare.main([*again, "--export", str(out)])


@pytest.mark.long
def test_prepare_exports_pathfinder_in_the_layout_of_lra(tmp_path):
  common = ["pathfinder", "--difficulty", "easy", "--num_images", "12"]
  folders = ["--data_dir", str(tmp_path), "--export", str(tmp_path / "lra")]
  short = ["--num_short", "10", "--short_paddles", "3"]
  with pytest.raises(SystemExit, match="--export.*remove --num_short"):
    prepare.main([*common, *short, *folders])
  prepare.main([*common, *folders])
  level = tmp_path / "lra" / "pathfinder32" / "curv_baseline"
  assert len(list((level / "imgs" / "0").glob("sample_*.png"))) == 12
  line = (level / "metadata" / "0.npy").read_text().splitlines()[3].split()
  assert line[:3] == ["imgs/0", "sample_3.png", "3"]
  assert line[3] in ("0", "1")
  assert line[4:] == ["1.0", "6", "2", "2", "0.5", "1", "1"]


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["nope"], "invalid choice: 'nope'"),
    ([], "required: TASK"),
    (["text", "--max_len", "x"], "invalid int value: 'x'"),
    (["text", "--depth", "3"], "unrecognized arguments: --depth"),
    (["image", "--export", "x"], "unrecognized arguments: --export"),
    (["recall", "--causal", "no"], "'no': give true or false"),
  ],
)
def test_prepare_refuses_wrong_arguments(argv, message, capsys):
  with pytest.raises(SystemExit):
    prepare.main(argv)
  assert message in capsys.readouterr().err


def test_prepare_reads_flags_and_lists(monkeypatch):
  class Stop(Exception):
    """Ends the command once it has read its arguments."""

  def get(name, **options):
    given.update(options)
    raise Stop

  given = {}
  monkeypatch.setattr(prepare.tasks, "get", get)
  with pytest.raises(Stop):
    prepare.main(["recall", "--causal", "False", "--test_lengths", "64,128"])
  assert given["causal"] is False
  assert given["test_lengths"] == (64, 128)


@pytest.mark.slow
def test_prepare_refuses_a_wrong_archive_and_leaves_no_files(tmp_path):
  counts = {"train": 4, "validation": 2, "test": 2}
  path = write_tar(tmp_path / "lra_release.gz", aan(counts))
  path.write_bytes(path.read_bytes()[:-100])
  job = subprocess.run(
    [
      sys.executable,
      "-m",
      "jaxformers.commands.prepare",
      "retrieval",
      "--archive",
      str(path),
      "--data_dir",
      str(tmp_path / "data"),
    ],
    capture_output=True,
    text=True,
    env={"PYTHONPATH": "."},
  )
  assert job.returncode == 1
  assert job.stdout == ""
  assert "Traceback" not in job.stderr
  assert "lra_release.gz" in job.stderr.splitlines()[-1]
  left = [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
  assert [p for p in left if not p.name.endswith(".lock")] == []


def test_prepare_refuses_a_damaged_archive_and_leaves_no_files(tmp_path):
  texts = {f"set/{k:02d}.txt": f"text {k} ".encode() * 90 for k in range(33)}
  path = write_tar(tmp_path / "texts.tar", texts, mode="w")
  sound = path.read_bytes()
  damaged = bytearray(sound)
  damaged[sound.index(b"set/17.txt")] ^= 1  # The 18th header.
  compressed = bytearray(gzip.compress(sound, mtime=0))
  compressed[-5] ^= 1  # The checksum.
  common = ["language", "--archive", str(path), "--tokens", "bytes"]
  common += ["--data_dir", str(tmp_path / "data")]
  for content in (damaged, compressed, sound[: len(sound) // 2]):
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"texts\.tar .*damaged"):
      prepare.main(common)
    left = [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
    assert [p for p in left if not p.name.endswith(".lock")] == []
  path.write_bytes(sound)
  prepare.main(common)


def test_prepare_accepts_fewer_examples_only_if_asked_for(tmp_path, capsys):
  counts = {"train": 4, "validation": 2, "test": 2}
  folder = write_folder(tmp_path / "x", aan(counts))
  common = ["retrieval", "--archive", str(folder)]
  common += ["--data_dir", str(tmp_path / "data")]
  with pytest.raises(SystemExit, match="num_train"):
    prepare.main(common)
  sizes = ["--num_train", "4", "--num_validation", "2", "--num_test", "2"]
  prepare.main([*common, *sizes])
  assert "train examples        4" in capsys.readouterr().out
  infos = list((tmp_path / "data" / "packed").rglob("info.json"))
  assert json.loads(infos[0].read_text())["source"] == "x"


@contextlib.contextmanager
def limited(size):
  """Sets the largest size of a file, as a quota does.

  Within a test only: pytest may print its progress to a larger file.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def left(folder):
  return [
    path
    for path in folder.rglob("*")
    if path.is_file() and path.suffix != ".lock"
  ]


PATHFINDER = ["pathfinder", "--difficulty", "easy", "--num_images", "12"]


@pytest.mark.parametrize(
  ("task", "size"), [(LISTOPS, 600), (PATHFINDER, 5_000)]
)
@pytest.mark.slow
def test_prepare_on_a_full_disk_leaves_no_files(tmp_path, task, size):
  folder = tmp_path / "data"
  message = f"^error: {folder}/tfds/.*file size limit.*--data_dir"
  full = pytest.raises(SystemExit, match=message)
  with full, limited(size):
    prepare.main([*task, "--data_dir", str(folder)])
  assert left(folder) == []


@pytest.mark.parametrize(
  ("task", "size"),
  [(LISTOPS, 600), pytest.param(PATHFINDER, 100, marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_prepare_export_to_a_full_disk_leaves_no_files(tmp_path, task, size):
  command = [*task, "--data_dir", str(tmp_path / "data")]
  prepare.main(command)
  folder = tmp_path / "out"
  full = pytest.raises(SystemExit, match=f"{folder} .*File too large")
  with full, limited(size):
    prepare.main([*command, "--export", str(folder)])
  assert left(folder) == []
  with limited(1 << 20):
    prepare.main([*command, "--export", str(folder)])
  assert left(folder)


def test_prepare_prints_one_line_at_ctrl_c(monkeypatch, capsys):
  def interrupted(*args, **kwargs):
    raise KeyboardInterrupt

  monkeypatch.setattr(tasks, "get", interrupted)
  monkeypatch.setattr(os, "_exit", sys.exit)
  with pytest.raises(SystemExit, match="^130$"):
    prepare.main(LISTOPS)
  said = capsys.readouterr().err.strip()
  assert said.startswith("Interrupted")
  assert "\n" not in said


@pytest.mark.long
def test_prepare_exits_with_130_at_ctrl_c_during_generation(tmp_path):
  command = [sys.executable, "-m", "jaxformers.commands.prepare", "listops"]
  command += ["--data_dir", str(tmp_path / "data")]
  restored = (  # What starts in the background may ignore Ctrl-C.
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", restored, *command],
    env=os.environ | {"PYTHONPATH": "."},
    stderr=subprocess.PIPE,
    text=True,
  )
  while not (tmp_path / "data" / "tfds").exists():
    assert process.poll() is None
    time.sleep(0.1)
  time.sleep(1)
  process.send_signal(signal.SIGINT)
  _, said = process.communicate(timeout=60)
  assert process.returncode == 130
  assert "Interrupted" in said
  assert "Traceback" not in said
  assert left(tmp_path / "data") == []
