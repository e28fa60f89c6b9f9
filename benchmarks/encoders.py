r"""Cost of every encoder, beside softmax attention in PyTorch and JAX.

python -m benchmarks.encoders --out encoders.json

Models have two layers, d = 64 and two heads, as in Skyformer's comparison. The
first table has seconds of a forward pass and of a train step (forward,
backward, Adam) at several lengths: medians of interleaved rounds, without
compilation. It also has the memory of the train step as the compiler plans it;
for PyTorch, the growth of the peak memory of a separate process. The second
table has fitted exponents of time and memory in the length. PyTorch comes with
the extra `bench`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ours
from benchmarks.data import OUT, Rows, report
from benchmarks.timing import Call, exponent, in_a_process, interleaved, median
from jaxformers import allocator, cli, models
from jaxformers.models import MIXERS, MODELS
from jaxformers.models.attention import attention

ROUNDS = 7
BATCH = 4
LENGTHS = (1_024, 2_048, 4_096)
GROWTH = (1_024, 2_048, 4_096, 8_192, 16_384)
PYTORCH = "PyTorch, softmax"


def register_library() -> None:
  """Registers JAX's softmax attention as a model, unless it already is."""
  name = "dot_product_attention"
  if name in MODELS:
    return

  @attention(name, growth="n^2")
  def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array
  ) -> jax.Array:
    # JAX's function takes and returns [b, n, h, e], ours [b, h, n, e].
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None])
    return jnp.swapaxes(y, 1, 2)

  MODELS.register(name)(models.Variant(name, "pre_norm"))


def make_encoder(name: str, n: int) -> models.Model:
  """Builds a model of Skyformer's size; TransJect has E = 4 and d = 80."""
  options: dict[str, Any] = {"d_model": 64, "positions": "learned"}
  if MODELS[name].block == "injective":
    options = {"d_model": 80}
  return ours.build(name, n, num_layers=2, pool="mean", **options)


def compile_programs(name: str, n: int, batch: int) -> ours.Programs:
  """Compiles the forward pass and train step of a model on n tokens."""
  inputs = jnp.asarray(ours.random_ids(batch, n))
  return ours.compile_passes(make_encoder(name, n), inputs, train=True)


def pytorch_calls(n: int, batch: int) -> dict[str, Call]:
  """Returns the calls "forward" and "step" of a Transformer in PyTorch."""
  import torch

  from benchmarks import rivals  # PyTorch is an extra.

  torch.manual_seed(0)
  return {
    "forward": rivals.infer(rivals.PlainTransformer(n), batch, n),
    "step": rivals.train(rivals.PlainTransformer(n), batch, n),
  }


def pytorch_memory(n: int) -> int:
  """Returns the bytes that a train step adds to a process of its own."""
  # A step on 16 tokens first: memory of the libraries is not counted.
  code = (
    "from benchmarks.encoders import pytorch_calls\n"
    "from benchmarks.timing import peak_memory\n"
    f"pytorch_calls(16, {BATCH})['step']()\n"
    "before = peak_memory()\n"
    f"pytorch_calls({n}, {BATCH})['step']()\n"
    "print(peak_memory() - before)"
  )
  return int(in_a_process(code))


def side_by_side(names: list[str], lengths: tuple[int, ...]) -> list[dict]:
  """Measures seconds and bytes of every model and PyTorch, a row each."""
  rows = {name: {"model": name} for name in (*names, PYTORCH)}
  for n in lengths:
    # Compile all models, and take the memory of their steps.
    calls: dict[str, dict[str, Call]] = {}
    for name in names:
      programs = compile_programs(name, n, BATCH)
      calls[name] = {key: program.call for key, program in programs.items()}
      rows[name][f"MB {n}"] = programs["step"].planned_bytes / 1e6
    calls[PYTORCH] = pytorch_calls(n, BATCH)
    rows[PYTORCH][f"MB {n}"] = pytorch_memory(n) / 1e6
    # Time them in turns.
    for key in ("forward", "step"):
      seconds = interleaved({k: both[key] for k, both in calls.items()}, ROUNDS)
      for name in calls:
        rows[name][f"{key} {n}"] = median(seconds, name)
    print(f"{n} tokens done", file=sys.stderr)
  return list(rows.values())


def growth(names: list[str], lengths: tuple[int, ...]) -> Rows:
  """Yields exponents of time (forward) and memory (train step), one sample."""
  for name in names:
    # Beyond 4,096 tokens, skip models that keep an array of n^2.
    memory = getattr(MIXERS[MODELS[name].mixer], "growth", "n")
    feasible = [n for n in lengths if n <= 4_096 or memory != "n^2"]
    seconds, planned = [], []
    for n in feasible:
      programs = compile_programs(name, n, 1)
      times = interleaved({name: programs["forward"].call}, ROUNDS)
      seconds.append(median(times, name))
      planned.append(programs["step"].planned_bytes)
    yield {
      "model": name,
      "longest": feasible[-1],
      "exponent of time": exponent(feasible, seconds),
      "exponent of memory": exponent(feasible, planned),
      "seconds at the longest": seconds[-1],
      "MB at the longest": planned[-1] / 1e6,
    }
    print(f"growth of {name} done", file=sys.stderr)


@cli.command(
  cli.argument("--models", default="", help="names: a,b (default: all)"),
  OUT,
)
def main(models: str, out: str) -> None:
  """Prints the tables, and writes them as JSON if asked."""
  # As training does; PyTorch gains from it, too.
  allocator.keep_freed_memory()
  register_library()
  names = cli.names(models) or sorted(MODELS)

  def tables() -> Iterator[tuple[str, Rows]]:
    yield "side by side", side_by_side(names, LENGTHS)
    yield "growth", growth(names, GROWTH)

  print(f"Seconds and MB, batch {BATCH}; growth with the length, one sample.")
  report(tables(), out)


if __name__ == "__main__":
  main()
