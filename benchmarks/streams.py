"""Long streams through causal recurrences, token by token in constant memory.

python -m benchmarks.streams --out streams.json

A language model of each recurrence reads a stream of random tokens. Models have
two layers and d = 64. "error" is the greatest difference of the log
probabilities of the first tokens from the result of one call, "MB at" are the
resident bytes of the process after a tenth of the tokens and at the end, and
"state, bytes" is the size of the state.
"""

from __future__ import annotations

import time

import jax
import numpy as np

from benchmarks.data import OUT, Row, Rows, report
from benchmarks.timing import status_bytes
from jaxformers import models
from jaxformers.foundations import cli
from jaxformers.models.decode import is_bounded
from jaxformers.models.mixer import names_with_step
from jaxformers.models.streams import Stream
from jaxformers.models.variables import outputs

VOCABULARY, COMPARED = 17, 16_384


def make(name: str) -> models.Model:
  """Returns a language model of two layers without positions."""
  return models.build(
    name,
    vocab_size=VOCABULARY,
    max_len=COMPARED,
    num_classes=0,
    d_model=64,
    num_layers=2,
    objective="language_model",
    positions="none",
  )


def measure(name: str, tokens: int) -> Row:
  """Returns the figures of a model for a stream of some tokens."""
  model = make(name)
  drawn = model.init(jax.random.key(0), model.example(), train=False)
  params = {"params": drawn["params"]}
  ids = np.random.default_rng(0).integers(1, VOCABULARY, (1, tokens))
  compared = min(COMPARED, tokens)
  wanted = np.asarray(outputs(model, params, ids[:, :compared]))
  # Parts of any lengths equal the whole.
  stream = Stream(model, params)
  cuts = [1, 3, 100, 1_500, 9_000]
  parts = np.split(ids[:, :compared], [k for k in cuts if k < compared], 1)
  got = np.concatenate([stream.feed(part) for part in parts], 1)
  real = np.isfinite(wanted)
  error = float(np.abs(got[real] - wanted[real]).max())
  # Read the whole stream, 4,096 tokens at a time.
  stream.reset()
  began, early = time.perf_counter(), 0
  for start in range(0, tokens, 4_096):
    stream.feed(ids[:, start : start + 4_096])
    if not early and start >= tokens // 10:
      early = status_bytes("VmRSS")
  seconds = time.perf_counter() - began
  return {
    "model": f"`{name}`",
    "tokens": f"{tokens:,}",
    "error": f"{error:.1e}",
    "state, bytes": sum(x.nbytes for x in jax.tree.leaves(stream.state)),
    "MB at a tenth": round(early / 1e6),
    "MB at the end": round(status_bytes("VmRSS") / 1e6),
    "tokens/s": round(tokens / seconds),
  }


def streams(names: list[str], tokens: int) -> Rows:
  """Yields the figures of each model."""
  for name in names:
    yield measure(name, tokens)


@cli.command(
  cli.argument("--models", default="", help="names: a,b (default: all)"),
  cli.argument("--tokens", default=1_000_000, help="tokens of a stream"),
  OUT,
)
def main(models: str, tokens: int, out: str) -> None:
  """Prints the table, and writes it as JSON if --out is set."""
  report([("streams", streams(cli.names(models) or _all(), tokens))], out)


def _all() -> list[str]:
  """Returns the models whose state does not grow."""
  able = names_with_step()
  return [
    name
    for name, variant in models.MODELS.items()
    if variant.mixer in able and not is_bounded(make(name))
  ]


if __name__ == "__main__":
  main()
