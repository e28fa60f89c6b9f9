r"""How fast TransJect trains and answers, beside PyTorch.

Train steps (forward, backward, Adam) and inference with the orthogonal matrices
at hand, of TransJect and Random-TransJect at L = 2, E = 4, d = 512 in float32,
beside two models in PyTorch (`benchmarks.rivals`): as a user writes it, and
with all of our algebra. A user's free matrices are zero at first, where
PyTorch's maps are cheapest; "first steps" is the time there.

`of the rate` is the FLOPs of the model as the paper writes it, 4 E + 4 products
of d^2 for each token and layer (three times that in training), over the time
and over the rate of a large product of the same rounds.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.__main__ import main
from benchmarks.timing import (
  Call,
  interleaved,
  median,
  product,
  ratio,
  threads,
)
from jaxformers import models
from jaxformers.models.variables import make_variables
from jaxformers.training import compilers, optim, state, steps
from jaxformers.training.layout import Layout

LAYERS, EXPERTS, D = 2, 4, 512
LENGTHS = (512, 1_024, 2_048, 4_096)
MODELS = ("transject", "random_transject")
TOKENS = 4_096  # Of a step, in batches of one row and more: 1 to 2 s.
VOCABULARY, CLASSES = 257, 2
RATE = 1e-4  # Of learning; the time does not depend on it.


def ids(batch: int, length: int) -> np.ndarray:
  """Random tokens, none of them padding."""
  rng = np.random.default_rng(0)
  return rng.integers(1, VOCABULARY, (batch, length)).astype(np.int32)


def build(name: str, length: int, **options: Any) -> models.Model:
  """One of ours; TransJect of the sizes above if no other are given."""
  if not options:
    options = {"num_layers": LAYERS, "mixer": {"num_experts": EXPERTS}}
  return models.build(
    name,
    vocab_size=VOCABULARY,
    num_classes=CLASSES,
    max_len=length,
    **{"d_model": D, **options},
  )


def batch_of(batch: int, length: int) -> dict[str, np.ndarray]:
  """Rows as the loader makes them."""
  return {
    "inputs": ids(batch, length),
    "targets": np.zeros(batch, np.int32),
    "weights": np.ones(batch, np.float32),
  }


def step_of(model: models.Model, accumulate: int) -> Any:
  """A step to compile, its layout, and the state it starts from."""
  tx, _ = optim.build(
    {"name": "adam"}, {"name": "constant", "learning_rate": RATE}, 10
  )
  step = functools.partial(
    steps.train_step, model=model, tx=tx, seed=0, accumulate=accumulate
  )
  layout = Layout.of("", jax.devices()[:1])
  return step, layout, functools.partial(state.create, model, tx, 0)


def train(model: models.Model, batch: int, length: int, parts: int = 0) -> Call:
  """A train step of ours, the batch in so many parts; a row each if 0."""
  step, layout, create = step_of(model, parts or batch)
  now = layout.place(create())
  run, place = compilers.compile_step(
    "jit", step, layout, state=now, donate=True
  )
  rows = place(batch_of(batch, length))

  def call() -> None:
    nonlocal now
    now, sums = run(now, rows)
    jax.block_until_ready((now, sums))

  return call


def infer(model: models.Model, batch: int, length: int) -> Call:
  """A forward pass of ours, matrices at hand."""
  inputs = jnp.asarray(ids(batch, length))
  init = jax.jit(functools.partial(model.init, train=False))
  params = init(jax.random.key(0), inputs[:1, :2])["params"]
  prepare = functools.partial(make_variables, model)
  variables = jax.jit(prepare)(params)
  run = jax.jit(functools.partial(model.apply, train=False))
  return lambda: run(variables, inputs).block_until_ready()


def torch_train(model: Any, batch: int, length: int) -> Call:
  """A train step of a model of `benchmarks.rivals`."""
  import torch

  inputs = torch.from_numpy(ids(batch, length)).long()
  targets = torch.zeros(batch, dtype=torch.long)
  optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

  def step() -> None:
    optimizer.zero_grad(set_to_none=True)
    logits, error = model(inputs)
    loss = torch.nn.functional.cross_entropy(logits, targets)
    (loss + 1e-3 * error).backward()
    optimizer.step()

  return step


def torch_infer(model: Any, batch: int, length: int) -> Call:
  """A forward pass of a model of `benchmarks.rivals`, matrices at hand."""
  import torch
  from torch.nn.utils import parametrize

  inputs = torch.from_numpy(ids(batch, length)).long()
  model.eval()
  with torch.no_grad():
    for module in model.modules():
      if parametrize.is_parametrized(module, "weight"):
        parametrize.remove_parametrizations(module, "weight")
    if hasattr(model, "rotations"):
      model.kept = model.rotations()

  def forward() -> None:
    with torch.inference_mode():
      model(inputs)

  return forward


def rivals(name: str, length: int, *, training: bool) -> dict[str, Any]:
  """PyTorch's models beside one of ours, by what they are called."""
  import torch

  from benchmarks import rivals

  torch.set_num_threads(threads())
  torch.manual_seed(0)
  sizes = (length, D, EXPERTS, LAYERS, name == "random_transject")
  found = {
    "user": rivals.TransJect(*sizes),
    "our algebra": rivals.FastTransJect(*sizes),
  }
  if training:
    found["first steps"] = rivals.TransJect(*sizes)
  rivals.grown(found["user"])
  return found


def flops(tokens: int, *, training: bool) -> float:
  """Of the model as the paper writes it."""
  forward = tokens * LAYERS * (4 * EXPERTS + 4) * D * D
  return forward * (3.0 if training else 1.0)


def row(
  name: str, length: int, rounds: int, *, training: bool
) -> dict[str, Any]:
  """One model at one length, ours beside the others."""
  batch = max(1, TOKENS // length)
  rate, size = product()
  ours, theirs = (train, torch_train) if training else (infer, torch_infer)
  others = rivals(name, length, training=training)
  calls = {
    "ours": ours(build(name, length), batch, length),
    **{key: theirs(one, batch, length) for key, one in others.items()},
    "product": rate,
  }
  seconds = interleaved(calls, rounds)
  speed = size / median(seconds, "product")
  work = flops(batch * length, training=training)
  return {
    "model": name,
    "n": length,
    "batch": batch,
    "s": median(seconds, "ours"),
    **{f"{key} s": median(seconds, key) for key in others},
    **{f"times {key}": ratio(seconds, key, "ours") for key in others},
    "GFLOP/s of a product": speed / 1e9,
    "of the rate": work / median(seconds, "ours") / speed,
  }


def tables(rounds: int) -> dict[str, list[dict[str, Any]]]:
  """Train steps and inference, every model at every length."""
  return {
    title: [
      row(name, length, rounds, training=training)
      for name in MODELS
      for length in LENGTHS
    ]
    for title, training in (("train step", True), ("inference", False))
  }


if __name__ == "__main__":
  main(["--tables=speed", *sys.argv[1:]])
