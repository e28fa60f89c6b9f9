"""Images: sizes, augmentation and training of DeiT (Touvron et al. 2021)."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxformers.config import base, parse_arg
from jaxformers.foundations.registry import choose
from jaxformers.recipes import shared
from jaxformers.recipes.traits import find_traits

# Width and number of heads of each DeiT.
DEITS = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}


def augmentation(crop: str, strength: str = "deit") -> dict[str, Any]:
  """Returns the augmentation of training images, for `data.images.augment`.

  Args:
    crop: "pad" for images of 32 x 32, "resized" for larger images.
    strength: "deit" for all that is in DeiT's table 9, or "light" for only
      crops and flips.
  """
  deit = choose("strength", strength, ("deit", "light")) == "deit"
  return {
    "crop": crop,
    "flip": True,
    "randaugment": 9.0 if deit else 0.0,
    # DeiT's code (timm) leaves out colour jitter if RandAugment is used.
    "color_jitter": 0.0,
    "erase": 0.25 if deit else 0.0,
    "mixup": 0.8 if deit else 0.0,
    "cutmix": 1.0 if deit else 0.0,
    "repeats": 3 if deit else 1,
  }


def model_fields(
  name: str, *, patch_size: int, deit: str = "tiny", tiny: bool = False
) -> dict[str, Any]:
  """Returns a model at the sizes of DeiT (Touvron et al. 2021, table 1).

  The model has twelve layers, a class token, learned positions, feed-forwards
  of 4 d and drop path 0.1. Kernels (also in a classifier's head), the
  class token and positions are drawn from a normal of deviation 0.02. TransJect
  has other layers, positions and head.

  Args:
    name: name of the model.
    patch_size: side of the patches: 16 for 224 x 224 pixels, 4 for 32 x 32.
    deit: "tiny", "small" or "base".
    tiny: True for twelve layers of d = 64 with two heads, for two cores;
      without drop path, and with the default initialisation of the head.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  # Find the width and the number of heads.
  d_model, num_heads = DEITS[choose("deit", deit, DEITS)]
  if tiny:
    d_model, num_heads = 64, 2
  # Fields of all models.
  common = {
    "d_model": d_model,
    "num_layers": 12,
    "patch_size": patch_size,
    "positions": "learned",
    "dropout_rate": 0.0,
    "pool": "cls",
    "pool_norm": "",
    "head_dim": 0,
    **shared.COMMON,
  }

  def make_transformer(name: str) -> dict[str, Any]:
    return {
      "name": name,
      **common,
      # A class token before a causal mixer would see no other token.
      "pool": "mean" if find_traits(name).is_causal else common["pool"],
      # 0 stands for the default initialisation of the head.
      "head_init_std": 0.0 if tiny else 0.02,
      "mixer": {},
      "mixer_defaults": {"num_heads": num_heads, "init_std": 0.02},
      "block": shared.block(
        name,
        mlp_dim=(2 if tiny else 4) * d_model,
        dropout_rate=0.0,
        drop_path_rate=0.0 if tiny else 0.1,
        norm_epsilon=1e-6,
        init_std=0.02,
      ),
    }

  # TransJect has experts instead of heads.
  transject = shared.transject(
    common, 2 if tiny else 4, orthogonal_map="cayley"
  )
  return shared.with_reference(name, make_transformer, transject)


def deit_schedule(
  examples: int, *, batch_size: int, epochs: int, rate: float = 5e-4
) -> dict[str, Any]:
  """Returns DeiT's training: AdamW, five epochs up, then a cosine down.

  Weight decay is 0.05, label smoothing 0.1, and the learning rate `rate` times
  batch_size / 512. Repeated augmentation does not lengthen an epoch. Differs
  from DeiT: the cosine ends at 0, not at 1e-5, and the warm-up starts at 0.

  Args:
    examples: number of training examples.
    batch_size: examples per step over all devices; 1024 in the paper.
    epochs: number of epochs of the run; 300 in the paper.
    rate: learning rate for a batch of 512.

  Returns:
    Fields for `base`.
  """
  # Steps of an epoch, rounded up.
  epoch = -(-examples // batch_size)
  return {
    "optimizer": {"name": "adam", "b2": 0.999, "weight_decay": 0.05},
    "schedule": {
      "name": "cosine",
      "learning_rate": rate * batch_size / 512,
      # A run of five epochs or fewer leaves its last epoch for the cosine.
      "warmup_steps": min(5, epochs - 1) * epoch,
    },
    "batch_size": batch_size,
    "eval_batch_size": 100,
    "label_smoothing": 0.1,
    "total_steps": epochs * epoch,
    "log_steps": 100,
    "eval_steps": epoch,
    "checkpoint_steps": epoch,
  }


def cifar(task: str, arg: str | None) -> ConfigDict:
  """Returns the config of a small DeiT on CIFAR.

  Args:
    task: "cifar10" or "cifar100".
    arg: argument of the config file: model=NAME, size=paper|tiny, seed=0.
  """
  args = parse_arg(arg, model="transformer", size="paper", seed=0)
  tiny = shared.is_tiny(args.size)
  # Train on 45,000 images.
  schedule = deit_schedule(45_000, batch_size=1_024, epochs=300)
  if tiny:
    # Train for ten to fourteen minutes on two cores, 703 steps per epoch.
    schedule = deit_schedule(45_000, batch_size=64, epochs=4)
    schedule["schedule"] |= {"learning_rate": 2e-3, "warmup_steps": 200}
    steps = {"total_steps": 2_816, "eval_steps": 703, "checkpoint_steps": 703}
    schedule |= {"label_smoothing": 0.0} | steps
  return base(
    seed=args.seed,
    task={
      "name": task,
      "protocol": "jaxformers",
      "archive": "",
      "augment": augmentation("pad", "light" if tiny else "deit"),
    },
    **model_fields(args.model, patch_size=4, tiny=tiny),
    **schedule,
  )
