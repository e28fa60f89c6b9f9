r"""What NeuTRENO's term costs: DeiT-tiny with and without it.

python -m benchmarks.fidelity --out fidelity.json

Images of 224 x 224 in patches of 16, a forward pass and a train step (forward,
backward, Adam), rounds interleaved; the ratio is the median over the rounds of
one to the other, compile time apart. Memory is what the compiler plans for the
step beside its inputs and outputs.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.data import OUT, save, table
from jaxformers import cli, models
from jaxformers.recipes import vision

ROUNDS = 15
NAMES = ("transformer", "neutreno")


def _programs(
  name: str, size: int, batch: int, layers: int
) -> dict[str, tuple[Any, Any]]:
  """`forward` and `step`, compiled, with their arguments."""
  options = vision.models(name, patch_size=16)["model"] | {"num_layers": layers}
  model = models.build(
    **options, vocab_size=0, max_len=0, num_classes=1_000, image=(size, size, 3)
  )
  x = jax.random.normal(jax.random.key(0), (batch, size, size, 3))
  labels = jnp.arange(batch)
  params = model.init(jax.random.key(1), x, train=False)["params"]
  tx = optax.adam(1e-3)

  def forward(params: Any) -> jax.Array:
    return model.apply({"params": params}, x, train=False)

  def loss(params: Any) -> jax.Array:
    logits = forward(params)
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, labels
    ).mean()

  def step(params: Any, state: Any) -> Any:
    updates, state = tx.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state

  return {
    "forward": (jax.jit(forward).lower(params).compile(), (params,)),
    "step": (
      jax.jit(step).lower(params, tx.init(params)).compile(),
      (params, tx.init(params)),
    ),
  }


def measure(
  size: int = 224, batch: int = 4, layers: int = 12, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
  """A row for `forward` and `step`: seconds, ratio and memory of both."""
  found = {name: _programs(name, size, batch, layers) for name in NAMES}
  rows = []
  for kind in ("forward", "step"):
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(rounds + 1):
      # The first is a warm-up; who begins alternates.
      for name in NAMES if turn % 2 else NAMES[::-1]:
        program, args = found[name][kind]
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        if turn:
          seconds[name].append(time.perf_counter() - start)
    plain, term = (seconds[name] for name in NAMES)
    ratios = [b / a for a, b in zip(plain, term, strict=True)]
    memory = [
      found[name][kind][0].memory_analysis().temp_size_in_bytes
      for name in NAMES
    ]
    rows.append(
      {
        "what": kind,
        "softmax s": statistics.median(plain),
        "with the term s": statistics.median(term),
        "time": statistics.median(ratios),
        "softmax MB": memory[0] / 1e6,
        "with the term MB": memory[1] / 1e6,
        "memory": memory[1] / memory[0],
      }
    )
  return rows


@cli.command(
  cli.argument("--batch", default=4, help="images of a step"),
  cli.argument("--rounds", default=ROUNDS, help="timed rounds"),
  OUT,
)
def main(batch: int, rounds: int, out: str) -> None:
  """Prints the rows, and writes them as JSON if asked."""
  rows = measure(batch=batch, rounds=rounds)
  print(table(rows))
  save({"rows": rows}, out)


if __name__ == "__main__":
  main()
