"""The mixer contract, and the one module that projects around attention.

A mixer is a Linen module whose call is

    mixer(x, *, mask, carry, train) -> (y, carry)

with x and y [b, n, d], mask [b, n] (True at tokens) and carry any pytree that
is handed from layer to layer, None before the first. What stands at masked
positions never reaches the others; a sample does not depend on its batch
mates; appending padding changes nothing.

Most mixers are a function of heads: see `attention`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers import orthogonal
from jaxformers.errors import UserError
from jaxformers.registry import Registry, choose

MIXERS: Registry = Registry("mixer")
LARGEST_CONSTANT = 2**22  # Entries; beyond, what is drawn is drawn in place.
_BLOCK = 32  # Tokens of which the greatest is taken before its place is.


def wide(x: jax.Array) -> jax.Array:
  """x in at least float32, for what half precision would lose."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.custom_jvp
def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The maximum over the tokens of x [b, n, d] where mask [b, n] -> [b, d].

  Zero for a sample without tokens. The gradient goes to the first of the
  greatest.
  """
  top = _tokens_alone(x, mask).max(1)
  return jnp.where(mask.any(1)[:, None], top, 0)


@masked_max.defjvp
def _masked_max_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array]:
  (x, mask), (dx, _) = primals, tangents
  # By place. The gradient of `max` looks for the tokens that equal it, and
  # finds none where a compiler makes x again and rounds it otherwise.
  place = _first_greatest(_tokens_alone(x, mask))

  def at(x: jax.Array) -> jax.Array:
    own = jnp.take_along_axis(x, place[:, None], 1)[:, 0]
    return jnp.where(mask.any(1)[:, None], own, 0)

  return at(x), at(dx)


def _tokens_alone(x: jax.Array, mask: jax.Array) -> jax.Array:
  """x [b, n, d] with the lowest number where mask [b, n] is False."""
  return jnp.where(mask[..., None], x, jnp.finfo(x.dtype).min)


def _first_greatest(x: jax.Array) -> jax.Array:
  """The place of the first greatest of x [b, n, d] along n -> int [b, d].

  First the block that has it, then the place there: CPUs take a maximum several
  times as fast as its place.
  """
  b, n, d = x.shape
  if n % _BLOCK:
    return x.argmax(1)
  blocks = x.reshape(b, n // _BLOCK, _BLOCK, d)
  block = blocks.max(2).argmax(1)
  own = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
  return block * _BLOCK + own.argmax(1)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The mean over the tokens of x [b, n, d] where mask [b, n] -> f32 [b, d].

  Zero for a sample without tokens.
  """
  total = jnp.where(mask[..., None], x.astype(jnp.float32), 0).sum(1)
  return total / jnp.maximum(mask.sum(1), 1)[:, None].astype(jnp.float32)


def rotation(
  module: nn.Module, name: str, shape: tuple[int, ...], mapping: str
) -> jax.Array:
  """The orthogonal matrices of a parameter of a module, float32 `shape`.

  Read from the collection `rotations` where the caller provides it (see
  `orthogonal.rotations`), so that a step maps every matrix of a model in one
  call; otherwise mapped here, with the same result.

  Args:
    module: the Linen module that owns the parameter, inside its call.
    name: what the matrices are; the parameter is `name`_skew, or under
      "matrix" `name`_orthogonal.
    shape: [..., d, d].
    mapping: in `orthogonal.MAPS`.
  """
  full = orthogonal.parameter_name(name, mapping)
  if module.has_variable("rotations", full):
    return module.get_variable("rotations", full)

  def initializer(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    a = orthogonal.initializer(key, shape)
    return orthogonal.cayley(a) if mapping == "matrix" else a

  return orthogonal.MAPS[mapping](module.param(full, initializer, shape))


def kernel_init(deviation: float) -> Callable[..., jax.Array]:
  """The initializer of kernels: normal of a deviation, or Xavier's for 0.

  Raises:
    UserError: for a negative deviation.
  """
  if deviation < 0:
    raise UserError(
      f"init_std={deviation}: a deviation is not negative; use 0 for the "
      "default initializer."
    )
  if deviation:
    return nn.initializers.normal(deviation)
  return nn.initializers.xavier_uniform()


def dropout_layer(rate: float, train: bool) -> nn.Module:
  """Drops a share of what it is given; ValueError if not in [0, 1)."""
  if not 0 <= rate < 1:
    raise UserError(
      f"dropout_rate={rate} is not in [0, 1): it is the share that is dropped."
    )
  return nn.Dropout(rate, deterministic=not train)


def check_heads(num_heads: int, d_model: int) -> None:
  """Raises UserError for a number of heads that does not divide d_model."""
  if num_heads < 1 or d_model % num_heads:
    raise UserError(
      f"num_heads={num_heads} does not divide d_model={d_model}: choose a "
      "number of heads that does."
    )


class Heads(NamedTuple):
  """What the signature of a function of heads asks for.

  Attributes:
    inputs: which of q, k and v it takes.
    tools: its keyword-only arguments without a default.
    options: those with one, which a config can set.
  """

  inputs: tuple[str, ...]
  tools: tuple[str, ...]
  options: dict[str, Any]


_PROJECTIONS = {"q": "query", "k": "key", "v": "value"}
_TOOLS = ("mask", "carry", "dropout", "draw", "param", "project", "max_len")


def _read(attend: Callable[..., Any]) -> Heads:
  inputs, tools, options = [], [], {}
  for name, parameter in inspect.signature(attend).parameters.items():
    if parameter.kind is not parameter.KEYWORD_ONLY:
      inputs.append(choose("input of a mixer", name, _PROJECTIONS))
    elif parameter.default is parameter.empty:
      tools.append(choose("tool of a mixer", name, _TOOLS))
    else:
      options[name] = parameter.default
  return Heads(tuple(inputs), tuple(tools), options)


class FirstValues(NamedTuple):
  """What a fidelity term carries from layer to layer.

  Attributes:
    values: of the first layer, [b, h, n, e].
    layers: int32, how many have been before.
    carry: of the mixer itself.
  """

  values: jax.Array
  layers: jax.Array
  carry: Any


class Attention(nn.Module):
  """Projects to heads, attends, projects back: x [b, n, d] -> [b, n, d].

  `query`, `key` and `value`, [b, h, n, e] each, are sown into `intermediates`
  as `projected`, and what the heads put out, before the projection back, as
  `attended`.

  Attributes:
    attend: a function of heads; see `attention`.
    heads: what its signature asks for.
    options: values for its options.
    num_heads: h; must divide d. ValueError if not.
    use_bias: whether the projections have biases (Skyformer: yes; LRA: no).
    orthogonal: whether those to heads are rotations, with a bias if `use_bias`
      (Transformer with orthogonal parametrisation, TransJect, table 1).
    symmetric: whether keys are the queries, too, so that there is no projection
      to queries (NeuTRENO, equation 13).
    fidelity: lambda of a term lambda (v0 - v) that is added to every layer's
      output but the first's, v0 the values of the first, head by head, before
      the projection back (NeuTRENO, Nguyen et al. 2023,
      https://arxiv.org/abs/2312.00751, definition 1). 0 leaves it out. From
      about 1 on the iteration that it comes from diverges.
    fidelity_schedule: factors of lambda in the second layer and those after it;
      the last holds for what comes later. () for 1 everywhere.
    learn_fidelity: whether lambda is a parameter of each layer, from
      `fidelity` on.
    feat_scale: whether the mean token of the output and the rest of it are
      scaled apart, by 1 + a parameter for each channel that starts at 0
      (FeatScale, Wang et al. 2022, https://arxiv.org/abs/2203.05962, equation
      10; its authors' code adds the correction twice).
    init_std: deviation of the kernels at the start; 0 for Xavier's.
    dropout_rate: of the attention weights, in training.
    seed: of what `attend` draws.
    redraw: whether it draws anew in every training step (in each of its
      accumulated parts, and under pmap on each device), from the stream
      "random"; evaluation always uses the seed, which is not the run's.
    max_len: greatest number of tokens.
    orthogonal_map: in `orthogonal.MAPS`.
    dtype: compute type; parameters are float32.
  """

  attend: Callable[..., Any]
  heads: Heads
  options: Any
  num_heads: int = 2
  use_bias: bool = True
  orthogonal: bool = False
  symmetric: bool = False
  fidelity: float = 0.0
  fidelity_schedule: tuple[float, ...] = ()
  learn_fidelity: bool = False
  feat_scale: bool = False
  init_std: float = 0.0
  dropout_rate: float = 0.0
  seed: int = 0
  redraw: bool = False
  max_len: int = 0
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    d = x.shape[-1]
    check_heads(self.num_heads, d)
    if self.max_len and x.shape[1] > self.max_len:
      raise UserError(
        f"A sequence of {x.shape[1]} tokens is longer than "
        f"max_len={self.max_len}: raise max_len or cut the sequence."
      )
    self._check_options()
    loyal = bool(self.fidelity) or self.learn_fidelity
    first = carry if loyal else None
    if loyal and carry is not None:
      carry = carry.carry
    drawn: list[str] = []
    names = [_PROJECTIONS[name] for name in self.heads.inputs]
    if self.symmetric:
      names[self.heads.inputs.index("q")] = "key"
    inputs = {name: self._project(x, name) for name in dict.fromkeys(names)}
    self.sow("intermediates", "projected", inputs)
    tools = {
      "mask": mask,
      "carry": carry,
      "dropout": self._dropout(train),
      "draw": functools.partial(self._draw, drawn, train=train),
      "param": self.param,
      "project": functools.partial(self._project, x),
      "max_len": self.max_len or x.shape[1],
    }
    y = self.attend(
      *(inputs[name] for name in names),
      **{name: tools[name] for name in self.heads.tools},
      **self.options,
    )
    if (self.seed or self.redraw) and not drawn:
      raise UserError(
        f"seed={self.seed}, redraw={self.redraw}: with these options nothing "
        "is drawn. Leave both out."
      )
    y, carry = y if "carry" in self.heads.tools else (y, carry)
    if loyal:
      y, carry = self._faithful(y, inputs["value"], first, carry)
    self.sow("intermediates", "attended", y)
    y = nn.DenseGeneral(
      d,
      axis=(-2, -1),
      use_bias=self.use_bias,
      kernel_init=kernel_init(self.init_std),
      dtype=self.dtype,
      name="out",
    )(jnp.swapaxes(y, 1, 2))
    return self._scaled(y, mask) if self.feat_scale else y, carry

  def _check_options(self) -> None:
    missing = {"q", "k"} - {*self.heads.inputs} if self.symmetric else set()
    if missing:
      raise UserError(
        "symmetric=True shares the projection of queries and keys, and this "
        f"mixer has no {' and no '.join(sorted(missing))}. Leave it out."
      )
    if (self.fidelity or self.learn_fidelity) and "v" not in self.heads.inputs:
      raise UserError(
        f"fidelity={self.fidelity}: this mixer has no values to be faithful "
        "to. Leave it out."
      )
    if self.fidelity < 0:
      raise UserError(f"fidelity={self.fidelity}: it must not be negative.")
    if self.feat_scale and self.options.get("causal"):
      raise UserError(
        "feat_scale=True takes the mean of all tokens, later ones too: there "
        "is no causal form. Leave out one of the two."
      )

  def _faithful(
    self, y: jax.Array, v: jax.Array, first: FirstValues | None, carry: Any
  ) -> tuple[jax.Array, FirstValues]:
    """y + lambda (v0 - v), and what the next layer needs for it."""
    if first is None:
      return y, FirstValues(v, jnp.ones((), jnp.int32), carry)
    weight: Any = self.fidelity
    if self.learn_fidelity:
      start = nn.initializers.constant(self.fidelity)
      weight = self.param("fidelity", start, ())
    if self.fidelity_schedule:
      factors = jnp.asarray(self.fidelity_schedule, jnp.float32)
      weight = weight * factors[jnp.minimum(first.layers, len(factors)) - 1]
    weight = jnp.asarray(weight, y.dtype)
    y = y + weight * (first.values - v).astype(y.dtype)
    return y, FirstValues(first.values, first.layers + 1, carry)

  def _scaled(self, y: jax.Array, mask: jax.Array) -> jax.Array:
    """FeatScale of y [b, n, d]: its mean over tokens and the rest, scaled."""
    zeros, shape = nn.initializers.zeros, y.shape[-1:]
    low = self.param("feat_scale_mean", zeros, shape).astype(y.dtype)
    high = self.param("feat_scale_rest", zeros, shape).astype(y.dtype)
    mean = masked_mean(y, mask)[:, None].astype(y.dtype)
    return y + low[None, None] * mean + high[None, None] * (y - mean)

  def _project(self, x: jax.Array, name: str) -> jax.Array:
    """x [b, n, d] through a linear map of its own -> [b, h, n, e]."""
    d, shape = x.shape[-1], (self.num_heads, x.shape[-1] // self.num_heads)
    if not self.orthogonal:
      y = nn.DenseGeneral(
        shape,
        use_bias=self.use_bias,
        kernel_init=kernel_init(self.init_std),
        dtype=self.dtype,
        name=name,
      )(x)
      return jnp.swapaxes(y, 1, 2)
    w = rotation(self, name, (d, d), self.orthogonal_map)
    y = x.astype(self.dtype) @ w.astype(self.dtype)
    y = y.reshape(*x.shape[:2], *shape)
    if self.use_bias:
      bias = self.param(f"{name}_bias", nn.initializers.zeros, shape)
      y = y + bias.astype(self.dtype)[None, None]
    return jnp.swapaxes(y, 1, 2)

  def _dropout(self, train: bool) -> Callable[..., jax.Array]:
    """Drops attention weights; `part` tells calls of one loop apart."""
    layer = dropout_layer(self.dropout_rate, train)
    if not train or not self.dropout_rate:
      return lambda weights, part=None: weights
    key = self.make_rng("dropout")

    def drop(weights: jax.Array, part: Any = None) -> jax.Array:
      own = key if part is None else jax.random.fold_in(key, part)
      return layer(weights, rng=own)

    return drop

  def _draw(
    self,
    drawn: list[str],
    name: str,
    make: Callable[[jax.Array], jax.Array],
    *,
    train: bool,
  ) -> jax.Array:
    """`make(key)`, unless the caller gives the collection `random`."""
    drawn.append(name)
    like = jax.eval_shape(make, jax.random.key(0))
    given = self.variables.get("random", {})
    if name in given:
      if given[name].shape != like.shape:
        raise UserError(
          f"The collection random has {name!r} of shape {given[name].shape}, "
          f"where {'/'.join(self.path)} takes {like.shape}."
        )
      return given[name]
    if given and not self.is_mutable_collection("random"):
      raise UserError(
        f"The collection random has {', '.join(sorted(given))} for "
        f"{'/'.join(self.path)}, which draws {name!r}."
      )
    if train and self.redraw:
      if not self.has_rng("random"):
        raise UserError(
          'With redraw=True training draws anew: give rngs={"random": key}, or '
          "set redraw=False."
        )
      values = make(self.make_rng("random"))
    else:
      # A layer's own, the same at any batch; a constant of the program.
      own = zlib.crc32("/".join((*self.path, name)).encode())
      constant = like.size <= LARGEST_CONSTANT
      # A step is traced under a transfer guard, which is for its batches: the
      # seed goes to the device once, with the program.
      with (
        jax.transfer_guard("allow"),
        jax.ensure_compile_time_eval()
        if constant
        else contextlib.nullcontext(),
      ):
        key = jax.random.fold_in(jax.random.key(self.seed), own)
        values = make(key)
    if self.is_mutable_collection("random") and not self.is_initializing():
      self.put_variable("random", name, values)
    return values


def attention(name: str, **defaults: Any) -> Callable[[Any], Any]:
  """Registers a function of heads as a mixer; its signature says all.

      @attention("name")
      def attend(q, k, v, *, mask, dropout, width=8) -> y

  Positional arguments, of q, k and v [b, h, n, e], are what x is projected to.
  Keyword-only arguments without a default are handed in if named:

    mask: [b, n], True at tokens.
    carry: from the layer before; then the result is a pair (y, carry).
    dropout: a function for attention weights, `dropout(weights, part=i)` in a
      loop; adds the option `dropout_rate`.
    draw: `draw(name, make)` is the array `make(key)`, drawn once from the
      option `seed`, or in every training step with `redraw`. `apply` shows what
      was drawn with `mutable=["random"]`, and takes it as that collection.
    param: `param(name, init, shape)`, a parameter.
    project: `project(name)`, x through a further linear map, [b, h, n, e].
    max_len: greatest number of tokens.

  Those with a default are options that a config can set. y is [b, h, n, e].

  Args:
    name: under which a config finds it.
    **defaults: of the attributes of `Attention`, where others suit it better,
      such as num_heads=1; a config's `mixer_defaults` leave these alone.
  """

  def add(attend: Callable[..., Any]) -> Callable[..., Any]:
    heads = _read(attend)

    def mixer(**given: Any) -> Attention:
      _check_types(name, heads.options | defaults, given)
      own = {key: given.pop(key, heads.options[key]) for key in heads.options}
      return Attention(attend, heads, own, **(defaults | given))

    mixer.options = (*heads.options, *_fields(heads.tools))
    mixer.defaults = defaults
    mixer.__doc__ = attend.__doc__
    MIXERS.register(name)(mixer)
    return attend

  return add


def _check_types(
  name: str, defaults: dict[str, Any], given: dict[str, Any]
) -> None:
  """ValueError for an option of another type than its default's."""
  own = {f.name: f.default for f in dataclasses.fields(Attention)}
  for option, value in given.items():
    kind = type((own | defaults).get(option))
    if kind not in (bool, int, float, str):
      continue
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
      raise UserError(
        f"Option {option}={value!r} of mixer {name!r} is not of type "
        f"{kind.__name__}."
      )


_WIRING = {"attend", "heads", "options", "parent", "name"}


def shared_options() -> list[str]:
  """Returns the attributes of `Attention` that a config can set."""
  return [f for f in Attention.__dataclass_fields__ if f not in _WIRING]


def _fields(tools: Iterable[str]) -> list[str]:
  """The attributes of `Attention` that mean something to a function."""
  hidden = set()
  if "dropout" not in tools:
    hidden |= {"dropout_rate"}
  if "draw" not in tools:
    hidden |= {"seed", "redraw"}
  return [f for f in shared_options() if f not in hidden]
