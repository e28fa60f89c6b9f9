r"""How fast TransJect trains and answers, beside PyTorch.

python -m benchmarks.speed --out speed.json

Train steps (forward, backward, Adam) and inference with the orthogonal matrices
at hand, of TransJect and Random-TransJect at L = 2, E = 4, d = 512 in float32,
beside two models in PyTorch (`benchmarks.rivals`): as a user writes it, and
with all of our algebra. All take turns in every round, on as many threads;
tables show medians, and ratios are medians of the ratios of a round.
Compilation is apart. Needs the extra `bench`.

`of the rate` is the FLOPs of the model as the paper writes it, 4 E + 4 products
with a d x d matrix for each token and layer (three times that in training),
over the time and over the rate of a large product of the same rounds.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import save, table
from jaxformers import models
from jaxformers.training import optim, parallel, state, steps
from jaxformers.training.layout import Layout

ROUNDS = 7
LAYERS, EXPERTS, D = 2, 4, 512
TOKENS = 8_192  # Of a step, in batches of one row and more.
RATE = 1e-4  # Of learning; the time does not depend on it.
Call = Callable[[], Any]


def product() -> tuple[Call, float]:
  """A product that runs at the machine's rate, and its FLOPs."""
  a, b = jnp.ones((4096, 1024)), jnp.ones((1024, 4096))
  run = jax.jit(jnp.matmul)
  return lambda: run(a, b).block_until_ready(), 2.0 * 4096 * 1024 * 4096


def ids(batch: int, length: int) -> np.ndarray:
  """Random tokens, none of them padding."""
  rng = np.random.default_rng(0)
  return rng.integers(1, 257, (batch, length)).astype(np.int32)


def build(name: str, length: int) -> models.Model:
  """Ours, of the sizes above."""
  return models.build(
    name,
    vocab_size=257,
    num_classes=2,
    max_len=length,
    d_model=D,
    num_layers=LAYERS,
    mixer={"num_experts": EXPERTS},
  )


def train(name: str, batch: int, length: int, accumulate: int = 0) -> Call:
  """A train step of ours, a row at a time."""
  model = build(name, length)
  tx, _ = optim.build(
    {"name": "adam"}, {"name": "constant", "learning_rate": RATE}, 10
  )
  layout = Layout.of("", jax.devices()[:1])
  now = layout.place(state.create(model, tx, 0))
  step = functools.partial(
    steps.train_step, model=model, tx=tx, seed=0, accumulate=accumulate or batch
  )
  run, place = parallel.compile_step(
    "jit", step, layout, state=now, donate=True
  )
  rows = place(
    {
      "inputs": ids(batch, length),
      "targets": np.zeros(batch, np.int32),
      "weights": np.ones(batch, np.float32),
    }
  )

  def call() -> None:
    nonlocal now
    now, sums = run(now, rows)
    jax.block_until_ready((now, sums))

  return call


def infer(name: str, batch: int, length: int) -> Call:
  """A forward pass of ours."""
  model = build(name, length)
  inputs = jnp.asarray(ids(batch, length))
  params = model.init(jax.random.key(0), inputs[:1], train=False)["params"]
  own = jax.jit(functools.partial(steps.prepared, name="cayley"))(params)
  run = jax.jit(functools.partial(model.apply, train=False))
  return lambda: run(own, inputs).block_until_ready()


def in_pytorch(
  kind: str, learned: bool, batch: int, length: int, *, training: bool
) -> Call:
  """The same in PyTorch; kind "user" or "fast"."""
  import torch
  from torch.nn.utils import parametrize

  from benchmarks import rivals

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  torch.manual_seed(0)
  make = {"user": rivals.TransJect, "fast": rivals.FastTransJect}[kind]
  model = make(length, D, EXPERTS, LAYERS, learned)
  inputs = torch.from_numpy(ids(batch, length)).long()
  targets = torch.zeros(batch, dtype=torch.long)
  if training:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    def step() -> None:
      optimizer.zero_grad(set_to_none=True)
      logits, error = model(inputs)
      loss = torch.nn.functional.cross_entropy(logits, targets)
      (loss + 1e-3 * error).backward()
      optimizer.step()

    return step
  model.eval()
  if kind == "fast":
    with torch.no_grad():
      model.kept = model.rotations()

  def forward() -> None:
    with torch.inference_mode(), parametrize.cached():
      model(inputs)

  with torch.no_grad():  # A user has removed what makes the matrices.
    for module in list(model.modules()):
      if parametrize.is_parametrized(module, "weight"):
        parametrize.remove_parametrizations(module, "weight")
  return forward


def interleaved(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
  """Seconds of every call in every round; the first round is not counted."""
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for number in range(rounds + 1):
    for name, call in calls.items():
      began = time.perf_counter()
      call()
      if number:
        seconds[name].append(time.perf_counter() - began)
  return seconds


def flops(tokens: int, *, training: bool) -> float:
  """Of the model as the paper writes it."""
  forward = tokens * LAYERS * (4 * EXPERTS + 4) * D * D
  return forward * (3.0 if training else 1.0)


def row(
  name: str, length: int, rounds: int, *, training: bool
) -> dict[str, Any]:
  """One model at one length, ours beside the others."""
  batch = max(1, TOKENS // length)
  learned = name == "random_transject"
  rate, size = product()
  ours = train if training else infer
  calls = {
    "ours": ours(name, batch, length),
    "user": in_pytorch("user", learned, batch, length, training=training),
    "fast": in_pytorch("fast", learned, batch, length, training=training),
    "product": rate,
  }
  seconds = interleaved(calls, rounds)
  median = {key: statistics.median(values) for key, values in seconds.items()}

  def ratio(other: str) -> float:
    pairs = zip(seconds[other], seconds["ours"], strict=True)
    return statistics.median(a / b for a, b in pairs)

  speed = size / median["product"]
  return {
    "model": name,
    "what": "train step" if training else "inference",
    "n": length,
    "batch": batch,
    "s": median["ours"],
    "PyTorch, user's s": median["user"],
    "PyTorch, our algebra s": median["fast"],
    "times a user's": ratio("user"),
    "times our algebra's": ratio("fast"),
    "GFLOP/s of a product": speed / 1e9,
    "of the rate": flops(batch * length, training=training)
    / median["ours"]
    / speed,
  }


def main() -> None:
  """Prints the table, and writes it as JSON if asked."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--lengths", default="512,1024,2048,4096")
  parser.add_argument("--models", default="transject,random_transject")
  parser.add_argument("--rounds", type=int, default=ROUNDS)
  parser.add_argument("--out", default="", help="path of the JSON")
  args = parser.parse_args()
  rows = []
  for training in (True, False):
    for name in args.models.split(","):
      for length in map(int, args.lengths.split(",")):
        rows.append(row(name, length, args.rounds, training=training))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
  print("\n" + table(rows))
  save({"speed": rows}, args.out)


if __name__ == "__main__":
  main()
