"""Encoder of every model: an embedding, and a stack of equal blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jaxformers.models.blocks import invertible
from jaxformers.models.blocks.streams import expand, reduce
from jaxformers.models.cache import is_decoding
from jaxformers.models.dropout import make_dropout
from jaxformers.models.norm import NORMS, normalize


class Encoder(nn.Module):
  """Embeds tokens and applies L blocks: ids [b, n] -> x [b, n, d].

  The embedding and the output of every layer are sown as `hidden` into
  `intermediates`, in this order. To perturb the embedding, pass the collection
  `perturbations`, {"encoder": {"embedded": [b, n, d]}}, which is added to the
  embedding.

  Attributes:
    embedding: factory of the `Embedding`; called with a name, and with
      `concatenate=True` if positions have separate channels.
    block: factory of a block; called with a name and the index of the layer.
      The class of the block has the attributes `concatenate_positions` and
      `final_norm`, which the encoder follows.
    num_layers: number of layers L.
    dropout_rate: dropout rate after the embedding, in training.
    memory: data that the forward pass stores for the backward pass. "stored":
      all activations. "recomputed": only the inputs of the layers.
      "reversible": only the output of the encoder, see `invertible.reversible`.
      (XLA on CPUs ignores "recomputed" and stores all activations, unless the
      layers are injective.)

  Between the layers, x is float32 for every compute type. In half precision the
  small first steps of ReZero layers would be lost.
  """

  embedding: Callable[..., nn.Module]
  block: Callable[..., nn.Module]
  num_layers: int
  dropout_rate: float
  memory: str = "stored"

  @nn.compact
  def __call__(
    self, ids: jax.Array, *, mask: jax.Array, train: bool
  ) -> jax.Array:
    """Returns the output of the last layer, after the final norm if it exists.

    Args:
      ids: inputs, [b, n].
      mask: mask of the output: [b, n + 1] if one token is prepended.
      train: True in training.
    """
    blocks = [
      self.block(name=f"layer_{i}", layer=i) for i in range(self.num_layers)
    ]
    kind = blocks[0]
    # Embed the tokens. `perturb` adds the collection `perturbations`, if any.
    embed = self.embedding(
      concatenate=kind.concatenate_positions, name="embedding"
    )
    x = embed(ids, mask)
    x = make_dropout(self, self.dropout_rate, train=train)(x)
    x = self.perturb("embedded", x)
    self.sow("intermediates", "hidden", x)
    # Run injective layers as one loop, except at initialization and with a
    # cache: the modules must be called to create parameters and states.
    layers = invertible.layers_of(kind)
    if (
      layers is not None
      and self.memory in invertible.LOOPED
      and not self.is_initializing()
      and not is_decoding(self)
    ):
      x = self._looped(layers, x, mask, train)
      return self._end(kind, x, mask, train)

    def call(
      block: nn.Module, x: jax.Array, mask: jax.Array, carry: Any
    ) -> tuple[jax.Array, Any]:
      return block(x, mask=mask, carry=carry, train=train)

    if self.memory == "recomputed":
      call = nn.remat(call)
    # Apply the layers. The first layer gets no carry.
    carry = None
    streams = getattr(kind, "streams", 1)
    x = expand(x, streams)
    for block in blocks:
      x, carry = call(block, x, mask, carry)
      self.sow("intermediates", "hidden", reduce(x, streams))
    return self._end(kind, reduce(x, streams), mask, train)

  def _looped(
    self,
    layers: invertible.InvertibleLayers,
    x: jax.Array,
    mask: jax.Array,
    train: bool,
  ) -> jax.Array:
    """Runs injective layers as one loop that stores no activations.

    The backward pass recomputes or inverts the layers: see `run_layers`.
    """
    # Give each layer a random key for dropout.
    keep_hidden = self.is_mutable_collection("intermediates")
    variables: dict[str, Any] = dict(self.variables)
    if train and self.has_rng("dropout"):
      keys = jax.random.split(self.make_rng("dropout"), self.num_layers)
      variables[invertible.KEYS] = jax.random.key_data(keys)
    # Run the loop; it returns all hidden states only if they are sown.
    outputs, shared = invertible.run_layers(
      layers,
      variables,
      x,
      mask,
      memory=self.memory,
      keep_hidden=keep_hidden,
    )
    # Sow the values that the modules would have sown.
    shared.sow(self)
    if outputs.hidden is not None:
      for hidden in outputs.hidden:
        self.sow("intermediates", "hidden", hidden)
      # Sow the side output of each layer.
      if outputs.sides is not None:
        for i in range(self.num_layers):
          side = jax.tree.map(lambda leaf, i=i: leaf[i], outputs.sides)
          self.sow("intermediates", layers.side_name, side)
    return outputs.y

  def _end(
    self, kind: nn.Module, x: jax.Array, mask: jax.Array, train: bool
  ) -> jax.Array:
    """Returns x after the final norm, or x if the block has none."""
    if not kind.final_norm:
      return x
    norm = NORMS[kind.norm_type](kind.norm_epsilon, name="norm")
    return normalize(norm, x, mask=mask, train=train)
