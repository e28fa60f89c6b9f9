"""Certified Lipschitz constants of Transformers with softmax attention.

Softmax attention has no Lipschitz constant for all inputs, but it has one for
tokens of bounded norms, which a LayerNorm before it guarantees. Distances of
two sequences X and Y of one mask are measured as the greatest distance of two
tokens, max_i |x_i - y_i|, or as the Frobenius norm of X - Y. Constants of
different norms are never multiplied. docs/theory.md, section 15, has the
proofs.

Bounds of this kind are due to Castin, Ablin and Peyré 2024, "How Smooth Is
Attention?", https://arxiv.org/abs/2312.14820, theorem 3.3. Those here are
smaller, and count biases, heads and rotary positions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jaxformers import orthogonal
from jaxformers.models import Model
from jaxformers.models.activations import SLOPES
from jaxformers.models.blocks.two_branches import TwoBranches
from jaxformers.models.bounds import token_table
from jaxformers.models.capture import Capture
from jaxformers.models.rotary import rotate
from jaxformers.models.variables import rectangular

KINDS = ("tokens", "frobenius")
Bound = Callable[[float], float]  # Function of the greatest norm of a token.


@dataclasses.dataclass(frozen=True)
class Heads:
  """Weights of the heads of softmax attention, float64.

  Attributes:
    query, key, value: kernels, [d, h, e].
    biases: their biases, [3, h, e].
    out: kernel of the output projection, [h, e, d].
    out_bias: its bias, [d].
    rotary: True for rotary positions.
    fidelity: weight of the term lambda (v0 - v), see `Attention`.
    exponent: power of e that divides the scores, see `softmax`.
  """

  query: np.ndarray
  key: np.ndarray
  value: np.ndarray
  biases: np.ndarray
  out: np.ndarray
  out_bias: np.ndarray
  rotary: bool = False
  fidelity: float = 0.0
  exponent: float = 0.5

  @classmethod
  def of(
    cls, weights: Mapping[str, Any], options: Mapping[str, Any], layer: int = 0
  ) -> Heads:
    """Returns the weights of a mixer.

    Args:
      weights: parameters of a mixer `softmax`; see `with_kernels` for
        orthogonal parameters.
      options: options of the mixer.
      layer: number of the layer, from 0. The first has no fidelity term.
    """
    is_shared = options.get("symmetric", False)
    names = ["key" if is_shared else "query", "key", "value"]
    query, key, value = (exact(weights[name]["kernel"]) for name in names)
    blank = np.zeros(query.shape[1:])
    biases = np.stack([exact(weights[k].get("bias", blank)) for k in names])
    out = exact(weights["out"]["kernel"])
    bias = exact(weights["out"].get("bias", np.zeros(out.shape[-1])))
    rotary = bool(options.get("rotary", False))
    fidelity = _fidelity(options, weights, layer) if layer else 0.0
    exponent = options.get("exponent", cls.exponent)
    return cls(query, key, value, biases, out, bias, rotary, fidelity, exponent)

  @property
  def scale(self) -> float:
    """Factor of q k.T in the scores."""
    return self.query.shape[2] ** -self.exponent

  @functools.cached_property
  def score_norms(self) -> np.ndarray:
    """Norms of the bilinear form of scores, and of its biases, [3, h].

    The second row is the part of |d score / d x_j| that does not depend on x_i,
    for keys j; the third row the part of |d score / d x_i| that differs between
    keys, and does not depend on them.
    """
    query, key = (np.moveaxis(k, 1, 0) for k in (self.query, self.key))
    query_bias, key_bias = self.biases[:2]
    if self.rotary:
      # The rotation between the two matrices depends on the two positions.
      both = norms(query) * norms(key)
      to_key = np.linalg.norm(query_bias, axis=1) * norms(key)
      to_query = np.linalg.norm(key_bias, axis=1) * norms(query)
    else:
      # |Q K.T| is the norm of a product of triangles of the size of a head.
      left, right = (np.linalg.qr(k, mode="r") for k in (query, key))
      both = norms(left @ np.swapaxes(right, 1, 2))
      to_key = np.linalg.norm(np.einsum("hde,he->hd", key, query_bias), axis=1)
      # A key's bias adds the same number to all scores of a query.
      to_query = np.zeros_like(to_key)
    return self.scale * np.stack([both, to_key, to_query])

  def slopes(self, radius: float) -> np.ndarray:
    """Returns bounds on how scores change with keys and with queries, [2, h].

    They are multiplied by the greatest norm of a token.

    Args:
      radius: greatest norm of a token.
    """
    both, *biases = self.score_norms
    return radius * (both * radius + np.stack(biases))

  def combine(self, constants: np.ndarray) -> float:
    """Returns the constant of all heads, from constants of means of tokens."""
    return self.project(self.value_norms * (constants + self.fidelity))

  @functools.cached_property
  def value_norms(self) -> np.ndarray:
    """Spectral norms of the kernels of the values, [h]."""
    return norms(np.moveaxis(self.value, 1, 0))

  @functools.cached_property
  def out_norm(self) -> float:
    """Spectral norm of the kernel of the output projection."""
    return float(norms(self.out.reshape(-1, self.out.shape[-1])))

  def project(self, sizes: np.ndarray) -> float:
    """Returns the greatest norm of the output projection of heads.

    Args:
      sizes: greatest norms of the outputs of heads, [h].
    """
    return self.out_norm * float(np.linalg.norm(sizes))

  def token_constant(self, radius: float) -> float:
    """Returns the Lipschitz constant for the greatest distance of two tokens.

    It is true for any number of tokens and any mask, causal or not.

    Args:
      radius: greatest norm of a token.
    """
    by_key, by_query = self.slopes(radius)
    return self.combine(1 + by_key + by_query)

  def frobenius_constant(self, radius: float, n: int) -> float:
    """Returns the Lipschitz constant for the Frobenius norm.

    Args:
      radius: greatest norm of a token.
      n: greatest number of tokens.
    """
    by_key, by_query = self.slopes(radius)
    return self.combine(n**0.5 * (1 + by_key) + by_query)

  def point_constant(
    self,
    x: np.ndarray,
    *,
    causal: bool = False,
    places: np.ndarray | None = None,
  ) -> tuple[float, float]:
    """Returns the Lipschitz constant near one sequence, for the Frobenius norm.

    It bounds the norm of the derivative at x, and is less the less attention
    any token gets: an attention sink, which all tokens see, costs sqrt(n).

    Args:
      x: tokens, float64 [n, d].
      causal: True if a token sees itself and earlier tokens only.
      places: places of the tokens, [n], for rotary positions; None for 0 to
        n - 1.

    Returns:
      The constant, and the greatest sum of weights that a token gets, between 1
      and n, of all heads.
    """
    n, scale = len(x), self.scale
    query, key = (
      np.einsum("nd,dhe->hne", x, kernel) + bias[:, None]
      for kernel, bias in zip(
        (self.query, self.key), self.biases[:2], strict=True
      )
    )
    length = np.linalg.norm(query, axis=2)
    if self.rotary:
      places = np.arange(n) if places is None else places
      query, key = _rotated(query, places), _rotated(key, places)
      # The matrix between two tokens depends on their distance.
      steep = length * norms(np.moveaxis(self.key, 1, 0))[:, None]
    else:
      steep = np.linalg.norm(np.einsum("hne,dhe->hnd", query, self.key), axis=2)
    scores = scale * query @ np.swapaxes(key, 1, 2)
    if causal:
      scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = scipy.special.softmax(scores, -1)
    # Variance of the tokens that a token sees, as E|x|^2 - |E x|^2, [h, n].
    x = x - x.mean(0)
    mean = weights @ x
    squares = weights @ np.square(x).sum(1) - np.square(mean).sum(2)
    spread = np.sqrt(np.maximum(squares, 0))
    # Covariances of these tokens and their keys, [h, n, d, e].
    pairs = np.einsum("md,hme->hmde", x, key).reshape(*key.shape[:2], -1)
    mixed = (weights @ pairs).reshape(*mean.shape, key.shape[2])
    mixed -= mean[..., None] * (weights @ key)[:, :, None]
    wide = np.moveaxis(self.query, 1, 0)
    if self.rotary:
      by_query = norms(mixed) * norms(wide)[:, None]
    else:
      # A product with Q and a product with its triangle have the same norm.
      triangle = np.linalg.qr(wide, mode="r")
      by_query = norms(mixed @ np.swapaxes(triangle, 1, 2)[:, None])
    sink = weights.sum(1).max(1)
    by_key = (1 + scale * steep * spread).max(1)
    constants = sink**0.5 * by_key + scale * by_query.max(1)
    return self.combine(constants), float(sink.max())

  def values(self, radius: float) -> np.ndarray:
    """Returns the greatest norms of the values of heads, [h]."""
    bias = np.linalg.norm(self.biases[2], axis=1)
    return self.value_norms * radius + bias

  def reach(self, radius: float, first: np.ndarray | float = 0.0) -> float:
    """Returns the greatest norm of an output token.

    Args:
      radius: greatest norm of a token.
      first: greatest norms of the values of the first layer, [h].
    """
    sizes = (1 + self.fidelity) * self.values(radius) + self.fidelity * first
    return self.project(sizes) + float(np.linalg.norm(self.out_bias))


def _rotated(x: np.ndarray, places: np.ndarray) -> np.ndarray:
  """Returns queries or keys rotated by their places [n], float64 [h, n, e]."""
  with jax.enable_x64(True):
    rotated = rotate(jnp.asarray(x)[None], jnp.asarray(places)[None])
    return np.asarray(rotated[0])


def exact(array: Any) -> np.ndarray:
  """Returns an array of NumPy in float64."""
  return np.asarray(array, np.float64)


def norms(matrices: np.ndarray) -> Any:
  """Returns the spectral norms of matrices [..., m, n] -> [...]."""
  return np.linalg.norm(matrices, 2, axis=(-2, -1))


class Norm(NamedTuple):
  """Bounds of a normalisation of tokens.

  Attributes:
    constant: Lipschitz constant.
    reach: greatest norm of an output token.
  """

  constant: float
  reach: float


def read_norm(weights: Mapping[str, Any], epsilon: float) -> Norm:
  """Returns the bounds of a LayerNorm or an RMSNorm.

  A token z = (x - mean) / sqrt(variance + epsilon) has at most the norm
  sqrt(d), and its derivative at most the norm 1 / sqrt(epsilon), which it has
  where all channels of x are equal, or for an RMSNorm at x = 0.

  Args:
    weights: parameters of the norm.
    epsilon: number that is added to the variance.
  """
  scale = np.abs(exact(weights["scale"]))
  greatest, bias = float(scale.max()), exact(weights.get("bias", 0.0))
  reach = greatest * scale.size**0.5 + float(np.linalg.norm(bias))
  return Norm(greatest / epsilon**0.5, reach)


class Mlp(NamedTuple):
  """Bounds of a feed-forward W2 f(W1 x + b1) + b2, where f(0) = 0.

  Attributes:
    first, second: spectral norms of W1 and W2.
    biases: norms of b1 and b2.
    slope: Lipschitz constant of f.
  """

  first: float
  second: float
  biases: tuple[float, float]
  slope: float

  @classmethod
  def of(cls, weights: Mapping[str, Any], block: Any, d: int) -> Mlp:
    """Returns the bounds of the feed-forward of a layer on d channels."""
    if block.orthogonal:
      weights = _with_kernels(weights, block, d)
    parts = [weights[name] for name in ("up", "down")]
    first, second = (float(norms(exact(p["kernel"]))) for p in parts)
    inner, outer = (
      float(np.linalg.norm(exact(p.get("bias", 0.0)))) for p in parts
    )
    return cls(first, second, (inner, outer), SLOPES[block.activation])

  def constant(self, radius: float) -> float:
    """Returns the Lipschitz constant, which no radius changes."""
    del radius
    return self.second * self.slope * self.first

  def reach(self, radius: float) -> float:
    """Returns the greatest norm of an output for inputs up to a norm."""
    inner = self.slope * (self.first * radius + self.biases[0])
    return self.second * inner + self.biases[1]


def with_kernels(weights: Mapping[str, Any], mixer: Any) -> dict[str, Any]:
  """Returns the weights of a mixer, with kernels of its orthogonal parameters.

  Args:
    weights: parameters of a mixer `softmax`.
    mixer: the unbound module of the mixer.
  """
  matrices = orthogonal.rotations(weights, mixer.orthogonal_map)
  plain = dict(weights)
  for name in ("query", "key", "value", "out"):
    full = orthogonal.parameter_name(name, mixer.orthogonal_map)
    if full not in matrices:
      continue
    d, heads = len(matrices[full]), mixer.num_heads
    size = (heads, d // heads)
    kernel = exact(matrices[full]).reshape(
      *((*size, d) if name == "out" else (d, *size))
    )
    plain[name] = {"kernel": kernel}
    if f"{name}_bias" in weights:
      plain[name]["bias"] = weights[f"{name}_bias"]
  return plain


def _with_kernels(
  weights: Mapping[str, Any], block: Any, d: int
) -> dict[str, Any]:
  """Returns kernels and biases of an orthogonal feed-forward on d channels."""
  matrices = orthogonal.rotations(weights, block.orthogonal_map)
  shapes = {"up": (d, block.mlp_dim), "down": (block.mlp_dim, d)}
  return {
    name: {
      "kernel": rectangular(
        matrices[orthogonal.parameter_name(name, block.orthogonal_map)], shape
      ),
      "bias": weights.get(f"{name}_bias", 0.0),
    }
    for name, shape in shapes.items()
  }


def _heads(model: Model, weights: Mapping[str, Any], layer: int) -> Heads:
  """Returns the heads of a layer, from the parameters of the layer."""
  block: Any = model.stacks()["encoder"]
  kernels = with_kernels(weights["mixer"], block.mixer(parent=None))
  return Heads.of(kernels, mixer_options(model), layer)


def mixer_options(model: Model) -> dict[str, Any]:
  """Returns the options of a model's mixer."""
  return {**model.config.mixer_options(), **model.config.variant.fixed}


# Options of attention for which the proofs do not hold as they are.
NOT_CONSIDERED = (
  *("feat_scale", "gate", "differential", "sink", "centred"),
  *("value_residual", "learn_value_residual", "share_values"),
)


def missing(model: Model) -> str:
  """Returns why a model has no constant here; "" if it has one."""
  config = model.config
  block = model.stacks()["encoder"]
  options = mixer_options(model)
  if config.variant.mixer != "softmax" or not isinstance(block, TwoBranches):
    return "only softmax attention in a block of two branches has one"
  if getattr(block, "norm_type", "layer") not in ("layer", "rms", "none"):
    return f"norm_type={block.norm_type} has none"
  for option in ("streams", "norm_after", "norm_scaling"):
    if getattr(block, option, 0) > (option == "streams"):
      return f"the option {option} of the block is not considered"
  for option in NOT_CONSIDERED:
    if options.get(option, "none") not in (0, "none"):
      return f"the option {option} of attention is not considered"
  return ""


def certify(model: Model, params: Any, n: int) -> dict[str, Any]:
  """Returns the certified constants of an encoder with softmax attention.

  Args:
    model, params: model and parameters from `models.build`.
    n: greatest number of tokens, for the Frobenius norm.

  Returns:
    `missing`: why there is no constant, or "". Otherwise also `layers`, with
    the greatest norm (`radius`) of the tokens that attention reads, the factor
    of the layer for `tokens` and `frobenius`, and the constants of its parts,
    `attention_tokens`, `attention_frobenius`, `mlp` and `norm` (0 without a
    norm). `log10` has the decimal logarithms of the constants of the whole
    encoder, after the embedding. `norm` is the greatest constant of a norm of
    tokens, 0 without norms. `ball` is the greatest norm of an embedded token
    for which the constants hold, None for all tokens.
  """
  if reason := missing(model):
    return {"missing": reason}
  encoder = jax.device_get(params["encoder"])
  block: Any = model.stacks()["encoder"]
  size = embedded = _embedded(model, encoder["embedding"])
  has_norms = "norm_mixer" in encoder["layer_0"]
  is_first = has_norms and getattr(block, "norm_first", True)
  if not is_first and not math.isfinite(size):
    return {"missing": "the tokens that it reads have no greatest norm"}
  layers, greatest = [], 0.0
  logs = dict.fromkeys(KINDS, 0.0)
  # Bounds of the values of the first layer: greatest norms, and slopes, [h].
  values, slopes = np.zeros(()), np.zeros(())
  for i in range(model.config.num_layers):
    weights = encoder[f"layer_{i}"]
    heads = _heads(model, weights, i)
    mlp = Mlp.of(weights, block, model.config.d_model)
    by_kind: dict[str, Bound] = {
      "tokens": heads.token_constant,
      "frobenius": functools.partial(heads.frobenius_constant, n=n),
    }
    branch = functools.partial(_branch, block, weights)
    row: dict[str, float] = {}
    reach = functools.partial(heads.reach, first=values)
    for kind, constant in by_kind.items():
      # The values of the first layer change with the embedded tokens.
      pull = heads.project(heads.fidelity * slopes) * 10.0 ** -logs[kind]
      first = branch("norm_mixer", size, constant, reach, pull)
      second = branch("norm_mlp", first.size, mlp.constant, mlp.reach)
      row |= {"radius": first.radius, kind: first.factor * second.factor}
      greatest = max(greatest, first.norm, second.norm)
      logs[kind] += math.log10(row[kind])
    # Constants of the parts of the layer.
    row |= {f"attention_{k}": f(first.radius) for k, f in by_kind.items()}
    row |= {"mlp": mlp.constant(0.0), "norm": first.norm}
    if not i:
      values = heads.values(first.radius)
      slopes = heads.value_norms * (first.norm if is_first else 1.0)
    size = second.size
    layers.append(row)
  if block.final_norm:
    last = read_norm(encoder["norm"], block.norm_epsilon).constant
    greatest = max(greatest, last)
    logs = {kind: value + math.log10(last) for kind, value in logs.items()}
  return {
    "missing": "",
    "layers": layers,
    "log10": logs,
    "norm": greatest,
    "ball": None if is_first else embedded,
  }


def near(model: Model, params: Any, captured: Capture) -> list[dict[str, Any]]:
  """Returns constants of the attention of each layer near some sequences.

  Args:
    model, params: model that has constants (`missing`), and its parameters.
    captured: hidden states of the sequences, from `capture`.

  Returns:
    For each layer the greatest norm of a token that attention reads (`radius`),
    the greatest constant (`frobenius`) and the greatest sum of weights that a
    token gets (`sink`), over all sequences; see `Heads.point_constant`.
  """
  encoder = jax.device_get(params["encoder"])
  block: Any = model.stacks()["encoder"]
  options = mixer_options(model)
  causal = bool(options.get("causal", False))
  rows = []
  for i, hidden in enumerate(captured.hidden[:-1]):
    if i == model.config.num_layers:
      break  # The last norm of the encoder follows.
    weights = encoder[f"layer_{i}"]
    heads = _heads(model, weights, i)
    sequences = []
    for x, mask in zip(exact(hidden), np.asarray(captured.mask), strict=True):
      x = x[mask]
      if "norm_mixer" in weights and getattr(block, "norm_first", True):
        centred = block.norm_type == "layer"
        x = normalised(x, weights["norm_mixer"], block.norm_epsilon, centred)
      if len(x):
        places = np.flatnonzero(mask)
        bounds = heads.point_constant(x, causal=causal, places=places)
        sequences.append((x, *bounds))
    lengths = [np.linalg.norm(x, axis=1).max() for x, *_ in sequences]
    rows.append(
      {
        "radius": float(max(lengths)),
        "frobenius": max(constant for _, constant, _ in sequences),
        "sink": max(sink for *_, sink in sequences),
      }
    )
  return rows


def normalised(
  x: np.ndarray, weights: Mapping[str, Any], epsilon: float, centred: bool
) -> np.ndarray:
  """Returns the LayerNorm of tokens [n, d], or their RMSNorm, float64.

  Args:
    x: tokens.
    weights: parameters of the norm.
    epsilon: number that is added to the variance.
    centred: True for a LayerNorm.
  """
  x = x - x.mean(-1, keepdims=True) if centred else x
  variance = np.square(x).mean(-1, keepdims=True)
  scale, bias = exact(weights["scale"]), exact(weights.get("bias", 0.0))
  return x / np.sqrt(variance + epsilon) * scale + bias


class Branch(NamedTuple):
  """Bounds of a branch f of a layer, with its residual and its norm.

  Attributes:
    factor: Lipschitz constant of all three.
    radius: greatest norm of an input of f.
    size: greatest norm of an output.
    norm: Lipschitz constant of the norm; 0 without one.
  """

  factor: float
  radius: float
  size: float
  norm: float = 0.0


def _branch(
  block: Any,
  weights: Mapping[str, Any],
  name: str,
  size: float,
  constant: Bound,
  reach: Bound,
  pull: float = 0.0,
) -> Branch:
  """Returns the bounds of s x + r f(norm x), or of norm(s x + r f(x)).

  Args:
    block: block of the layer.
    weights: parameters of the layer.
    name: name of the branch's norm.
    size: greatest norm of a token before the branch.
    constant, reach: Lipschitz constant of the branch, and the greatest norm of
      its outputs, for a greatest norm of its inputs.
    pull: Lipschitz constant of a term of f that depends on the embedded tokens,
      relative to the constant of the layers before.
  """
  shares = block.shares(abs(float(weights.get("residual", 1.0))))
  keep, share = shares.x, getattr(shares, name.removeprefix("norm_"))
  norm = None
  if name in weights:
    norm = read_norm(weights[name], block.norm_epsilon)
  if norm and getattr(block, "norm_first", True):
    slope = norm.constant * constant(norm.reach) + pull
    after = keep * size + share * reach(norm.reach)
    return Branch(keep + share * slope, norm.reach, after, norm.constant)
  factor = keep + share * (constant(size) + pull)
  after = keep * size + share * reach(size)
  if norm:
    total = norm.constant * factor
    return Branch(total, size, norm.reach, norm.constant)
  return Branch(factor, size, after)


def _fidelity(
  options: Mapping[str, Any], weights: Mapping[str, Any], layer: int
) -> float:
  """Returns the weight of the fidelity term in a layer after the first.

  Args:
    options, weights: options and parameters of the mixer.
    layer: number of the layer, from 1.
  """
  weight = float(weights.get("fidelity", options.get("fidelity", 0.0)))
  factors = options.get("fidelity_schedule") or (1.0,)
  return abs(weight * factors[min(layer, len(factors)) - 1])


def _embedded(model: Model, embedding: Mapping[str, Any]) -> float:
  """Returns the greatest norm of an embedded token; infinity if unknown."""
  epsilon = model.config.embedding.get("norm_epsilon")
  if epsilon:
    return read_norm(embedding["norm"], epsilon).reach
  table = token_table(model, {"encoder": {"embedding": embedding}})
  if table is None:
    return math.inf

  def longest(name: str) -> float:
    """Returns the greatest norm of the rows of a table; 0 without it."""
    rows = exact(embedding.get(name, np.zeros(1)))
    return float(np.linalg.norm(np.atleast_2d(rows), axis=1).max())

  size = float(np.linalg.norm(exact(table), axis=1).max())
  size = max(size + longest("segments"), longest("cls"))
  # Each pair of a sine and a cosine has the norm 1.
  waves = math.ceil(model.config.d_model / 2) ** 0.5
  added = waves if "sinusoid" in model.config.positions else 0.0
  return size + max(added, longest("positions"))
