"""TransJect's orthogonal attention with a mixture of experts.

Source: "Designing Injective and Low-Entropic Transformer for Short-Long Range
Encoding", section 4.1 and 4.2, equations 4 to 6.

Differs from the authors' code, which is another model: no biases in U and V;
Sigma is the least-squares diagonal for the basis, not an element-wise product;
the learned Sigma is one parameter, not noise drawn anew in every pass; no
`random_features`; padding never takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers import orthogonal
from jaxformers.errors import UserError
from jaxformers.models.activations import elu
from jaxformers.models.attention import MIXERS, masked_max, rotation
from jaxformers.models.parallel import experts_are_spread, product
from jaxformers.models.variants import MODELS, Variant
from jaxformers.registry import choose

MODELS.register("transject")(
  Variant("transject", "injective", source="TransJect")
)
MODELS.register("random_transject")(
  Variant("transject", "injective", {"sigma": "learned"}, source="TransJect")
)

FOLDED = "folded"  # The collection of `fold`.
# tanh reaches 1 in float32; a weight of 1 would cost injectivity at L = 1.
_BELOW_ONE = 1 - 1e-6
# float32 on accelerators too, where less is the default: it costs d^2 a token
# once, and d^3 a sample and expert.
_HIGHEST = jax.lax.Precision.HIGHEST


def residual_weight(r: jax.Array) -> jax.Array:
  """alpha in [0, 1) from an unconstrained r: |tanh(r)|, kept below 1.

  Zero with slope one at r = 0, so that training starts from the identity
  (ReZero) and leaves it; the paper asks for (0, 1) and a zero start, which
  contradict each other.
  """
  t = jnp.tanh(r)
  return _BELOW_ONE * jnp.where(r >= 0, t, -t)


class ResidualScale(nn.Module):
  """a = alpha / L of one layer (equation 5), a float32 scalar in [0, 1/L)."""

  num_layers: int

  @nn.compact
  def __call__(self) -> jax.Array:
    r = self.param("alpha", nn.initializers.zeros, ())
    return residual_weight(r) / self.num_layers


def _or_one(top: jax.Array) -> jax.Array:
  """What to divide by: also where all is zero, with a finite gradient."""
  return jnp.where(top > 0, top, 1)


def eigenvalues(
  x: jax.Array, basis: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Approximate eigenvalues of x.T x / n, and how far off they are.

  The diagonal of basis.T (x.T x / n) basis minimises the distance to the
  matrix for a given basis, and is divided by its maximum so that the norm of
  Sigma is 1. (The paper asks for a "stochastic" x.T x, which has negative
  entries; only the norm is used.) The reconstruction error is the square of
  the off-diagonal part, of x.T x over the number n of tokens. The authors' code
  takes the mean over the d^2 entries of x.T x itself: this is d^2 / n^2 times
  as much. It fits the basis to the tokens, not the tokens to the
  basis: no gradient reaches x through it, or it would shrink the embedding.

  Args:
    x: [b, n, d] embedded tokens.
    basis: float32 [d, d], orthogonal.
    mask: [b, n], True at tokens.

  Returns:
    Sigma, float32 [b, d] in [0, 1] with maximum 1 (0 for a sample without
    tokens), and the squared Frobenius reconstruction error, float32 [b].
  """
  x = jnp.where(mask[..., None], x.astype(jnp.float32), 0)
  count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
  values, error = _diagonal(x, basis)
  values = values / count[:, None]
  # By place, as in `masked_max`.
  largest = jnp.take_along_axis(values, values.argmax(1, keepdims=True), 1)
  return values / _or_one(largest), jnp.maximum(error, 0) / jnp.square(count)


@jax.custom_jvp
def _diagonal(x: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The diagonal of basis.T x.T x basis [b, d], and the square of the rest [b].

  The rest is the error of a basis: it has no gradient with respect to x.

  Args:
    x: float32 [b, n, d].
    basis: float32 [d, d], orthogonal.
  """
  # Without gradients the error is left out as a rule; this is cheapest then.
  values = jnp.square(product(x, basis, _HIGHEST)).sum(1)
  return values, _rest(_gram(x, x), values)


def _gram(x: jax.Array, y: jax.Array) -> jax.Array:
  """x.T y of every sample -> [b, d, d]."""
  return jnp.einsum("bni,bnj->bij", x, y, precision=_HIGHEST)


def _rest(gram: jax.Array, values: jax.Array) -> jax.Array:
  return jnp.square(gram).sum((1, 2)) - jnp.square(values).sum(1)


@_diagonal.defjvp
def _diagonal_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> Any:
  (x, basis), (dx, dbasis) = primals, tangents
  gram = _gram(x, x)
  if x.shape[1] > x.shape[2]:
    # From x.T x, which the error needs anyway: one product of all tokens
    # backwards instead of three.
    y = product(gram, basis, _HIGHEST)
    # A sum of squares, but for rounding.
    values = jnp.maximum((basis[None] * y).sum(1), 0)
    by_basis = 2 * (y * dbasis[None]).sum(1)
    # In this order: XLA transposes the gradient of what stands second.
    turned = product(_gram(dx, x), basis, _HIGHEST)
    by_x = 2 * (basis[None] * turned).sum(1)
  else:
    y = product(x, basis, _HIGHEST)
    values = jnp.square(y).sum(1)
    by_basis = 2 * (y * product(x, dbasis, _HIGHEST)).sum(1)
    by_x = 2 * (y * product(dx, basis, _HIGHEST)).sum(1)
  change = by_x + by_basis, -2 * (values * by_basis).sum(1)
  return (values, _rest(gram, values)), change


class Experts(NamedTuple):
  """What the mixture of a layer is made of.

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


Outputs = list[jax.Array] | jax.Array


def folded(u: jax.Array, sigma: jax.Array, v: jax.Array) -> jax.Array:
  """U diag(sigma) V of all experts under one Sigma -> f32 [e, d, d].

  Args:
    u, v: float32 [e, d, d], orthogonal.
    sigma: float32 [1, d], shared by all samples.
  """
  return jnp.matmul(u * sigma, v, precision=_HIGHEST)


def expert_outputs(x: jax.Array, experts: Experts, sigma: jax.Array) -> Outputs:
  """ELU(x U_e diag(sigma) V_e) of every expert e -> e times [b, n, d].

  With more tokens than channels the product of the three is made first, once
  for each sample (once for all if sigma is shared, or not at all if it is
  known): half the work. A list, not one array with an axis for the experts,
  because XLA transposes that on CPUs; but one array where experts lie on
  several devices.

  Args:
    x: [b, n, d] in the compute type.
    experts: of the layer.
    sigma: float32 [b, d], or [1, d] if shared by the samples.
  """
  n, d = x.shape[1:]

  def output(own: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
    u, v, known = own
    if known is not None:
      y = product(x, known.astype(x.dtype))
    elif n > d:
      # In this order: one with U V first would be [d, d, d].
      whole = product(u[None] * sigma[:, None], v, _HIGHEST).astype(x.dtype)
      if whole.shape[0] == 1:
        y = product(x, whole[0])
      else:
        y = jnp.einsum("bni,bik->bnk", x, whole)
    else:
      y = product(x, u.astype(x.dtype)) * sigma[:, None].astype(x.dtype)
      y = product(y, v.astype(x.dtype))
    return elu(y)

  own = experts.u, experts.v, experts.folded
  if experts_are_spread():
    return jax.vmap(output)(own)
  each = [jax.tree.map(lambda a, e=e: a[e], own) for e in range(len(experts.u))]
  return [output(one) for one in each]


def _stacked(
  function: Callable[[jax.Array], jax.Array], f: Outputs
) -> jax.Array:
  """What a function makes of every expert's output, the experts second."""
  if isinstance(f, list):
    return jnp.stack([function(one) for one in f], 1)
  return jax.vmap(function, out_axes=1)(f)


def gate(
  x: jax.Array,
  f: Outputs,
  a: jax.Array,
  w: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  """The weights of the experts, one convex combination a sample -> f32 [b, e].

  softmax over e of w . max over the tokens of (x + a f_e). The paper leaves
  the gate open; this is its authors', with padding left out and without the
  bias, which a softmax does not see.

  Args:
    x: [b, n, d].
    f: `expert_outputs`, e times [b, n, d].
    a: scalar, the residual scale.
    w: float32 [d].
    mask: [b, n], True at tokens.
  """
  a = a.astype(x.dtype)
  pooled = _stacked(lambda one: masked_max(x + a * one, mask), f)
  pooled = pooled.astype(jnp.float32)
  return jax.nn.softmax(jnp.matmul(pooled, w, precision=_HIGHEST), axis=-1)


def certified_gate(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
  """Weights of the experts that keep sequences apart -> f32 [b, e].

  softmax over e of w_e . h, with h the mean token divided by the root mean
  square norm of the tokens: |h| <= 1, and h moves by at most
  2 |X - Y| / (|X| + |Y|) (Frobenius norms). What an expert puts out grows as
  the norm of its input at most, so the two meet in a constant: see
  `certified_constant`. The proof is in docs/theory.md.

  Args:
    x: [b, n, d], the layer's input.
    w: float32 [e, d].
    mask: [b, n], True at tokens.
  """
  x = jnp.where(mask[..., None], x.astype(jnp.float32), 0)
  count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
  square = jnp.square(x).sum((1, 2)) / count
  h = x.sum(1) / (count * jnp.sqrt(square + 1e-12))[:, None]
  return jax.nn.softmax(jnp.matmul(h, w.T, precision=_HIGHEST), axis=-1)


def certified_constant(w: jax.Array) -> jax.Array:
  """A Lipschitz constant of a mixture under `certified_gate` -> f32 scalar.

  1 + sqrt(e) |w - mean_e w| / 2 with the Frobenius norm (a softmax does not see
  the mean): for any two sequences under one mask and one Sigma,
  sum_e lambda_e ELU(x U_e Sigma V_e) differs by at most this times what they
  differ by. The layer divides by it.

  Args:
    w: float32 [e, d].
  """
  w = w - w.mean(0, keepdims=True)
  return 1 + jnp.sqrt(len(w) * (jnp.square(w).sum() + 1e-12)) / 2


def mixture(
  x: jax.Array,
  experts: Experts,
  sigma: jax.Array,
  mask: jax.Array,
  *,
  gating: str,
  weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """a sum_e lambda_e ELU(x U_e diag(sigma) V_e): what attention adds to x.

  Args:
    x: [b, n, d] in the compute type.
    experts: of the layer.
    sigma: float32 [b, d] or [1, d].
    mask: [b, n], True at tokens.
    gating: "paper", or "certified", which divides by `certified_constant`.
    weights: lambda, float32 [b, e], if it is known; it is not computed then.

  Returns:
    [b, n, d] in the type of x, and lambda.
  """
  a = experts.a
  f = expert_outputs(x, experts, sigma)
  if weights is None:
    if len(experts.u) == 1:  # A softmax of one.
      weights = jnp.ones((x.shape[0], 1), jnp.float32)
    elif gating == "certified":
      weights = certified_gate(x, experts.gate, mask)
    else:
      weights = gate(x, f, a, experts.gate, mask)
  if gating == "certified":
    a = a / certified_constant(experts.gate)
  scaled = (a * weights).astype(x.dtype)
  if not isinstance(f, list):
    return jnp.einsum("be,ebnd->bnd", scaled, f), weights
  scaled = scaled[:, :, None, None]
  return sum(scaled[:, e] * one for e, one in enumerate(f)), weights


def learned_sigma(s: jax.Array) -> jax.Array:
  """Sigma for all samples from a free vector: s / max |s| -> f32 [1, d]."""
  return (s / _or_one(jnp.abs(s).max()))[None]


def fold(
  params: Mapping[str, Any], rotations: Mapping[str, Any], mapping: str
) -> dict[str, Any]:
  """`folded` of every layer of a model whose samples share Sigma.

  A step or an evaluation makes them once, for all that it reads.

  Args:
    params: of the model.
    rotations: of `orthogonal.rotations`.
    mapping: that they are of.

  Returns:
    The Linen collection `folded`; {} for a model of another kind.
  """
  u, v = (orthogonal.parameter_name(name, mapping) for name in "uv")
  layers = rotations.get("encoder", {})
  first = params.get("encoder", {}).get("layer_0", {}).get("mixer", {})
  if "sigma" not in first or u not in layers["layer_0"].get("mixer", {}):
    return {}
  sigma = learned_sigma(first["sigma"])

  def of(mixer: Mapping[str, Any]) -> dict[str, Any]:
    return {"mixer": {"experts": folded(mixer[u], sigma, mixer[v])}}

  return {"encoder": {name: of(one["mixer"]) for name, one in layers.items()}}


@MIXERS.register("transject")
class TransJect(nn.Module):
  """sum_e lambda_e (alpha / L) ELU(x U_e Sigma V_e): what a layer adds to x.

  Tokens meet only in Sigma, made once from the embedded sequence and carried
  from layer to layer, and in the gate. For two tokens of one sample x plus
  this is injective and Lipschitz: distances change by 1 - alpha/L to
  1 + alpha/L. For two sequences the gating "certified" gives the same, if they
  have one Sigma; the paper's gate does not (docs/theory.md).

  Attributes:
    num_experts: E.
    gating: "paper", the softmax over pooled expert outputs of the paper's
      authors, or "certified", see `certified_gate`.
    sigma: "eigenvalues" of the embedded tokens (TransJect), or "learned", one
      vector for all samples (Random-TransJect).
    reconstruction_weight: weight of the reconstruction error in the loss, for
      "eigenvalues". 1e-3 is also the authors', of an error that is n^2 / d^2
      times as large (`eigenvalues`).
    residual: the block's `ResidualScale`, shared with it; its own if None.
    orthogonal_map: in `orthogonal.MAPS`.
    dtype: compute type; parameters, Sigma and gate are float32.
  """

  num_experts: int = 4
  gating: str = "paper"
  sigma: str = "eigenvalues"
  reconstruction_weight: float = 1e-3
  residual: nn.Module | None = None
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, jax.Array]:
    d = x.shape[-1]
    if self.num_experts < 1:
      raise UserError(
        f"num_experts={self.num_experts}: at least one is needed."
      )
    shape = (self.num_experts, d, d)
    a = (self.residual or ResidualScale(1, name="residual"))()
    u = rotation(self, "u", shape, self.orthogonal_map)
    v = rotation(self, "v", shape, self.orthogonal_map)
    if choose("gating", self.gating, ("paper", "certified")) == "paper":
      w = self.param("gate", nn.initializers.normal(d**-0.5), (d,))
    else:  # Small, for the layer is divided by what grows with it.
      init = nn.initializers.normal(0.1 * d**-0.5)
      w = self.param("gate", init, (self.num_experts, d))
    sigma = self._first_sigma(x, mask) if carry is None else carry
    known = self.get_variable(FOLDED, "experts")
    y, weights = mixture(
      x.astype(self.dtype),
      Experts(u, v, w, a, known),
      sigma,
      mask,
      gating=self.gating,
    )
    self.sow("intermediates", "gate", weights)
    return y, sigma

  def _first_sigma(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    d = x.shape[-1]
    choose("sigma", self.sigma, ("eigenvalues", "learned"))
    if self.sigma == "learned":
      s = self.param("sigma", nn.initializers.uniform(1.0), (d,))
      sigma = learned_sigma(s)
      self.sow("intermediates", "sigma", sigma)
      return sigma
    basis = rotation(self, "basis", (d, d), self.orthogonal_map)
    sigma, error = eigenvalues(x, basis, mask)
    self.sow("losses", "reconstruction", self.reconstruction_weight * error)
    self.sow("intermediates", "reconstruction", error)
    self.sow("intermediates", "sigma", sigma)
    return sigma
