"""Language models: decoders in the form of a Transformer, with any mixer."""

from __future__ import annotations

from typing import Any

from jaxformers.recipes import shared


def task(**fields: Any) -> dict[str, Any]:
  """Returns the section `task` of a language model, for `base`.

  Args:
    **fields: `tokens`, `vocab_size` and `max_len`.
  """
  common = {"name": "language", "protocol": "jaxformers", "archive": ""}
  more = {"vocabulary": "", "stride": 0, "eval_windows": 0}
  return {**common, **fields, **more}


def model_fields(
  name: str,
  *,
  d_model: int,
  num_layers: int,
  num_heads: int,
  mlp_dim: int,
  positions: str = "learned",
) -> dict[str, Any]:
  """Returns a decoder-only model with dropout 0.1, and its reference.

  The softmax shares the embedding, which has a standard deviation of d^-1/2 and
  is multiplied by sqrt(d) where tokens are read ("Attention is all you need",
  section 3.4). With a deviation of 0.02, tokens could not be distinguished once
  sinusoids of amplitude 1 are added to them: such a model stays at the
  frequencies of single tokens.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  # Tie the softmax to the embedding.
  common = {
    "d_model": d_model,
    "num_layers": num_layers,
    "positions": positions,
    "dropout_rate": 0.1,
    **shared.COMMON,
    "embedding": {"scale": d_model**0.5, "init_std": d_model**-0.5},
    "head": {"tied": True},
  }
  # The reference is a Transformer with the sizes of the model.
  return {
    field: shared.transformer(model, common, num_heads, mlp_dim)
    for field, model in (("model", name), ("reference", "transformer"))
  }
