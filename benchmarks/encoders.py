r"""What every encoder costs, beside softmax attention in PyTorch and JAX.

python -m benchmarks.encoders --out encoders.json

Two layers, d = 64, two heads, as in Skyformer's comparison. Prints Markdown
tables: seconds of a forward pass and of a train step (forward, backward, Adam)
at several lengths, rounds interleaved, the median of several, compile time
apart; the memory of the train step as the compiler plans it (for PyTorch, what
a process of its own takes more than before); and how time and memory grow with
the length, as fitted exponents. PyTorch comes with the extra `bench`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.data import OUT, save, table
from benchmarks.timing import (
  exponent,
  in_a_process,
  interleaved,
  median,
  threads,
)
from jaxformers import cli, models
from jaxformers.models import MIXERS, MODELS
from jaxformers.models.attention import attention

ROUNDS = 7
BATCH = 4
LENGTHS = (1_024, 2_048, 4_096)
GROWTH = (1_024, 2_048, 4_096, 8_192, 16_384)
SIZES = {"vocab_size": 257, "num_classes": 2}


def register_library() -> None:
  """Adds JAX's own softmax attention to the models, once."""
  name = "dot_product_attention"
  if name in MODELS:
    return

  @attention(name, growth="n^2")
  def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array
  ) -> jax.Array:
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None])
    return jnp.swapaxes(y, 1, 2)

  MODELS.register(name)(models.Variant(name, "pre_norm"))


def encoder(name: str, n: int) -> models.Classifier:
  """A model of Skyformer's size for n tokens; TransJect with E = 4, d = 80."""
  options = {"d_model": 64, "positions": "learned"}
  if MODELS[name].block == "injective":
    options = {"d_model": 80}
  return models.build(
    name, **SIZES, max_len=n, num_layers=2, **options, pool="mean"
  )


def programs(
  name: str, n: int, batch: int
) -> tuple[Callable[[], Any], Callable[[], Any], int]:
  """Forward pass and train step on n tokens, and the step's planned bytes."""
  model = encoder(name, n)
  rng = np.random.default_rng(0)
  ids = jnp.asarray(rng.integers(1, 257, size=(batch, n)))
  targets = jnp.asarray(rng.integers(0, 2, size=batch))
  init = jax.jit(functools.partial(model.init, train=False))
  params = init(jax.random.key(0), model.example())["params"]
  tx = optax.adam(1e-4)

  def forward(params: Any) -> jax.Array:
    return model.apply({"params": params}, ids, train=False)

  def loss(params: Any, key: jax.Array) -> jax.Array:
    logits = model.apply(
      {"params": params}, ids, train=True, rngs={"random": key}
    )
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, targets
    ).mean()

  def step(params: Any, state: Any, key: jax.Array) -> Any:
    updates, state = tx.update(jax.grad(loss)(params, key), state)
    return optax.apply_updates(params, updates), state

  state, key = tx.init(params), jax.random.key(1)
  ahead = jax.jit(forward).lower(params).compile()
  train = jax.jit(step).lower(params, state, key).compile()
  planned = train.memory_analysis().temp_size_in_bytes
  return (
    lambda: jax.block_until_ready(ahead(params)),
    lambda: jax.block_until_ready(train(params, state, key)),
    planned,
  )


def in_pytorch(
  n: int, batch: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
  """The same Transformer as a user would write it in PyTorch."""
  import torch
  from torch import nn
  from torch.nn import functional

  class Layer(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
      self.heads = nn.Linear(64, 192)
      self.out = nn.Linear(64, 64)
      self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Any, mask: Any) -> Any:
      parts = self.heads(self.norms[0](x)).chunk(3, -1)
      q, k, v = (a.unflatten(-1, (2, 32)).transpose(1, 2) for a in parts)
      scores = q @ k.transpose(-1, -2) / 32**0.5
      scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
      y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
      x = x + self.out(y)
      return x + self.down(functional.gelu(self.up(self.norms[1](x))))

  class Transformer(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.tokens, self.places = nn.Embedding(257, 64), nn.Embedding(n, 64)
      self.layers = nn.ModuleList(Layer() for _ in range(2))
      self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 2)

    def forward(self, ids: Any) -> Any:
      mask = ids > 0
      x = self.tokens(ids) + self.places.weight
      for layer in self.layers:
        x = layer(x, mask)
      x = self.norm(x) * mask[..., None]
      return self.head(x.sum(1) / mask.sum(1)[:, None])

  torch.manual_seed(0)
  torch.set_num_threads(threads())
  model = Transformer()
  ids = torch.randint(1, 257, (batch, n))
  targets = torch.randint(0, 2, (batch,))
  optimizer = torch.optim.Adam(model.parameters(), 1e-4)

  def forward() -> None:
    with torch.no_grad():
      model(ids)

  def step() -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(ids), targets).backward()
    optimizer.step()

  return forward, step


def peak() -> int:
  """The most bytes that this process had in memory so far (Linux)."""
  # Not getrusage: a child starts there from the peak of its parent.
  with open("/proc/self/status") as file:
    (line,) = (line for line in file if line.startswith("VmHWM"))
  return 1024 * int(line.split()[1])


def _pytorch_memory(n: int) -> int:
  """Bytes that a train step adds to a process of its own."""
  code = (
    "from benchmarks.encoders import in_pytorch, peak\n"
    f"in_pytorch(16, {BATCH})[1]()\n"
    "before = peak()\n"
    f"in_pytorch({n}, {BATCH})[1]()\n"
    "print(peak() - before)"
  )
  return int(in_a_process(code))


def side_by_side(names: list[str], lengths: tuple[int, ...]) -> list[dict]:
  """Seconds and bytes of every model and PyTorch, one row a model."""
  rows = {name: {"model": name} for name in (*names, "PyTorch, softmax")}
  for n in lengths:
    ready: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for name in names:
      forward, step, planned = programs(name, n, BATCH)
      ready[name] = (forward, step)
      rows[name][f"MB {n}"] = planned / 1e6
    ready["PyTorch, softmax"] = in_pytorch(n, BATCH)
    rows["PyTorch, softmax"][f"MB {n}"] = _pytorch_memory(n) / 1e6
    for what, at in (("forward", 0), ("step", 1)):
      calls = {name: both[at] for name, both in ready.items()}
      seconds = interleaved(calls, ROUNDS)
      for name in ready:
        rows[name][f"{what} {n}"] = median(seconds, name)
    print(f"{n} tokens done", file=sys.stderr)
  return list(rows.values())


def _is_dense(name: str) -> bool:
  """True if time and memory of a model grow as n^2."""
  mixer = MIXERS[MODELS[name].mixer]
  return getattr(mixer, "growth", "n") == "n^2"


def growth(names: list[str], lengths: tuple[int, ...]) -> list[dict]:
  """Exponents of time (forward) and memory (train step) in n, one sample."""
  rows = []
  for name in names:
    own = [n for n in lengths if n <= 4_096 or not _is_dense(name)]
    seconds, planned = [], []
    for n in own:
      forward, _, memory = programs(name, n, 1)
      times = interleaved({name: forward}, ROUNDS)
      seconds.append(median(times, name))
      planned.append(memory)
    rows.append(
      {
        "model": name,
        "longest": own[-1],
        "exponent of time": exponent(own, seconds),
        "exponent of memory": exponent(own, planned),
        "seconds at the longest": seconds[-1],
        "MB at the longest": planned[-1] / 1e6,
      }
    )
    print(f"growth of {name} done", file=sys.stderr)
  return rows


@cli.command(
  cli.argument("--models", default="", help="names: a,b (default: all)"),
  OUT,
)
def main(models: str, out: str) -> None:
  """Prints the tables, and writes them as JSON if asked."""
  register_library()
  names = cli.names(models) or sorted(MODELS)
  report = {"side by side": side_by_side(names, LENGTHS)}
  print(f"Seconds and MB, batch {BATCH}:\n")
  print(table(report["side by side"]))
  report["growth"] = growth(names, GROWTH)
  print("\nGrowth with the length, one sample:\n")
  print(table(report["growth"]))
  save(report, out)


if __name__ == "__main__":
  main()
