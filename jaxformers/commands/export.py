r"""Exports a trained model as files that work without this package.

jaxformers export runs/text --out model

Writes the program model.jax (`jax.export`, for CPU, GPU and TPU) and its arrays
model.safetensors. The arrays contain the orthogonal matrices themselves, so
that no orthogonal map has to be computed. To use them:

    program = jax.export.deserialize(bytearray(Path("model.jax").read_bytes()))
    arrays = safetensors.numpy.load_file("model.safetensors")
    logits = program.call(arrays, ids)

The folder also contains model.json, which describes inputs and outputs, and the
vocabulary.json and tokenizer.json of the run. parameters.safetensors contains
the trained parameters; `--config.pretrained=model` starts a run from them.
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
  """Writes the files, and compares the exported program with the model."""
  run = states.load(workdir)
  content = export.write(run, out, length)
  # Print the size, and the largest difference from the model.
  print(
    f"{out}: inputs {content['inputs']} {content['dtype']}, "
    f"{content['numbers']:,} numbers, for {', '.join(content['platforms'])};"
    f" at most {export.check(run, out):.2g} from the model on four examples."
  )


if __name__ == "__main__":
  main()
