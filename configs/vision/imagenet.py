r"""ImageNet-1k with DeiT's training, as in NeuTRENO's table 1.

PATH/imagenet2012/5.1.0 is a directory that tensorflow-datasets has prepared
with file_format="array_record", or a folder with train/CLASS/ and val/CLASS/:

jaxformers train vision/imagenet:model=neutreno \
    --workdir runs/imagenet --config.task.archive=PATH/imagenet2012/5.1.0

The paper reports top-1 72.17 and top-5 91.02 for DeiT-tiny, and 73.01 and 91.56
for NeuTRENO (model=neutreno, mixer.fidelity=0.6). For DeiT-small it reports
top-1 79.97, and 80.68 for NeuTRENO (table 7). To adapt a trained DeiT in a
third of the epochs, set epochs=100 and --config.pretrained=PATH. For FeatScale,
set --config.model.mixer.feat_scale=true. The 300 epochs need an accelerator; we
have not run them. DeiT keeps an average of the parameters but never scores it,
so there is none here: ema_decay=0.

Arguments: model=NAME, deit=tiny|small|base, protocol=jaxformers|paper,
epochs=300, seed=0. Under "paper" the authors' validation split selects the
checkpoint, as for the numbers above.
"""

from jaxformers import config as c
from jaxformers.recipes import vision

# Images of the training split; jaxformers holds out 10,009 for validation.
NUM_TRAIN = {"jaxformers": 1_271_158, "paper": 1_281_167}


def get_config(arg=None):
  arg = c.parse_arg(
    arg,
    model="transformer",
    deit="tiny",
    protocol="jaxformers",
    epochs=300,
    seed=0,
  )
  protocol = c.choose("protocol", arg.protocol, NUM_TRAIN)
  return c.base(
    seed=arg.seed,
    task={
      "name": "imagenet2012",
      "protocol": protocol,
      "archive": "",
      "size": 224,
      "augment": vision.augmentation("resized"),
    },
    **vision.model_fields(arg.model, patch_size=16, deit=arg.deit),
    **vision.deit_schedule(
      NUM_TRAIN[protocol], batch_size=1_024, epochs=arg.epochs
    ),
  )
