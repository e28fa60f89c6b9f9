r"""LRA Image: CIFAR-10 as a sequence of 1024 grey pixels, ten classes.

Downloads through tensorflow-datasets, or takes a local archive:

python -m jaxformers.main --config configs/lra/image.py --workdir runs/image \
    --config.task.archive=PATH/cifar-10-binary.tar.gz

The paper gives 38.9 for TransJect and 40.6 for the Transformer; a linear
classifier on the pixels has 30.9. At size=tiny: 31.4, in half an hour on two
cores. More in docs/results.md.

Arguments: model=NAME, one of those that python -m jaxformers models lists;
size=paper|matched|tiny, protocol=jaxformers|lra|skyformer|s4, seed=0.
"""

from jaxformers import config as c

# TransJect's pooling on the task, and those of the code bases.
POOLS = {
  "jaxformers": "max",
  "lra": "cls",
  "skyformer": "padded_mean",
  "s4": "mean",
}
# Width of TransJect at size=matched: no more parameters than the Transformer.
MATCHED = dict.fromkeys(POOLS, 80) | {"s4": 78}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  tiny = c.is_tiny(arg.size, c.LRA_SIZES)
  config = c.base(
    seed=arg.seed,
    task={"name": "image", "protocol": arg.protocol, "archive": ""},
    **c.lra_models(
      arg.model,
      pools=POOLS,
      protocol=arg.protocol,
      size=arg.size,
      matched=MATCHED,
    ),
    batch_size=256,
    eval_batch_size=100,
    **c.skyformer_schedule(1e-4, warmup_steps=175),
  )
  if tiny:
    rate = c.tiny_rate(arg.model, 1e-2)
    config.update(c.tiny_schedule(rate, total_steps=12_000))
    config.update(batch_size=32, eval_steps=1_000)
    if arg.model in c.TRANSJECTS:
      # The maximum does not leave chance here. TransJect's tokens meet in the
      # mean alone, so that a channel is a filter on the image: rows and columns
      # make smooth ones, positions along the raster do not.
      config.model.update(d_model=64, num_layers=1, positions="sinusoid_2d")
      config.model.mixer.num_experts = 1
      if arg.protocol == "jaxformers":
        config.model.pool = "mean"
  return config
