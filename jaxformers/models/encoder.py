"""The encoder of every model: an embedding, and layers of one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jaxformers.models.blocks import invertible
from jaxformers.models.dropout import make_dropout
from jaxformers.models.norm import NORMS, normalize
from jaxformers.models.parallel import whole_tokens


class Encoder(nn.Module):
  """Embeds tokens and applies L blocks: ids [b, n] -> x [b, n, d].

  Every layer's output is sown as `hidden` into `intermediates`, the embedding
  as the first of them. The embedding can be moved by giving the collection
  `perturbations`, {"encoder": {"embedded": [b, n, d]}}, which is added to it.

  Attributes:
    embedding: makes the `Embedding`; called with a name, and with
      `concatenate=True` where positions have channels of their own.
    block: makes a block; called with a name and the index of the layer. Its
      class says how positions enter and whether a LayerNorm ends the encoder.
    num_layers: number of layers.
    dropout_rate: dropout after the embedding, in training.
    memory: what the backward pass reads: "stored", all activations;
      "recomputed", the layers' inputs alone; "reversible", the encoder's output
      alone, see `invertible.reversible`. (Unless the layers are injective, XLA
      on CPUs stores what it would recompute all the same.)

  Between the layers x is float32 whatever the compute type is: the small steps
  of a ReZero start would be lost in half precision.
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
    """Returns the last layer's output, after the norm that may follow it.

    Args:
      ids: [b, n].
      mask: mask of the output, so [b, n + 1] with a token in front.
      train: True in training.
    """
    blocks = [
      self.block(name=f"layer_{i}", layer=i) for i in range(self.num_layers)
    ]
    kind = blocks[0]
    # Embed the tokens; `perturb` lets an analysis move the embedding.
    embed = self.embedding(
      concatenate=kind.concatenate_positions, name="embedding"
    )
    x = whole_tokens(embed(ids, mask))
    x = make_dropout(self, self.dropout_rate, train=train)(x)
    x = self.perturb("embedded", x)
    self.sow("intermediates", "hidden", x)
    # Run injective layers as one loop. Initialization calls the modules, which
    # own the parameters.
    layers = invertible.layers_of(kind)
    if (
      layers is not None
      and self.memory in invertible.LOOPED
      and not self.is_initializing()
    ):
      x = self._looped(layers, x, mask, train)
      return self._end(kind, x, mask, train)

    def call(
      block: nn.Module, x: jax.Array, mask: jax.Array, carry: Any
    ) -> tuple[jax.Array, Any]:
      return block(x, mask=mask, carry=carry, train=train)

    if self.memory == "recomputed":
      call = nn.remat(call)
    # Apply the layers; the first one makes what is carried to the others.
    carry = None
    for block in blocks:
      x, carry = call(block, x, mask, carry)
      x = whole_tokens(x)
      self.sow("intermediates", "hidden", x)
    return self._end(kind, x, mask, train)

  def _looped(
    self,
    layers: invertible.InvertibleLayers,
    x: jax.Array,
    mask: jax.Array,
    train: bool,
  ) -> jax.Array:
    """Runs injective layers as one loop, undone or made again backwards."""
    keep_hidden = self.is_mutable_collection("intermediates")
    variables: dict[str, Any] = dict(self.variables)
    if train and self.has_rng("dropout"):
      keys = jax.random.split(self.make_rng("dropout"), self.num_layers)
      variables[invertible.KEYS] = jax.random.key_data(keys)
    outputs, shared = invertible.run_layers(
      layers,
      variables,
      x,
      mask,
      memory=self.memory,
      keep_hidden=keep_hidden,
    )
    # Sow what the modules would have sown.
    shared.sow(self)
    if outputs.hidden is not None:
      for hidden in outputs.hidden:
        self.sow("intermediates", "hidden", hidden)
      if outputs.sides is not None:
        for i in range(self.num_layers):
          side = jax.tree.map(lambda leaf, i=i: leaf[i], outputs.sides)
          self.sow("intermediates", layers.side_name, side)
    return outputs.y

  def _end(
    self, kind: nn.Module, x: jax.Array, mask: jax.Array, train: bool
  ) -> jax.Array:
    """Returns x after the norm that ends the encoder, if one does."""
    if not kind.final_norm:
      return x
    norm = NORMS[kind.norm_type](kind.norm_epsilon, name="norm")
    return normalize(norm, x, mask=mask, train=train)
