r"""matrix_scan against the code of others: errors in float32.

pip install -e '.[bench]' einops transformers
pip install --no-deps fla-core
python -m benchmarks.oracles

A line has the greatest difference of the outputs, and of the last state, to a
plain function of `fla-core` (flash-linear-attention) or `transformers`, both of
which run on CPUs. Neither package is a dependency. The arguments are random,
with queries and keys of norm 1 or near it, 100 tokens, which no chunk divides,
and 3 heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import matrix_scan
from jaxformers.foundations import cli
from jaxformers.foundations.tables import markdown_table

B, N, H, K, V = 2, 100, 3, 16, 8
Arrays = Mapping[str, Any]


def draw(writes: int) -> dict[str, np.ndarray]:
  """Draws the arguments of matrix_scan, with all decays, in float32."""
  rng = np.random.default_rng(0)
  k = rng.normal(size=(B, N, writes, H, K))
  arrays = {
    "q": rng.normal(size=(B, N, H, K)) / math.sqrt(K),
    "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
    "v": rng.normal(size=(B, N, writes, H, V)),
    "beta": 2 * rng.uniform(size=(B, N, writes, H)),
    "head": -rng.exponential(size=(B, N, H)),
    "channel": -rng.exponential(size=(B, N, H, K)),
  }
  return {name: x.astype(np.float32) for name, x in arrays.items()}


def ours(
  arrays: Arrays, decay: str, *, erases: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the outputs and the last state of matrix_scan."""
  q, k, v = (jnp.asarray(arrays[name]) for name in "qkv")
  options = {}
  if erases:
    options["beta"] = jnp.asarray(arrays["beta"])
  if decay:
    options["log_decay"] = jnp.asarray(arrays[decay])
  return jax.device_get(jax.jit(matrix_scan)(q, k, v, **options))


def _delta_rule(a: Arrays) -> Any:
  from fla.ops.delta_rule.naive import delta_rule_recurrence

  # Heads come before tokens, and queries are divided by sqrt(K).
  q, k, v = (a[name].swapaxes(1, 2) for name in "qkv")
  q, beta = q * math.sqrt(K), a["beta"].swapaxes(1, 2)
  o, last = delta_rule_recurrence(q, k, v, beta, output_final_state=True)
  return o.swapaxes(1, 2), last


def _gated_delta_rule(a: Arrays) -> Any:
  from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

  return naive_recurrent_gated_delta_rule(
    a["q"],
    a["k"],
    a["v"],
    a["beta"],
    a["head"],
    scale=1.0,
    output_final_state=True,
  )


def _chunked_gated_delta_rule(a: Arrays) -> Any:
  from benchmarks.matrix_twins import delta_rule_in_chunks

  return delta_rule_in_chunks(a["q"], a["k"], a["v"], a["head"], a["beta"])


def _gated_delta_product(a: Arrays) -> Any:
  from fla.ops.gated_delta_product.naive import (
    naive_recurrent_gated_delta_product,
  )

  # The writes of a token follow one another.
  k, v, beta = (a[name].flatten(1, 2) for name in ("k", "v", "beta"))
  return naive_recurrent_gated_delta_product(
    a["q"],
    k,
    v,
    a["head"],
    beta,
    scale=1.0,
    cu_seqlens=None,
    output_final_state=True,
    num_householder=a["k"].shape[2],
  )


def _simple_gla(a: Arrays) -> Any:
  from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

  arrays = (a["q"], a["k"], a["v"], a["head"])
  return naive_recurrent_simple_gla(*arrays, scale=1.0, output_final_state=True)


def _gla(a: Arrays) -> Any:
  from fla.ops.gla.naive import naive_recurrent_gla

  q = a["q"] * math.sqrt(K)
  arrays = (q, a["k"], a["v"], a["channel"])
  return naive_recurrent_gla(*arrays, output_final_state=True)


# Function, number of writes, decay and erasing of each comparison.
CASES: dict[str, tuple[Callable[..., Any], int, str, bool]] = {
  "fla-core, delta rule": (_delta_rule, 1, "", True),
  "fla-core, gated delta rule": (_gated_delta_rule, 1, "head", True),
  "transformers, gated delta rule": (
    _chunked_gated_delta_rule,
    1,
    "head",
    True,
  ),
  "fla-core, gated delta product": (_gated_delta_product, 3, "head", True),
  "fla-core, simple GLA": (_simple_gla, 1, "head", False),
  "fla-core, GLA": (_gla, 1, "channel", False),
}


def compare(name: str) -> tuple[float, float]:
  """Returns the greatest differences of outputs and of last states."""
  import torch

  function, writes, decay, erases = CASES[name]
  arrays = draw(writes)
  wanted = ours(arrays, decay, erases=erases)
  if writes == 1:
    arrays |= {key: arrays[key][:, :, 0] for key in ("k", "v", "beta")}
  tensors = {key: torch.tensor(value) for key, value in arrays.items()}
  actual = function(tensors)
  differences = [
    float(np.abs(np.asarray(x) - y.float().numpy()).max())
    for x, y in zip(wanted, actual, strict=True)
  ]
  return differences[0], differences[1]


@cli.command()
def main() -> None:
  """Prints the table."""
  lines = [[name, *(f"{x:.1e}" for x in compare(name))] for name in CASES]
  print(markdown_table(("code", "outputs", "last state"), lines))


if __name__ == "__main__":
  main()
