r"""Speed and memory of every encoder and of its twin in PyTorch, by length.

python -m benchmarks.encoders --out encoders.json

Models have two layers, d = 64 and two heads, as in Skyformer's comparison;
TransJect has d = 80 and four experts. The first table has batches of 16,384
tokens. It lists the seconds of a forward pass and of a train step (forward,
backward, Adam), as medians of interleaved rounds without compilation.

"PyTorch" is the twin in eager mode (`benchmarks.twins`; for TransJect
`benchmarks.rivals`). "compiled" is the twin under `torch.compile`, if it has no
loop over tokens. "fused" is the twin with PyTorch's kernel of softmax
attention. "forward times" and "step times" are our speed-ups over the fastest
twin, as medians over the rounds; our model is faster if they are above 1. "of
the rate" is the rate of our train step (FLOPs of the twin's step over our time)
as a share of the rate of a large matrix product in the same rounds. "MB" is the
memory that the compiler plans for the train step. "PyTorch MB" is the growth of
the peak memory of a process.

The second table has fitted exponents of time and memory in the length. The
extra `bench` installs PyTorch.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ours
from benchmarks.data import OUT, Row, Rows, report
from benchmarks.timing import (
  Calls,
  exponent,
  in_a_process,
  interleaved,
  median,
  peak_memory,
  product,
  ratio,
)
from jaxformers import models
from jaxformers.foundations import allocator, cli, requirements
from jaxformers.foundations.registry import choose
from jaxformers.models import MIXERS, MODELS
from jaxformers.models.variables import make_variables

TOKENS = 16_384  # Tokens of a batch, so that a step takes 0.2 to 2 s.
LENGTHS = (512, 1_024, 2_048, 4_096)
# Only length at which twins are compiled, which takes a minute per model.
COMPILED = 1_024
# Mixers whose twins have a loop, which `torch.compile` would unroll, or which
# are one operation of PyTorch.
LOOPS = (
  *("rglru", "mamba", "mamba2", "delta", "gla", "retnet", "hgrn2", "mlstm"),
  *("mingru", "lstm", "gru"),
)
TITLES = ("PyTorch", "compiled", "fused")  # Twins, as the columns name them.
GROWTH = (1_024, 2_048, 4_096, 8_192, 16_384)  # Lengths of the second table.
Passes = dict[str, Calls]


def make_encoder(name: str, n: int) -> models.Model:
  """Builds a model of Skyformer's size. TransJect has E = 4 and d = 80."""
  options: dict[str, Any] = {"d_model": 64, "positions": "learned"}
  if MODELS[name].block == "injective":
    options = {"d_model": 80}
  return ours.build(name, n, num_layers=2, pool="mean", **options)


def keeps_square(name: str) -> bool:
  """Returns True if the mixer of a model stores an array of n^2 numbers."""
  return getattr(MIXERS[MODELS[name].mixer], "growth", "n") == "n^2"


def compile_programs(name: str, n: int, batch: int) -> ours.Programs:
  """Compiles the forward pass and train step of a model on n tokens."""
  inputs = jnp.asarray(ours.random_ids(batch, n))
  return ours.compile_passes(make_encoder(name, n), inputs, train=True)


@functools.lru_cache(maxsize=2)  # All twins of one length share them.
def draw_variables(name: str, n: int) -> Mapping[str, Any]:
  """Draws the variables of a model, with the random arrays of its mixers."""
  model = make_encoder(name, n)
  variables = make_variables(model, ours.draw_params(model, model.example()))
  apply = functools.partial(model.apply, train=False, mutable=["random"])
  _, drawn = jax.jit(apply)(variables, model.example())
  return {**variables, **drawn}


def make_twin(name: str, n: int, *, is_fused: bool = False) -> Any:
  """Builds the twin of a model in PyTorch.

  Args:
    name: name of the model.
    n: number of tokens.
    is_fused: True for PyTorch's kernel of softmax attention.
  """
  from benchmarks import rivals, twins  # PyTorch is an extra.

  # TransJect's twin is in `rivals`. Draw its free matrices as ours are drawn.
  if MODELS[name].block == "injective":
    is_learned = name == "random_transject"
    twin = rivals.TransJect(n, 80, ours.EXPERTS, 2, is_learned)
    rivals.draw_free_matrices(twin)
    return twin
  attend = twins.fused if is_fused else None
  return twins.Twin(make_encoder(name, n), draw_variables(name, n), attend)


def twin_calls(name: str, n: int, batch: int, *, compiled: bool) -> Passes:
  """Returns the calls "forward" and "step" of each twin, by title.

  Args:
    name: name of the model.
    n: number of tokens.
    batch: number of rows of a batch.
    compiled: True to add the twin under `torch.compile`.
  """
  import torch

  from benchmarks import rivals

  # Functions that build the twins, by title.
  twins: dict[str, Callable[[], Any]] = {"PyTorch": lambda: make_twin(name, n)}
  if MODELS[name].mixer == "softmax":
    twins["fused"] = lambda: make_twin(name, n, is_fused=True)
  if compiled:
    torch.compiler.reset()
    twins["compiled"] = lambda: torch.compile(make_twin(name, n))
  # Build a twin for each call, because `infer` changes its model.
  return {
    title: {
      "step": rivals.train(make(), batch, n),
      "forward": rivals.infer(make(), batch, n),
    }
    for title, make in twins.items()
  }


def twin_bytes(name: str, lengths: Iterable[int]) -> list[int]:
  """Returns the bytes that a twin's train step takes at every length.

  They are measured in a separate process.
  """
  code = (
    "from benchmarks.encoders import step_bytes\n"
    f"print([step_bytes({name!r}, n) for n in {list(lengths)}])"
  )
  return ast.literal_eval(in_a_process(code))


def step_bytes(name: str, n: int) -> int:
  """Returns the bytes that a twin's train step adds to the peak (Linux)."""
  from benchmarks import rivals

  # Run a small step first, so that the libraries' memory is not counted.
  rivals.train(make_twin(name, 256), 1, 256)()
  step = rivals.train(make_twin(name, n), TOKENS // n, n)
  # Return free memory to the kernel, and reset the peak.
  gc.collect()
  ctypes.CDLL("libc.so.6").malloc_trim(0)
  Path("/proc/self/clear_refs").write_text("5")
  # Run the step, and compare the peak with the memory before it.
  before = peak_memory()
  step()
  return peak_memory() - before


def twin_flops(name: str, n: int, batch: int) -> int:
  """Returns the FLOPs of the matrix products in a twin's train step."""
  from torch.utils.flop_counter import FlopCounterMode

  from benchmarks import rivals

  step = rivals.train(make_twin(name, n), batch, n)
  with FlopCounterMode(display=False) as counter:
    step()
  return counter.get_total_flops()


def side_by_side(
  names: list[str], rounds: int, lengths: tuple[int, ...] = LENGTHS
) -> Rows:
  """Yields a row of the first table for every model and length."""
  for name in names:
    twins_bytes = twin_bytes(name, lengths)
    for n, num_bytes in zip(lengths, twins_bytes, strict=True):
      yield side_by_side_at(name, n, rounds) | {"PyTorch MB": num_bytes / 1e6}
      print(f"{name}, {n} tokens done", file=sys.stderr)


def side_by_side_at(name: str, n: int, rounds: int) -> Row:
  """Measures the time and memory of a model and its twins at one length."""
  # Build our programs, the calls of the twins, and a large product.
  batch = TOKENS // n
  programs = compile_programs(name, n, batch)
  is_compiled = n == COMPILED and MODELS[name].mixer not in LOOPS
  passes = twin_calls(name, n, batch, compiled=is_compiled)
  passes["ours"] = {key: program.call for key, program in programs.items()}
  call, product_flops = product()
  row = {"model": name, "n": n, "batch": batch}
  # Time all calls in turns, and compare ours with the fastest twin.
  for key in ("forward", "step"):
    calls = {title: both[key] for title, both in passes.items()}
    seconds = interleaved(calls | {"product": call}, rounds)
    medians = {title: median(seconds, title) for title in calls}
    row[f"{key} s"] = medians.pop("ours")
    row |= {f"{key} {title} s": medians.get(title) for title in TITLES}
    best = min(medians, key=medians.get)
    row[f"{key} times"] = ratio(seconds, best, "ours")
  # Relate the FLOPs of the step to the rate of the product.
  rate = product_flops / median(seconds, "product")
  row["of the rate"] = twin_flops(name, n, batch) / row["step s"] / rate
  row["step / forward"] = row["step s"] / row["forward s"]
  row["MB"] = programs["step"].planned_bytes / 1e6
  return row


def growth(
  names: list[str], rounds: int, lengths: tuple[int, ...] = GROWTH
) -> Rows:
  """Yields fitted exponents of forward time and train-step memory.

  Batches have one sample.

  Args:
    names: names of the models.
    rounds: number of timed rounds.
    lengths: numbers of tokens.
  """
  for name in names:
    # Above 4,096 tokens, skip models that store an array of n^2 numbers.
    feasible = [n for n in lengths if n <= 4_096 or not keeps_square(name)]
    seconds, planned = [], []
    # Measure each length.
    for n in feasible:
      programs = compile_programs(name, n, 1)
      times = interleaved({name: programs["forward"].call}, rounds)
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


TABLES: dict[str, Callable[..., Rows]] = {
  "twins": side_by_side,
  "growth": growth,
}


@cli.command(
  cli.argument("--models", default="", help="names: a,b (default: all)"),
  cli.argument("--tables", default=",".join(TABLES), help="tables: a,b"),
  cli.argument("--rounds", default=7, help="number of timed rounds"),
  cli.argument("--lengths", default="", help="a,b (default: by table)"),
  OUT,
)
def main(models: str, tables: str, rounds: int, lengths: str, out: str) -> None:
  """Prints the tables, and writes them as JSON if --out is set."""
  # Keep freed memory, as training does. PyTorch becomes faster as well.
  allocator.keep_freed_memory()
  # Check the arguments before the measurements.
  names = cli.names(models) or sorted(MODELS)
  chosen = [choose("table", title, TABLES) for title in cli.names(tables)]
  if "twins" in chosen:
    requirements.require("bench", "The table 'twins'")
  tokens = tuple(cli.numbers("lengths", lengths))
  options = {"lengths": tokens} if tokens else {}
  report(((t, TABLES[t](names, rounds, **options)) for t in chosen), out)


if __name__ == "__main__":
  main()
