"""TransJect's layers as pure functions, run backwards.

A layer is x + a G(x), then y + a H(y), with a < 1/L and G and H 1-Lipschitz
once the gate's weights are given. So each half is undone by the fixed point of
x = y - a G(x) (Behrmann et al. 2019, https://arxiv.org/abs/1811.00995,
algorithm 1), and training need not keep what it can undo: `run` has the memory
of one layer whatever the depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformers import orthogonal
from jaxformers.errors import UserError
from jaxformers.models.blocks import Injective, orthogonal_feed_forward
from jaxformers.models.mixers.transject import (
  FOLDED,
  Experts,
  TransJect,
  certified_constant,
  eigenvalues,
  learned_sigma,
  mixture,
  residual_weight,
)

MAX_STEPS = 64  # At least 2 layers, so a < 1/2: float64 needs 53.


class Layer(NamedTuple):
  """The weights of a layer.

  Attributes:
    experts: of its attention.
    w: [2, d, d], orthogonal, of its feed-forward.
    bias: [2, d].
  """

  experts: Experts
  w: jax.Array
  bias: jax.Array


class Form(NamedTuple):
  """What is static of the layers of a model.

  Attributes:
    gating, sigma: see `mixers.transject.TransJect`.
    orthogonal_map: in `orthogonal.MAPS`.
    num_layers: L.
    dtype: compute type.
  """

  gating: str
  sigma: str
  orthogonal_map: str
  num_layers: int
  dtype: Any


def has_form(block: Any) -> bool:
  """Whether a block's layers are these, and not some of another class."""
  if type(block) is not Injective:
    return False
  return type(block.mixer(parent=None)) is TransJect


def form(block: Any) -> Form:
  """The form of the layers of which `block` is one, unbound.

  Raises:
    UserError: if the block is not TransJect's.
  """
  if not has_form(block):
    raise UserError(
      f"{type(block).__name__} layers cannot be run backwards: that needs "
      'TransJect\'s, so the model "transject" or "random_transject".'
    )
  mixer = block.mixer(parent=None)
  return Form(
    mixer.gating,
    mixer.sigma,
    block.orthogonal_map,
    block.num_layers,
    jnp.dtype(block.dtype),
  )


def layers(variables: Mapping[str, Any], form: Form) -> list[Layer]:
  """The weights of all layers.

  Args:
    variables: `params` of the encoder, and `rotations` if they are known; they
      are made here if not; and `folded` if it is known.
    form: of the layers.
  """
  params = variables["params"]
  rotations = variables.get("rotations") or orthogonal.rotations(
    params, form.orthogonal_map
  )

  known = variables.get(FOLDED)

  def of(i: int) -> Layer:
    own, turned = params[f"layer_{i}"], rotations[f"layer_{i}"]
    name = functools.partial(
      orthogonal.parameter_name, mapping=form.orthogonal_map
    )
    a = residual_weight(own["residual"]["alpha"]) / form.num_layers
    mixer = turned["mixer"]
    experts = Experts(
      mixer[name("u")],
      mixer[name("v")],
      own["mixer"]["gate"],
      a,
      known[f"layer_{i}"]["mixer"]["experts"] if known else None,
    )
    return Layer(experts, turned[name("feed_forward")], own["bias"])

  return [of(i) for i in range(form.num_layers)]


def first_sigma(
  x: jax.Array, mask: jax.Array, variables: Mapping[str, Any], form: Form
) -> tuple[jax.Array, jax.Array]:
  """Sigma of all layers from the embedded tokens, and its error [b].

  Args:
    x: [b, n, d] embedded tokens.
    mask: [b, n], True at tokens.
    variables: as for `layers`.
    form: of the layers.
  """
  own = variables["params"]["layer_0"]["mixer"]
  if form.sigma == "learned":
    return learned_sigma(own["sigma"]), jnp.zeros(len(x), jnp.float32)
  name = orthogonal.parameter_name("basis", form.orthogonal_map)
  if "rotations" in variables:
    basis = variables["rotations"]["layer_0"]["mixer"][name]
  else:
    basis = orthogonal.MAPS[form.orthogonal_map](own[name])
  return eigenvalues(x, basis, mask)


def apply(
  x: jax.Array,
  layer: Layer,
  sigma: jax.Array,
  mask: jax.Array,
  form: Form,
  weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """A layer: x [b, n, d] to its output and the experts' weights [b, e].

  The same as the module `Injective`, with the weights given if they are known.
  """
  y, weights = _mixture(x, layer, sigma, mask, form, weights)
  x = x + y.astype(x.dtype)
  return x + _feed_forward(x, layer, form), weights


def mixing_rate(layer: Layer, form: Form) -> jax.Array:
  """What the mixture is multiplied by: a, or a / c with the certified gate."""
  if form.gating == "certified":
    return layer.experts.a / certified_constant(layer.experts.gate)
  return layer.experts.a


# Both branches at the full precision of float32, on accelerators too, where
# less is the default: a branch that rounds is a step function, and steps are
# not undone. Half precision rounds alike forwards and backwards.
def _precisely(branch: Callable[..., Any]) -> Callable[..., Any]:
  @functools.wraps(branch)
  def run(*args: Any) -> Any:
    with jax.default_matmul_precision("highest"):
      return branch(*args)

  return run


@_precisely
def _mixture(
  x: jax.Array,
  layer: Layer,
  sigma: jax.Array,
  mask: jax.Array,
  form: Form,
  weights: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  return mixture(
    x.astype(form.dtype),
    layer.experts,
    sigma,
    mask,
    gating=form.gating,
    weights=weights,
  )


@_precisely
def _feed_forward(x: jax.Array, layer: Layer, form: Form) -> jax.Array:
  y = orthogonal_feed_forward(x.astype(form.dtype), layer.w, layer.bias)
  return layer.experts.a * y.astype(x.dtype)


def solve(
  y: jax.Array,
  branch: Callable[[jax.Array], jax.Array],
  rate: jax.Array | float,
  mask: jax.Array,
  *,
  max_steps: int = MAX_STEPS,
  dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """The x with x + branch(x) = y, by iterating x = y - branch(x).

  A token is done when the error that is left, at most rate / (1 - rate) of its
  last step, is below two units in the last place of its norm; or when its steps
  no longer become shorter, which is where rounding begins. Each token is
  measured by itself, so that a large one does not end the work on the others.

  Args:
    y: [..., d].
    branch: of x, with a Lipschitz constant of at most `rate` for each token, in
      the Euclidean norm.
    rate: in [0, 1).
    mask: [...], which tokens are waited for.
    max_steps: after which it stops in any case.
    dtype: what `branch` computes in; that of y if None. What it rounds away is
      not iterated for.

  Returns:
    x, and the number of steps.
  """
  eps = jnp.finfo(y.dtype).eps
  rate = jnp.maximum(jnp.asarray(rate, y.dtype), eps)
  unit = jnp.maximum(eps, rate * jnp.finfo(dtype or y.dtype).eps)
  unit = unit.astype(y.dtype)
  # Rounding keeps the steps from becoming smaller than a unit themselves.
  allowed = jnp.maximum(2 * unit * (1 - rate) / rate, unit)

  def going_on(state: tuple[Any, ...]) -> jax.Array:
    count, _, _, done = state
    return (count < max_steps) & ~done.all()

  def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
    count, x, before, done = state
    following = y - branch(x).astype(y.dtype)
    step = jnp.linalg.norm(following - x, axis=-1)
    size = jnp.linalg.norm(following, axis=-1)
    # Of what is not finite nothing can be said, nor waited for.
    done |= (step <= allowed * size) | ~(step < before)
    return count + 1, following, step, done

  start = (
    jnp.zeros((), jnp.int32),
    y,
    jnp.full(mask.shape, jnp.inf, y.dtype),
    ~mask,
  )
  count, x, _, _ = jax.lax.while_loop(going_on, iterate, start)
  return x, count


def undo(
  y: jax.Array,
  layer: Layer,
  sigma: jax.Array,
  mask: jax.Array,
  weights: jax.Array,
  form: Form,
  *,
  rates: tuple[Any, Any] | None = None,
  max_steps: int = MAX_STEPS,
) -> tuple[jax.Array, jax.Array]:
  """The input of a layer from its output: the inverse of `apply`.

  Args:
    y: [b, n, d], the layer's output.
    layer, sigma, mask: as in `apply`.
    weights: of the experts, float32 [b, e], as `apply` returned them.
    form: of the layers.
    rates: Lipschitz constants of the two branches; those of orthogonal
      matrices if None.
    max_steps: of each of the two iterations.

  Returns:
    x [b, n, d], right at tokens; and the steps of the feed-forward's and the
    mixture's iterations, int32 [2].
  """
  mixed, fed = rates or (mixing_rate(layer, form), layer.experts.a)
  stop = {"mask": mask, "max_steps": max_steps, "dtype": form.dtype}
  middle, first = solve(y, lambda x: _feed_forward(x, layer, form), fed, **stop)

  def branch(x: jax.Array) -> jax.Array:
    return _mixture(x, layer, sigma, mask, form, weights)[0]

  x, second = solve(middle, branch, mixed, **stop)
  return x, jnp.stack([first, second])


def scan(
  form: Form, stacked: Layer, x: jax.Array, sigma: jax.Array, mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """All layers in order, as one loop.

  Args:
    form: of the layers.
    stacked: a `Layer` whose arrays have an axis of layers in front.
    x, sigma, mask: as in `apply`.

  Returns:
    The output of the last layer; those of all, [l, b, n, d], and the weights
    of the experts of all, [l, b, e].
  """

  def step(x: jax.Array, layer: Layer) -> tuple[jax.Array, Any]:
    y, weights = apply(x, layer, sigma, mask, form)
    return y, (y, weights)

  return jax.lax.scan(step, x, stacked)


def recomputed(
  form: Form, stacked: Layer, x: jax.Array, sigma: jax.Array, mask: jax.Array
) -> jax.Array:
  """The output of the last layer, as `scan` has it.

  Its gradient keeps the input of every layer, and runs the layer again.
  """

  # In a loop nothing merges the second run with the first.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(x: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
    return apply(x, layer, sigma, mask, form)[0], None

  return jax.lax.scan(step, x, stacked)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
  form: Form, stacked: Layer, x: jax.Array, sigma: jax.Array, mask: jax.Array
) -> jax.Array:
  """The output of the last layer, as `scan` has it.

  Its gradient keeps that output and the experts' weights, [l, b, e], and undoes
  one layer after the other. The gradient of the undone input is rounding away
  from that of the true one: in half precision, the rounding of the branches.
  """
  return _forward(form, stacked, x, sigma, mask)[0]


def _forward(
  form: Form, stacked: Layer, x: jax.Array, sigma: jax.Array, mask: jax.Array
) -> tuple[jax.Array, Any]:
  def step(x: jax.Array, layer: Layer) -> tuple[jax.Array, Any]:
    return apply(x, layer, sigma, mask, form)

  y, weights = jax.lax.scan(step, x, stacked)
  return y, (stacked, sigma, mask, y, weights)


def _backward(form: Form, kept: Any, g: jax.Array) -> tuple[Any, ...]:
  stacked, sigma, mask, y, weights = kept

  def step(carry: Any, own: tuple[Layer, jax.Array]) -> tuple[Any, Layer]:
    y, g, g_sigma = carry
    layer, weights = own
    x, _ = undo(y, layer, sigma, mask, weights, form)
    _, pull = jax.vjp(
      lambda x, layer, sigma: apply(x, layer, sigma, mask, form)[0],
      x,
      layer,
      sigma,
    )
    g, g_layer, more = pull(g)
    return (x, g, g_sigma + more), g_layer

  start = (y, g, jnp.zeros_like(sigma))
  (_, g, g_sigma), g_layers = jax.lax.scan(
    step, start, (stacked, weights), reverse=True
  )
  return g_layers, g, g_sigma, None


run.defvjp(_forward, _backward)
