"""Language models: decoders of the Transformer's form, of any mixer."""

from __future__ import annotations

from typing import Any

from jaxformers.recipes import shared


def task(**fields: Any) -> dict[str, Any]:
  """Returns the fields of a task of text, for `base`.

  Args:
    **fields: `tokens`, `vocab_size` and `max_len`.
  """
  common = {"name": "language", "protocol": "jaxformers", "archive": ""}
  return {**common, **fields, "stride": 0, "eval_windows": 0}


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

  The softmax shares the embedding, of deviation d^-1/2 and multiplied by
  sqrt(d) where it is read ("Attention is all you need", section 3.4). Vectors
  of deviation 0.02 cannot be told apart when sinusoids of amplitude 1 are added
  to them: such a model stays at the frequencies of single tokens.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  common = {
    "d_model": d_model,
    "num_layers": num_layers,
    "positions": positions,
    "dropout_rate": 0.1,
    **shared.COMMON,
    "embedding": {"scale": d_model**0.5, "init_std": d_model**-0.5},
    "head": {"tied": True},
  }
  # The reference is the Transformer at the sizes of the model.
  return {
    field: shared.transformer(model, common, num_heads, mlp_dim)
    for field, model in (("model", name), ("reference", "transformer"))
  }
