r"""CIFAR-10 in patches of 4 x 4, ten classes: a small DeiT.

Downloads through tensorflow-datasets, or takes a local archive:

jaxformers train vision/cifar10:model=neutreno \
    --workdir runs/cifar10 --config.task.archive=PATH/cifar-10-binary.tar.gz

NeuTRENO's table 8 reports 75.89 for kernel attention with 12 layers, and 76.75
with NeuTRENO's term; it does not give the rest of the setting. size=paper is
DeiT-tiny with DeiT's training over 300 epochs. See docs/results.md for
size=tiny.

Arguments: model=NAME, one that jaxformers models lists;
size=paper|tiny, seed=0. Table 8's models are model=kernelized with
--config.model.mixer.normalize=true and --config.model.mixer.fidelity=0.6.
"""

from jaxformers.recipes import vision


def get_config(arg=None):
  return vision.cifar("cifar10", arg)
