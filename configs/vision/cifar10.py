r"""CIFAR-10 in patches of 4 x 4, ten classes: a small DeiT.

Downloads through tensorflow-datasets, or takes a local archive:

python -m jaxformers.main --config configs/vision/cifar10.py:model=neutreno \
    --workdir runs/cifar10 --config.task.archive=PATH/cifar-10-binary.tar.gz

NeuTRENO's table 8 gives 75.89 for kernel attention of 12 layers and 76.75 with
its term, and says no more of the setting; size=paper is DeiT-tiny's, with the
training of DeiT over 300 epochs. At size=tiny: docs/results.md.

Arguments: model=NAME, one of those that python -m jaxformers.models lists;
size=paper|tiny, seed=0. Table 8's are model=kernelized with
--config.model.mixer.normalize=true and --config.model.mixer.fidelity=0.6.
"""

from jaxformers import config as c


def get_config(arg=None):
  arg = c.parse_arg(arg, model="transformer", size="paper", seed=0)
  tiny = c.is_tiny(arg.size)
  config = c.base(
    seed=arg.seed,
    task={
      "name": "cifar10",
      "protocol": "jaxformers",
      "archive": "",
      "augment": c.augmentation("pad"),
    },
    **c.vision_models(arg.model, patch_size=4),
    **c.deit_schedule(45_000, batch_size=1_024, epochs=300),
  )
  if tiny:
    config.task.augment.update(c.augmentation("pad", strength="light"))
    config.update(c.vision_models(arg.model, patch_size=4, tiny=True))
    config.update(c.deit_schedule(45_000, batch_size=64, epochs=4))
    config.schedule.update(learning_rate=2e-3, warmup_steps=200)
    config.update(label_smoothing=0.0, eval_steps=703, checkpoint_steps=703)
  return config
