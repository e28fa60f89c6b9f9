"""Models as files that need nothing of this package."""

import json
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxformers import models
from jaxformers.analysis.evaluation import export
from jaxformers.commands import export as export_command
from jaxformers.commands import states
from jaxformers.models.variables import make_variables
from jaxformers.training import loop
from tests import initial
from tests.marks import long_except

USER = """
import json, sys
from pathlib import Path
import jax, jax.export, numpy as np, safetensors.numpy
folder = Path(sys.argv[1])
program = jax.export.deserialize(bytearray((folder / "model.jax").read_bytes()))
arrays = safetensors.numpy.load_file(folder / "model.safetensors")
ids = np.load(folder / "ids.npy")
np.save(folder / "logits.npy", program.call(arrays, ids))
assert not any(name.startswith("jaxformers") for name in sys.modules)
"""


@pytest.mark.slow
def test_exported_program_runs_without_the_package(smoke, tmp_path, capsys):
  loop.run(smoke(), tmp_path / "run")
  out = tmp_path / "model"
  export_command.main([str(tmp_path / "run"), f"--out={out}", "--length=20"])
  assert "inputs ['b', 20] int32" in capsys.readouterr().out
  content = json.loads((out / "model.json").read_text())
  assert content["platforms"] == ["cpu", "cuda", "tpu"]
  assert (out / "vocabulary.json").exists()
  run = states.load(tmp_path / "run")
  ids = run.sample(3, 20)
  np.save(out / "ids.npy", ids)
  subprocess.run([sys.executable, "-c", USER, str(out)], check=True, cwd=out)
  want = run.model.apply(
    make_variables(run.model, run.params), jnp.asarray(ids), train=False
  )
  np.testing.assert_allclose(np.load(out / "logits.npy"), want, atol=1e-5)
  arrays = safetensors.numpy.load_file(out / "model.safetensors")
  assert not [
    name for name in arrays if name.startswith("params") and "skew" in name
  ]
  q = arrays["rotations.encoder.layer_0.mixer.u_skew"]
  eye = np.broadcast_to(np.eye(16), q.shape)
  np.testing.assert_allclose(q @ q.swapaxes(1, 2), eye, atol=1e-5)
  with pytest.raises(ValueError, match="--length=61.*50"):
    export.write(run, out, 61)


UNDONE = ["isometric", "allpass", "certified_s4d", "transformer", "s5"]


@pytest.mark.parametrize("name", long_except(UNDONE[:1], UNDONE))
@pytest.mark.slow
def test_exported_invertible_model_takes_any_batch_size(name):
  """One program for two sizes, full lengths and others."""
  model = models.build(
    name,
    vocab_size=9,
    max_len=6,
    num_classes=3,
    d_model=8,
    num_layers=1,
    coupled=name in ("transformer", "s5"),
  )
  ids = jnp.array([[1, 2, 3, 4, 5, 6], [3, 2, 1, 0, 0, 0], [4, 4, 8, 1, 0, 0]])
  params = initial.params(model, ids)
  variables = make_variables(model, params)
  arrays = export.arrays(model, params)
  program = export.program(model, arrays, 6)
  for rows in (ids[:1], ids):
    want = model.apply(variables, rows, train=False)
    np.testing.assert_allclose(program.call(arrays, rows), want, atol=1e-5)


def test_export_refuses_a_length_for_images(tmp_path):
  task = types.SimpleNamespace(name="cifar10", image=(32, 32, 3), max_len=0)
  run = types.SimpleNamespace(task=task, model=None)
  with pytest.raises(ValueError, match="--length=5.*cifar10"):
    export.write(run, tmp_path, 5)


def test_export_refuses_a_folder_without_a_run(tmp_path):
  with pytest.raises(SystemExit, match="There is no run"):
    export_command.main([str(tmp_path), f"--out={tmp_path}"])
