r"""Exports a trained model as files that need nothing of this package.

python -m jaxformers export runs/text --out model

Writes model.jax, the program (`jax.export`, for CPU, GPU and TPU), and
model.safetensors, its arrays: orthogonal matrices as they are, with no map to
compute. To use them:

    program = jax.export.deserialize(bytearray(Path("model.jax").read_bytes()))
    arrays = safetensors.numpy.load_file("model.safetensors")
    logits = program.call(arrays, ids)

Beside them lie model.json, which describes inputs and outputs, the
vocabulary.json and tokenizer.json of the run, and parameters.safetensors, the
parameters as they are trained: `--config.pretrained=model` begins with them.
"""

from __future__ import annotations

from pathlib import Path

from jaxformers.analysis.evaluation import export
from jaxformers.commands import states
from jaxformers.foundations import cli


@cli.command(
  cli.WORKDIR,
  cli.argument("--out", type=Path, required=True, help="folder to write"),
  cli.option(
    "length", 0, "number of tokens of an input (default: max_len of the task)"
  ),
)
def main(workdir: str, out: Path, length: int) -> None:
  """Writes the files and compares them with the model."""
  run = states.load(workdir)
  content = export.write(run, out, length)
  print(
    f"{out}: inputs {content['inputs']} {content['dtype']}, "
    f"{content['numbers']:,} numbers, for {', '.join(content['platforms'])};"
    f" at most {export.check(run, out):.2g} from the model on four examples."
  )


if __name__ == "__main__":
  main()
