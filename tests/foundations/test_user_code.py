"""Code that a folder names runs only if the user says so."""

import contextlib
import json
import subprocess
import sys

import pytest

import jaxformers as jf
from jaxformers.data.engine import digests
from jaxformers.foundations import user_code
from jaxformers.foundations.errors import UserError
from jaxformers.training import exported, zoo

pytestmark = pytest.mark.slow

PAYLOAD = """
import pathlib
pathlib.Path({path!r}).write_text("ran")
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
  """A folder of a trained model that names a module, and the module's place.

  The module leaves a file if it runs.
  """
  folder = tmp_path / "model"
  model = jf.load("zoo:listops-transject")
  model.save(folder)
  name_modules(folder, "payload_of_a_stranger")
  monkeypatch.chdir(tmp_path)
  yield folder, tmp_path / "payload_of_a_stranger.py"
  sys.modules.pop("payload_of_a_stranger", None)


def name_modules(folder, names):
  content, _ = digests.verify(folder, exported.RECORD)
  (folder / exported.RECORD).unlink()
  digests.seal(folder, exported.RECORD, {**content, "imports": names})


def write_payload(path):
  path.write_text(PAYLOAD.format(path=str(path.parent / "ran")))
  return path.parent / "ran"


def test_load_runs_code_of_a_folder_only_with_trust(stranger):
  folder, module = stranger
  ran = write_payload(module)
  before = list(sys.path)
  with pytest.raises(UserError, match="'payload_of_a_stranger'.*--trust"):
    jf.load(folder)
  assert not ran.exists()
  assert jf.load(folder, trust=True).imports == "payload_of_a_stranger"
  assert ran.exists()
  assert sys.path == before
  # It is imported now: nothing would run again.
  assert jf.load(folder).predict(["[MAX 2 9 ]"])


@pytest.mark.parametrize("package", [False, True])
def test_load_never_imports_a_module_inside_the_folder(
  stranger, package, monkeypatch
):
  folder, _ = stranger
  monkeypatch.chdir(folder)
  if package:
    (folder / "payload_of_a_stranger").mkdir()
    ran = write_payload(folder / "payload_of_a_stranger" / "__init__.py")
  else:
    ran = write_payload(folder / "payload_of_a_stranger.py")
  with pytest.raises(
    UserError, match="'payload_of_a_stranger'.*never imported"
  ):
    jf.load(folder, trust=True)
  assert not ran.exists()


def test_import_named_by_refuses_a_submodule_without_importing_its_package(
  stranger, monkeypatch
):
  folder, _ = stranger
  monkeypatch.chdir(folder)
  (folder / "payload_of_a_stranger").mkdir()
  ran = write_payload(folder / "payload_of_a_stranger" / "__init__.py")
  with (
    user_code.trusting(),
    pytest.raises(
      UserError, match="'payload_of_a_stranger.inner'.*never imported"
    ),
  ):
    user_code.import_named_by(folder, "payload_of_a_stranger.inner")
  assert not ran.exists()


@pytest.mark.parametrize(
  "command",
  [
    ("lipschitz",),
    ("inverse",),
    ("smoothness", "--samples=1"),
    ("price",),
    ("export", "--out=out"),
    ("report", "--samples=1"),
  ],
  ids=lambda c: c[0],
)
def test_commands_refuse_the_code_of_a_run(
  command, stranger, smoke, tmp_path, monkeypatch
):
  """The run is refused before its model is built."""
  from jaxformers import config as configs
  from jaxformers.commands.console import console
  from jaxformers.foundations import workdirs

  _, module = stranger
  ran = write_payload(module)
  config = configs.plain(smoke(imports="payload_of_a_stranger"))
  run = tmp_path / "run"
  (run / "checkpoints" / "10").mkdir(parents=True)
  workdirs.write(run, "config.json", config)
  monkeypatch.setattr(sys, "argv", ["jaxformers", command[0], str(run)])
  sys.argv += command[1:]
  with contextlib.suppress(SystemExit):  # A report goes on without the run.
    console()
  assert not ran.exists()


def test_train_refuses_untrusted_code_of_pretrained_weights(
  stranger, smoke, tmp_path
):
  folder, module = stranger
  ran = write_payload(module)
  config = smoke(pretrained=str(folder), **{"model.d_model": 48})
  with pytest.raises(UserError, match="payload_of_a_stranger"):
    jf.train(config, tmp_path / "run")
  assert not ran.exists()


@pytest.mark.parametrize(
  "listed", [5, ["os"], None, "..x", "a b", "/tmp/x", "x/y", "a,,b", "x.py!"]
)
def test_import_modules_refuses_malformed_names(listed, tmp_path):
  for call in (
    lambda: user_code.import_modules(listed),
    lambda: user_code.import_named_by(tmp_path, listed),
  ):
    with pytest.raises(UserError, match="imports=.*names of modules"):
      call()


def test_zoo_models_name_no_user_modules():
  for name in zoo.RECIPES:
    assert not json.loads((zoo.find(name) / "model.json").read_text())[
      "imports"
    ]


@pytest.mark.slow
def test_load_in_another_process_needs_trust_too(stranger):
  folder, module = stranger
  ran = write_payload(module)
  code = f"import jaxformers as jf; jf.load({str(folder)!r})"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  assert done.returncode == 1
  assert "trust=True" in done.stderr
  assert not ran.exists()


def test_trusted_module_imports_nothing_from_the_folder(
  stranger, tmp_path, monkeypatch
):
  folder, module = stranger
  module.write_text("import neighbour_of_a_stranger")
  (tmp_path / "neighbour_of_a_stranger.py").write_text("x = 1")
  ran = write_payload(folder / "neighbour_of_a_stranger.py")
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.chdir(folder)
  with user_code.trusting():
    user_code.import_named_by(folder, "payload_of_a_stranger")
  assert sys.modules.pop("neighbour_of_a_stranger").x == 1
  assert not (ran.exists() or (folder / "ran").exists())


def test_import_named_by_finds_modules_of_namespace_packages(
  tmp_path, monkeypatch
):
  (tmp_path / "pk_of_a_user" / "sub").mkdir(parents=True)
  (tmp_path / "pk_of_a_user" / "sub" / "mod.py").write_text("x = 1")
  monkeypatch.chdir(tmp_path)
  with user_code.trusting():
    user_code.import_named_by(tmp_path / "run", "pk_of_a_user.sub.mod")
  assert sys.modules["pk_of_a_user.sub.mod"].x == 1
