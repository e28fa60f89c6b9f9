"""LRA Image: CIFAR-10 as sequences of 1,024 grey pixels, ten classes."""

from __future__ import annotations

from jaxformers.data.engine import encodings
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.sets import cifar10
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines
from jaxformers.tasks.pixels import PixelProtocol
from jaxformers.tasks.splits import slices, torch_random
from jaxformers.tasks.task import TASKS, Task

# All protocols have 45,000 / 5,000 / 10,000 images. s4 normalises pixels:
# (x / 255 - 122.6 / 255) / (61 / 255).
PROTOCOLS = {
  "jaxformers": PixelProtocol(),
  "lra": PixelProtocol(pad_is_zero=True),
  "skyformer": PixelProtocol(pad_is_zero=True),
  "s4": PixelProtocol(scale=(122.6, 61.0), torch_split=True),
}
# Numbers in TransJect's paper use Skyformer's protocol.
PROTOCOLS["paper"] = PROTOCOLS["skyformer"]


@TASKS.register("image")
def load_image(
  *, data_dir: str = "", protocol: str = "jaxformers", archive: str = ""
) -> Task:
  """Opens CIFAR-10 as grey pixels; downloads it on first use if necessary.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": ids are pixel values + 1. "lra", "skyformer" and
      "paper": ids are pixel values with TensorFlow's grey, and 0 is padding.
      "s4": inputs are real numbers.
    archive: path of cifar-10-binary.tar.gz, or of an archive or folder of
      {train,test}/CLASS/*.{png,jpg}; "" searches for cifar-10-binary.tar.gz,
      and else downloads it.
  """
  chosen = PROTOCOLS[choose("protocol of image", protocol, PROTOCOLS)]
  # Convert with TensorFlow's grey for LRA and Skyformer, else with Pillow's.
  encoding = encodings.grey("grey", encodings.grey_itu)
  if chosen.pad_is_zero:
    encoding = encodings.grey("grey-tf", encodings.grey_tf)
  splits, info = open_splits(cifar10.SOURCE, encoding, data_dir, archive)
  # Hold out a tenth of train for validation.
  if chosen.torch_split:
    splits |= torch_random(splits["train"], {"validation": 0.1})
  else:
    splits |= slices(splits["train"], {"train": 90, "validation": 10})
  # Apply the tokens and the vocabulary of the protocol.
  return Task(
    name="image",
    protocol=protocol,
    splits=chosen.apply(splits),
    vocabulary=chosen.vocabulary,
    max_len=1_024,
    num_classes=len(cifar10.LABELS),
    classes=cifar10.LABELS,
    trivial=baselines.PIXELS,
    info=info,
  )
