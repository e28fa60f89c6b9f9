r"""Speed of TransJect in training and inference, compared with PyTorch.

The tables have the times of train steps (forward, backward, Adam) and of
inference, for TransJect and Random-TransJect at L = 2, E = 4, d = 512 in
float32. Inference reuses precomputed orthogonal matrices. Two PyTorch models
are timed in the same rounds (`benchmarks.rivals`). "user" is written as a user
would write it, and "our algebra" has all of our algebraic optimisations.
PyTorch initialises the free matrices to zero, where its maps are cheapest.
"first steps" is the time of the user's train step with these zeros, and "user"
is the time with matrices drawn from our initial distribution.

`of the rate` is our rate as a share of the machine's rate of matrix products.
Our rate is the number of FLOPs by the paper's formulas over our time. The
formulas count (4 E + 4) d^2 for each token and layer in inference, and three
times as many in training. The machine's rate is measured on a large product.
"""

from __future__ import annotations

import itertools
import sys

from benchmarks import ours
from benchmarks.__main__ import main
from benchmarks.data import Row, Rows
from benchmarks.timing import Calls, interleaved, median, product, ratio

LENGTHS = (512, 1_024, 2_048, 4_096)
MODELS = ("transject", "random_transject")
# Number of tokens of a batch at every length. A step takes 1 to 2 s.
TOKENS = 4_096


def flops(tokens: int, *, training: bool) -> float:
  """Returns the FLOPs of the model by the paper's formulas."""
  # 2 E + 2 matrices, each with d^2 multiplications and d^2 additions.
  products = 4 * ours.EXPERTS + 4
  forward = tokens * ours.LAYERS * products * ours.D**2
  return forward * (3.0 if training else 1.0)


def rival_calls(name: str, batch: int, length: int, *, training: bool) -> Calls:
  """Returns the calls of PyTorch's models, by title in the table."""
  from benchmarks import rivals  # PyTorch is an extra.

  make = rivals.train if training else rivals.infer
  models = rivals.make(name, length, training=training)
  return {k: make(model, batch, length) for k, model in models.items()}


def row(name: str, length: int, rounds: int, *, training: bool) -> Row:
  """Times one of our models and PyTorch's models, at one length."""
  # Steps have the same number of tokens at every length.
  batch = max(1, TOKENS // length)
  call, product_flops = product()
  make = ours.train if training else ours.infer
  calls = {"ours": make(ours.build(name, length), batch, length)}
  rivals = rival_calls(name, batch, length, training=training)
  seconds = interleaved(calls | rivals | {"product": call}, rounds)
  # Compare with the rate of a product in the same rounds.
  rate = product_flops / median(seconds, "product")
  model_flops = flops(batch * length, training=training)
  return {
    "model": name,
    "n": length,
    "batch": batch,
    "s": median(seconds, "ours"),
    **{f"{title} s": median(seconds, title) for title in rivals},
    **{f"times {title}": ratio(seconds, title, "ours") for title in rivals},
    "GFLOP/s of a product": rate / 1e9,
    "of the rate": model_flops / median(seconds, "ours") / rate,
  }


def time_all(rounds: int, *, training: bool) -> Rows:
  """Times every model at every length."""
  for name, length in itertools.product(MODELS, LENGTHS):
    yield row(name, length, rounds, training=training)


def tables(rounds: int) -> dict[str, Rows]:
  """Times train steps and inference of every model at every length."""
  return {
    "train step": time_all(rounds, training=True),
    "inference": time_all(rounds, training=False),
  }


if __name__ == "__main__":
  main(["--tables=speed", *sys.argv[1:]])
