"""Parameters, operations and memory of a model, counted in its JAX program."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jaxformers import orthogonal
from jaxformers.models import Model, shapes, size


@dataclasses.dataclass(frozen=True)
class Cost:
  """Cost of a model on one example.

  Attributes:
    parameters: number of stored parameters.
    flops: number of operations in the matrix products of a forward pass. A
      multiplication with an addition counts as two. Orthogonal maps are not
      counted, because they run once per step for the whole batch.
    elementwise: number of other floating-point operations of the forward pass:
      one for every entry that a sum, product, quotient or function computes,
      and one for every entry that a reduction reads. Sums and products of
      complex numbers, and Fourier transforms, are not counted. NeuTRENO's term
      takes three operations per entry (appendix G.4).
    activations: bytes that the forward pass stores for the backward pass,
      before the compiler decides to recompute some of them.
  """

  parameters: int
  flops: int
  elementwise: int
  activations: int


# Primitives that count one operation for every entry of their output.
_ENTRIES = (
  "abs add add_any atan2 cbrt cos cosh div erf erf_inv erfc exp exp2 expm1 "
  "integer_pow log log1p logistic max min mul neg pow rsqrt sin sinh sqrt "
  "square sub tan tanh"
)
# Primitives that count one operation for every entry of their first input.
_SUMS = (
  "argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max "
  "reduce_min reduce_prod reduce_sum"
)
ELEMENTWISE, REDUCTIONS = (frozenset(x.split()) for x in (_ENTRIES, _SUMS))


class Operations(NamedTuple):
  """Numbers of operations.

  Attributes:
    products: number of operations in matrix products.
    elementwise: number of all other floating-point operations.
  """

  products: int
  elementwise: int


def operations(function: Callable[..., Any], *args: Any) -> Operations:
  """Counts the operations of `function(*args)`, including all steps of loops.

  Args:
    function: function that JAX can trace.
    *args: arrays, or `jax.ShapeDtypeStruct`s.
  """
  return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> Operations:
  products = elementwise = 0
  # Arrays that repeat one number: a product with one of them is a sum.
  uniform: set[int] = set()
  for equation in jaxpr.eqns:
    name, inputs = equation.primitive.name, equation.invars
    outputs = [variable.aval for variable in equation.outvars]
    if name == "broadcast_in_dim" and not inputs[0].aval.shape:
      uniform.add(id(equation.outvars[0]))
    if name == "dot_general" and {id(x) for x in inputs} & uniform:
      elementwise += max(x.aval.size for x in inputs)
    elif name == "dot_general":
      left = inputs[0].aval.shape
      (contracted, _), _ = equation.params["dimension_numbers"]
      # 2 x (size of the contracted axes) x (entries of the product).
      depth = math.prod(left[axis] for axis in contracted)
      products += 2 * depth * outputs[0].size
    elif name in ELEMENTWISE | REDUCTIONS:
      entries = outputs[0] if name in ELEMENTWISE else inputs[0].aval
      if jnp.issubdtype(entries.dtype, jnp.floating):
        elementwise += entries.size
    # Add nested programs. A scan runs its program `length` times. A condition
    # runs one branch: count the most expensive one.
    times = equation.params.get("length", 1)
    inside = [_count(inner) for inner in jaxprs_in_params(equation.params)]
    for more in [max(inside)] if name == "cond" else inside:
      products += times * more.products
      elementwise += times * more.elementwise
  return Operations(products, elementwise)


def count_cost(model: Model, length: int) -> Cost:
  """Returns the cost of a model on an example of `length` tokens."""
  # Describe the inputs only by their shapes, so that nothing is computed.
  like = model.example(length)
  tokens = jax.ShapeDtypeStruct(like.shape, like.dtype)
  params = shapes(model)
  # Pass rotations as inputs, so that the maps to rotations do not count. Do not
  # pass products derived from rotations: the paper counts them in the layers.
  rotations = jax.eval_shape(
    functools.partial(
      orthogonal.rotations, orthogonal_map=model.orthogonal_map
    ),
    params,
  )
  variables = {"params": params, "rotations": rotations}

  def forward(variables: Any, tokens: jax.Array) -> Any:
    return model.apply(variables, tokens, train=False)

  def keep(variables: Any, tokens: jax.Array) -> Any:
    return jax.vjp(functools.partial(forward, tokens=tokens), variables)[1]

  # Sum the bytes that the backward pass stores, except the weights.
  inputs = (variables, tokens)
  residuals = jax.tree.leaves(jax.eval_shape(keep, *inputs))
  weights = [leaf.shape for leaf in jax.tree.leaves(variables)]
  activations = sum(
    leaf.size * leaf.dtype.itemsize
    for leaf in residuals
    if leaf.shape not in weights
  )
  count = operations(forward, *inputs)
  return Cost(size(model), count.products, count.elementwise, activations)
