r"""CIFAR-100 in patches of 4 x 4, a hundred classes: DeiT-tiny.

Downloads through tensorflow-datasets, or takes a local archive:

jaxformers train vision/cifar100:model=neutreno \
    --workdir runs/cifar100 --config.task.archive=PATH/cifar-100-binary.tar.gz

size=paper is DeiT's training over 300 epochs. It needs an accelerator, and we
have not run it. size=tiny is the same as in configs/vision/cifar10.py.

Arguments: model=NAME, one that jaxformers models lists;
size=paper|tiny, seed=0.
"""

from jaxformers.recipes import vision


def get_config(arg=None):
  return vision.cifar("cifar100", arg)
