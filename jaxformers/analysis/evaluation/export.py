r"""A trained model as files that need nothing of this package.

python -m jaxformers export runs/text --out model

Writes model.jax, the program (`jax.export`, for CPU, GPU and TPU), and
model.safetensors, its arrays: orthogonal matrices as they are, with no map to
compute. They are used by

    program = jax.export.deserialize(bytearray(Path("model.jax").read_bytes()))
    arrays = safetensors.numpy.load_file("model.safetensors")
    logits = program.call(arrays, ids)

Beside them lie model.json, which says what goes in and comes out, and the
vocabulary.json and tokenizer.json of the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxformers import cli, orthogonal, trained, workdirs
from jaxformers.errors import UserError
from jaxformers.models import Model
from jaxformers.models.variables import make_variables

PLATFORMS = ("cpu", "cuda", "tpu")


def arrays(model: Model, params: Any) -> dict[str, np.ndarray]:
  """What the program takes, by name: parameters, and rotations of the others.

  Args:
    model: from `models.build`.
    params: its parameters.

  Returns:
    "params.encoder..." and "rotations.encoder...", C-contiguous.
  """
  plain = jax.tree_util.tree_map_with_path(
    lambda path, leaf: None if orthogonal.is_parameter(path) else leaf, params
  )
  own = make_variables(model, params) | {"params": plain}
  flat = flax.traverse_util.flatten_dict(own, sep=".")
  return {
    name: np.asarray(leaf, order="C")
    for name, leaf in flat.items()
    if leaf is not None
  }


def program(
  model: Model, own: dict[str, np.ndarray], length: int
) -> jax.export.Exported:
  """The model in evaluation as a function of (arrays, inputs [b, ...]).

  Args:
    model: from `models.build`.
    own: of `arrays`, for the shapes.
    length: n of the inputs, which shorter ones are padded to; of no meaning for
      images. The number of examples b is free.
  """

  def apply(flat: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    own = flax.traverse_util.unflatten_dict(flat, sep=".")
    return model.apply(own, inputs, train=False)

  struct = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), own)
  example = model.example(length)
  shape = (*jax.export.symbolic_shape("b"), *example.shape[1:])
  export = jax.export.export(jax.jit(apply), platforms=PLATFORMS)
  return export(struct, jax.ShapeDtypeStruct(shape, example.dtype))


def write(run: Any, out: Path, length: int = 0) -> dict[str, Any]:
  """Writes all files of a run; the content of model.json.

  Args:
    run: of `trained.load`.
    out: a folder, made if it is not there.
    length: of the inputs; 0 for the task's greatest.

  Raises:
    UserError: for a length that the task has not.
  """
  task, model = run.task, run.model
  if not 0 <= length <= task.max_len:
    raise UserError(f"--length={length} is not in 1 to {task.max_len}.")
  length = length or task.max_len
  own = arrays(model, run.params)
  made = program(model, own, length)
  inputs = model.example(length)
  content = {
    "model": run.config["model"],
    "task": task.description(),
    "step": run.step,
    "inputs": ["b", *inputs.shape[1:]],
    "dtype": str(inputs.dtype),
    "platforms": list(made.platforms),
    "jax": jax.__version__,
    "numbers": int(sum(a.size for a in own.values())),
  }
  out.mkdir(parents=True, exist_ok=True)
  (out / "model.jax").write_bytes(made.serialize())
  safetensors.numpy.save_file(own, out / "model.safetensors")
  (out / "model.json").write_text(json.dumps(content, indent=2) + "\n")
  workdirs.write_vocabulary(out, task)
  return content


def check(run: Any, out: Path) -> float:
  """How far the files are from the model on some of the test, at most."""
  loaded = jax.export.deserialize(bytearray((out / "model.jax").read_bytes()))
  own = safetensors.numpy.load_file(out / "model.safetensors")
  length = loaded.in_avals[-1].shape[-1]
  inputs = jnp.asarray(run.sample(4, length))
  variables = make_variables(run.model, run.params)
  want = run.model.apply(variables, inputs, train=False)
  found = np.asarray(loaded.call(own, inputs))
  return float(np.abs(found - np.asarray(want)).max())


@cli.command(
  cli.WORKDIR,
  cli.argument("--out", type=Path, required=True, help="folder to write"),
  cli.argument(
    "--length",
    type=int,
    default=0,
    help="number of tokens of an input (default: the task's greatest)",
  ),
)
def main(workdir: str, out: Path, length: int) -> None:
  """Writes the files and compares them with the model."""
  run = trained.load(workdir)
  content = write(run, out, length)
  print(
    f"{out}: inputs {content['inputs']} {content['dtype']}, "
    f"{content['numbers']:,} numbers, for {', '.join(content['platforms'])};"
    f" at most {check(run, out):.2g} from the model on four examples."
  )


if __name__ == "__main__":
  main()
