"""Libraries of extras and devices that are missing, each in one message."""

import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from jaxformers import main
from jaxformers.analysis.evaluation import layers
from jaxformers.analysis.page import measured, page, report
from jaxformers.analysis.plotting.figures import Figure
from jaxformers.commands import advise as advise_command
from jaxformers.commands import depth as depth_command
from jaxformers.commands import price as price_command
from jaxformers.commands import report as report_command
from jaxformers.commands import smoothness as smoothness_command
from jaxformers.foundations import requirements
from jaxformers.foundations.errors import UserError
from jaxformers.theory import advise

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without(monkeypatch):
  """A function that hides modules, as where an extra is not installed."""

  def hide(*names):
    for name in names:
      monkeypatch.setitem(sys.modules, name, None)

  return hide


@pytest.mark.parametrize("extra", requirements.EXTRAS)
def test_require_names_an_extra_of_setup_cfg(extra, without):
  setup = ConfigParser()
  setup.read(ROOT / "setup.cfg")
  listed = setup["options.extras_require"][extra]
  for module in requirements.EXTRAS[extra]:
    assert requirements._PACKAGES.get(module, module) in listed
  without(*requirements.EXTRAS[extra])
  with pytest.raises(UserError, match=rf"'\.\[{extra}\]'"):
    requirements.require(extra, "It")


def test_require_names_only_missing_libraries(without):
  without("sklearn")
  with pytest.raises(UserError) as raised:
    requirements.require("plots", "The page of a report")
  assert "page of a report" in str(raised.value)
  assert "pip install scikit-learn" in str(raised.value)
  assert "'.[plots]'" in str(raised.value)
  assert "matplotlib" not in str(raised.value)


@pytest.mark.parametrize(
  ("command", "argv"),
  [
    (report_command.main, ["nothing"]),
    (price_command.main, ["nothing", "--out=drawn"]),
    (depth_command.main, ["nothing", "--out=drawn"]),
    (smoothness_command.main, ["nothing", "--out=drawn"]),
    (advise_command.main, ["--params=1e6", "--out=drawn"]),
  ],
)
def test_commands_check_libraries_before_any_work(
  command, argv, without, tmp_path, monkeypatch
):
  """Before it notices that there is no run, and leaves no folder."""
  monkeypatch.chdir(tmp_path)
  without("matplotlib", "sklearn")
  with pytest.raises(SystemExit, match=r"matplotlib.*scikit-learn.*\[plots\]"):
    command(argv)
  assert not [*tmp_path.iterdir()]


def test_plotting_functions_name_missing_libraries(without, tmp_path):
  without("matplotlib", "sklearn")
  figure = Figure("name", "title", "caption", ("x",), [(1,)], lambda *_: None)
  for call in (
    figure.draw,
    lambda: figure.picture("png"),
    lambda: figure.write(tmp_path / "out"),
    lambda: layers.plane(None, None),
    lambda: report.build_page([tmp_path], measured.Options()),
    lambda: page.write(page.Page(), tmp_path / "out"),
    lambda: advise.draw(tmp_path / "a.png", advise.advise(1e6, 0, 0), None),
  ):
    with pytest.raises(UserError, match=r"matplotlib.*\[plots\]"):
      call()
  assert not [*tmp_path.iterdir()]


WITHOUT = """
import sys
sys.modules["tensorboardX"] = sys.modules["wandb"] = None
from jaxformers import main
try:
  main.console()
finally:
  assert "jax" not in sys.modules
"""


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
@pytest.mark.slow
def test_main_refuses_a_log_without_its_library_before_importing_jax(
  extra, tmp_path
):
  flags = ["--config=lra/listops:size=tiny", "--workdir=nowhere"]
  done = subprocess.run(
    [sys.executable, "-c", WITHOUT, *flags, f"--config.{extra}=true"],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == main.MISTAKE
  (line,) = done.stderr.splitlines()
  assert f"config.{extra}=True" in line
  assert requirements.EXTRAS[extra][0] in line
  assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
  "argv",
  [
    ["-m", "jaxformers.main", "--config=lra/listops", "--workdir=run"],
    ["-m", "jaxformers", "models", "--config=lra/listops"],
    ["-c", "import jaxformers as jf; jf.load('zoo:listops-s5')"],
  ],
  ids=["main", "command", "python"],
)
@pytest.mark.slow
def test_commands_name_a_jax_platform_without_device(argv, tmp_path):
  done = subprocess.run(
    [sys.executable, *argv],
    env=os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)},
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode
  last = done.stderr.splitlines()[-1]
  assert "JAX_PLATFORMS='cuda'" in last
  assert "AssertionError" not in done.stderr
  assert argv[0] == "-c" or "Traceback" not in done.stderr
  assert not [*tmp_path.glob("run/*")]


def test_require_device_passes_other_jax_errors(monkeypatch):
  requirements.require_device()

  def fail():
    raise RuntimeError(message)

  monkeypatch.setenv("JAX_PLATFORMS", "tpu")
  monkeypatch.setattr("jax.devices", fail)
  message = "Unable to initialize backend 'tpu': ..."
  with pytest.raises(UserError, match="JAX_PLATFORMS='tpu'"):
    requirements.require_device()
  message = "a peer is gone"
  with pytest.raises(RuntimeError, match="a peer is gone"):
    requirements.require_device()


def test_hooks_before_a_commit_are_the_linters_of_setup():
  setup = ConfigParser()
  setup.read(ROOT / "setup.cfg")
  linters = setup["options.extras_require"]["lint"].split()
  hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
  versions = {
    hook["id"]: repo.get("rev", "").removeprefix("v")
    for repo in hooks["repos"]
    for hook in repo["hooks"]
  }
  for name in ("ruff", "typos"):
    assert f"{name}=={versions[name]}" in linters
  assert "mypy" in versions
