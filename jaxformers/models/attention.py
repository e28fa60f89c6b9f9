"""Attention as a mixer: project to heads, apply a function of heads, project.

A function of heads maps queries, keys and values to the output of each head.
The decorator `attention` registers such a function as a mixer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import (
  Count,
  Deviation,
  Fraction,
  Length,
  OptionalSize,
  Share,
  Weight,
  Width,
  refuse_unused,
)
from jaxformers.foundations.registry import choose
from jaxformers.models.cache import (
  check_causal,
  extend,
  is_decoding,
  recall,
  remember,
)
from jaxformers.models.dropout import Dropout, make_dropout
from jaxformers.models.mixer import (
  MIXERS,
  check_heads,
  kernel_init,
  names_with_step,
)
from jaxformers.models.parallel import dot_general, product
from jaxformers.models.reductions import masked_mean, wide
from jaxformers.models.rotary import number_tokens, rotate
from jaxformers.models.segments import is_packed, tokens
from jaxformers.models.variables import find_rotations, rotation

# Greatest number of entries of a random array that is a constant of the
# compiled program. The program draws larger arrays when it runs.
LARGEST_CONSTANT = 2**22


class HeadsSignature(NamedTuple):
  """Arguments that a function of heads takes, read from its signature.

  Attributes:
    inputs: names of the projections that the function takes: q, k or v.
    tools: names of the keyword-only arguments without a default.
    options: keyword-only arguments with a default, and their defaults. A config
      can set these options.
    redraws: True if `redraw` is True by default for this mixer, even with
      options under which the mixer draws nothing.
  """

  inputs: tuple[str, ...]
  tools: tuple[str, ...]
  options: dict[str, Any]
  redraws: bool = False


# Names of the projections, by the input of a function of heads.
_PROJECTIONS = {"q": "query", "k": "key", "v": "value"}
# Tools that a function of heads can request: see `attention`.
_TOOLS = ("mask", "carry", "dropout", "draw", "param", "project", "max_len")
# Gates of the outputs of the heads, by the option `gate`.
GATES = ("none", "elementwise", "headwise")


def _read_signature(attend: Callable[..., Any]) -> HeadsSignature:
  inputs, tools, options = [], [], {}
  for name, parameter in inspect.signature(attend).parameters.items():
    # Positional: an input; keyword-only: an option if it has a default.
    if parameter.kind is not parameter.KEYWORD_ONLY:
      inputs.append(choose("input of a mixer", name, _PROJECTIONS))
    elif parameter.default is parameter.empty:
      tools.append(choose("tool of a mixer", name, _TOOLS))
    else:
      options[name] = parameter.default
  return HeadsSignature(tuple(inputs), tuple(tools), options)


class Cache(NamedTuple):
  """Cache of earlier tokens, for a function of heads.

  Attributes:
    module: mixer that owns the cache.
    mask: [b, n], True at new tokens.
    maps: number of successive heads that share their values, which are cached
      once.
    dropout: dropout of the attention weights.
  """

  module: Attention
  mask: jax.Array
  maps: int = 1
  dropout: Dropout = Dropout()

  def past(
    self, k: jax.Array, v: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys and values of m earlier tokens, and which are visible.

    Args:
      k, v: keys and values of the new tokens, [b, h, n, e].

    Returns:
      Keys and values of the earlier tokens, [b, h, m, e], with m=max_len, or 0
      without a cache; and bool [b, 1, n, m + n], True where a new token sees an
      earlier or a new one.
    """
    b, n = self.mask.shape
    seen = jnp.tril(jnp.broadcast_to(tokens(self.mask)[:, None], (b, n, n)))
    count = self.recall("count")
    if count is None:
      return k[:, :, :0], v[:, :, :0], seen[:, None]
    k, v = self.recall("k"), jnp.repeat(self.recall("v"), self.maps, 1)
    is_past = jnp.arange(k.shape[2]) < count[:, None, None]
    is_past = jnp.broadcast_to(is_past, (b, n, k.shape[2]))
    return k, v, jnp.concatenate([is_past, seen], -1)[:, None]

  def append(self, k: jax.Array, v: jax.Array, after: jax.Array) -> None:
    """Appends keys and values to the cache.

    Args:
      k, v: keys and values of the new tokens, [b, h, n, e].
      after: what was computed from the cache, [b, ..., n, e].

    Raises:
      UserError: for a mixer without `max_len`.
    """
    if not self.module.max_len:
      raise UserError(
        "A cache of keys needs max_len: set it to the number of tokens."
      )
    # XLA copies the cache unless its change depends on what reads it.
    change = 0 * after[:, :1, :, :1]
    arrays = {"k": k + change, "v": v[:, :: self.maps] + change}
    extend(self.module, self.mask, self.module.max_len, 2, **arrays)

  def recall(self, name: str) -> Any:
    """Returns the cached value of `name`, or None if there is none yet."""
    return recall(self.module, name)

  def remember(self, name: str, value: jax.Array) -> None:
    """Stores a value in the cache as `name`."""
    remember(self.module, name, value)


class FirstValues(NamedTuple):
  """Carry of a model whose layers read the first one, or their own number.

  Attributes:
    values: values v0 of the first layer, [b, h, n, e]; None if no layer reads
      them.
    layers: number of layers applied so far, int32.
    carry: carry of the function of heads.
  """

  values: Any
  layers: jax.Array
  carry: Any


def _in_two_maps(inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns heads [b, 2 h, n, ...]: halves of queries and keys, values twice.

  Args:
    inputs: heads [b, h, n, e] by name.
  """
  halves = {}
  for name in {"query", "key"} & inputs.keys():
    x = inputs[name]
    b, h, n, e = x.shape
    x = jnp.moveaxis(x.reshape(b, h, n, 2, e // 2), 3, 2)
    halves[name] = x.reshape(b, 2 * h, n, e // 2)
  return {**halves, "value": jnp.repeat(inputs["value"], 2, 1)}


def _subtract_second(y: jax.Array, factor: jax.Array) -> jax.Array:
  """Returns the first of two maps minus a factor times the second.

  Args:
    y: results of two maps of each head, [b, 2 h, n, e].
    factor: scalar.
  """
  pairs = wide(y).reshape(y.shape[0], -1, 2, *y.shape[2:])
  return pairs[:, :, 0] - factor.astype(pairs.dtype) * pairs[:, :, 1]


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function that calls `make` once for each first argument."""
  memo: dict[str, Any] = {}

  def get(name: str, *args: Any) -> Any:
    if name not in memo:
      memo[name] = make(name, *args)
    return memo[name]

  return get


class HeadWeights(nn.Module):
  """Kernel [d, h, e] and bias [h, e] of a projection to heads.

  Attributes:
    shape: number of heads h, and number of channels e of a head.
    use_bias: True for a bias; otherwise the returned bias is None.
    kernel_init: initializer of the kernel as a matrix [d, h e].
  """

  shape: tuple[int, int]
  use_bias: bool
  kernel_init: Callable[..., jax.Array]

  @nn.compact
  def __call__(self, d: int) -> tuple[jax.Array, jax.Array | None]:
    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
      return self.kernel_init(key, (d, math.prod(self.shape))).reshape(shape)

    kernel = self.param("kernel", init, (d, *self.shape))
    if not self.use_bias:
      return kernel, None
    return kernel, self.param("bias", nn.initializers.zeros, self.shape)


class Attention(nn.Module):
  """Projects to heads, attends, projects back: x [b, n, d] -> [b, n, d].

  Sows two values into `intermediates`: `projected`, a dictionary of the
  projections `query`, `key` and `value`, [b, h, n, e]; and `attended`, the
  output of the heads before the output projection, [b, h, n, e]. If the
  collection `weights` is mutable, it gets `matrix`, [b, h, n, n], with the
  weight [i, j] of the value of token j in the output at token i.

  Attributes:
    attend: function of heads; see `attention`.
    signature: arguments that `attend` takes.
    options: values of the options of `attend`.
    step: function that continues `attend` from a cache; None if the mixer does
      not support a cache.
    constants: function that returns the Lipschitz constants of heads; None if
      they have none. See `attention`.
    num_heads: number of heads h. It must divide d, unless `head_size` is given.
    head_size: number of channels e of a head; 0 for d / h.
    use_bias: True for projections with biases (Skyformer: yes; LRA: no).
    qkv_bias: False to remove the biases of the projections to heads and keep
      the bias of the output projection (`qkv_bias` of ViT).
    orthogonal: True to make the projections to heads rotations, with biases if
      `use_bias` (Transformer with orthogonal parametrisation, TransJect, table
      1).
    orthogonal_output: True to make the output projection a rotation.
    symmetric: True to use the keys as queries, without a projection to queries
      (NeuTRENO, equation 13).
    fidelity: weight lambda of the term lambda (v0 - v), which is added to the
      output of the heads in every layer after the first, before the output
      projection. v are the values of the layer and v0 the values of the first
      layer (NeuTRENO, Nguyen et al. 2023, https://arxiv.org/abs/2312.00751,
      definition 1). 0 turns the term off. Models in which many layers add the
      term diverge for lambda of about 1 or more.
    fidelity_schedule: factors of lambda in the second layer and the layers
      after it. The last factor holds for all later layers. () for 1 everywhere.
    learn_fidelity: True to learn lambda in each layer, starting at `fidelity`.
      With `value_residual`, v are the values before it.
    value_residual: share w of the first layer's values in the values of every
      later layer, (1 - w) v + w v0, before the function of heads (ResFormer,
      Zhou et al. 2025, https://arxiv.org/abs/2410.17897, which sets 0.5). 0
      turns it off.
    learn_value_residual: True to learn both factors in each layer, starting at
      1 - w and w.
    share_values: True to use v0 as the values of every layer; later layers
      have no projection to values (SVFormer, Zhou et al. 2025).
    differential: True to subtract two attention maps, A1 v - lambda A2 v, where
      each has half of the channels of queries and keys. The result is divided
      by its root mean square over the channels of a head, and multiplied by a
      parameter and 1 - c. lambda is exp(a1 . b1) - exp(a2 . b2) + c, where c is
      0.8 - 0.6 exp(-0.3 l) in layer l, counted from 0 as in the authors' code
      (Ye et al. 2024, https://arxiv.org/abs/2410.05258, equations 1 to 3). The
      paper has half as many heads as its baseline.
    gate: "elementwise" or "headwise" to multiply the output of the heads by
      sigmoid(x W), before the output projection; W has a column for each
      channel, or for each head (Qiu et al. 2025,
      https://arxiv.org/abs/2505.06708). "none" for no gate.
    rotary: True to rotate queries and keys by angles that grow with the
      position of the token, before the function of heads (rotary positions, Su
      et al. 2021, https://arxiv.org/abs/2104.09864, equation 34). Channel i of
      the first half of a head is paired with channel i of the second half.
    feat_scale: True to scale the mean token of the output and the deviations
      from it separately, by 1 + s. The parameters s, one for each channel,
      start at 0 (FeatScale, Wang et al. 2022,
      https://arxiv.org/abs/2203.05962, equation 10). Differs from the authors'
      code, which adds the correction twice.
    init_std: standard deviation of the kernels at initialization; 0 for
      Xavier's initializer. Rotations do not read it.
    dropout_rate: dropout rate of the attention weights.
    seed: seed of the arrays that `attend` draws; independent of the run's seed.
    redraw: True to draw new arrays in every training step, from the Flax key
      stream "random". Each part of a batch under gradient accumulation, and
      each device under pmap, draws different arrays. Evaluation always draws
      from `seed`.
    max_len: greatest number of tokens; 0 for no limit.
    orthogonal_map: name of the map to rotations, in `orthogonal.MAPS`.
    dtype: compute type; parameters are float32.
  """

  distance: ClassVar[str] = "farthest"  # Distance to which `gain` applies.

  attend: Callable[..., Any]
  signature: HeadsSignature
  options: Any
  step: Callable[..., jax.Array] | None = None
  constants: Callable[..., np.ndarray] | None = None
  num_heads: Width = 2
  head_size: OptionalSize = 0
  use_bias: bool = True
  qkv_bias: bool = True
  orthogonal: bool = False
  orthogonal_output: bool = False
  symmetric: bool = False
  fidelity: Weight = 0.0
  fidelity_schedule: tuple[Weight, ...] = ()
  learn_fidelity: bool = False
  value_residual: Share = 0.0
  learn_value_residual: bool = False
  share_values: bool = False
  differential: bool = False
  gate: str = "none"
  rotary: bool = False
  feat_scale: bool = False
  init_std: Deviation = 0.0
  dropout_rate: Fraction = 0.0
  seed: Count = 0
  redraw: bool = False
  max_len: Length = 0
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    n, d = x.shape[1:]
    self._check_options(n, d, mask)
    # Project to queries, keys and values; symmetric queries are the keys.
    names = [_PROJECTIONS[name] for name in self.signature.inputs]
    if self.symmetric:
      names[self.signature.inputs.index("q")] = "key"
    # Unwrap the carry: it may contain the first values.
    first = carry if self._wraps_carry else None
    carry = carry if first is None else first.carry
    layer = 0 if first is None else first.layers
    inputs, v = self._inputs(x, names, first)
    # Rotate queries and keys by their positions.
    if self.rotary:
      numbers = number_tokens(self, mask)
      inputs |= {
        name: rotate(inputs[name], numbers)
        for name in {"query", "key"} & inputs.keys()
      }
    # Apply the function of heads, add the fidelity term, and gate the heads.
    heads = [inputs[name] for name in names]
    attend = self._attention(x, mask, carry, train)
    y, carry = self._apply_maps(attend, heads, layer)
    if first is not None and self._has_fidelity:
      y = self._add_fidelity(y, v, first)
    if self._wraps_carry:
      start = v if self._reads_first else None
      values = start if first is None else first.values
      carry = FirstValues(values, jnp.asarray(layer + 1, jnp.int32), carry)
    if self.gate != "none":
      y = y * self._gates(x).astype(y.dtype)
    self.sow("intermediates", "attended", y)
    # Project the heads to one vector for each token.
    y = self._project_back(jnp.swapaxes(y, 1, 2), d)
    return self._scale_features(y, mask) if self.feat_scale else y, carry

  @property
  def is_bounded(self) -> bool:
    """True if `gain` is a Lipschitz constant."""
    is_rotated = self.orthogonal and self.orthogonal_output
    adds = self._reads_first or self.feat_scale or self.differential
    is_plain = not adds and self.gate == "none"
    return self.constants is not None and is_rotated and is_plain

  @property
  def _has_fidelity(self) -> bool:
    return bool(self.fidelity) or self.learn_fidelity

  @property
  def _mixes_values(self) -> bool:
    return bool(self.value_residual) or self.learn_value_residual

  @property
  def _reads_first(self) -> bool:
    """True if layers read the values of the first layer."""
    return self._has_fidelity or self._mixes_values or self.share_values

  @property
  def differs_by_layer(self) -> bool:
    """True if a layer needs its number, or parameters that the first lacks."""
    learns = self.learn_fidelity or self.learn_value_residual
    return bool(self.fidelity_schedule) or self.differential or learns

  @property
  def _wraps_carry(self) -> bool:
    """True if the carry is `FirstValues`."""
    return self._reads_first or self.differs_by_layer

  @nn.nowrap
  def gain(self, collections: Mapping[str, Any]) -> float:
    """Returns a Lipschitz constant for sequences with equal masks, in float64.

    The distance of two sequences is the greatest distance of two tokens.

    Args:
      collections: variables of the mixer: `params`, and `rotations`, which are
        computed from `params` if missing.
    """
    assert self.constants is not None  # See `is_bounded`.
    # Compute the spectral norms of the maps to heads, [h], and back.
    norms = {}
    for name, matrix in find_rotations(
      collections, self.orthogonal_map
    ).items():
      count = 1 if name.startswith("out") else self.num_heads
      parts = np.split(np.asarray(matrix, np.float64), count, 1)
      norms[name.partition("_")[0]] = np.linalg.norm(parts, 2, (1, 2))
    heads = self.constants(norms, collections["params"])
    return float(norms["out"][0] * np.linalg.norm(heads))

  def check_width(self, d: int) -> None:
    """Raises UserError if the size of the heads does not fit the width d."""
    check_heads(self.num_heads, self.head_size * self.num_heads or d)
    if self.head_size < 0:
      raise UserError(
        f"head_size={self.head_size} is negative: set it to the number of "
        "channels of a head, or to 0 for d_model / num_heads."
      )
    # Rotations need square kernels [d, h e].
    is_square = self.head_size in (0, d // self.num_heads)
    if (self.orthogonal or self.orthogonal_output) and not is_square:
      raise UserError(
        "orthogonal=True and orthogonal_output=True need square matrices, but "
        f"head_size={self.head_size} with {self.num_heads} heads differs from "
        f"the width {d}: remove head_size."
      )

  def _check_options(self, n: int, d: int, mask: jax.Array) -> None:
    self.check_width(d)
    if self.max_len and n > self.max_len and not is_packed(mask):
      raise UserError(
        f"A sequence of {n} tokens is longer than max_len={self.max_len}: "
        "raise max_len or cut the sequence."
      )
    # Check options that need certain inputs.
    missing = {"q", "k"} - {*self.signature.inputs}
    # With differential attention a head of queries is half as wide.
    pair = 4 if self.differential else 2
    size = self.head_size or d // self.num_heads
    odd = f"heads of {size} channels, no multiple of {pair}"
    if self.rotary and (missing or size % pair):
      raise UserError(
        "rotary=True rotates pairs of channels of queries and keys, but this "
        f"mixer has {'none' if missing else odd}: remove rotary."
      )
    if self.symmetric and missing:
      raise UserError(
        "symmetric=True shares the projection of queries and keys, but this "
        f"mixer has no {' and no '.join(sorted(missing))}: remove symmetric."
      )
    self._check_values(size)
    choose("gate", self.gate, GATES)
    # Check options that cannot be combined.
    if self.feat_scale and self.options.get("causal"):
      raise UserError(
        "feat_scale=True averages over all tokens, including later ones, so it "
        "cannot be combined with causal=True: remove one of the two."
      )

  def _check_values(self, size: int) -> None:
    """Raises UserError for options that the values or heads do not allow.

    Args:
      size: number of channels of a head.
    """
    if self._reads_first and "v" not in self.signature.inputs:
      raise UserError(
        f"fidelity={self.fidelity}, value_residual={self.value_residual} and "
        f"share_values={self.share_values} read values of the first layer, but "
        "this mixer has no values: remove these options."
      )
    names = [
      "value_residual",
      "learn_value_residual",
      "fidelity",
      "learn_fidelity",
    ]
    others = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n)]
    if self.share_values and others:
      raise UserError(
        "share_values=True leaves later layers no projected values, which "
        f"{', '.join(others)} compares or mixes with the first: remove "
        "share_values, or the rest."
      )
    if not self._has_fidelity:
      reason = "fidelity is 0: set fidelity, or remove it."
      refuse_unused(self, ("fidelity_schedule",), reason)
    missing = {*"qkv"} - {*self.signature.inputs}
    has_others = "project" in self.signature.tools
    if self.differential and (missing or has_others or size % 2):
      raise UserError(
        "differential=True splits queries and keys, but this mixer has not all "
        "of queries, keys and values, or further projections, or heads of an "
        f"odd size ({size}): remove differential."
      )

  def _attention(
    self, x: jax.Array, mask: jax.Array, carry: Any, train: bool
  ) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns the function of heads with the tools that its signature names.

    The result maps heads to outputs and a carry, and may be called repeatedly.
    """
    if is_decoding(self):
      return lambda heads, eye=None: self._go_on(heads, mask, carry, train)
    # Record the names of drawn arrays, to refuse options without effect.
    drawn: list[str] = []
    tools = {
      "mask": mask,
      "carry": carry,
      "dropout": make_dropout(self, self.dropout_rate, train=train),
      "draw": _once(functools.partial(self._draw, drawn, train=train)),
      "param": _once(self.param),
      "project": _once(lambda name: self._project(x, name)[0]),
      "max_len": self.max_len or x.shape[1],
    }
    # Pass only the tools that `attend` requests.
    tools = {name: tools[name] for name in self.signature.tools}

    def attend(
      heads: list[jax.Array], eye: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
      chosen = tools
      if eye is not None and "project" in tools:
        # Other values of a mixer are the rows of I, too.
        project = tools["project"]
        chosen = tools | {
          "project": lambda name: (
            eye if name.startswith("value") else project(name)
          )
        }
      y = self.attend(*heads, **chosen, **self.options)
      # Refuse a seed that has no effect.
      redraws = self.redraw and not self.signature.redraws
      if (self.seed or redraws) and not drawn:
        raise UserError(
          f"seed={self.seed}, redraw={self.redraw}: this mixer draws nothing "
          "with these options. Remove both."
        )
      # Functions that request the carry return (y, carry).
      return y if "carry" in tools else (y, carry)

    return attend

  def _go_on(
    self, heads: list[jax.Array], mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    """Applies the heads of new tokens to all tokens in the cache."""
    if self.step is None:
      raise UserError(
        "This mixer does not support a cache: choose "
        f"{', '.join(names_with_step())}, or apply the model to all tokens."
      )
    if is_packed(mask):
      raise UserError(
        "Attention cannot continue from a state in packed rows or after "
        "resets: leave out one of the two, or choose a recurrence."
      )
    options = dict(self.options)
    check_causal(self, causal=options.pop("causal"))
    rate = self.dropout_rate if "dropout" in self.signature.tools else 0.0
    dropout = make_dropout(self, rate, train=train)
    cache = Cache(self, mask, 2 if self.differential else 1, dropout)
    return self.step(*heads, cache=cache, **options), carry

  def _inputs(
    self, x: jax.Array, names: list[str], first: FirstValues | None
  ) -> tuple[dict[str, jax.Array], Any]:
    """Returns what the function of heads reads, and the layer's values.

    Args:
      x: tokens, [b, n, d].
      names: names of the projections.
      first: values of the first layer; None in the first layer.

    Returns:
      Heads [b, h, n, e] by name; and the values before the first layer's values
      are added, None for a mixer without values.
    """
    # Layers after the first have no projection to values if they share them.
    shared = first if self.share_values else None
    distinct = dict.fromkeys(n for n in names if n != "value" or not shared)
    # A mixer may have no projection but the one to values.
    projected = self._project(x, *distinct) if distinct else []
    inputs = dict(zip(distinct, projected, strict=True))
    if shared is not None:
      inputs["value"] = shared.values
    self.sow("intermediates", "projected", inputs)
    v: Any = inputs.get("value")
    if first is not None and self._mixes_values:
      inputs["value"] = self._mix_values(v, first.values)
    return _in_two_maps(inputs) if self.differential else inputs, v

  def _apply_maps(
    self,
    attend: Callable[..., tuple[jax.Array, Any]],
    heads: list[jax.Array],
    layer: jax.Array | int,
  ) -> tuple[jax.Array, Any]:
    """Returns the outputs of the heads and the carry, and sows the weights.

    Args:
      attend: result of `_attention`.
      heads: inputs of the function of heads.
      layer: number of the layer, from 0.
    """
    y, carry = attend(heads)
    factor: Any = None
    if self.differential:
      factor, start = self._second_factor(y.shape[-1], layer)
      norm = nn.RMSNorm(1e-5, name="head_norm")
      y = ((1 - start) * norm(_subtract_second(y, factor))).astype(self.dtype)
    is_asked = self.is_mutable_collection("weights") and not is_decoding(self)
    has_values = "v" in self.signature.inputs
    if is_asked and has_values and not self.is_initializing():
      # The weights are the result for values that are the rows of I.
      b, h, n, _ = heads[-1].shape
      eye = jnp.broadcast_to(jnp.eye(n, dtype=y.dtype), (b, h, n, n))
      matrix, _ = attend([*heads[:-1], eye], eye)
      if factor is not None:
        matrix = _subtract_second(matrix, factor)
      self.sow("weights", "matrix", matrix)
    return y, carry

  def _mix_values(self, v: jax.Array, first: jax.Array) -> jax.Array:
    """Returns (1 - w) v + w v0 of values [b, h, n, e]."""
    factors: Any = (1 - self.value_residual, self.value_residual)
    if self.learn_value_residual:
      start = factors
      factors = self.param("value_residual", lambda _: jnp.asarray(start))
    of_layer, of_first = (jnp.asarray(factor, v.dtype) for factor in factors)
    return of_layer * v + of_first * first

  def _second_factor(
    self, e: int, layer: jax.Array | int
  ) -> tuple[jax.Array, jax.Array]:
    """Returns lambda of differential attention, and its start c.

    Args:
      e: number of channels of a head.
      layer: number of the layer, from 0.
    """
    start = 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(layer, float))
    # Vectors have no weight decay.
    q1, k1, q2, k2 = (
      self.param(f"lambda_{name}", nn.initializers.normal(0.1), (e // 2,))
      for name in ("q1", "k1", "q2", "k2")
    )
    factor = jnp.exp((q1 * k1).sum()) - jnp.exp((q2 * k2).sum())
    return factor + start, start

  def _gates(self, x: jax.Array) -> jax.Array:
    """Returns the gates of the heads, sigmoid(x W), [b, h, n, e or 1]."""
    shape = (self.num_heads, self.head_size or x.shape[-1] // self.num_heads)
    if self.gate == "headwise":
      shape = (self.num_heads, 1)
    weights = HeadWeights(shape, False, kernel_init(self.init_std), name="gate")
    kernel, _ = weights(x.shape[-1])
    y = product(x.astype(self.dtype), kernel.astype(self.dtype))
    return jax.nn.sigmoid(jnp.swapaxes(y, 1, 2))

  def _add_fidelity(
    self, y: jax.Array, v: jax.Array, first: FirstValues
  ) -> jax.Array:
    """Returns y + lambda (v0 - v)."""
    # Compute the weight lambda of this layer.
    weight: Any = self.fidelity
    if self.learn_fidelity:
      start = nn.initializers.constant(self.fidelity)
      weight = self.param("fidelity", start, ())
    # Layer 1 takes the first factor; layers after the last factor keep it.
    if self.fidelity_schedule:
      factors = jnp.asarray(self.fidelity_schedule, jnp.float32)
      weight = weight * factors[jnp.minimum(first.layers, len(factors)) - 1]
    weight = jnp.asarray(weight, y.dtype)
    return y + weight * (first.values - v).astype(y.dtype)

  def _scale_features(self, y: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns FeatScale of y [b, n, d]: y + s mean + t (y - mean).

    Here s and t are parameters, [d], and mean is the mean token, [b, 1, d].
    """
    zeros, shape = nn.initializers.zeros, y.shape[-1:]
    # With parameters of 0, the result is y.
    low = self.param("feat_scale_mean", zeros, shape).astype(y.dtype)
    high = self.param("feat_scale_rest", zeros, shape).astype(y.dtype)
    mean = masked_mean(y, mask)[:, None].astype(y.dtype)
    return y + low[None, None] * mean + high[None, None] * (y - mean)

  def _project(self, x: jax.Array, *names: str) -> list[jax.Array]:
    """Returns x [b, n, d] projected to heads [b, h, n, e], once for each name.

    All projections are computed as one matrix product, in both passes.
    """
    d = x.shape[-1]
    # Kernels are [d, h, e] and biases [h, e].
    shape = (self.num_heads, self.head_size or d // self.num_heads)
    weights = [self._head_weights(name, d, shape) for name in names]
    kernels, biases = zip(*weights, strict=True)
    # Stack kernels [d, names, h, e]: with a separate axis, a mesh can split h.
    y = product(x.astype(self.dtype), jnp.stack(kernels, 1).astype(self.dtype))
    if self.use_bias and self.qkv_bias:
      y = y + jnp.stack(biases).astype(self.dtype)[None, None]
    return [jnp.swapaxes(y[:, :, i], 1, 2) for i in range(len(names))]

  def _project_back(self, y: jax.Array, d: int) -> jax.Array:
    """Projects heads [b, n, h, e] to one vector for each token, [b, n, d]."""
    if not self.orthogonal_output:
      return nn.DenseGeneral(
        d,
        axis=(-2, -1),
        use_bias=self.use_bias,
        kernel_init=kernel_init(self.init_std),
        dtype=self.dtype,
        dot_general=dot_general,
        name="out",
      )(y)
    # Multiply by a rotation: [b, n, h e] -> [b, n, d].
    kernel = rotation(self, "out", (d, d), self.orthogonal_map)
    y = product(y.reshape(*y.shape[:2], d), kernel.astype(self.dtype))
    if not self.use_bias:
      return y
    bias = self.param("out_bias", nn.initializers.zeros, (d,))
    return y + bias.astype(y.dtype)[None, None]

  def _head_weights(
    self, name: str, d: int, shape: tuple[int, int]
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns the kernel [d, h, e] of a projection, and its bias [h, e]."""
    use_bias = self.use_bias and self.qkv_bias
    if not self.orthogonal:
      return HeadWeights(
        shape, use_bias, kernel_init(self.init_std), name=name
      )(d)
    # Split a rotation [d, d] into heads [d, h, e].
    kernel = rotation(self, name, (d, d), self.orthogonal_map)
    bias = None
    if use_bias:
      bias = self.param(f"{name}_bias", nn.initializers.zeros, shape)
    return kernel.reshape(d, *shape), bias

  def _draw(
    self,
    drawn: list[str],
    name: str,
    make: Callable[[jax.Array], jax.Array],
    *,
    train: bool,
  ) -> jax.Array:
    """Returns a random array, drawn or passed by the caller.

    The caller can pass arrays in the Linen collection `random`.

    Args:
      drawn: list to which the name is added.
      name: name of the array in the collection.
      make: function of a key that draws the array.
      train: True in training, where `redraw` has an effect.
    """
    drawn.append(name)
    # Prefer an array that the caller passes.
    expected = jax.eval_shape(make, jax.random.key(0))
    collection = self.variables.get("random", {})
    if name in collection:
      self._check_shape(name, collection[name].shape, expected.shape)
      return collection[name]
    if collection and not self.is_mutable_collection("random"):
      raise UserError(
        f"The collection random has {', '.join(sorted(collection))} for "
        f"{'/'.join(self.path)}, which draws {name!r}: rename the entry to "
        "that name."
      )
    # Draw from the seed, or in training from the key stream of the caller.
    if not (train and self.redraw):
      is_constant = expected.size <= LARGEST_CONSTANT
      values = self._draw_from_seed(name, make, is_constant)
    elif self.has_rng("random"):
      values = make(self.make_rng("random"))
    else:
      raise UserError(
        'redraw=True draws new arrays in training: pass rngs={"random": key}, '
        "or set redraw=False."
      )
    # Return the array to a caller that requests the collection.
    if self.is_mutable_collection("random") and not self.is_initializing():
      self.put_variable("random", name, values)
    return values

  def _check_shape(
    self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
  ) -> None:
    if shape != expected:
      raise UserError(
        f"The collection random has {name!r} of shape {shape}, but "
        f"{'/'.join(self.path)} needs {expected}: pass an array of that shape."
      )

  def _draw_from_seed(
    self, name: str, make: Callable[[jax.Array], jax.Array], is_constant: bool
  ) -> jax.Array:
    """Returns an array drawn from the seed and the path of this layer."""
    path = zlib.crc32("/".join((*self.path, name)).encode())
    # Training forbids implicit transfers to the device, to detect batches that
    # were not placed. Allow the transfer of the seed: it happens once, while
    # tracing.
    with (
      jax.transfer_guard("allow"),
      jax.ensure_compile_time_eval()
      if is_constant
      else contextlib.nullcontext(),
    ):
      return make(jax.random.fold_in(jax.random.key(self.seed), path))


def attention(
  name: str,
  *,
  growth: str = "n",
  step: Callable[..., jax.Array] | None = None,
  segments: bool = False,
  constants: Callable[..., np.ndarray] | None = None,
  **defaults: Any,
) -> Callable[[Any], Any]:
  """Registers a function of heads as a mixer, by its signature.

      @attention("name")
      def attend(q, k, v, *, mask, dropout, width=8) -> y

  Positional arguments are projections of x: q, k and v, [b, h, n, e] each.
  Keyword-only arguments without a default are tools. Name the tools you need:

    mask: [b, n], True at tokens.
    carry: carry of the layer before. `attend` then returns a pair (y, carry).
    dropout: a `Dropout` of attention weights. Call `dropout(weights)`, or
      `dropout.fold(i)(weights)` in a loop. This tool adds the option
      `dropout_rate`.
    draw: `draw(name, make)` returns the array `make(key)`, drawn once from the
      option `seed`, or in every training step with `redraw`. `apply` returns
      the arrays with `mutable=["random"]`, and accepts them as that collection.
    param: `param(name, init, shape)` returns a parameter.
    project: `project(name)` returns x projected by another linear map,
      [b, h, n, e].
    max_len: greatest number of tokens.

  Keyword-only arguments with a default are options that a config can set. The
  result y is [b, h, n, e].

  Args:
    name: name of the mixer in configs.
    growth: growth of the largest array with the number of tokens: "n",
      "n log n" or "n^2".
    step: function that continues `attend` from a cache. Its arguments are the
      heads of the new tokens, `cache` (a `Cache`) and the options except
      `causal`. It returns what `attend` with causal=True returns for the new
      tokens, given the earlier tokens.
    segments: True if `mask` may be the numbers of packed rows, whose examples
      do not see each other; see `models.segments`.
    constants: function of the spectral norms [h] of the maps to heads, by name
      (`query`, `key` and `value`), and of the parameters of the mixer. It
      returns the Lipschitz constant of each head, [h], for the greatest
      distance of two tokens. It needs orthogonal=True and
      orthogonal_output=True. None if heads have no such constant.
    **defaults: attributes of `Attention` for which this mixer has another
      default, such as num_heads=1. `mixer_defaults` of a config do not change
      these defaults.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxformers.models.mixer import MIXERS
    >>> @attention("first")
    ... def attend(v, *, mask):
    ...   return jnp.broadcast_to(v[:, :, :1], v.shape)
    >>> "first" in MIXERS
    True
    >>> del MIXERS.data["first"]
  """

  def register(attend: Callable[..., Any]) -> Callable[..., Any]:
    signature = _read_signature(attend)._replace(
      redraws=defaults.get("redraw", False)
    )

    # The factory of the mixer checks and splits the options of a config.
    def mixer(**values: Any) -> Attention:
      ranges.check(mixer, values)
      # Split the values into options of `attend` and attributes of `Attention`.
      options = {
        key: values.pop(key, default)
        for key, default in signature.options.items()
      }
      return Attention(
        attend, signature, options, step, constants, **(defaults | values)
      )

    # Hide options without effect, such as `dropout_rate` without dropout.
    settable = _settable_attributes(signature.tools)
    # Attach what configs and checks read from an entry of the registry.
    entry: Any = mixer
    entry.options = (*signature.options, *settable)
    entry.owners = (Attention, attend)
    entry.has_step = step is not None
    entry.has_segments = segments
    entry.defaults = defaults
    entry.growth = growth
    mixer.__doc__, mixer.__module__ = attend.__doc__, attend.__module__
    MIXERS.register(name)(mixer)
    return attend

  return register


# Attributes of `Attention` that the registration sets, not a config.
_NOT_OPTIONS = {
  *("attend", "signature", "options", "step", "constants", "parent", "name")
}


def shared_options() -> list[str]:
  """Returns the attributes of `Attention` that a config can set."""
  names = [field.name for field in dataclasses.fields(Attention)]
  return [name for name in names if name not in _NOT_OPTIONS]


def _settable_attributes(tools: Iterable[str]) -> list[str]:
  """Returns the attributes that a config can set, given the mixer's tools."""
  hidden = set()
  if "dropout" not in tools:
    hidden |= {"dropout_rate"}
  if "draw" not in tools:
    hidden |= {"seed", "redraw"}
  return [f for f in shared_options() if f not in hidden]
