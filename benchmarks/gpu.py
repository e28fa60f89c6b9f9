r"""Benchmarks of an accelerator: its peak rates, our models and PyTorch's.

python -m benchmarks.gpu --out gpu.json --seconds 480
python -m benchmarks.gpu --small

The tables are, in this order:
1. the rates of matrix products and of a copy;
2. the exactness of orthogonal maps;
3. the train step and the inference of TransJect with E = 4 and L = 2 at
   d = 512, by length and precision, and of PyTorch's eager model;
4. softmax attention, compared with the kernels of JAX and PyTorch;
5. every encoder, at JAX's default precision.

`of the rate` is the rate of the model as a share of the rate of a matrix
product at the same precision. Planned memory is the compiler's plan. The peak
covers all programs up to the row. Every row is written once it is measured, and
no row starts after --seconds. --small selects sizes for a trial on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import ours, speed
from benchmarks.data import OUT, Row, Rows, report
from benchmarks.encoders import keeps_square, make_encoder
from benchmarks.timing import Call, Calls, interleaved, median, ready
from jaxformers import orthogonal
from jaxformers.foundations import cli, requirements
from jaxformers.foundations.registry import choose
from jaxformers.models import MODELS
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers import flash
from jaxformers.training import memory

PRECISIONS = ("float32", "tensorfloat32", "bfloat16")


class Sizes(NamedTuple):
  """Sizes of all tables.

  Attributes:
    product: number of rows and columns of the matrices of the rates.
    batch: number of rows of a batch of TransJect.
    lengths: numbers of tokens for TransJect and for attention.
    tokens: number of tokens of a batch of the other encoders.
    encoder_lengths: numbers of tokens per row of the other encoders.
    rounds: number of timed rounds.
    models: names of the encoders; () for all.
    precisions: precisions of TransJect.
  """

  product: int = 8_192
  batch: int = 32
  lengths: tuple[int, ...] = (1_024, 4_096, 16_384)
  tokens: int = 131_072
  encoder_lengths: tuple[int, ...] = (1_024, 4_096, 16_384)
  rounds: int = 5
  models: tuple[str, ...] = ()
  precisions: tuple[str, ...] = PRECISIONS


SMALL = Sizes(
  256, 2, (64,), 512, (256,), 1, ("transject", "linformer"), ("float32",)
)


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
  """Sets the precision of float32 products in JAX and PyTorch, in the block."""
  import torch  # PyTorch is an extra.

  is_exact = name == "float32"
  torch.set_float32_matmul_precision("highest" if is_exact else "high")
  with jax.default_matmul_precision("float32" if is_exact else "tensorfloat32"):
    yield


def rates(sizes: Sizes) -> Rows:
  """Yields the rate of a product at each precision, and the rate of a copy."""
  # A product of two n x n matrices has 2 n^3 FLOPs.
  n = sizes.product
  for name in PRECISIONS:
    call = product(n, name)
    seconds = median(interleaved({"product": call}, sizes.rounds), "product")
    yield {
      "what": f"product of {n}, {name}",
      "TFLOP/s": 2 * n**3 / seconds / 1e12,
    }
  # A copy reads and writes every number once.
  x = jnp.ones((n, n), jnp.float32)
  call = ready(jax.jit(lambda x: x + 1), x)
  seconds = median(interleaved({"copy": call}, sizes.rounds), "copy")
  yield {"what": "copy", "GB/s": 2 * x.nbytes / seconds / 1e9}


def product(n: int, name: str) -> Call:
  """Returns a call that multiplies two matrices [n, n] at a precision."""
  dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
  x = jnp.full((n, n), 1 / n, dtype)
  kind = "float32" if name == "float32" else "tensorfloat32"
  return ready(jax.jit(lambda x: jnp.matmul(x, x, precision=kind)), x)


def exactness(sizes: Sizes) -> Rows:
  """Yields the orthogonality defect of every map at d = 512."""
  del sizes
  a = orthogonal.initializer(jax.random.key(0), (4, ours.D, ours.D))
  # Map the initial matrices of models, and measure max |Q.T Q - I|.
  for name in ("cayley", "expm", "householder"):
    q = jax.jit(orthogonal.MAPS[name])(a)
    yield {
      "map": name,
      "max |Q.T Q - I|": float(orthogonal.orthogonality_defect(q).max()),
    }


def transject(sizes: Sizes) -> Rows:
  """Yields the train step and inference of TransJect, by size and precision."""
  for name, n, kind, training in itertools.product(
    speed.MODELS, sizes.lengths, sizes.precisions, (True, False)
  ):
    with precision(kind):
      row = transject_row(name, n, kind, sizes, training=training)
    yield row


def transject_row(
  name: str, n: int, kind: str, sizes: Sizes, *, training: bool
) -> Row:
  """Times one of our models and PyTorch's model.

  Args:
    name: name of the model.
    n: number of tokens.
    kind: precision.
    sizes: sizes of the tables.
    training: True for a train step, False for inference.
  """
  from benchmarks import rivals  # PyTorch is an extra.

  # Build our model, and a product for the rate.
  dtype = "bfloat16" if kind == "bfloat16" else "float32"
  model = ours.build(
    name,
    n,
    num_layers=ours.LAYERS,
    mixer={"num_experts": ours.EXPERTS},
    dtype=dtype,
  )
  make = functools.partial(ours.train, accumulate=1) if training else ours.infer
  calls = {
    "ours": make(model, sizes.batch, n),
    "product": product(sizes.product, kind),
  }
  # PyTorch's orthogonal parametrisation does not support bfloat16.
  if kind != "bfloat16":
    rival = rivals.make(name, n, training=False)["user"]
    make_rival = rivals.train if training else rivals.infer
    calls["PyTorch"] = make_rival(rival, sizes.batch, n)
  seconds = interleaved(calls, sizes.rounds)
  # Relate the FLOPs of the model to the rate of the product.
  rate = 2 * sizes.product**3 / median(seconds, "product")
  flops = speed.flops(sizes.batch * n, training=training)
  row = {
    "model": name,
    "n": n,
    "batch": sizes.batch,
    "precision": kind,
    "what": "train step" if training else "inference",
    "s": median(seconds, "ours"),
    "of the rate": flops / median(seconds, "ours") / rate,
  }
  if "PyTorch" in calls:
    row["PyTorch s"] = median(seconds, "PyTorch")
  # Add the planned memory of a train step, and the peak.
  if training:
    program = ours.compile_on_shapes(*ours.make_step(model, 1), sizes.batch, n)
    row["planned GB"] = memory.planned_bytes(program) / 1e9
  return row | peak()


def peak() -> Row:
  """Returns the peak of memory in use, or {} if the device has no counter."""
  stats = jax.devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" not in stats:
    return {}
  return {"peak GB so far": stats["peak_bytes_in_use"] / 1e9}


def attention(sizes: Sizes) -> Rows:
  """Yields the times of softmax attention and its gradient, in bfloat16."""
  heads, width = 8, 64
  for n in sizes.lengths:
    # Draw queries, keys and values [3, b, h, n, e], and time all kernels.
    key, shape = jax.random.key(0), (sizes.batch, heads, n, width)
    qkv = jax.random.normal(key, (3, *shape), jnp.bfloat16)
    calls = attention_calls(qkv) | torch_attention_calls(shape)
    seconds = interleaved(calls, sizes.rounds)
    yield {"n": n, **{f"{title} s": median(seconds, title) for title in calls}}


def attention_calls(qkv: jax.Array) -> Calls:
  """Returns calls of our attention and of JAX's, forward and gradient.

  Args:
    qkv: queries, keys and values, [3, b, h, n, e].
  """
  mask = jnp.ones((qkv.shape[1], qkv.shape[3]), bool)
  form = flash.Form(scale=qkv.shape[-1] ** -0.5)

  def blocked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return flash.attend(q, k, v, mask, Dropout(), form)

  def of_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    # JAX expects tokens before heads, [b, n, h, e]. The implementation "xla"
    # stores an n x n array.
    kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, implementation=kind)

  # Compile the forward pass and the gradient of both.
  calls = {}
  for title, function in (("ours", blocked), ("JAX", of_jax)):

    def loss(*args: jax.Array, f: Callable[..., jax.Array] = function) -> Any:
      return f(*args).astype(jnp.float32).sum()

    calls[f"{title} forward"] = ready(jax.jit(function), *qkv)
    calls[f"{title} gradient"] = ready(jax.jit(jax.grad(loss, (0, 1, 2))), *qkv)
  return calls


def torch_attention_calls(shape: tuple[int, ...]) -> Calls:
  """Returns calls of PyTorch's attention, forward and gradient.

  Args:
    shape: shape of the queries, [b, h, n, e].
  """
  import torch

  from benchmarks import rivals

  q, k, v = torch.randn(
    3, *shape, dtype=torch.bfloat16, requires_grad=True
  ).unbind()
  attend = torch.nn.functional.scaled_dot_product_attention

  def forward() -> None:
    with torch.inference_mode():
      attend(q, k, v)
    rivals.wait()

  def gradient() -> None:
    torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    rivals.wait()

  return {"PyTorch forward": forward, "PyTorch gradient": gradient}


def encoders(sizes: Sizes) -> Rows:
  """Yields the times of every encoder that `benchmarks.encoders` builds."""
  names = sizes.models or sorted(MODELS)
  for n, name in itertools.product(sizes.encoder_lengths, names):
    # Above 4,096 tokens, skip models that store an array of n^2 numbers.
    if n > 4_096 and keeps_square(name):
      continue
    # Compile the forward pass and the train step, and time both in turns.
    inputs = jnp.asarray(ours.random_ids(max(1, sizes.tokens // n), n))
    programs = ours.compile_passes(make_encoder(name, n), inputs, train=True)
    calls = {key: program.call for key, program in programs.items()}
    seconds = interleaved(calls, sizes.rounds)
    yield {
      "model": name,
      "n": n,
      "batch": len(inputs),
      **{f"{key} s": median(seconds, key) for key in calls},
      "planned MB": programs["step"].planned_bytes / 1e6,
    }


TABLES: dict[str, Callable[[Sizes], Rows]] = {
  "rates": rates,
  "exactness": exactness,
  "transject": transject,
  "attention": attention,
  "encoders": encoders,
}


def until(rows: Rows, deadline: float) -> Rows:
  """Yields rows until a deadline.

  An error of the device, such as too little memory, ends the table with a row
  that has the message. Later tables are still measured.

  Args:
    rows: rows of a table.
    deadline: value of `time.monotonic` after which no row starts.
  """
  iterator = iter(rows)
  try:
    while time.monotonic() < deadline and (row := next(iterator, None)):
      yield row
  except RuntimeError as error:
    yield {"error": str(error).partition("\n")[0]}


@cli.command(
  cli.argument("--tables", default=",".join(TABLES), help="tables: a,b"),
  cli.option("seconds", 540, "time in seconds after which no row starts"),
  cli.switch("--small", help="sizes for a trial on a CPU"),
  OUT,
)
def main(tables: str, seconds: int, small: bool, out: str) -> None:
  """Prints the tables, and writes them as JSON if --out is set."""
  requirements.require("bench", "A table of this module")
  import torch

  if torch.cuda.is_available():
    torch.set_default_device("cuda")
  sizes, deadline = SMALL if small else Sizes(), time.monotonic() + seconds
  # Cache compiled programs: planned memory compiles a program a second time.
  cache = Path(tempfile.gettempdir()) / "jaxformers-benchmarks"
  jax.config.update("jax_compilation_cache_dir", str(cache))
  # Measure the tables in order, until the deadline.
  names = [choose("table", name, TABLES) for name in cli.names(tables)]
  report(((n, until(TABLES[n](sizes), deadline)) for n in names), out)


if __name__ == "__main__":
  main()
