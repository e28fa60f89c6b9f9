import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data import prepare
from tests.data.archives import aan, write_folder, write_tar

COUNTS = ["--num_train", "20", "--num_validation", "5", "--num_test", "6"]
LENGTHS = ["--min_length", "5", "--max_length", "60"]
LISTOPS = ["listops", *COUNTS, *LENGTHS]


def test_it_says_what_it_has_prepared(tmp_path, capsys):
  for _ in range(2):  # Doing it again does nothing.
    prepare.main([*LISTOPS, "--data_dir", str(tmp_path)])
    said = capsys.readouterr()
    assert "train examples        20" in said.out
    assert "source                generated" in said.out
  assert said.err == ""


def test_exported_and_prepared_from_the_export(tmp_path, capsys):
  out = tmp_path / "out"
  prepare.main(
    [*LISTOPS, "--data_dir", str(tmp_path / "a"), "--export", str(out)]
  )
  options = ["listops", *COUNTS]
  prepare.main(
    [*options, "--data_dir", str(tmp_path / "b"), "--archive", str(out)]
  )
  assert "(not the authors')" in capsys.readouterr().out
  kw = dict(num_train=20, num_validation=5, num_test=6)
  made = tasks.get(
    "listops", data_dir=str(tmp_path / "a"), min_length=5, max_length=60, **kw
  )
  read = tasks.get(
    "listops", data_dir=str(tmp_path / "b"), archive=str(out), **kw
  )
  np.testing.assert_array_equal(
    made.splits["test"].tokens, read.splits["test"].tokens
  )
  again = [*options, "--data_dir", str(tmp_path / "b"), "--archive", str(out)]
  with pytest.raises(SystemExit, match="--export writes generated"):
    prepare.main([*again, "--export", str(out)])


def test_pathfinder_in_lras_layout(tmp_path):
  common = ["pathfinder", "--difficulty", "easy", "--num_images", "12"]
  prepare.main(
    [*common, "--data_dir", str(tmp_path), "--export", str(tmp_path / "lra")]
  )
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
  ],
)
def test_wrong_command_lines(argv, message, capsys):
  with pytest.raises(SystemExit):
    prepare.main(argv)
  assert message in capsys.readouterr().err


def test_a_wrong_archive_ends_in_one_message_and_leaves_nothing(tmp_path):
  counts = {"train": 4, "validation": 2, "test": 2}
  path = write_tar(tmp_path / "lra_release.gz", aan(counts))
  path.write_bytes(path.read_bytes()[:-100])
  job = subprocess.run(
    [
      *(sys.executable, "-m", "jaxformers.data.prepare", "retrieval"),
      *("--archive", str(path), "--data_dir", str(tmp_path / "data")),
    ],
    capture_output=True,
    text=True,
    env={"PYTHONPATH": "."},
  )
  assert job.returncode == 1
  assert job.stdout == ""
  assert "Traceback" not in job.stderr
  assert "cannot be read to its end" in job.stderr.splitlines()[-1]
  left = [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
  assert [p for p in left if not p.name.endswith(".lock")] == []


def test_texts_of_a_damaged_archive_are_refused_and_leave_nothing(tmp_path):
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
    with pytest.raises(SystemExit, match="cannot be read to its end"):
      prepare.main(common)
    left = [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
    assert [p for p in left if not p.name.endswith(".lock")] == []
  path.write_bytes(sound)
  prepare.main(common)


def test_a_stand_in_is_prepared_when_it_is_meant(tmp_path, capsys):
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
