r"""Speed of the forms of `linear_scan`, and of JAX's scans.

python -m benchmarks.scan --out scan.json

The table has the times of a forward pass and of a gradient by length, for
16,384 tokens in total, as medians of interleaved rounds. It also has the time
to compile the gradient. The first rows have 64 complex states with the same
factors in every step. The other rows have 64 real states with different factors
in each step. "JAX tree" is `jax.lax.associative_scan`, and "JAX loop" is
`jax.lax.scan`; JAX differentiates both.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.data import OUT, Row, Rows, report
from benchmarks.timing import interleaved, median, ready, timed
from jaxformers.foundations import cli
from jaxformers.scan import FORMS, linear_scan

TOKENS, STATES = 16_384, 64
LENGTHS = (1_024, 4_096, 16_384, 65_536)
Scan = Callable[[jax.Array, jax.Array], jax.Array]


def tree(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the states by `jax.lax.associative_scan`."""

  def combine(x: Any, y: Any) -> Any:
    return y[0] * x[0], y[0] * x[1] + y[1]

  factors = jnp.broadcast_to(a, b.shape)
  return jax.lax.associative_scan(combine, (factors, b), axis=1)[1]


def loop(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the states by `jax.lax.scan`."""
  factors = jnp.broadcast_to(a, b.shape)

  def step(h: jax.Array, args: Any) -> tuple[jax.Array, jax.Array]:
    h = args[0] * h + args[1]
    return h, h

  leading = jnp.moveaxis(factors, 1, 0), jnp.moveaxis(b, 1, 0)
  _, states = jax.lax.scan(step, jnp.zeros_like(b[:, 0]), leading)
  return jnp.moveaxis(states, 0, 1)


def forms(*, varies: bool) -> dict[str, Scan]:
  """Returns our forms and JAX's scans, by title.

  Args:
    varies: True if every step has different factors, which excludes "fft".
  """

  def ours(a: jax.Array, b: jax.Array, form: str) -> jax.Array:
    return linear_scan(a, b, form=form)[0]

  # "fft" needs factors that all steps share.
  names = [form for form in (*FORMS, "auto") if not (varies and form == "fft")]
  scans = {name: functools.partial(ours, form=name) for name in names}
  return {**scans, "JAX tree": tree, "JAX loop": loop}


def measure(n: int, rounds: int, *, varies: bool) -> Rows:
  """Yields a row for each form at one length.

  Args:
    n: number of steps.
    rounds: number of timed rounds.
    varies: True for real factors that differ in each step, False for complex
      factors that all steps share.
  """
  # Draw factors a and inputs b [batch, n, states].
  shape = (max(1, TOKENS // n), n, STATES)
  keys = jax.random.split(jax.random.key(0), 4)
  b = jax.random.normal(keys[0], shape)
  a = jax.random.uniform(keys[1], shape if varies else shape[2:], minval=0.5)
  if not varies:
    a = a * jnp.exp(1j * jax.random.normal(keys[2], shape[2:]))
    b = b + 1j * jax.random.normal(keys[3], shape)
  # Compile the forward pass and the gradient of each form.
  forward, gradient, compiled = {}, {}, {}
  for title, scan in forms(varies=varies).items():

    def loss(a: Any, b: Any, scan: Scan = scan) -> jax.Array:
      return jnp.square(jnp.abs(scan(a, b))).sum()

    forward[title] = ready(jax.jit(scan), a, b)
    program = jax.jit(jax.grad(loss, (0, 1))).lower(a, b)
    run, compiled[title] = timed(program.compile)
    gradient[title] = ready(run, a, b)
  # Time the forms in turns.
  times = interleaved(forward, rounds), interleaved(gradient, rounds)
  for title in forward:
    row: Row = {"n": n, "factors": "each step's" if varies else "one"}
    yield row | {
      "form": title,
      "forward ms": 1e3 * median(times[0], title),
      "gradient ms": 1e3 * median(times[1], title),
      "compile s": compiled[title],
    }


def rows(rounds: int, lengths: tuple[int, ...] = LENGTHS) -> Rows:
  """Yields the rows of all lengths."""
  for varies in (False, True):
    for n in lengths:
      yield from measure(n, rounds, varies=varies)
      print(f"{n} steps done", file=sys.stderr)


@cli.command(
  cli.argument("--lengths", default=",".join(map(str, LENGTHS)), help="a,b"),
  cli.argument("--rounds", default=7, help="number of timed rounds"),
  OUT,
)
def main(lengths: str, rounds: int, out: str) -> None:
  """Prints the rows, and writes them as JSON if --out is set."""
  chosen = tuple(cli.numbers("lengths", lengths))
  report([("linear scans", rows(rounds, chosen))], out)


if __name__ == "__main__":
  main()
