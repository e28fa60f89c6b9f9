r"""LRA ListOps: the value of a nested expression of 501 to 1999 tokens.

Nothing is downloaded: data are generated from LRA's distribution. The paper
reports 42.2 for TransJect and 38.4 for the Transformer. A rule that looks only
at the first token reaches 35.6 on our test split. size=tiny reaches 36 to 37 on
two cores in 5 minutes. size=laptop first trains on short expressions, which are
not in Long Range Arena. See docs/results.md for more.

jaxformers train lra/listops:size=tiny \
    --workdir runs/listops

Arguments: model=NAME, one that jaxformers models lists;
size=paper|matched|tiny|laptop|published,
protocol=jaxformers|lra|skyformer|s4|paper, objective=masked|causal for
pre-training on the inputs, seed=0.
Longer test expressions: --config.task.test_min_length=2000
--config.task.test_max_length=4000.
"""

from jaxformers.recipes import lra
from jaxformers.recipes.pretraining import pretraining
from jaxformers.recipes.traits import find_traits

# Sizes and training of LRA.
ORIGINAL = lra.Original(
  {"transformer": lra.Shape(512, 8, 4, 512, 1_024)},
  lra.original_schedule(
    "rsqrt", 0.05, 1_000, 5_000, weight_decay=0.1, batch_size=32
  ),
)
# Vocabulary, greatest length and classes, by protocol.
INPUTS = {
  "jaxformers": lra.Inputs(16, 1_999, 10),
  "s4": lra.Inputs(18, 2_048, 10),
}
# Width of TransJect at size=matched, with at most the Transformer's parameters.
MATCHED_WIDTHS = dict.fromkeys(lra.POOLS, 94) | {"lra": 632}


# Size the model by the protocol, and the data by LRA's generator.
def get_config(arg=None):
  args = lra.parse_arguments(arg)
  config = lra.make_config(
    args,
    task={
      "name": "listops",
      "archive": "",  # LRA's release or a folder of its files; "" generates.
      "seed": 0,  # Seed of the data, which the seed of the run does not change.
      "num_train": 96_000,
      "num_validation": 2_000,
      "num_test": 2_000,
      "max_depth": 10,
      "max_args": 10,
      "min_length": 500,
      "max_length": 2_000,
      "test_min_length": 0,  # 0: as in training.
      "test_max_length": 0,
      "operators": "MIN MAX MED SM",
      # Short expressions for the first steps of the training.
      "num_short": 200_000 if args.size == "laptop" else 0,
      "short_min_length": 20,
      "short_max_length": 200,
    },
    length=2_048,
    matched_widths=MATCHED_WIDTHS,
    inputs=INPUTS,
    original=ORIGINAL,
    batch_size=32,
    eval_batch_size=40,
    buckets=4,
    learning_rate=1e-4,
    warmup_steps=1_000,
    tiny={"learning_rate": 5e-3, "total_steps": 1_500},
    laptop={
      "total_steps": 9_000,
      "short_steps": 6_000,
      "short_length": 200,
      "batch_size": 64,
      "eval_steps": 1_000,
    },
  )
  if (
    args.is_small
    and args.protocol == "jaxformers"
    and find_traits(args.model).recurrence
  ):
    # With the mean, recurrences learn nothing for 450 of the 1,500 steps.
    config.model.pool = "max"
  return pretraining(config, args)
