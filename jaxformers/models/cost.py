"""What a model costs, counted from its program and not measured."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from jaxformers import orthogonal
from jaxformers.models import Classifier, shapes, size


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of a model at a length.

  Attributes:
    parameters: as stored.
    flops: of the matrix products of a forward pass of one example, two for a
      multiplication and addition; the orthogonal maps, which are made once a
      step for a whole batch, left out.
    activations: bytes that a forward pass of one example keeps for the backward
      pass, before the compiler decides which to compute again.
  """

  parameters: int
  flops: int
  activations: int


def flops(function: Callable[..., Any], *args: Any) -> int:
  """Those of the matrix products in `function(*args)`, loops counted out.

  Args:
    function: anything JAX can trace.
    *args: arrays or their shapes.
  """
  return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Any) -> int:
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      left = equation.invars[0].aval.shape
      (contracted, _), _ = equation.params["dimension_numbers"]
      depth = math.prod(left[axis] for axis in contracted)
      total += 2 * depth * equation.outvars[0].aval.size
    times = equation.params.get("length", 1)
    for inner in jaxprs_in_params(equation.params):
      total += times * _flops(inner)
  return total


def of(model: Classifier, length: int) -> Cost:
  """The cost of a model on examples of `length` tokens."""
  like = model.example(length)
  tokens = jax.ShapeDtypeStruct(like.shape, like.dtype)
  params = shapes(model)
  rotations = jax.eval_shape(
    functools.partial(orthogonal.rotations, name=model.orthogonal_map), params
  )

  def forward(params: Any, rotations: Any, tokens: jax.Array) -> jax.Array:
    variables = {"params": params, "rotations": rotations}
    return model.apply(variables, tokens, train=False)

  def kept(params: Any, rotations: Any, tokens: jax.Array) -> Any:
    run = functools.partial(forward, tokens=tokens)
    return jax.vjp(run, params, rotations)[1]

  inputs = (params, rotations, tokens)
  residuals = jax.tree.leaves(jax.eval_shape(kept, *inputs))
  weights = [leaf.shape for leaf in jax.tree.leaves((params, rotations))]
  held = sum(
    leaf.size * leaf.dtype.itemsize
    for leaf in residuals
    if leaf.shape not in weights
  )
  return Cost(size(model), flops(forward, *inputs), held)
