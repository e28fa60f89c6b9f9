"""Makes the small random models in this folder, and their logits.

The script needs PyTorch and transformers (5.24 made these models):

    python tests/models/pretrained/make.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers

HERE = Path(__file__).parent
SMALL = dict(
  hidden_size=12,
  num_hidden_layers=2,
  num_attention_heads=3,
  intermediate_size=24,
  initializer_range=0.3,
)


def inputs():
  """Returns images [3, 16, 16, 3], and ids [3, 9] with one short row."""
  rng = np.random.default_rng(0)
  images = rng.normal(size=(3, 16, 16, 3)).astype(np.float32)
  ids = rng.integers(1, 30, (3, 9))
  ids[1, 6:] = 0
  return images, ids


def pairs():
  """Returns ids [3, 9] with separators, 29, and the segment of each."""
  _, ids = inputs()
  ids[:, 3] = 29
  ends = (ids == 29).astype(int)
  return ids, (np.cumsum(ends, 1) - ends > 0).astype(int)


def tokenizer():
  """Returns a tokenizer of 280 byte pairs, in the form of GPT-2's."""
  trained = tokenizers.Tokenizer(tokenizers.models.BPE())
  trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  trained.decoder = tokenizers.decoders.ByteLevel()
  trained.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=279, initial_alphabet=alphabet, show_progress=False
  )
  text = "the film and the book, the actor and the story of the film " * 3
  trained.train_from_iterator([text], trainer)
  # GPT-2 has this token last.
  trained.add_special_tokens(["<|endoftext|>"])
  return trained


def make(seed):
  """Returns randomly initialised PyTorch models by name, and their logits."""
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
  # Move biases and norms away from 0 and 1.
  for model in (vit, bert):
    for parameter in model.parameters():
      parameter.data += 0.1 * torch.randn_like(parameter)
  size = tokenizer().get_vocab_size()
  gpt2 = t.GPT2LMHeadModel(
    t.GPT2Config(
      n_embd=12,
      n_layer=2,
      n_head=3,
      vocab_size=size,
      n_positions=16,
      initializer_range=0.3,
      bos_token_id=size - 1,
      eos_token_id=size - 1,
    )
  ).eval()
  for parameter in gpt2.parameters():
    parameter.data += 0.1 * torch.randn_like(parameter)
  seen = torch.tensor(images.transpose(0, 3, 1, 2))
  mask = torch.tensor(ids > 0)
  ids_of_pairs, segments = map(torch.tensor, pairs())
  with torch.no_grad():
    states = bert.bert(
      input_ids=ids_of_pairs,
      attention_mask=ids_of_pairs > 0,
      token_type_ids=segments,
    )
    texts = gpt2(input_ids=torch.tensor(ids), output_hidden_states=True)
    logits = {
      # Two channels stand for the logits of a span.
      "pairs": states.last_hidden_state[..., :2],
      "vit": vit(pixel_values=seen).logits,
      "bert": bert(input_ids=torch.tensor(ids), attention_mask=mask).logits,
      "gpt2": texts.logits.log_softmax(-1)[..., :5],
      # The last hidden states of transformers are those after the last norm.
      "gpt2_states": torch.stack(texts.hidden_states)[:, 0],
    }
  return {"vit": vit, "bert": bert, "gpt2": gpt2}, {
    name: value.numpy().tolist() for name, value in logits.items()
  }


DERIVED = ("decoder", "no_qkv_bias", "relu", "deit", "teacher")


def derive(name, folder):
  """Writes a variant of a model in this folder, without using PyTorch."""
  kind = "bert" if name == "decoder" else "vit"
  config = json.loads((HERE / kind / "config.json").read_text())
  tensors = safetensors.numpy.load_file(HERE / kind / "model.safetensors")
  if name == "decoder":
    config["is_decoder"] = True
  elif name == "relu":
    config["hidden_act"] = "relu"
  elif name == "no_qkv_bias":
    config["qkv_bias"] = False
    left_out = tuple(
      f"attention.{part}.bias" for part in ("query", "key", "value")
    )
    tensors = {k: v for k, v in tensors.items() if not k.endswith(left_out)}
  else:
    is_teacher = name == "teacher"
    architecture = "DeiTForImageClassification" + "WithTeacher" * is_teacher
    config |= {"model_type": "deit", "architectures": [architecture]}
    tensors = {k.replace("vit.", "deit."): v for k, v in tensors.items()}
    table = tensors["deit.embeddings.position_embeddings"]
    token = np.linspace(-1, 1, 12, dtype=np.float32)[None, None]
    tensors["deit.embeddings.distillation_token"] = token
    tensors["deit.embeddings.position_embeddings"] = np.concatenate(
      [table[:, :1], -table[:, 1:2], table[:, 1:]], 1
    )
    if is_teacher:
      for part in ("weight", "bias"):
        value = tensors.pop(f"classifier.{part}")
        tensors[f"cls_classifier.{part}"] = value
        tensors[f"distillation_classifier.{part}"] = value[::-1] + 0.5
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(config))
  tensors = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
  path = folder / "model.safetensors"
  safetensors.numpy.save_file(tensors, path, {"format": "pt"})
  return folder


def derived_logits(folder):
  """Writes all variants to a folder; returns transformers' logits of each."""
  import torch
  import transformers as t

  images, ids = inputs()
  logits = {}
  for name in DERIVED:
    path = derive(name, folder / name)
    config = json.loads((path / "config.json").read_text())
    model = getattr(t, config["architectures"][0]).from_pretrained(path).eval()
    with torch.no_grad():
      if name == "decoder":
        mask = torch.tensor(ids > 0)
        out = model(input_ids=torch.tensor(ids), attention_mask=mask)
      else:
        out = model(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2)))
    logits[name] = out.logits.numpy().tolist()
  return logits


def main():
  """Writes a folder for each model, and logits.json."""
  found, logits = make(0)
  for name, model in found.items():
    model.save_pretrained(HERE / name)
  tokenizer().save(str(HERE / "gpt2" / "tokenizer.json"), pretty=False)
  with tempfile.TemporaryDirectory() as folder:
    logits |= derived_logits(Path(folder))
  (HERE / "logits.json").write_text(json.dumps(logits, indent=1) + "\n")


if __name__ == "__main__":
  main()
