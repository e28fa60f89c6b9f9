"""Export of trained models to files that do not need this package."""

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
from jaxformers.foundations.platforms import portable
from jaxformers.inference import TrainedModel
from jaxformers.models import Model
from jaxformers.models.variables import make_variables
from jaxformers.training import exported

PLATFORMS = ("cpu", "cuda", "tpu")


def arrays(model: Model, params: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of the exported program, by dotted name.

  Args:
    model: model from `models.build`.
    params: parameters of the model.

  Returns:
    C-contiguous arrays: "params..." are plain parameters, "rotations..." are
    orthogonal matrices, and "derived..." are values that blocks compute from
    both.
  """
  # Drop the parameters of orthogonal maps; make_variables adds the matrices.
  plain = jax.tree_util.tree_map_with_path(
    lambda path, leaf: {} if orthogonal.is_parameter(path) else leaf, params
  )
  variables = make_variables(model, params) | {"params": plain}
  flat = flax.traverse_util.flatten_dict(variables, sep=".")
  # Make the arrays C-contiguous for safetensors.
  return {name: np.asarray(leaf, order="C") for name, leaf in flat.items()}


def program(
  model: Model, flat_arrays: dict[str, np.ndarray], length: int
) -> jax.export.Exported:
  """Returns the exported function (arrays, inputs [b, ...]) -> outputs.

  The function evaluates the model (train=False), for any batch size b.

  Args:
    model: model from `models.build`.
    flat_arrays: result of `arrays`; only the shapes are used.
    length: number n of tokens of the inputs; users pad shorter inputs to it.
      Ignored for images.
  """

  def apply(flat: dict[str, jax.Array], inputs: jax.Array) -> Any:
    variables = flax.traverse_util.unflatten_dict(flat, sep=".")
    return model.apply(variables, inputs, train=False)

  # Export from shapes only, with a symbolic batch size b.
  shapes = jax.eval_shape(lambda: flat_arrays)
  example = model.example(length)
  shape = (*jax.export.symbolic_shape("b"), *example.shape[1:])
  export = jax.export.export(jax.jit(apply), platforms=PLATFORMS)
  # Avoid the variants that are optimised for the current device.
  with portable():
    return export(shapes, jax.ShapeDtypeStruct(shape, example.dtype))


def write(run: TrainedModel, out: Path, length: int = 0) -> dict[str, Any]:
  """Writes the files of an exported model.

  Args:
    run: result of `inference.load_run`.
    out: folder to write to; created if it is missing.
    length: number of tokens of the inputs; 0 for the task's `max_len`.

  Returns:
    Content of model.json.

  Raises:
    UserError: if the length is out of the task's range, or if a length is given
      for a task of images.
  """
  task, model = run.task, run.model
  if length and task.image:
    raise UserError(
      f"--length={length} does not apply to the images of {task.name}. Remove "
      "the option."
    )
  if not 0 <= length <= task.max_len:
    raise UserError(
      f"--length={length} is out of range: give 1 to {task.max_len}, or 0 for "
      f"{task.max_len}."
    )
  # Export the program.
  length = length or task.max_len
  flat_arrays = arrays(model, run.params)
  compiled = program(model, flat_arrays, length)
  inputs = model.example(length)
  # Describe the program for users of other languages.
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
  # Write the program, the arrays, the parameters and the vocabulary.
  with exported.writing(out, content) as staged:
    (staged / "model.jax").write_bytes(compiled.serialize())
    exported.write_arrays(staged / "model.safetensors", flat_arrays)
    exported.write_parameters(staged, run.params)
    workdirs.write_vocabulary(staged, task)
  return content


def check(run: TrainedModel, out: Path) -> float:
  """Returns the largest error of the exported outputs on four test examples."""
  # Read the files back, as a user's program does.
  loaded = jax.export.deserialize(bytearray((out / "model.jax").read_bytes()))
  flat_arrays = safetensors.numpy.load_file(out / "model.safetensors")
  # The program takes the inputs last.
  shape = loaded.in_avals[-1].shape
  length = shape[1] if run.model.config.channels else shape[-1]
  inputs = jnp.asarray(run.sample(4, length))
  # Compare the exported outputs with the model's outputs.
  variables = make_variables(run.model, run.params)
  expected = run.model.apply(variables, inputs, train=False)
  outputs = np.asarray(loaded.call(flat_arrays, inputs))
  # Equal infinities have error 0; the logit of padding is -inf.
  expected = np.asarray(expected)
  with np.errstate(invalid="ignore"):
    errors = np.where(outputs == expected, 0, np.abs(outputs - expected))
  return float(errors.max())
