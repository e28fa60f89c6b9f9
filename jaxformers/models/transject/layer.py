"""TransJect's layer as pure functions: forward, inverse and certificate.

A layer is x + a G(x), then y + a H(y), with G the mixture of experts, H the
orthogonal feed-forward and a = alpha / L < 1/L. Once the gate's weights are
given G and H are 1-Lipschitz, so each half is undone by a fixed point and
distances of two tokens of one sample change by (1 - a)^2 to (1 + a)^2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import orthogonal
from jaxformers.models.activations import elu
from jaxformers.models.blocks.fixed_point import MAX_STEPS, solve
from jaxformers.models.blocks.invertible import (
  Bound,
  Change,
  Interval,
  InvertibleLayers,
  Shared,
  lesser,
)
from jaxformers.models.parallel import (
  experts_are_spread,
  product,
  whole_tokens,
)
from jaxformers.models.transject.gate import (
  Outputs,
  certified_constant,
  certified_gate,
  gate,
)
from jaxformers.models.transject.sigma import (
  HIGHEST,
  eigenvalues,
  learned_sigma,
)
from jaxformers.models.variables import DERIVED, find_rotations

# tanh reaches 1 in float32; a weight of 1 would cost injectivity at L = 1.
_BELOW_ONE = 1 - 1e-6


def residual_weight(r: jax.Array) -> jax.Array:
  """Returns alpha in [0, 1) from an unconstrained r: |tanh(r)|, kept below 1.

  Zero with slope one at r = 0, so that training starts from the identity
  (ReZero) and leaves it; the paper asks for (0, 1) and a zero start, which
  contradict each other.
  """
  t = jnp.tanh(r)
  return _BELOW_ONE * jnp.where(r >= 0, t, -t)


class Experts(NamedTuple):
  """Weights of the mixture of a layer.

  Attributes:
    u, v: [e, d, d], orthogonal, float32.
    gate: float32 [d], or [e, d] for the gating "certified".
    a: alpha / L, a float32 scalar.
    folded: U diag(sigma) V of all experts if it is known, as `folded` has it.
  """

  u: jax.Array
  v: jax.Array
  gate: jax.Array
  a: jax.Array
  folded: jax.Array | None = None


class Weights(NamedTuple):
  """Weights of a layer.

  Attributes:
    experts: weights of the mixture.
    feed_forward: [2, d, d], orthogonal.
    bias: [2, d], of the feed-forward.
  """

  experts: Experts
  feed_forward: jax.Array
  bias: jax.Array


def folded(u: jax.Array, sigma: jax.Array, v: jax.Array) -> jax.Array:
  """Returns U diag(sigma) V of all experts under one Sigma -> f32 [e, d, d].

  Args:
    u, v: float32 [e, d, d], orthogonal.
    sigma: float32 [1, d], shared by all samples.
  """
  return jnp.matmul(u * sigma, v, precision=HIGHEST)


def expert_outputs(x: jax.Array, experts: Experts, sigma: jax.Array) -> Outputs:
  """Returns ELU(x U_e diag(sigma) V_e) of every expert e -> e times [b, n, d].

  With more tokens than channels the product of the three is made first, once
  for each sample (once for all if sigma is shared, or not at all if it is
  known): half the work. A list, not one array with an axis for the experts,
  because XLA transposes that on CPUs; but one array where experts lie on
  several devices.

  Args:
    x: [b, n, d] in the compute type.
    experts: weights of the layer's mixture.
    sigma: float32 [b, d], or [1, d] if shared by the samples.
  """
  n, d = x.shape[1:]

  def output(matrices: tuple[Any, Any, Any]) -> jax.Array:
    u, v, u_sigma_v = matrices
    # Choose the cheapest order of the products.
    if u_sigma_v is not None:
      y = product(x, u_sigma_v.astype(x.dtype))
    elif n > d:
      # In this order: one with U V first would be [d, d, d].
      matrix = product(u[None] * sigma[:, None], v, HIGHEST).astype(x.dtype)
      if matrix.shape[0] == 1:
        y = product(x, matrix[0])
      else:
        y = jnp.einsum("bni,bik->bnk", x, matrix)
    else:
      y = product(x, u.astype(x.dtype)) * sigma[:, None].astype(x.dtype)
      y = product(y, v.astype(x.dtype))
    return elu(y)

  # Map over the experts at once where they lie on several devices.
  stacked = experts.u, experts.v, experts.folded
  if experts_are_spread():
    return jax.vmap(output)(stacked)
  return [
    output(jax.tree.map(lambda a, e=e: a[e], stacked))
    for e in range(len(experts.u))
  ]


def mixture(
  x: jax.Array,
  experts: Experts,
  sigma: jax.Array,
  mask: jax.Array,
  *,
  gating: str,
  weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns a sum_e lambda_e ELU(x U_e diag(sigma) V_e), which is added to x.

  Args:
    x: [b, n, d] in the compute type.
    experts: weights of the layer's mixture.
    sigma: float32 [b, d] or [1, d].
    mask: [b, n], True at tokens.
    gating: "paper", or "certified", which divides by `certified_constant`.
    weights: lambda, float32 [b, e], if it is known; it is not computed then.

  Returns:
    [b, n, d] in the type of x, and lambda.
  """
  a = experts.a
  # Apply every expert to the tokens.
  f = expert_outputs(x, experts, sigma)
  # Weigh the experts; the inverse gives the weights of the forward pass.
  if weights is None:
    if len(experts.u) == 1:  # A softmax of one.
      weights = jnp.ones((x.shape[0], 1), jnp.float32)
    elif gating == "certified":
      weights = certified_gate(x, experts.gate, mask)
    else:
      weights = gate(x, f, a, experts.gate, mask)
  if gating == "certified":
    a = a / certified_constant(experts.gate)
  # Sum the outputs by a lambda: one factor for each sample and expert.
  scaled = (a * weights).astype(x.dtype)
  if not isinstance(f, list):
    return jnp.einsum("be,ebnd->bnd", scaled, f), weights
  # Broadcast over tokens and channels: [b, e, 1, 1].
  scaled = scaled[:, :, None, None]
  total = sum(scaled[:, e] * output for e, output in enumerate(f))
  return jnp.asarray(total), weights


def orthogonal_feed_forward(
  x: jax.Array, w: jax.Array, bias: jax.Array
) -> jax.Array:
  """Returns ELU(ELU(x W_1 + b_1) W_2 + b_2), which expands no distance.

  Source: TransJect, equation 7.

  Args:
    x: [b, n, d].
    w: [2, d, d], orthogonal.
    bias: [2, d].

  Returns:
    [b, n, d] in the type of x.
  """
  # An orthogonal map keeps distances, and ELU expands none.
  for matrix, b in zip(w.astype(x.dtype), bias.astype(x.dtype), strict=True):
    x = elu(product(x, matrix) + b[None, None])
  return x


def fold(
  params: Mapping[str, Any], rotations: Mapping[str, Any], orthogonal_map: str
) -> dict[str, Any]:
  """Returns `folded` of every layer of a stack whose samples share Sigma.

  A step or an evaluation makes them once, for all that it reads.

  Args:
    params: parameters of the stack, {"layer_0": ...} among them.
    rotations: orthogonal matrices of the same tree.
    orthogonal_map: name of the map that made them.

  Returns:
    {"layer_0": {"mixer": {"folded": [e, d, d]}}, ...}; {} where samples have a
    Sigma of their own.
  """
  u, v = (orthogonal.parameter_name(name, orthogonal_map) for name in "uv")
  first = params["layer_0"]["mixer"]
  if "sigma" not in first:
    return {}
  # The first layer owns Sigma; all others share it.
  sigma = learned_sigma(first["sigma"])
  mixers = {
    name: tree["mixer"]
    for name, tree in rotations.items()
    if name.startswith("layer_")
  }
  return {
    name: {"mixer": {"folded": folded(mixer[u], sigma, mixer[v])}}
    for name, mixer in mixers.items()
  }


def interval(mixture: float, feed_forward: float) -> Interval:
  """Returns the factors by which a layer may change a distance: (low, high).

  (1 - m)(1 - h) to (1 + m)(1 + h); the lowest is 0, which says nothing, if a
  branch is not a contraction.

  Args:
    mixture: m, a Lipschitz constant of the first residual branch.
    feed_forward: h, of the second.
  """
  lowest = max(0.0, 1 - mixture) * max(0.0, 1 - feed_forward)
  return lowest, (1 + mixture) * (1 + feed_forward)


@dataclasses.dataclass(frozen=True)
class TransJectLayers(InvertibleLayers):
  """The layers of TransJect and Random-TransJect.

  They share Sigma. Besides a layer's output, the inverse needs the experts'
  weights, float32 [b, e].

  Attributes:
    num_layers: number of layers.
    gating, sigma, reconstruction_weight: see `block.TransJect`.
    orthogonal_map: in `orthogonal.MAPS`.
    dtype: compute type.
  """

  side_name: ClassVar[str] = "gate"
  least_layers: ClassVar[int] = 2

  num_layers: int
  gating: str
  sigma: str
  reconstruction_weight: float
  orthogonal_map: str
  dtype: Any

  def weights(self, variables: Mapping[str, Any]) -> list[Weights]:
    """Returns the weights of every layer."""
    params = variables["params"]
    rotations = find_rotations(variables, self.orthogonal_map)
    derived = variables.get(DERIVED) or {}
    name = functools.partial(
      orthogonal.parameter_name, orthogonal_map=self.orthogonal_map
    )

    def layer_weights(layer: str) -> Weights:
      free, matrices = params[layer], rotations[layer]
      experts = Experts(
        matrices["mixer"][name("u")],
        matrices["mixer"][name("v")],
        free["mixer"]["gate"],
        residual_weight(free["residual"]["alpha"]) / self.num_layers,
        derived[layer]["mixer"]["folded"] if derived else None,
      )
      return Weights(experts, matrices[name("feed_forward")], free["bias"])

    return [layer_weights(f"layer_{i}") for i in range(self.num_layers)]

  def shared(
    self, variables: Mapping[str, Any], x: jax.Array, mask: jax.Array
  ) -> Shared:
    """Returns Sigma of all layers from the embedded tokens x [b, n, d]."""
    free = variables["params"]["layer_0"]["mixer"]
    if self.sigma == "learned":
      return self.sown(learned_sigma(free["sigma"]), None)
    name = orthogonal.parameter_name("basis", self.orthogonal_map)
    if "rotations" in variables:
      basis = variables["rotations"]["layer_0"]["mixer"][name]
    else:
      basis = orthogonal.MAPS[self.orthogonal_map](free[name])
    return self.sown(*eigenvalues(x, basis, mask))

  def sown(self, sigma: jax.Array, error: jax.Array | None) -> Shared:
    """Returns Sigma with what a model sows of it.

    Args:
      sigma: float32 [b, d] or [1, d].
      error: float32 [b], of the reconstruction; None for a learned Sigma.
    """
    if error is None:
      return Shared(sigma, {"intermediates": {"sigma": sigma}})
    return Shared(
      sigma,
      {
        "losses": {"reconstruction": self.reconstruction_weight * error},
        "intermediates": {"reconstruction": error, "sigma": sigma},
      },
    )

  def forward(
    self,
    weights: Weights,
    x: jax.Array,
    shared: jax.Array,
    mask: jax.Array,
    side: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the layer's output and the experts' weights."""
    # Add the mixture, then the feed-forward of the result.
    y, side = self._mixture(weights, x, shared, mask, side)
    x = whole_tokens(x + y.astype(x.dtype))
    return x + self._feed_forward(weights, x), side

  def _mixture(
    self,
    weights: Weights,
    x: jax.Array,
    sigma: jax.Array,
    mask: jax.Array,
    side: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array]:
    x = x.astype(self.dtype)
    return mixture(
      x, weights.experts, sigma, mask, gating=self.gating, weights=side
    )

  def _feed_forward(self, weights: Weights, x: jax.Array) -> jax.Array:
    y = orthogonal_feed_forward(
      x.astype(self.dtype), weights.feed_forward, weights.bias
    )
    return weights.experts.a * y.astype(x.dtype)

  def mixing_rate(self, weights: Weights) -> jax.Array:
    """Returns the rate of the mixture: a, or a / c if certified."""
    if self.gating == "certified":
      return weights.experts.a / certified_constant(weights.experts.gate)
    return weights.experts.a

  def inverse(
    self,
    weights: Weights,
    y: jax.Array,
    shared: jax.Array,
    mask: jax.Array,
    side: jax.Array,
    *,
    constants: Mapping[str, Any] | None = None,
    max_steps: int = MAX_STEPS,
  ) -> jax.Array:
    """Returns the layer's input: the feed-forward is undone, then the mixture.

    Without `constants` the matrices are taken for orthogonal.
    """
    if constants is None:
      constants = {
        "mixture": self.mixing_rate(weights),
        "feed_forward": weights.experts.a,
      }
    stop = {"mask": mask, "max_steps": max_steps, "dtype": self.dtype}
    # Undo the feed-forward, which was added last.
    middle, _ = solve(
      y,
      lambda x: self._feed_forward(weights, x),
      constants["feed_forward"],
      **stop,
    )
    # Undo the mixture, with the experts' weights of the forward pass.
    x, _ = solve(
      middle,
      lambda x: self._mixture(weights, x, shared, mask, side)[0],
      constants["mixture"],
      **stop,
    )
    return x

  def constants(self, weights: Weights, shared: Any) -> dict[str, float]:
    """Returns Lipschitz constants of both branches, by float64 singular values.

    a max_e |U_e| |Sigma| |V_e| for the mixture with its weights given (a / c
    with the certified gate), and a |W_1| |W_2| for the feed-forward.
    """
    # Spectral norms: u and v [e], w [2].
    u, v, w = (
      np.linalg.norm(np.asarray(matrices, np.float64), 2, (-2, -1))
      for matrices in (
        weights.experts.u,
        weights.experts.v,
        weights.feed_forward,
      )
    )
    largest = float(np.abs(np.asarray(shared, np.float64)).max())
    # ELU is 1-Lipschitz, so the norms of the matrices multiply.
    rate = float(self.mixing_rate(weights))
    return {
      "mixture": rate * largest * float((u * v).max()),
      "feed_forward": float(weights.experts.a) * float(w.prod()),
    }

  def certificate(
    self, weights: Weights, shared: Any, norm: float
  ) -> dict[str, Any]:
    """Returns a, the constants of both branches, and the two intervals.

    `tokens` bounds pairs of one sample, for which gate and Sigma are the same:
    theorem 2 of the paper with measured norms. `sequences` bounds pairs of
    sequences under one mask and one Sigma in the Frobenius norm. With the
    gating "certified" that holds everywhere; with the paper's gate, whose part
    is e |w| (1 + m) |X| / 2 times m, for sequences of at most the given norm.
    """
    constants = self.constants(weights, shared)
    mixture, w = constants["mixture"], weights.experts.gate
    if self.gating == "certified":
      across = mixture * float(certified_constant(w))
    else:
      # Bound how far the gate moves between sequences of at most this norm.
      count = len(weights.experts.u)
      moved = count * float(jnp.linalg.norm(w)) * (1 + mixture) * norm / 2
      across = mixture * (1 + moved)
    feed_forward = constants["feed_forward"]
    return {
      "a": float(weights.experts.a),
      **constants,
      "tokens": interval(mixture, feed_forward),
      "sequences": interval(across, feed_forward),
    }

  def bound(
    self, weights: Weights, shared: Any, *, exact: bool = True
  ) -> Bound | None:
    """Returns bounds of the output: see `InvertibleLayers.bound`.

    For a learned Sigma, with the certified gate or one expert. With one expert
    no tokens meet: a token that does not move does not move others.
    """
    is_alone = len(weights.experts.u) == 1
    if self.sigma != "learned" or not (is_alone or self.gating == "certified"):
      return None
    # A certified gate is divided by what it adds: its branch has the rate a.
    across = 1.0 if is_alone else certified_constant(weights.experts.gate)
    rates: tuple[Any, Any]
    if exact:
      constants = self.constants(weights, shared)
      rates = constants["mixture"] * float(across), constants["feed_forward"]
    else:
      mixture = self.mixing_rate(weights) * across * jnp.abs(shared).max()
      rates = mixture, weights.experts.a

    def move(change: Change, n: Any) -> Change:
      total = change.total
      for rate in rates:
        change = change.add_branch(rate, n)
        total = (1 + rate) * total
      if not is_alone:
        return change
      total = lesser(total, change.total)
      return Change(change.norm, total, lesser(change.mean, total / n))

    return move

  def scope(self) -> str:
    """Returns the pairs that `sequences` speaks of, as a noun phrase."""
    scope = super().scope()
    if self.gating == "paper":
      scope += ", before every layer no larger than those measured"
    return scope + (
      " and with one Sigma" if self.sigma == "eigenvalues" else ""
    )

  def remarks(self, *, bounded: bool) -> list[str]:
    """Returns what the paper's gate and Sigma leave open."""
    remarks = []
    if not bounded and self.gating == "paper":
      remarks.append(
        "The paper's gate depends on what it weighs; "
        'model.mixer.gating="certified" has a bound.'
      )
    if self.sigma == "eigenvalues":
      remarks.append(
        "The ascent between sequences lets Sigma change with them, beyond this."
      )
    return remarks

  def parts(self, weights: Weights, x: jax.Array, shared: Any) -> jax.Array:
    """Returns x + r F_e(x) of every expert, r the rate -> [b, e, n, d]."""
    # Expert e alone, without the gate.
    rate = self.mixing_rate(weights)
    outputs = expert_outputs(x, weights.experts, shared)
    return jnp.stack([x + rate * output for output in outputs], 1)
