import numpy as np
import pytest

from jaxformers.data.engine import encodings, preparation
from jaxformers.data.generators import listops, listops_text
from jaxformers.data.sets import listops as f
from tests.data.archives import write_folder, write_tar

SMALL = dict(num_train=20, num_validation=5, num_test=6)
SETTINGS = listops.Settings(min_length=5, max_length=60, **SMALL)


def pack(source, folder, archive=""):
  return preparation.open_splits(
    source, encodings.ids(), data_dir=folder, archive=archive
  )


def test_listops_generated_equals_its_export(tmp_path):
  generated, info = pack(f.generated(SETTINGS), tmp_path)
  assert info["settings"]["num_train"] == 20
  direct = listops.generate(SETTINGS)
  for name, split in direct.items():
    np.testing.assert_array_equal(generated[name].tokens, split.tokens)
    np.testing.assert_array_equal(generated[name].labels, split.labels)
  listops_text.write_tsv(generated, tmp_path / "tsv")
  back, _ = pack(f.released(**SMALL), tmp_path / "x", str(tmp_path / "tsv"))
  for name, split in generated.items():
    np.testing.assert_array_equal(back[name].tokens, split.tokens)
    np.testing.assert_array_equal(back[name].labels, split.labels)


def test_listops_source_key_depends_on_the_settings():
  other = listops.Settings(min_length=5, max_length=61, **SMALL)
  assert f.generated(SETTINGS).key != f.generated(other).key
  assert f.released().key == "listops-lra"
  assert f.released(**SMALL).key != f.released().key


FILES = {
  f"lra_release/listops-1000/basic_{name}.tsv": b"Source\tTarget\n"
  b"( ( ( [MAX 2 ) 3 ) ] )\t3\n"
  for name in ("train", "val", "test")
}
ONE = dict(num_train=1, num_validation=1, num_test=1)


def test_listops_released_finds_its_files_in_the_release(tmp_path):
  path = write_tar(tmp_path / "lra_release.gz", FILES)
  rows = f.released(**ONE).read(path)["validation"]
  assert rows[0][1]["label"] == "3"
  assert listops_text.decode(rows[0][1]["ids"]) == "[MAX 2 3 ]"


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b"[MAX 2 3 ]\t2", r"value 3\b.*\b2\b"),
    (b"[MAX 2 3\t3", "one expression"),
    (b"[MOX 2 3 ]\t3", "'.MOX'.*ListOps"),
    (b"[MAX 2 3 ]", "tab.*digit"),
    (b"[MAX 2 \xff ]\t3", "xff.*ListOps"),
    (b"[MAX 2 3 ]\t\xff", "tab.*digit"),
  ],
)
def test_listops_released_names_broken_lines(tmp_path, line, message):
  name = "lra_release/listops-1000/basic_val.tsv"
  files = FILES | {name: b"Source\tTarget\n" + line + b"\n"}
  path = write_folder(tmp_path / "x", files)
  with pytest.raises(ValueError, match=f"basic_val.tsv, line 2.*{message}"):
    f.released(**ONE).read(path)


def test_listops_released_refuses_other_counts(tmp_path):
  path = write_folder(tmp_path / "x", FILES)
  with pytest.raises(ValueError, match=r"\b1 examples.*96,000"):
    f.released().read(path)
