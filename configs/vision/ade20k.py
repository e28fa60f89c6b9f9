r"""Segmenter on ADE20K's 150 classes, as in NeuTRENO's table 2.

PATH/ADEChallengeData2016 is the folder that its authors publish. PATH/deit-tiny
is an encoder trained on ImageNet, by configs/vision/imagenet.py or from Hugging
Face's hub:

jaxformers train vision/ade20k:model=neutreno \
    --workdir runs/ade20k --config.pretrained=PATH/deit-tiny \
    --config.model.block.norm_epsilon=1e-5 \
    --config.task.archive=PATH/ADEChallengeData2016

A folder of Hugging Face replaces the sizes below. The epsilon in the command
keeps Segmenter's value. Differs from Segmenter: positions are interpolated by
cubics, and not linearly.

The paper reports a mean IoU of 35.72 (single scale) and 36.68 (multi-scale) for
softmax attention, and 37.24 and 38.06 for NeuTRENO (model=neutreno,
mixer.fidelity=0.6 in encoder and decoder). These are scores of sliding windows,
which `jaxformers segmentation` computes. A run itself prints only the
score on the centre of each image. The training of 64 epochs of 512 x 512 pixels
needs an accelerator; we have not run it.

Arguments: model=NAME, protocol=jaxformers|paper, deit=tiny|small|base, seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import vision

# The protocol jaxformers holds out 1,000 scenes for validation.
NUM_TRAIN = {"jaxformers": 19_210, "paper": 20_210}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transformer", protocol="jaxformers", deit="tiny", seed=0
  )
  protocol = c.choose("protocol", arg.protocol, NUM_TRAIN)
  # Steps of an epoch in batches of 8, rounded down.
  epoch = NUM_TRAIN[protocol] // 8
  # Take DeiT's encoder, with Segmenter's decoder of two layers.
  models = vision.model_fields(arg.model, patch_size=16, deit=arg.deit)
  for model in models.values():
    model.pop("head_init_std", None)  # Only classifiers have it.
    model["head"] = {
      "num_layers": 2,
      "dropout_rate": 0.1,
      "mixer_defaults": {"dropout_rate": 0.1},
    }
    if "norm_epsilon" in model.get("block", {}):
      model["block"]["norm_epsilon"] = 1e-5  # As in Segmenter; DeiT has 1e-6.
  return c.base(
    seed=arg.seed,
    task={
      "name": "ade20k",
      "protocol": protocol,
      "archive": "",
      "window": 512,
      "num_train": 20_210,
      "num_test": 2_000,
    },
    **models,
    optimizer={"name": "sgd", "momentum": 0.9},
    schedule={
      "name": "polynomial",
      "learning_rate": 1e-3,
      "power": 0.9,
      "end": 1e-5,
    },
    batch_size=8,
    eval_batch_size=8,
    select="mean_iou",
    total_steps=64 * epoch,
    log_steps=50,
    eval_steps=2 * epoch,
    checkpoint_steps=2 * epoch,
  )
