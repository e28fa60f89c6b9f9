"""Libraries of extras and devices that are missing, each in one message."""

import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from jaxformers import main, requirements
from jaxformers.analysis.certificates import price
from jaxformers.analysis.evaluation import layers
from jaxformers.analysis.page import report
from jaxformers.analysis.plotting.figures import Figure
from jaxformers.analysis.tables import depth
from jaxformers.analysis.tokens import smoothness
from jaxformers.errors import UserError
from jaxformers.theory import advise

ROOT = Path(__file__).parents[1]


@pytest.fixture
def without(monkeypatch):
  """A function that hides modules, as where an extra is not installed."""

  def hide(*names):
    for name in names:
      monkeypatch.setitem(sys.modules, name, None)

  return hide


@pytest.mark.parametrize("extra", requirements.EXTRAS)
def test_an_extra_is_one_of_setup_and_names_its_libraries(extra, without):
  setup = ConfigParser()
  setup.read(ROOT / "setup.cfg")
  listed = setup["options.extras_require"][extra]
  for module in requirements.EXTRAS[extra]:
    assert requirements._PACKAGES.get(module, module) in listed
  without(*requirements.EXTRAS[extra])
  with pytest.raises(UserError, match=rf"It needs .*'\.\[{extra}\]'"):
    requirements.require(extra, "It")


def test_the_message_names_what_is_missing_only(without):
  without("sklearn")
  with pytest.raises(UserError) as raised:
    requirements.require("plots", "The page of a report")
  assert str(raised.value) == (
    "The page of a report needs scikit-learn, which is not installed: run pip "
    "install scikit-learn, or pip install -e '.[plots]' in a copy of the "
    "repository."
  )


@pytest.mark.parametrize(
  ("command", "argv"),
  [
    (report.main, ["nothing"]),
    (price.main, ["nothing", "--out=drawn"]),
    (depth.main, ["nothing", "--out=drawn"]),
    (smoothness.main, ["nothing", "--out=drawn"]),
    (advise.main, ["--params=1e6", "--out=drawn"]),
  ],
)
def test_a_command_ends_before_it_works(
  command, argv, without, tmp_path, monkeypatch
):
  """Before it notices that there is no run, and leaves no folder."""
  monkeypatch.chdir(tmp_path)
  without("matplotlib", "sklearn")
  with pytest.raises(SystemExit, match="needs matplotlib.*scikit-learn"):
    command(argv)
  assert not [*tmp_path.iterdir()]


def test_functions_say_it_as_well(without, tmp_path):
  without("matplotlib", "sklearn")
  figure = Figure("name", "title", "caption", ("x",), [(1,)], lambda *_: None)
  for call in (
    figure.draw,
    lambda: figure.picture("png"),
    lambda: figure.write(tmp_path / "out"),
    lambda: layers.plane(None, None),
    lambda: report.build([tmp_path], report.Options()),
    lambda: report.write(report.Page(), tmp_path / "out"),
    lambda: advise.draw(tmp_path / "a.png", advise.advise(1e6, 0, 0), None),
  ):
    with pytest.raises(UserError, match="needs matplotlib"):
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
def test_a_log_is_refused_before_jax_is_imported(extra, tmp_path):
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
  assert f"config.{extra}=True needs {requirements.EXTRAS[extra][0]}" in line
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
def test_a_platform_without_a_device_is_named(argv, tmp_path):
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
  assert "JAX_PLATFORMS='cuda', but JAX has no such device here" in last
  assert "AssertionError" not in done.stderr
  assert argv[0] == "-c" or "Traceback" not in done.stderr
  assert not [*tmp_path.glob("run/*")]


def test_an_error_of_jax_that_is_no_missing_device_is_raised(monkeypatch):
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
