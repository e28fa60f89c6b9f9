r"""LRA Image: CIFAR-10 as a sequence of 1024 grey pixels, ten classes.

Downloads through tensorflow-datasets, or takes a local archive:

jaxformers train lra/image --workdir runs/image \
    --config.task.archive=PATH/cifar-10-binary.tar.gz

The paper reports 38.9 for TransJect and 40.6 for the Transformer; a linear
classifier on the pixels reaches 30.9. size=tiny reaches 31.4 in half an hour on
two cores; size=laptop with model=s5 and protocol=s4 reaches 62.8 to 65.3 on
one core in 35 to 104 minutes. See docs/results.md and docs/laptop.md for more.

Arguments: model=NAME, one that jaxformers models lists;
size=paper|matched|tiny|laptop|published,
protocol=jaxformers|lra|skyformer|s4|paper,
objective=masked|causal for pre-training on the inputs, seed=0.
"""

from jaxformers.recipes import lra
from jaxformers.recipes.pretraining import pretraining
from jaxformers.recipes.traits import find_traits

# Sizes of LRA by model, and its training of 200 epochs.
WIDE = lra.Shape(128, 8, 1, 64, 128, dropout_rate=0.3)
ORIGINAL = lra.Original(
  {
    "transformer": WIDE,
    "bigbird": WIDE._replace(num_heads=4),
    "local": WIDE._replace(num_heads=2, pool="mean"),
    "longformer": lra.Shape(128, 4, 4, 64, 128, 0.3, "mean"),
    "reformer": lra.Shape(64, 8, 4, 32, 64, 0.3),
    "sinkhorn": lra.Shape(32, 1, 1, 32, 64, 0.1),
  },
  lra.original_schedule("cosine", 5e-4, 175, 35_000, batch_size=256),
  attention_dropout=0.2,
  block_size=64,
  positions="learned",
)
# Vocabulary, greatest length and classes, by protocol.
INPUTS = {
  "jaxformers": lra.Inputs(257, 1_024, 10),
  "lra": lra.Inputs(256, 1_024, 10),
  "s4": lra.Inputs(0, 1_024, 10),
}
# Width of TransJect at size=matched, with at most the Transformer's parameters.
MATCHED_WIDTHS = dict.fromkeys(lra.POOLS, 80) | {"lra": 102, "s4": 78}


def get_config(arg=None):
  args = lra.parse_arguments(arg)
  config = lra.make_config(
    args,
    task={"name": "image", "archive": ""},
    length=1_024,
    matched_widths=MATCHED_WIDTHS,
    inputs=INPUTS,
    original=ORIGINAL,
    batch_size=256,
    eval_batch_size=100,
    learning_rate=1e-4,
    warmup_steps=175,
    tiny={
      "learning_rate": 1e-2,
      "total_steps": 12_000,
      "batch_size": 32,
      "eval_steps": 1_000,
    },
    laptop={"total_steps": 10_500, "eval_steps": 1_050},
  )
  if args.protocol == "lra" and args.model == "sinkhorn" and not args.is_small:
    config.optimizer.weight_decay = 0.7  # As in LRA's config of this model.
  # Layers with bounds need to know the row and the column of a pixel.
  if args.is_small and find_traits(args.model).is_bounded:
    config.model.positions = "sinusoid_2d"
  if args.is_small and args.model == "isometric":
    # One section mixes pixels with neighbours in their row and in the next row.
    config.model.block.update(num_sections=1, dilations=(1, 31, 32, 33))
  if args.is_small and find_traits(args.model).is_transject:
    # With max pooling TransJect stays at chance on this task. Its tokens
    # interact only through the mean, so that a channel is a filter on the
    # image. Sinusoids of row and column give smooth filters; sinusoids along
    # the raster do not.
    config.model.update(d_model=64, num_layers=1, positions="sinusoid_2d")
    config.model.mixer.num_experts = 1
    if args.protocol == "jaxformers":
      config.model.pool = "mean"
  return pretraining(config, args)
