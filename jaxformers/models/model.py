"""Functions that build models by name, and the base class of all models.

`bind_encoder`, `bind_block` and `bind_mixer` bind the options of a config to
the modules of which every model consists.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry, call, unknown
from jaxformers.models import step_sizes as steps
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.invertible import layers_of, model_names
from jaxformers.models.cache import CACHE
from jaxformers.models.config import (
  FIELDS,
  PLAIN_HEAD,
  ModelConfig,
  field_names,
)
from jaxformers.models.embedding import Embedding
from jaxformers.models.encoder import Encoder
from jaxformers.models.kinds import find_kinds
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.convolution import (
  front_mask,
  move_back,
  numbers_to_front,
  to_front,
)
from jaxformers.models.norm import RUNNING
from jaxformers.models.segments import Packed, check_sizes, repack, unpack
from jaxformers.models.segments import make as make_packed
from jaxformers.models.variants import MODELS, Variant

Make = functools.partial[Any]
# Classes of models, by objective. The file of a class registers it.
CLASSES: Registry = Registry("objective")
# Fields of `ModelConfig` that describe the encoder.
ENCODER_FIELDS = tuple(
  field
  for field in FIELDS
  if field not in PLAIN_HEAD
  and field
  not in (
    "name",
    "num_classes",
    "objective",
    "causal",
    "num_inputs",
    "padded_len",
    "head",
    "head_activation",
    "interaction",
  )
)


def _bind(
  make: Any,
  config: ModelConfig,
  length: int,
  options: Mapping[str, Any],
  **wiring: Any,
) -> Make:
  """Binds options, and the entries of `wiring` for which there is a field."""
  wiring = {
    "dtype": jnp.dtype(config.dtype),
    "orthogonal_map": config.orthogonal_map,
    "max_len": length,
    **wiring,
  }
  # Pass only arguments for which the module has a field.
  fields = field_names(make)
  return functools.partial(
    make, **options, **{k: v for k, v in wiring.items() if k in fields}
  )


def bind_mixer(
  config: ModelConfig, length: int, options: dict[str, Any] | None = None
) -> Make | None:
  """Binds the options of a layer's mixer; returns None if there is no mixer.

  Args:
    config: configuration of the model.
    length: greatest number of tokens, with prepended tokens.
    options: options of the mixer; None for the options in the config.
  """
  variant = config.variant
  if not variant.mixer:
    return None
  options = config.mixer_options() if options is None else options
  make = MIXERS[variant.mixer]
  return _bind(make, config, length, options, **variant.fixed)


def bind_block(
  config: ModelConfig,
  mixer: Make | None,
  length: int,
  num_layers: int,
  **changes: Any,
) -> Make:
  """Binds the options of a layer.

  Args:
    config: configuration of the model.
    mixer: result of `bind_mixer`.
    length: greatest number of tokens, with prepended tokens.
    num_layers: number of layers of the stack.
    **changes: options of the block that replace the options in the config.
  """
  return _bind(
    BLOCKS[config.block_name],
    config,
    length,
    {**config.block, **changes},
    mixer=mixer,
    num_layers=num_layers,
  )


def bind_encoder_block(config: ModelConfig) -> Make:
  """Binds the options of a layer of the encoder."""
  length = config.encoder_len
  mixer = bind_mixer(config, length)
  return bind_block(config, mixer, length, config.num_layers)


def bind_encoder(config: ModelConfig) -> Make:
  """Binds the options of the encoder."""
  embedding = functools.partial(
    Embedding,
    vocab_size=config.vocab_size,
    max_len=config.num_tokens,
    d_model=config.d_model,
    positions=config.positions,
    cls=config.cls,
    patch_size=config.patch_size,
    masked=config.masks_values,
    separator=config.separator,
    **config.embedding,
  )
  return functools.partial(
    Encoder,
    embedding=embedding,
    block=bind_encoder_block(config),
    num_layers=config.num_layers,
    dropout_rate=config.dropout_rate,
    memory=config.memory,
  )


def check_mixer(config: ModelConfig, mixer: Make | None, n: int) -> None:
  """Traces a mixer on n tokens, or a block of the encoder if mixer is None."""
  make = bind_encoder_block(config) if mixer is None else mixer
  # Trace only shapes: nothing is computed.
  x = jax.ShapeDtypeStruct((1, n, config.d_model), jnp.dtype(config.dtype))
  mask = jax.ShapeDtypeStruct((1, n), bool)
  # Set no parent: inside another module's call, it would become a submodule.
  init = functools.partial(make(parent=None).init, carry=None, train=False)
  jax.eval_shape(lambda x, mask: init(jax.random.key(0), x, mask=mask), x, mask)


def _check_reversible(config: ModelConfig) -> None:
  """Raises UserError if memory="reversible" does not suit the layers."""
  layers = layers_of(bind_encoder_block(config)(parent=None))
  if layers is None:
    raise UserError(
      'memory="reversible" needs layers that can be inverted. Choose a model '
      f'from {model_names()}, or memory="recomputed".'
    )
  if layers.reversible_layers() < 1:
    raise UserError(
      f'memory="reversible" with dtype={config.dtype!r}: the inverse of a '
      "layer may multiply rounding errors beyond 1e-3. Choose "
      'memory="recomputed".'
    )
  # With few layers, branches contract too slowly.
  if config.num_layers < layers.least_layers:
    raise UserError(
      f'memory="reversible" with num_layers={config.num_layers}: alpha / '
      "L may come close to 1, where inverting a layer takes very many steps. "
      f"Choose at least {layers.least_layers} layers, or "
      'memory="recomputed".'
    )


class Model(nn.Module):
  """Base class of models: an encoder followed by a task head.

  `apply({"params": params}, ids, train=False)` is a pure function.

  Attributes:
    config: complete definition of the model.
  """

  # True if a model returns one result for an example, and not for each token.
  is_pooled: ClassVar[bool] = False
  # True if the class reads packed rows; see also `reads_packed`.
  takes_packed: ClassVar[bool] = False

  config: ModelConfig

  @nn.nowrap
  def apply(
    self,
    variables: Mapping[str, Any],
    *args: Any,
    initial_state: Any = None,
    return_state: bool = False,
    segments: Any = None,
    sizes: tuple[int, int] | None = None,
    step_sizes: Any = None,
    mutable: Any = False,
    **options: Any,
  ) -> Any:
    """Applies the model to inputs.

    Packed rows have several examples behind each other. Every example has the
    same result as in a separate row: states and positions begin again, a token
    sees only its example, and a classifier returns logits [b, most, c]. Models
    whose mixer or block cannot do so (`reads_packed`) read the examples in
    separate rows, which takes more time.

    A causal model can continue from a state. If each part of a sequence is read
    from the state after the previous part, the results equal the results for
    the whole sequence, if it has no padding between tokens; a classifier
    returns the logits of all tokens so far. Learned positions beyond
    `max_len` are NaN.
    Results and states are differentiable. A recurrence has a state of a fixed
    size, and attention a state of `max_len` tokens; it drops later tokens.

    Step sizes are how long each token lasts: a token of size s acts on a state
    as s equal tokens. Only state-space models (`MIXERS[...].has_step_sizes`)
    have them. In Mamba they multiply the steps that it computes from tokens,
    after its convolution of tokens.

    Args:
      variables: collections, such as `make_variables` returns them.
      *args: inputs.
      initial_state: state that an earlier call has returned; None to begin.
      return_state: True to return the state after the inputs.
      segments: numbers of the examples of packed rows, int [b, n], or [b, 2, n]
        for pairs: 1, 2, ... in their order, and 0 at padding. With a state,
        example 1 continues from it, so that 1 + resets.cumsum(1) empties the
        state at resets.
      sizes: greatest number of examples of a row, and of tokens of an example;
        None to read them from `segments`, which a compiled function cannot.
      step_sizes: step size of each token, float [b, n], at least 0; None for 1.
        Sizes at padding have no effect. The results are differentiable in them.
      mutable: collections that change, as in Flax.
      **options: `train`, and other arguments of Flax.

    Returns:
      The outputs; with `mutable`, the pair of outputs and changed collections;
      with `return_state`, the pair of this result and the state.

    Raises:
      UserError: with a state, for a model that is not causal or that has class
        tokens or a separator, a mixer without a cache, or a pool that needs the
        whole sequence; with segments, for
        images, or numbers in another order; with step sizes, for a
        model without them, another shape, and negative numbers.
    """
    has_state = initial_state is not None or return_state
    if step_sizes is not None:
      step_sizes = self._check_step_sizes(step_sizes, args[0])
    if segments is not None:
      self._check_segments(np.shape(segments), np.shape(args[0]))
      packed = make_packed(self._in_rows(segments), sizes)
      packs = self.reads_packed(has_state=has_state)
      self._check_packed(packed, packs, has_state)
      if not packs:
        options["mutable"] = mutable
        options["step_sizes"] = step_sizes
        return self._apply_unpacked(variables, packed, args, options)
      options["packed"] = packed
    if step_sizes is not None:
      sizes_of_mixers = self._place_step_sizes(step_sizes, args[0])
      variables = {**variables, **sizes_of_mixers}
    if not has_state:
      return super().apply(variables, *args, mutable=mutable, **options)
    self.check_causal()
    if initial_state is not None:
      variables = {**variables, CACHE: initial_state}
    changing: Any = True
    if mutable is not True:
      others = [mutable] if isinstance(mutable, str) else list(mutable or ())
      changing = [CACHE, *others]
    result, changed = super().apply(
      variables, *args, mutable=changing, **options
    )
    changed = dict(changed)
    changed.pop(steps.STEP_SIZES, None)
    state = changed.pop(CACHE, {})
    result = (result, changed) if mutable is not False else result
    return (result, state) if return_state else result

  @nn.nowrap
  def reads_packed(self, *, has_state: bool = False) -> bool:
    """Returns True if the model reads packed rows without unpacking them.

    Args:
      has_state: True for a call that continues from a state.
    """
    config = self.config
    traits = ("has_segments", "has_resets") if has_state else ("has_segments",)
    return (
      self.takes_packed
      and not (config.coupled or config.cls or config.separator)
      and config.num_inputs == 1
      and _takes_numbers(config.variant, traits)
      and not config.mixer_options().get("feat_scale")
    )

  @nn.nowrap
  def _in_rows(self, x: Any) -> Any:
    """Returns x, or for pairs [b, 2, n] the rows of all sequences, [2 b, n]."""
    if self.config.num_inputs == 1:
      return x
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    return x.reshape(-1, x.shape[-1])

  @nn.nowrap
  def _check_segments(
    self, shape: tuple[int, ...], inputs: tuple[int, ...]
  ) -> None:
    """Raises UserError for segments of another shape than the inputs."""
    config = self.config
    if config.image:
      raise UserError(
        "This model reads images, which are no rows of tokens: leave out "
        "segments."
      )
    if shape != (inputs[:-1] if config.channels else inputs):
      raise UserError(
        f"segments have the shape {shape} and the inputs {inputs}: give the "
        "number of the example of each token."
      )

  @nn.nowrap
  def _check_packed(self, packed: Packed, packs: bool, has_state: bool) -> None:
    """Raises UserError for rows that do not fit the model.

    Args:
      packed: examples of the rows.
      packs: result of `reads_packed`.
      has_state: True for a call that continues from a state.
    """
    config = self.config
    if packed.longest > config.max_len and config.positions != "none":
      raise UserError(
        f"An example of {packed.longest} tokens is longer than max_len="
        f"{config.max_len}, to which this model has positions: cut it."
      )
    if self.is_pooled and config.pool == "all_mean":
      raise UserError(
        "pool='all_mean' counts padding, which packed rows do not have: "
        "choose another pool, such as 'mean'."
      )
    if self.is_pooled:
      check_sizes(packed)
    if has_state and (self.is_pooled or not packs):
      raise UserError(
        f"The model {config.name!r} cannot continue from a state in packed "
        "rows or after resets: choose a recurrence such as 'lru' with a result "
        "for each token."
      )
    if config.real and not config.channels and not packs:
      raise UserError(
        f"The model {config.name!r} has no packed rows of real numbers: choose "
        "one whose mixer has has_segments, such as 's5' or 'transformer'."
      )

  @nn.nowrap
  def _check_step_sizes(self, sizes: Any, inputs: Any) -> jax.Array:
    """Returns the step sizes, 1 at padding, if they suit model and inputs."""
    config = self.config
    if config.coupled or not _has_step_sizes(config.variant):
      names = [n for n in MODELS if _has_step_sizes(MODELS[n])]
      coupled = " with coupled=True" if config.coupled else ""
      raise UserError(
        f"The model {config.name!r}{coupled} has no step sizes: choose one of "
        f"{', '.join(names)}, or leave out step_sizes."
      )
    shape = np.shape(inputs)
    if config.num_inputs > 1 or config.image:
      raise UserError(
        f"Inputs of the shape {shape} are pairs or images, which have no step "
        "sizes: leave out step_sizes."
      )
    return steps.check(sizes, shape[:2], self.is_token(jnp.asarray(inputs)))

  @nn.nowrap
  def _place_step_sizes(self, sizes: jax.Array, inputs: Any) -> dict[str, Any]:
    """Returns the step sizes as variables of the mixers."""
    config = self.config
    if self._closes_holes:
      mask = self.is_token(jnp.asarray(inputs))
      sizes = to_front(sizes[..., None], mask)[..., 0]
    # Prepended tokens have the size 1.
    sizes = jnp.pad(sizes, ((0, 0), (config.cls, 0)), constant_values=1)
    return steps.make_collection(sizes, config.num_layers)

  @nn.nowrap
  def _apply_unpacked(
    self,
    variables: Mapping[str, Any],
    packed: Packed,
    args: Sequence[jax.Array],
    options: Mapping[str, Any],
  ) -> Any:
    """Applies the model to each example of packed rows in a separate row."""
    parts = self.config.num_inputs

    def examples(array: Any) -> jax.Array:
      rows = unpack(packed, self._in_rows(jnp.asarray(array)))
      if self.config.channels and rows.ndim == 3:
        # Behind the end of a time series, no channel has a number.
        is_step = unpack(packed, packed.numbers) > 0
        rows = jnp.where(is_step[..., None], rows, jnp.nan)
      if parts == 1:
        return rows
      # Put the two sequences of an example next to each other.
      by_row = rows.reshape(-1, parts, packed.most, packed.longest)
      return jnp.swapaxes(by_row, 1, 2).reshape(-1, parts, packed.longest)

    inputs = [examples(array) for array in args]
    more = {
      name: unpack(packed, jnp.asarray(array))
      for name, array in options.items()
      if name in ("targets", "weights", "step_sizes") and array is not None
    }
    options = {**options, **more}
    result = self.apply(variables, *inputs, **options)
    pair: Any = result if options["mutable"] is not False else (result,)
    y, *changed = pair
    if self.is_pooled:
      y = y.reshape(-1, packed.most, *y.shape[1:])
    elif y.shape[1:2] == (packed.longest,):
      y = repack(packed, y)
    else:
      raise UserError(
        f"{type(self).__name__} returns {y.shape} for examples of "
        f"{packed.longest} tokens: a class of models with one result for an "
        "example must set is_pooled = True."
      )
    return (y, *changed) if changed else y

  @nn.nowrap
  def check_causal(self) -> None:
    """Raises UserError for a model without a state.

    It reads later tokens; or it would begin every part of a sequence with its
    class tokens, or with the first of two parts.
    """
    if not self.config.is_causal:
      raise UserError(
        f"The model {self.config.name!r} reads later tokens, too: only causal "
        "models have a state. Build or train it with mixer.causal=True, or "
        "choose a recurrence such as 'mamba'."
      )
    if self.config.cls or self.config.separator:
      raise UserError(
        "A model with class tokens or with a separator of two parts has no "
        "state: choose another pool, or separator=0."
      )

  @property
  def objective(self) -> str:
    """Objective of the model: see `ModelConfig.objective`."""
    return self.config.objective

  @property
  def orthogonal_map(self) -> str:
    """Name of the map that makes all orthogonal matrices of the model."""
    return self.config.orthogonal_map

  @nn.nowrap
  def stacks(self) -> dict[str, nn.Module]:
    """Returns an unbound block for each stack of layers, by stack name."""
    return {"encoder": bind_encoder_block(self.config)(parent=None)}

  @nn.nowrap
  def kinds(self, params: Any) -> Any:
    """Returns a tree with the kind of every parameter: see `models.kinds`."""
    return find_kinds(self.stacks(), params)

  @nn.nowrap
  def check(self) -> None:
    """Checks the options of the layers, by tracing one on its longest input.

    Raises:
      UserError: for an option of the layer out of its range; for
        memory="reversible" if the layers cannot be inverted.
    """
    config, length = self.config, self.config.encoder_len
    if config.memory == "reversible":
      _check_reversible(config)
    # Mixers of coupled layers have half the width: trace the whole layer.
    mixer = None if config.coupled else bind_mixer(config, length)
    check_mixer(config, mixer, length)

  @nn.nowrap
  def is_token(self, x: jax.Array) -> jax.Array:
    """Returns where rows of sequences have tokens, bool [b, n].

    Args:
      x: ids or numbers [b, n], or steps of time series [b, n, c].

    Raises:
      UserError: for another number of axes or channels.
    """
    channels = self.config.channels
    if x.ndim != 2 + bool(channels) or x.shape[2:] not in ((), (channels,)):
      axes = f"[b, n, {channels}]" if channels else "[b, n]"
      raise UserError(
        f"Inputs of the shape {x.shape}: this model reads sequences {axes}."
      )
    if channels:
      return ~jnp.isnan(x).all(-1)
    return jnp.ones(x.shape, bool) if self.config.real else x > 0

  @nn.nowrap
  def mask(
    self, ids: jax.Array | np.ndarray, packed: Packed | None = None
  ) -> jax.Array:
    """Returns the mask of the encoder's tokens, bool [b, n].

    With prepended tokens, the mask is [b, n + config.cls]. The two sequences of
    a pair are adjacent samples, [2 b, n].

    Args:
      ids: inputs, as in a call of the model.
      packed: examples of packed rows; their numbers are then returned, negative
        at masked tokens. None for one example a row.

    Raises:
      UserError: for inputs without tokens.
    """
    config = self.config
    if 0 in ids.shape[1:]:
      raise UserError(
        f"Inputs of the shape {ids.shape} have no tokens: give each sample at "
        "least one token, such as padding (id 0)."
      )
    if config.image:
      return jnp.ones((ids.shape[0], config.encoder_len), bool)
    # Convert arrays of NumPy: sums of a NumPy mask would be 64 bits wide.
    ids = jnp.asarray(ids)
    if config.num_inputs > 1:
      ids = ids.reshape(-1, ids.shape[-1])
    mask = self.is_token(ids)
    if packed is not None:
      return jnp.where(mask, packed.numbers, -jnp.abs(packed.numbers))
    # Prepended tokens are never padding.
    if config.cls:
      front = ((0, 0), (config.cls, 0))
      mask = jnp.pad(mask, front, constant_values=True)
    return mask

  @property
  def _closes_holes(self) -> bool:
    """True if `close_holes` moves tokens."""
    config = self.config
    is_sequence = not config.real or config.channels > 0
    return config.must_be_causal and is_sequence and not config.image

  @nn.nowrap
  def close_holes(
    self, ids: jax.Array, packed: Packed | None = None
  ) -> tuple[jax.Array, Packed | None, Callable[[jax.Array], jax.Array]]:
    """Moves the tokens of each row to the front, in models that must be causal.

    Then padding before or between tokens does not shift a position, bias,
    window or chunk of any mixer. The result at tokens equals the result for the
    tokens without padding, and the result of decoding with a cache. Rows that
    have padding only at the end do not change.

    Args:
      ids: int32 [b, n], pairs [b, 2, n], or steps of time series [b, n, c].
        Other real numbers, which have no padding, and inputs of models that may
        see later tokens are returned unchanged.
      packed: examples of packed rows; None for one example a row.

    Returns:
      The moved inputs, the examples of the moved rows, and a function that
      moves outputs [b, n, d] back.
    """
    if not self._closes_holes:
      return ids, packed, lambda y: y
    shape = jnp.shape(ids)
    ids = self._in_rows(jnp.asarray(ids))
    mask = self.is_token(ids)
    if self.config.channels:
      front = to_front(ids, mask)
      front = jnp.where(front_mask(mask)[..., None], front, jnp.nan)
    else:
      front = to_front(ids[..., None], mask)[..., 0]
    if packed is not None:
      numbers = numbers_to_front(packed.numbers, mask)
      packed = packed._replace(numbers=numbers)
    return front.reshape(shape), packed, lambda y: move_back(y, mask)

  @nn.nowrap
  def encode_tokens(
    self, inputs: jax.Array, *, train: bool, packed: Packed | None = None
  ) -> jax.Array:
    """Returns the encoder's output for each token, float32 [b, n, d].

    Call this inside a module's compact call: it makes the submodule `encoder`.

    Args:
      inputs: ids or numbers, [b, n].
      train: True in training.
      packed: examples of packed rows; None for one example a row.
    """
    encoder = bind_encoder(self.config)(name="encoder")
    inputs, packed, move_back = self.close_holes(inputs, packed)
    x = move_back(encoder(inputs, mask=self.mask(inputs, packed), train=train))
    # Leave out prepended tokens.
    return x[:, self.config.cls :].astype(jnp.float32)

  @nn.nowrap
  def example(self, length: int = 2) -> jax.Array:
    """Returns a batch of one input of zeros: `length` tokens, or one image.

    The shapes of the parameters do not depend on the length.
    """
    config = self.config
    if config.image:
      return jnp.zeros((1, *config.image))
    pair = () if config.num_inputs == 1 else (config.num_inputs,)
    dtype: Any = jnp.float32 if config.real else jnp.int32
    channels = (config.channels,) if config.channels else ()
    return jnp.zeros((1, *pair, length, *channels), dtype)


class EncoderModel(Model):
  """Encoder without a head: maps inputs to float32 [b, n, d].

  Inputs are ids [b, n], 0 at padding; or real numbers, float32 [b, n], without
  padding; or time series, float32 [b, n, c], NaN at padding; or images, float32
  [b, height, width, c]. Outputs at padding have no meaning.
  """

  takes_packed = True

  @nn.compact
  def __call__(
    self, ids: jax.Array, *, train: bool, packed: Packed | None = None
  ) -> jax.Array:
    encode = bind_encoder(self.config)(name="encoder")
    return encode(ids, mask=self.mask(ids, packed), train=train)


def build(name: str | ModelConfig, **options: Any) -> Model:
  """Returns the model with a name, or with a config.

  Args:
    name: name of the model, in `MODELS`; or a `ModelConfig`, such as the
      attribute `config` of another model.
    **options: the other fields of `ModelConfig`, or the fields of the given
      config to change.

  Raises:
    UserError: for a wrong config, see `ModelConfig`; and for options of a mixer
      that do not allow its longest input.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> sizes = {"vocab_size": 17, "max_len": 8, "num_classes": 10}
    >>> model = build("transject", d_model=16, num_layers=1, **sizes)
    >>> ids = jnp.ones((2, 8), jnp.int32)
    >>> variables = model.init(jax.random.key(0), ids, train=False)
    >>> model.apply(variables, ids, train=False).shape
    (2, 10)
  """
  if isinstance(name, ModelConfig):
    fields = {field: getattr(name, field) for field in FIELDS}
    return from_config(call("build", ModelConfig, fields | options))
  return from_config(_named_config("config.model", name, options))


def encoder(name: str, **options: Any) -> EncoderModel:
  """Returns the encoder of the model with a name, without pool and head.

  The result is a Flax module. Use it to write custom models: inside a module's
  call, `encoder(ids, train=train)` returns [b, n, d].

  Args:
    name: name of the model, in `MODELS`.
    **options: the other fields of `ModelConfig` that describe an encoder:
      d_model, num_layers, vocab_size (0 for tokens that are real numbers),
      max_len, image, patch_size, pool ("mean"; "cls" prepends a token, so that
      the output is [b, n + 1, d]), positions, dropout_rate, dtype,
      orthogonal_map, memory, coupled, mixer, mixer_defaults, block, embedding.

  Raises:
    UserError: as for `build`; and for a field of a head.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> sizes = {"vocab_size": 17, "max_len": 8}
    >>> layers = encoder("s5", d_model=16, num_layers=1, **sizes)
    >>> ids = jnp.ones((2, 8), jnp.int32)
    >>> variables = layers.init(jax.random.key(0), ids, train=False)
    >>> layers.apply(variables, ids, train=False).shape
    (2, 8, 16)
  """
  for option in options:
    # Refuse fields of the head.
    if option not in ENCODER_FIELDS:
      raise unknown("argument of encoder", option, ENCODER_FIELDS)
  config = _named_config("encoder", name, {**options, "num_classes": 1})
  model = EncoderModel(config)
  model.check()
  return model


def _named_config(
  kind: str, name: str, options: Mapping[str, Any]
) -> ModelConfig:
  """Returns the config of a model; checks its name before other fields."""
  _ = MODELS[name]
  return call(kind, ModelConfig, {**options, "name": name})


def from_config(config: ModelConfig) -> Model:
  """Returns the model with a config, and checks its layers by a trace."""
  model = CLASSES[config.objective](config)
  model.check()
  return model


def in_float32(model: Model) -> Model:
  """Returns the model with dtype float32, which takes the same parameters."""
  return type(model)(dataclasses.replace(model.config, dtype="float32"))


def shapes(model: Model) -> Any:
  """Returns the shapes of a model's parameters as a tree; computes nothing."""
  init = functools.partial(model.init, train=False)
  return jax.eval_shape(init, jax.random.key(0), model.example())["params"]


def packed_names() -> list[str]:
  """Returns the names of the models that read packed rows as they are."""
  return [
    name
    for name, variant in MODELS.items()
    if _takes_numbers(variant, ("has_segments",))
  ]


def _takes_numbers(variant: Variant, traits: Sequence[str]) -> bool:
  """Returns True if a block and its mixer take numbers instead of the mask.

  Args:
    variant: block and mixer.
    traits: attributes of the mixer, one of which must be True.
  """
  mixer = MIXERS[variant.mixer] if variant.mixer else None
  return getattr(BLOCKS[variant.block], "has_segments", False) and any(
    getattr(mixer, trait, False) for trait in traits
  )


def _has_step_sizes(variant: Variant) -> bool:
  """Returns True if the mixer of a variant has step sizes."""
  mixer = MIXERS[variant.mixer] if variant.mixer else None
  return getattr(mixer, "has_step_sizes", False) and not variant.bounded


def has_statistics(model: Model) -> bool:
  """Returns True if a model has a BatchNorm, which mixes training samples."""
  config = model.config
  return "batch" in (config.block.get("norm_type"), config.pool_norm)


def _is_running(path: Any) -> bool:
  """Returns True for the path of a running average of a norm."""
  return str(getattr(path[-1], "key", "")).startswith(RUNNING)


def size(model: Model) -> int:
  """Returns the number of stored parameters of a model.

  Running averages of norms are not counted.
  """
  return sum(
    leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(model))
    if not _is_running(path)
  )


def state_bytes(model: Model, length: int) -> int:
  """Returns the bytes of a causal model's state after `length` tokens.

  This is the size of the collection `cache` of one sequence: keys and values of
  `length` tokens for attention, and the state for recurrences. Counters of
  tokens (integers) are not counted.

  Args:
    model: causal model whose mixer has a cache (`mixer.names_with_step`).
    length: number of tokens, at most max_len.
  """
  # Caches that grow have an axis of max_len: make it a prime, which no other
  # axis has. It is hardly longer, so that nothing else depends on it.
  most = model.config.max_len + 1
  while any(most % k == 0 for k in range(2, math.isqrt(most) + 1)):
    most += 1
  sized = from_config(dataclasses.replace(model.config, max_len=most))
  apply = functools.partial(sized.apply, train=False, mutable=["cache"])
  ids = sized.example(length)
  _, changed = jax.eval_shape(apply, {"params": shapes(sized)}, ids)
  # Count floats, and of growing axes only `length` entries.
  return sum(
    math.prod(length if size == most else size for size in leaf.shape)
    * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(changed["cache"])
    if jnp.issubdtype(leaf.dtype, jnp.inexact)
  )
