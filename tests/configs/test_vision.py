"""Configs of images build the published sizes."""

import math

import numpy as np
import pytest

from jaxformers import config as c
from jaxformers import models, tasks
from jaxformers.data.images.augment import Augment
from jaxformers.data.sets import ade20k
from jaxformers.models.mixer import MIXERS
from jaxformers.tasks import segmentation
from tests import initial, optimizers
from tests.marks import slow_except

SIZES = {
  "cifar10": dict(num_classes=10, image=(32, 32, 3)),
  "cifar100": dict(num_classes=100, image=(32, 32, 3)),
  "imagenet": dict(num_classes=1_000, image=(224, 224, 3)),
  "ade20k": dict(
    num_classes=150, image=(512, 512, 3), objective="segmentation"
  ),
}
GOLDEN = {
  "imagenet.py": 5_717_416,
  "imagenet.py:deit=small,model=neutreno": 22_050_664,
  "cifar10.py": 5_362_762,
  "cifar10.py:size=tiny,model=neutreno": 409_802,
  "cifar100.py": 5_380_132,
  "ade20k.py:model=neutreno": 6_713_388,
}


@pytest.mark.parametrize(
  "spec", slow_except(("cifar10.py", "imagenet.py"), sorted(GOLDEN))
)
@pytest.mark.slow
def test_vision_configs_have_the_published_parameters(spec):
  config = c.plain(c.load(f"configs/vision/{spec}"))
  sizes = {"vocab_size": 0, "max_len": 256} | SIZES[spec.partition(".py")[0]]
  model = models.build(**config["model"], **sizes)
  assert models.size(model) == GOLDEN[spec]
  assert models.build(**config["reference"], **sizes)
  optimizers.build(
    config["optimizer"], config["schedule"], config["total_steps"]
  )
  Augment(**config["task"].get("augment", {}))
  accepted = tasks.TASKS[config["task"].pop("name")].__kwdefaults__
  assert config["task"].keys() == accepted.keys() - {"data_dir"}


@pytest.mark.parametrize("config", ["cifar10", "imagenet"])
@pytest.mark.parametrize("name", ["transformer_rezero", "capped_transformer"])
def test_vision_configs_start_models_without_norms(config, name):
  model = c.plain(c.load(f"configs/vision/{config}.py:model={name}"))["model"]
  assert models.shapes(
    models.build(**model, vocab_size=0, max_len=256, **SIZES[config])
  )


def test_imagenet_config_has_the_training_of_deit():
  config = c.load("configs/vision/imagenet.py:protocol=paper")
  epoch = math.ceil(1_281_167 / 1_024)
  assert (config.total_steps, config.eval_steps) == (300 * epoch, epoch)
  assert config.schedule.warmup_steps == 5 * epoch
  assert config.schedule.learning_rate == pytest.approx(1e-3)
  assert (config.optimizer.weight_decay, config.label_smoothing) == (0.05, 0.1)
  how = config.task.augment
  assert (how.randaugment, how.mixup, how.cutmix) == (9.0, 0.8, 1.0)
  assert (how.erase, how.repeats, how.crop) == (0.25, 3, "resized")
  assert config.model.block.drop_path_rate == 0.1


@pytest.mark.parametrize("name", ["transformer", "neutreno"])
@pytest.mark.slow
def test_imagenet_config_starts_with_a_deviation_of_002(name):
  """Initial values are those of timm, except for patches."""
  config = c.plain(c.load(f"configs/vision/imagenet.py:model={name}"))
  config["model"]["num_layers"] = 1
  sizes = dict(vocab_size=0, max_len=0) | SIZES["imagenet"]
  model = models.build(**config["model"], **sizes)
  leaves = c.flatten(initial.params(model, model.example()))
  for path, leaf in leaves.items():
    if "patches" in path:
      continue
    if path.endswith(("kernel", "positions", "cls")):
      np.testing.assert_allclose(leaf.std(), 0.02, rtol=0.15, err_msg=path)
    else:
      assert path.endswith("bias") or "norm" in path
      assert (leaf == float(path.endswith("scale"))).all()


def test_vision_head_init_std_is_002_but_at_size_tiny():
  for spec in ("cifar10.py", "cifar100.py", "imagenet.py"):
    config = c.load(f"configs/vision/{spec}")
    assert config.model.head_init_std == config.reference.head_init_std == 0.02
  # What docs/results.md has was measured with the default.
  assert c.load("configs/vision/cifar10.py:size=tiny").model.head_init_std == 0


@pytest.mark.parametrize(
  ("protocol", "held_out"),
  [("jaxformers", segmentation.HELD_OUT), ("paper", 0)],
)
def test_ade20k_config_trains_for_64_epochs(protocol, held_out):
  config = c.load(f"configs/vision/ade20k.py:protocol={protocol}")
  examples = ade20k.COUNTS["train"] - held_out
  seen = config.total_steps * config.batch_size
  assert seen / examples == pytest.approx(64, abs=0.03)
  assert config.total_steps == 32 * config.eval_steps
  assert config.model.block.norm_epsilon == 1e-5
  with pytest.raises(ValueError, match="protocol.*'theirs'.*jaxformers, paper"):
    c.load("configs/vision/ade20k.py:protocol=theirs")


@pytest.mark.parametrize(
  "name",
  slow_except(
    ("neutreno",),
    sorted(models.MODELS),
    ("neutreno", "performer", "transject"),
  ),
)
def test_ade20k_config_drops_attention_weights_in_the_decoder(name):
  """Strudel et al. 2021, segm/config.yml: one dropout of 0.1 for all of it."""
  config = c.plain(c.load(f"configs/vision/ade20k.py:model={name}"))
  sizes = dict(vocab_size=0, max_len=0) | SIZES["ade20k"]
  for part, built in (("model", name), ("reference", "transformer")):
    model = models.build(**config[part], **sizes)
    mixer = models.MODELS[built].mixer
    has_weights = "dropout_rate" in getattr(MIXERS[mixer], "options", ())
    rates = [
      getattr(block.mixer(parent=None), "dropout_rate", 0.0)
      for block in model.stacks().values()
    ]
    assert rates == [0.0, 0.1 if has_weights else 0.0]
