"""A wheel of the package works from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# What the first minutes of a new user are, reduced to two steps.
FIRST_MINUTES = """
import jaxformers as jf

assert "site-packages" not in jf.__file__ and "installed" in jf.__file__
options = {"total_steps": 2, "eval_steps": 2, "checkpoint_steps": 2}
options |= {"schedule.warmup_steps": 1, "batch_size": 4, "model.d_model": 8}
texts = ["a good film", "a bad film"] * 10
model = jf.train(
  "lra/text:size=tiny,model=transject",
  "run",
  train=(texts, ["good", "bad"] * 10),
  options=options,
)
model = jf.load("run")
print(model.predict(["a film"])[0].label, model.invert(["a film"]).texts)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """A folder with the package, installed from its wheel."""
  folder = tmp_path_factory.mktemp("wheel")
  # A copy, without what builds and runs have left.
  source = folder / "source"
  kept = shutil.ignore_patterns(".*", "build", "runs", "site", "__pycache__")
  shutil.copytree(ROOT, source, symlinks=True, ignore=kept)
  pip = [sys.executable, "-m", "pip", "--quiet"]
  subprocess.run(
    [*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", str(source)],
    check=True,
  )
  (wheel,) = folder.glob("*.whl")
  target = folder / "installed"
  subprocess.run(
    [*pip, "install", "--no-deps", f"--target={target}", str(wheel)], check=True
  )
  return wheel, target


def run(target, folder, *argv):
  env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  return subprocess.run(
    [sys.executable, *argv],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    cwd=folder,
    env=env | {"PYTHONPATH": str(target)},
  ).stdout


def test_wheel_has_all_files(installed):
  wheel, _ = installed
  names = {*zipfile.ZipFile(wheel).namelist()}
  for path in (ROOT / "configs").rglob("*.py"):
    relative = path.relative_to(ROOT).as_posix()
    assert f"jaxformers/{relative}" in names
  assert "jaxformers/py.typed" in names
  assert not [name for name in names if name.startswith(("tests", "docs"))]


@pytest.mark.long
def test_wheel_runs_the_first_example_of_a_user(installed, tmp_path):
  _, target = installed
  listed = run(target, tmp_path, "-m", "jaxformers", "configs")
  assert "| lra/text | LRA Text" in listed
  printed = run(target, tmp_path, "-c", FIRST_MINUTES)
  assert printed.split(maxsplit=1)[0] in ("good", "bad")
  assert "('a film',)" in printed


def test_install_instructions_do_not_name_the_foreign_package(installed):
  """The index has a package called jaxformers that is not this one."""
  wheel, _ = installed
  assert wheel.name.startswith("jaxformers_encoders-")
  foreign = re.compile(
    r"pip install[^\n`]*[\s'\"]jaxformers(?:\[|['\"\s`]|$)", re.M
  )
  assert foreign.search('pip install -q "jaxformers[plots]"')
  folders = ("docs", "examples", "launch", "jaxformers", "benchmarks", ".ci")
  paths = [path for name in folders for path in (ROOT / name).rglob("*")]
  for path in [*ROOT.glob("*.*"), *paths]:
    if path.suffix in (".md", ".py", ".ipynb", ".sh", ".cfg", ".yml", ""):
      text = path.read_text() if path.is_file() else ""
      assert not foreign.search(text), path
