"""TransJect's layer as pure functions: forward, inverse and certificate.

A layer is y = x + a G(x), then y + a H(y), with the mixture of experts G, the
orthogonal feed-forward H and a = alpha / L < 1/L. For fixed weights of the
experts G and H are 1-Lipschitz. Therefore fixed points invert both branches,
and the distance of two tokens of one sample changes by a factor from
(1 - a)^2 to (1 + a)^2.
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
from jaxformers.foundations.registry import choose
from jaxformers.models.activations import NONEXPANSIVE, elu
from jaxformers.models.blocks.fixed_point import MAX_STEPS, solve
from jaxformers.models.blocks.invertible import (
  Bound,
  Change,
  Interval,
  InvertibleLayers,
  Shared,
  lesser,
)
from jaxformers.models.parallel import experts_are_spread, product
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

# tanh can round to 1 in float32. A layer with alpha = 1 and L = 1 would not be
# injective.
_BELOW_ONE = 1 - 1e-6


def residual_weight(r: jax.Array) -> jax.Array:
  """Returns alpha = |tanh(r)|, kept below 1, from an unconstrained r.

  At r = 0 alpha is 0 with slope 1, so training starts from the identity
  (ReZero) and gradients can change alpha. The paper asks for alpha in (0, 1)
  and for a start at 0, which contradict each other.
  """
  t = jnp.tanh(r)
  return _BELOW_ONE * jnp.where(r >= 0, t, -t)


class Experts(NamedTuple):
  """Weights of the mixture of a layer.

  Attributes:
    u, v: orthogonal matrices U and V of the experts, float32 [e, d, d].
    gate: weights w of the gate, float32 [d], or [e, d] for "certified".
    a: alpha / L, a float32 scalar.
    folded: product U diag(sigma) V of all experts, from the function `folded`;
      None if it was not computed.
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
    feed_forward: orthogonal matrices of the feed-forward, [2, d, d].
    bias: biases of the feed-forward, [2, d].
  """

  experts: Experts
  feed_forward: jax.Array
  bias: jax.Array


def folded(u: jax.Array, sigma: jax.Array, v: jax.Array) -> jax.Array:
  """Returns U_e diag(sigma) V_e of all experts, float32 [e, d, d].

  Args:
    u, v: orthogonal matrices, float32 [e, d, d].
    sigma: Sigma that all samples share, float32 [1, d].
  """
  return jnp.matmul(u * sigma, v, precision=HIGHEST)


def expert_outputs(x: jax.Array, experts: Experts, sigma: jax.Array) -> Outputs:
  """Returns ELU(x U_e diag(sigma) V_e) for every expert e.

  With more tokens than channels the three matrices are multiplied first, which
  halves the work: once per sample, once in total if all samples share sigma, or
  not at all if `experts.folded` is given. The result is a list, because XLA on
  CPUs would transpose an array with an axis of experts. It is one array if the
  experts are spread over several devices.

  Args:
    x: tokens [b, n, d] in the compute type.
    experts: weights of the layer's mixture.
    sigma: float32 [b, d], or [1, d] if all samples share it.

  Returns:
    A list of e arrays [b, n, d], or one array [e, b, n, d].
  """
  n, d = x.shape[1:]

  def output(matrices: tuple[Any, Any, Any]) -> jax.Array:
    u, v, u_sigma_v = matrices
    # Choose the cheapest order of the products.
    if u_sigma_v is not None:
      y = product(x, u_sigma_v.astype(x.dtype))
    elif n > d:
      # Multiply U diag(sigma) by V; other orders need an array [d, d, d].
      matrix = product(u[None] * sigma[:, None], v, HIGHEST).astype(x.dtype)
      if matrix.shape[0] == 1:
        y = product(x, matrix[0])
      else:
        y = jnp.einsum("bni,bik->bnk", x, matrix)
    else:
      y = product(x, u.astype(x.dtype)) * sigma[:, None].astype(x.dtype)
      y = product(y, v.astype(x.dtype))
    return elu(y)

  # Use one batched call if the experts are spread over several devices.
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
  """Returns the residual branch a sum_e lambda_e ELU(x U_e diag(sigma) V_e).

  Args:
    x: tokens [b, n, d] in the compute type.
    experts: weights of the layer's mixture.
    sigma: float32 [b, d] or [1, d].
    mask: bool [b, n], True at tokens.
    gating: "paper", or "certified", which divides by `certified_constant`.
    weights: weights lambda of the experts, float32 [b, e]; None to compute them
      by the gate.

  Returns:
    The branch [b, n, d] in the dtype of x, and lambda.
  """
  a = experts.a
  # Apply every expert to the tokens.
  f = expert_outputs(x, experts, sigma)
  # Compute lambda; the inverse passes lambda of the forward pass.
  if weights is None:
    if len(experts.u) == 1:  # The softmax of a single logit is 1.
      weights = jnp.ones((x.shape[0], 1), jnp.float32)
    elif gating == "certified":
      weights = certified_gate(x, experts.gate, mask)
    else:
      weights = gate(x, f, a, experts.gate, mask)
  if gating == "certified":
    a = a / certified_constant(experts.gate)
  # Sum the outputs with the factors a lambda_e, [b, e].
  scaled = (a * weights).astype(x.dtype)
  if not isinstance(f, list):
    return jnp.einsum("be,ebnd->bnd", scaled, f), weights
  # Broadcast over tokens and channels: [b, e, 1, 1].
  scaled = scaled[:, :, None, None]
  total = sum(scaled[:, e] * output for e, output in enumerate(f))
  return jnp.asarray(total), weights


def orthogonal_feed_forward(
  x: jax.Array, w: jax.Array, bias: jax.Array, activation: str = "elu"
) -> jax.Array:
  """Returns f(f(x W_1 + b_1) W_2 + b_2), which is nonexpansive.

  Source: TransJect, equation 7, where f is ELU.

  Args:
    x: tokens, [b, n, d].
    w: orthogonal matrices W_1 and W_2, [2, d, d].
    bias: biases b_1 and b_2, [2, d].
    activation: name of f in `activations.NONEXPANSIVE`.

  Returns:
    The outputs [b, n, d] in the dtype of x.
  """
  # Orthogonal maps preserve distances, and f is 1-Lipschitz.
  function = NONEXPANSIVE[choose("activation", activation, NONEXPANSIVE)]
  for matrix, b in zip(w.astype(x.dtype), bias.astype(x.dtype), strict=True):
    x = function(product(x, matrix) + b[None, None])
  return x


def fold(
  params: Mapping[str, Any], rotations: Mapping[str, Any], orthogonal_map: str
) -> dict[str, Any]:
  """Returns `folded` of every layer of a stack whose samples share Sigma.

  A training step or an evaluation computes these products once.

  Args:
    params: parameters of the stack, a dict with the keys "layer_0", ...
    rotations: orthogonal matrices of the stack, a tree with the same keys.
    orthogonal_map: name of the map of the orthogonal matrices.

  Returns:
    {"layer_0": {"mixer": {"folded": [e, d, d]}}, ...}; {} if each sample has
    its own Sigma.
  """
  u, v = (orthogonal.parameter_name(name, orthogonal_map) for name in "uv")
  first = params["layer_0"]["mixer"]
  if "sigma" not in first:
    return {}
  # The first layer owns Sigma, and all layers share it.
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
  """Returns the least and greatest factor by which a layer changes a distance.

  They are (1 - m)(1 - h) and (1 + m)(1 + h). The least factor is 0, a trivial
  bound, if a branch is not a contraction.

  Args:
    mixture: Lipschitz constant m of the first residual branch.
    feed_forward: Lipschitz constant h of the second residual branch.
  """
  lowest = max(0.0, 1 - mixture) * max(0.0, 1 - feed_forward)
  return lowest, (1 + mixture) * (1 + feed_forward)


@dataclasses.dataclass(frozen=True)
class TransJectLayers(InvertibleLayers):
  """Layers of TransJect and Random-TransJect, which share Sigma.

  The inverse needs a layer's output and the experts' weights, float32 [b, e].

  Attributes:
    num_layers: number of layers.
    gating, sigma, reconstruction_weight: see `block.TransJect`.
    orthogonal_map: name of the map to the rotations, in `orthogonal.MAPS`.
    dtype: compute type.
    num_experts: number E of experts. The gate of a single expert is 1.
    activation: activation of the feed-forward.
  """

  side_name: ClassVar[str] = "gate"
  least_layers: ClassVar[int] = 2

  num_layers: int
  gating: str
  sigma: str
  reconstruction_weight: float
  orthogonal_map: str
  dtype: Any
  num_experts: int
  activation: str = "elu"

  def weights(self, variables: Mapping[str, Any]) -> list[Weights]:
    """Returns the weights of every layer."""
    params = variables["params"]
    rotations = find_rotations(variables, self.orthogonal_map)
    derived = variables.get(DERIVED) or {}
    name = functools.partial(
      orthogonal.parameter_name, orthogonal_map=self.orthogonal_map
    )

    # Collect the parameters and the orthogonal matrices of one layer.
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
    """Returns Sigma of all layers, from the embedded tokens x [b, n, d]."""
    free = variables["params"]["layer_0"]["mixer"]
    if self.sigma == "learned":
      return self.sown(learned_sigma(free["sigma"]), None)
    # Compute the eigenvalues of the embedded tokens in the learned basis.
    name = orthogonal.parameter_name("basis", self.orthogonal_map)
    if "rotations" in variables:
      basis = variables["rotations"]["layer_0"]["mixer"][name]
    else:
      basis = orthogonal.MAPS[self.orthogonal_map](free[name])
    return self.sown(*eigenvalues(x, basis, mask))

  def sown(self, sigma: jax.Array, error: jax.Array | None) -> Shared:
    """Returns Sigma with the loss and the intermediates that a model sows.

    Args:
      sigma: float32 [b, d] or [1, d].
      error: reconstruction error, float32 [b]; None for a learned Sigma.
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
    # y = x + a G(x), then y + a H(y).
    y, side = self._mixture(weights, x, shared, mask, side)
    x = x + y.astype(x.dtype)
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
      x.astype(self.dtype), weights.feed_forward, weights.bias, self.activation
    )
    return weights.experts.a * y.astype(x.dtype)

  def mixing_rate(self, weights: Weights) -> jax.Array:
    """Returns the factor of the mixture: a, or a / c if certified.

    c is the `certified_constant` of the gate.
    """
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
    """Returns the layer's input: inverts the feed-forward, then the mixture.

    Without `constants` the matrices are assumed to be exactly orthogonal.
    """
    if constants is None:
      constants = {
        "mixture": self.mixing_rate(weights),
        "feed_forward": weights.experts.a,
      }
    stop = {"mask": mask, "max_steps": max_steps, "dtype": self.dtype}
    # Invert y + a H(y).
    middle, _ = solve(
      y,
      lambda x: self._feed_forward(weights, x),
      constants["feed_forward"],
      **stop,
    )
    # Invert x + a G(x), with the experts' weights of the forward pass.
    x, _ = solve(
      middle,
      lambda x: self._mixture(weights, x, shared, mask, side)[0],
      constants["mixture"],
      **stop,
    )
    return x

  def constants(self, weights: Weights, shared: Any) -> dict[str, float]:
    """Returns Lipschitz constants of both branches, by float64 singular values.

    The constant of the mixture, for fixed weights of the experts, is
    a max_e |U_e| |Sigma| |V_e|, with a / c instead of a for the certified gate.
    The constant of the feed-forward is a |W_1| |W_2|.
    """
    # Compute the spectral norms of U and V, [e], and of W, [2].
    u, v, w = (
      np.linalg.norm(np.asarray(matrices, np.float64), 2, (-2, -1))
      for matrices in (
        weights.experts.u,
        weights.experts.v,
        weights.feed_forward,
      )
    )
    largest = float(np.abs(np.asarray(shared, np.float64)).max())
    # Multiply the norms of the matrices, since ELU is 1-Lipschitz.
    rate = float(self.mixing_rate(weights))
    return {
      "mixture": rate * largest * float((u * v).max()),
      "feed_forward": float(weights.experts.a) * float(w.prod()),
    }

  def certificate(
    self, weights: Weights, shared: Any, norm: float
  ) -> dict[str, Any]:
    """Returns a, the constants of both branches, and the two intervals.

    `tokens` bounds the distance of two tokens of one sample, which have equal
    gate and Sigma: theorem 2 of the paper with measured norms. `sequences`
    bounds the Frobenius distance of two sequences with equal masks and equal
    Sigma. With the gating "certified" or a single expert this bound holds for
    all sequences. With the paper's gate it holds for sequences of at most the
    given norm, since the gate adds m e |w| (1 + m) |X| / 2 to the constant m of
    the mixture.
    """
    constants = self.constants(weights, shared)
    mixture, w = constants["mixture"], weights.experts.gate
    across = mixture
    if self.num_experts > 1 and self.gating == "certified":
      across *= float(certified_constant(w))
    elif self.num_experts > 1:
      # Bound the change of the gate between sequences of at most this norm.
      size = self.num_experts * float(jnp.linalg.norm(w))
      across *= 1 + size * (1 + mixture) * norm / 2
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
    """Returns bounds of the output's change: see `InvertibleLayers.bound`.

    They exist for a learned Sigma with the certified gate or a single expert,
    and are None otherwise. With a single expert tokens are not mixed: a change
    of one token changes no other token.
    """
    is_alone = self.num_experts == 1
    if self.sigma != "learned" or not (is_alone or self.gating == "certified"):
      return None
    # The changes of a certified gate multiply the constant a / c of the mixture
    # by c.
    across = 1.0 if is_alone else certified_constant(weights.experts.gate)
    rates: tuple[Any, Any]
    if exact:
      constants = self.constants(weights, shared)
      rates = constants["mixture"] * float(across), constants["feed_forward"]
    else:
      mixture = self.mixing_rate(weights) * across * jnp.abs(shared).max()
      rates = mixture, weights.experts.a

    def move(change: Change, n: Any) -> Change:
      total, farthest = change.total, change.farthest
      for rate in rates:
        change = change.add_branch(rate, n)
        total, farthest = (1 + rate) * total, (1 + rate) * farthest
      if not is_alone:
        return change
      total = lesser(total, change.total)
      mean = lesser(change.mean, total / n)
      return Change(change.norm, total, mean, lesser(farthest, change.farthest))

    return move

  def scope(self) -> str:
    """Returns the pairs that `sequences` applies to, as a noun phrase."""
    scope = super().scope()
    if self.gating == "paper" and self.num_experts > 1:
      scope += ", before every layer no larger than the measured ones"
    return scope + (
      " and with one Sigma" if self.sigma == "eigenvalues" else ""
    )

  def remarks(self, *, bounded: bool) -> list[str]:
    """Returns remarks on the limits of the paper's gate and of Sigma."""
    remarks = []
    if not bounded and self.gating == "paper" and self.num_experts > 1:
      remarks.append(
        "The paper's gate depends on the outputs that it weighs; "
        'model.mixer.gating="certified" has a bound.'
      )
    if self.sigma == "eigenvalues":
      remarks.append(
        "The ascent between sequences also changes Sigma, beyond this bound."
      )
    return remarks

  def parts(self, weights: Weights, x: jax.Array, shared: Any) -> jax.Array:
    """Returns x + r F_e(x) of every expert e, [b, e, n, d].

    F_e(x) is the output of the expert without the gate, and r is `mixing_rate`.
    """
    rate = self.mixing_rate(weights)
    outputs = expert_outputs(x, weights.experts, shared)
    return jnp.stack([x + rate * output for output in outputs], 1)
