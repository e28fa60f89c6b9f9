r"""LRA Text: IMDb reviews as bytes, two classes.

Downloads through tensorflow-datasets, or takes a local archive:

jaxformers train lra/text --workdir runs/text \
    --config.task.archive=PATH/aclImdb_v1.tar.gz

The paper reports 64.9 for TransJect and 61.9 for the Transformer. A logistic
regression on the byte histogram of the whole review reaches 66.2, more than
every model in TransJect's table 2 and in LRA's table. size=tiny reaches 64.3 on
two cores in ten minutes; size=laptop with model=lru reaches 87.1 to 87.5 on one
core in 70 to 100 minutes. See docs/results.md and docs/laptop.md for more.

Arguments: model=NAME, one that jaxformers models lists;
size=paper|matched|tiny|laptop|published,
protocol=jaxformers|lra|skyformer|s4|paper,
objective=masked|causal for pre-training on the inputs, seed=0.
Except under the first protocol, the test split selects the checkpoint, as it
did for the published numbers.
"""

from jaxformers.recipes import lra
from jaxformers.recipes.pretraining import pretraining
from jaxformers.recipes.traits import find_traits

POOLS = lra.POOLS | {"jaxformers": "mean"}
# Sizes and training of LRA.
ORIGINAL = lra.Original(
  {"transformer": lra.Shape(256, 4, 4, 256, 1_024)},
  lra.original_schedule(
    "rsqrt", 0.05, 8_000, 20_000, weight_decay=0.1, batch_size=32
  ),
)
# Vocabulary, greatest length and classes, by protocol.
INPUTS = {
  "jaxformers": lra.Inputs(257, 4_000, 2),
  "lra": lra.Inputs(257, 1_000, 2),
  "s4": lra.Inputs(134, 4_096, 2),
}
# Width of TransJect at size=matched, with at most the Transformer's parameters.
MATCHED_WIDTHS = dict.fromkeys(lra.POOLS, 120) | {"lra": 386}


def get_config(arg=None):
  args = lra.parse_arguments(arg)
  config = lra.make_config(
    args,
    task={
      "name": "text",
      "archive": "",
      # 0: the protocol's length.
      "max_len": 2_000 if args.size == "tiny" else 0,
    },
    pools=POOLS,
    length=4_096,
    matched_widths=MATCHED_WIDTHS,
    inputs=INPUTS,
    original=ORIGINAL,
    batch_size=32,
    eval_batch_size=40,
    eval_examples=6_400,
    buckets=4,
    learning_rate=1e-4,
    warmup_steps=80,
    tiny={"learning_rate": 5e-3, "total_steps": 3_000},
    laptop={
      "total_steps": 13_500,
      "short_steps": 6_000,
      "short_length": 1_000,
      "batch_size": 16,
      "eval_steps": 1_500,
      "warmup_steps": 1_000,
      "weight_decay": 0.05,
      "buckets": 8,
    },
  )
  if args.is_small and find_traits(args.model).is_bounded:
    # The means of long texts differ little: scale them by their deviation.
    config.model.update(num_layers=2, positions="none", head_dim=0)
    config.model.pool_norm = "running"
  if args.is_small and args.model == "isometric":
    # One section mixes bytes with the bytes next to them.
    config.model.block.update(num_sections=1, dilations=(1, 2, 3, 4))
  return pretraining(config, args)
