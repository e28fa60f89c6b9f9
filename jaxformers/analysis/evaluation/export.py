"""Trained models as files that need nothing of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxformers import orthogonal
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.inference import TrainedModel
from jaxformers.models import Model
from jaxformers.models.parallel import portable
from jaxformers.models.variables import make_variables
from jaxformers.training import exported

PLATFORMS = ("cpu", "cuda", "tpu")


def arrays(model: Model, params: Any) -> dict[str, np.ndarray]:
  """Returns the program's arrays, C-contiguous, by dotted names.

  Args:
    model: model from `models.build`.
    params: parameters of the model.

  Returns:
    "params...", plain parameters; "rotations...", orthogonal matrices; and
    "derived...", products that blocks make of both.
  """
  # Drop parameters of orthogonal maps: make_variables returns the matrices.
  plain = jax.tree_util.tree_map_with_path(
    lambda path, leaf: {} if orthogonal.is_parameter(path) else leaf, params
  )
  variables = make_variables(model, params) | {"params": plain}
  flat = flax.traverse_util.flatten_dict(variables, sep=".")
  # The safetensors format needs C-contiguous arrays.
  return {name: np.asarray(leaf, order="C") for name, leaf in flat.items()}


def program(
  model: Model, flat_arrays: dict[str, np.ndarray], length: int
) -> jax.export.Exported:
  """Returns the model in evaluation as a function of (arrays, inputs [b, ...]).

  Args:
    model: model from `models.build`.
    flat_arrays: result of `arrays`, for the shapes.
    length: number n of tokens; pad shorter inputs to it. Ignored for images.
      The batch size b stays free.
  """

  def apply(flat: dict[str, jax.Array], inputs: jax.Array) -> Any:
    variables = flax.traverse_util.unflatten_dict(flat, sep=".")
    return model.apply(variables, inputs, train=False)

  # Export from shapes alone, with a symbolic batch size b.
  shapes = jax.eval_shape(lambda: flat_arrays)
  example = model.example(length)
  shape = (*jax.export.symbolic_shape("b"), *example.shape[1:])
  export = jax.export.export(jax.jit(apply), platforms=PLATFORMS)
  # Not the forms that are fast on the device at hand.
  with portable():
    return export(shapes, jax.ShapeDtypeStruct(shape, example.dtype))


def write(run: TrainedModel, out: Path, length: int = 0) -> dict[str, Any]:
  """Writes all files of a run.

  Args:
    run: result of `inference.load_run`.
    out: folder, made if it is not there.
    length: number of tokens of the inputs; 0 for the task's `max_len`.

  Returns:
    Content of model.json.

  Raises:
    UserError: for a length out of the task's range, or of images.
  """
  task, model = run.task, run.model
  if length and task.image:
    raise UserError(
      f"--length={length} has no meaning for the images of {task.name}: leave "
      "it out."
    )
  if not 0 <= length <= task.max_len:
    raise UserError(
      f"--length={length} is out of range: give 1 to {task.max_len}, or 0 for "
      f"{task.max_len}."
    )
  length = length or task.max_len
  flat_arrays = arrays(model, run.params)
  compiled = program(model, flat_arrays, length)
  inputs = model.example(length)
  # Describe inputs and outputs for users of other languages.
  content = {
    "model": dict(run.config),
    "task": task.description(),
    "imports": run.imports,
    "step": run.step,
    "inputs": ["b", *inputs.shape[1:]],
    "dtype": str(inputs.dtype),
    "platforms": list(compiled.platforms),
    "jax": jax.__version__,
    "numbers": int(sum(a.size for a in flat_arrays.values())),
  }
  with exported.writing(out, content) as staged:
    (staged / "model.jax").write_bytes(compiled.serialize())
    exported.write_arrays(staged / "model.safetensors", flat_arrays)
    exported.write_parameters(staged, run.params)
    workdirs.write_vocabulary(staged, task)
  return content


def check(run: TrainedModel, out: Path) -> float:
  """Returns the largest error of the files' outputs on four test examples."""
  # Read the files back, as a user's program does.
  loaded = jax.export.deserialize(bytearray((out / "model.jax").read_bytes()))
  flat_arrays = safetensors.numpy.load_file(out / "model.safetensors")
  # The arrays come first, the inputs last.
  length = loaded.in_avals[-1].shape[-1]
  inputs = jnp.asarray(run.sample(4, length))
  variables = make_variables(run.model, run.params)
  expected = run.model.apply(variables, inputs, train=False)
  outputs = np.asarray(loaded.call(flat_arrays, inputs))
  # Equal infinities differ by nothing: padding is never predicted.
  expected = np.asarray(expected)
  with np.errstate(invalid="ignore"):
    errors = np.where(outputs == expected, 0, np.abs(outputs - expected))
  return float(errors.max())
