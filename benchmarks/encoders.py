r"""Every encoder beside its twin in PyTorch, by length.

python -m benchmarks.encoders --out encoders.json

Models have two layers, d = 64 and two heads, as in Skyformer's comparison;
TransJect has d = 80 and four experts. The first table has batches of 16,384
tokens, and the seconds of a forward pass and of a train step (forward,
backward, Adam): medians of interleaved rounds, without compilation. "PyTorch"
is the twin in eager mode (`benchmarks.twins`; for TransJect
`benchmarks.rivals`), "compiled" the twin under `torch.compile` if it has no
loop over tokens, and "fused" the twin with PyTorch's own kernel of softmax
attention. "forward times" and "step times" are speed-ups over the fastest twin,
medians over the rounds: above 1 our model is faster. "of the rate" is the FLOPs
of the twin's step over our time, over the rate of a large product in the same
rounds. Memory is what the compiler plans for the train step; for PyTorch, the
growth of the peak memory of a process.

The second table has fitted exponents of time and memory in the length. PyTorch
comes with the extra `bench`.
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

TOKENS = 16_384  # Tokens of a batch: a step takes 0.2 to 2 s.
LENGTHS = (512, 1_024, 2_048, 4_096)
# Only length at which twins are compiled: it takes a minute per model.
COMPILED = 1_024
# Twins with a loop over tokens, which `torch.compile` would unroll.
LOOPS = ("rglru", "mamba")
TITLES = ("PyTorch", "compiled", "fused")  # Twins, as the columns name them.
GROWTH = (1_024, 2_048, 4_096, 8_192, 16_384)  # Lengths of the second table.
Passes = dict[str, Calls]


def make_encoder(name: str, n: int) -> models.Model:
  """Builds a model of Skyformer's size; TransJect has E = 4 and d = 80."""
  options: dict[str, Any] = {"d_model": 64, "positions": "learned"}
  if MODELS[name].block == "injective":
    options = {"d_model": 80}
  return ours.build(name, n, num_layers=2, pool="mean", **options)


def keeps_square(name: str) -> bool:
  """Returns True for a model whose mixer keeps an array of n^2."""
  return getattr(MIXERS[MODELS[name].mixer], "growth", "n") == "n^2"


def compile_programs(name: str, n: int, batch: int) -> ours.Programs:
  """Compiles the forward pass and train step of a model on n tokens."""
  inputs = jnp.asarray(ours.random_ids(batch, n))
  return ours.compile_passes(make_encoder(name, n), inputs, train=True)


@functools.lru_cache(maxsize=2)  # Every twin of one length has these.
def draw_variables(name: str, n: int) -> Mapping[str, Any]:
  """Returns variables of a model, with what its mixers draw."""
  model = make_encoder(name, n)
  variables = make_variables(model, ours.draw_params(model, model.example()))
  apply = functools.partial(model.apply, train=False, mutable=["random"])
  _, drawn = jax.jit(apply)(variables, model.example())
  return {**variables, **drawn}


def make_twin(name: str, n: int, *, is_fused: bool = False) -> Any:
  """Builds the twin of a model in PyTorch."""
  from benchmarks import rivals, twins  # PyTorch is an extra.

  if MODELS[name].block == "injective":
    is_learned = name == "random_transject"
    twin = rivals.TransJect(n, 80, ours.EXPERTS, 2, is_learned)
    rivals.draw_free_matrices(twin)
    return twin
  attend = twins.fused if is_fused else None
  return twins.Twin(make_encoder(name, n), draw_variables(name, n), attend)


def twin_calls(name: str, n: int, batch: int, *, compiled: bool) -> Passes:
  """Returns the calls "forward" and "step" of each twin, by title."""
  import torch

  from benchmarks import rivals

  twins: dict[str, Callable[[], Any]] = {"PyTorch": lambda: make_twin(name, n)}
  if MODELS[name].mixer == "softmax":
    twins["fused"] = lambda: make_twin(name, n, is_fused=True)
  if compiled:
    torch.compiler.reset()
    twins["compiled"] = lambda: torch.compile(make_twin(name, n))
  # `infer` changes its model, so each call has its own.
  return {
    title: {
      "step": rivals.train(make(), batch, n),
      "forward": rivals.infer(make(), batch, n),
    }
    for title, make in twins.items()
  }


def twin_bytes(name: str, lengths: Iterable[int]) -> list[int]:
  """Returns the bytes that a twin's train step takes at every length.

  A process of its own measures them.
  """
  code = (
    "from benchmarks.encoders import step_bytes\n"
    f"print([step_bytes({name!r}, n) for n in {list(lengths)}])"
  )
  return ast.literal_eval(in_a_process(code))


def step_bytes(name: str, n: int) -> int:
  """Returns the bytes by which a twin's train step raises the peak (Linux)."""
  from benchmarks import rivals

  # Run a small step first, so that memory of the libraries is not counted.
  rivals.train(make_twin(name, 256), 1, 256)()
  step = rivals.train(make_twin(name, n), TOKENS // n, n)
  # Give free memory back to the kernel, and reset the peak.
  gc.collect()
  ctypes.CDLL("libc.so.6").malloc_trim(0)
  Path("/proc/self/clear_refs").write_text("5")
  before = peak_memory()
  step()
  return peak_memory() - before


def twin_flops(name: str, n: int, batch: int) -> int:
  """Returns the FLOPs of the products in a train step of a twin."""
  from torch.utils.flop_counter import FlopCounterMode

  from benchmarks import rivals

  step = rivals.train(make_twin(name, n), batch, n)
  with FlopCounterMode(display=False) as counter:
    step()
  return counter.get_total_flops()


def side_by_side(
  names: list[str], rounds: int, lengths: tuple[int, ...] = LENGTHS
) -> Rows:
  """Yields a row for every model and length."""
  for name in names:
    twins_bytes = twin_bytes(name, lengths)
    for n, num_bytes in zip(lengths, twins_bytes, strict=True):
      yield side_by_side_at(name, n, rounds) | {"PyTorch MB": num_bytes / 1e6}
      print(f"{name}, {n} tokens done", file=sys.stderr)


def side_by_side_at(name: str, n: int, rounds: int) -> Row:
  """Measures seconds and bytes of a model and its twins at one length."""
  batch = TOKENS // n
  programs = compile_programs(name, n, batch)
  is_compiled = n == COMPILED and name not in LOOPS
  passes = twin_calls(name, n, batch, compiled=is_compiled)
  passes["ours"] = {key: program.call for key, program in programs.items()}
  call, product_flops = product()
  row = {"model": name, "n": n, "batch": batch}
  for key in ("forward", "step"):
    calls = {title: both[key] for title, both in passes.items()}
    seconds = interleaved(calls | {"product": call}, rounds)
    medians = {title: median(seconds, title) for title in calls}
    row[f"{key} s"] = medians.pop("ours")
    row |= {f"{key} {title} s": medians.get(title) for title in TITLES}
    best = min(medians, key=medians.get)
    row[f"{key} times"] = ratio(seconds, best, "ours")
  rate = product_flops / median(seconds, "product")
  row["of the rate"] = twin_flops(name, n, batch) / row["step s"] / rate
  row["step / forward"] = row["step s"] / row["forward s"]
  row["MB"] = programs["step"].planned_bytes / 1e6
  return row


def growth(
  names: list[str], rounds: int, lengths: tuple[int, ...] = GROWTH
) -> Rows:
  """Yields exponents of time (forward) and memory (train step), one sample."""
  for name in names:
    # Beyond 4,096 tokens, skip models that keep an array of n^2.
    feasible = [n for n in lengths if n <= 4_096 or not keeps_square(name)]
    seconds, planned = [], []
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
  cli.argument("--rounds", default=7, help="timed rounds"),
  cli.argument("--lengths", default="", help="a,b (default: the table's own)"),
  OUT,
)
def main(models: str, tables: str, rounds: int, lengths: str, out: str) -> None:
  """Prints the tables, and writes them as JSON if asked."""
  # Training keeps freed memory as well. PyTorch also becomes faster.
  allocator.keep_freed_memory()
  names = cli.names(models) or sorted(MODELS)
  chosen = [choose("table", title, TABLES) for title in cli.names(tables)]
  if "twins" in chosen:
    requirements.require("bench", "The table 'twins'")
  tokens = tuple(cli.numbers("lengths", lengths))
  options = {"lengths": tokens} if tokens else {}
  report(((t, TABLES[t](names, rounds, **options)) for t in chosen), out)


if __name__ == "__main__":
  main()
