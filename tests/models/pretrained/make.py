"""Makes the small random models beside this file, and what they say.

Run with PyTorch and transformers at hand (5.23 made these):

    python tests/models/pretrained/make.py
"""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SMALL = dict(
  hidden_size=12,
  num_hidden_layers=2,
  num_attention_heads=3,
  intermediate_size=24,
  initializer_range=0.3,
)


def inputs():
  """Images [3, 16, 16, 3], and ids [3, 9] of which one is short."""
  rng = np.random.default_rng(0)
  images = rng.normal(size=(3, 16, 16, 3)).astype(np.float32)
  ids = rng.integers(1, 30, (3, 9))
  ids[1, 6:] = 0
  return images, ids


def make(seed):
  """Randomly initialised models of PyTorch, by name, and their logits."""
  import torch
  import transformers as t

  torch.manual_seed(seed)
  images, ids = inputs()
  vit = t.ViTForImageClassification(
    t.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=5)
  ).eval()
  bert = t.BertForSequenceClassification(
    t.BertConfig(
      **SMALL, vocab_size=30, max_position_embeddings=9, num_labels=3
    )
  ).eval()
  for model in (vit, bert):  # Biases and norms away from 0 and 1.
    for parameter in model.parameters():
      parameter.data += 0.1 * torch.randn_like(parameter)
  seen = torch.tensor(images.transpose(0, 3, 1, 2))
  mask = torch.tensor(ids > 0)
  with torch.no_grad():
    logits = {
      "vit": vit(pixel_values=seen).logits,
      "bert": bert(input_ids=torch.tensor(ids), attention_mask=mask).logits,
    }
  return {"vit": vit, "bert": bert}, {
    name: value.numpy().tolist() for name, value in logits.items()
  }


def main():
  """Writes a folder for each model, and logits.json."""
  found, logits = make(0)
  for name, model in found.items():
    model.save_pretrained(HERE / name)
  (HERE / "logits.json").write_text(json.dumps(logits, indent=1) + "\n")


if __name__ == "__main__":
  main()
