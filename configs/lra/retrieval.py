r"""LRA Retrieval: does one of two papers cite the other, from their bytes?

The papers come from the ACL Anthology Network, in LRA's release of 7.7 GB:

jaxformers train lra/retrieval \
    --workdir runs/retrieval --config.task.archive=PATH/lra_release.gz

The paper reports 80.3 for TransJect and 80.7 for the Transformer. At size=tiny,
on a substitute of 8,000 pairs of reviews, TransJect reaches 56.0; a rule that
compares byte histograms reaches 53.1. See docs/results.md for more.

Arguments: model=NAME, one that jaxformers models lists;
size=paper|matched|tiny|laptop|published,
protocol=jaxformers|lra|skyformer|s4|paper, objective=masked|causal for
pre-training on the inputs, seed=0.
If an archive has another number of pairs than LRA's, set
--config.task.num_train, num_validation and num_test.
"""

from jaxformers.recipes import lra
from jaxformers.recipes.pretraining import pretraining
from jaxformers.recipes.traits import find_traits

# How the head combines the two pooled documents. "jaxformers" is symmetric,
# because a citation has no order here. LRA has two hidden layers, 512 and 256
# wide, and S4 has one that is as wide as its encoder.
HEADS = {
  "jaxformers": {"interaction": "symmetric"},
  "skyformer": {"interaction": "nli"},
  "paper": {"interaction": "nli"},
  "lra": {"interaction": "concat", "head_dim": 512, "head_layers": 2},
  "s4": {"interaction": "nli", "head_dim": 256, "head_activation": "gelu"},
}
POOLS = lra.POOLS | {"lra": "first"}
# Sizes and training of LRA; the run ends during its warm-up.
ORIGINAL = lra.Original(
  {"transformer": lra.Shape(128, 4, 4, 128, 512)},
  lra.original_schedule(
    "rsqrt", 0.05, 8_000, 5_000, weight_decay=0.1, batch_size=32
  ),
)
# Vocabulary, greatest length and classes, by protocol.
INPUTS = {
  "jaxformers": lra.Inputs(257, 4_000, 2),
  "s4": lra.Inputs(98, 4_000, 2),
}
# Greatest lengths that differ from the protocol's, by size.
LENGTHS = {"tiny": 1_000, "laptop": 2_000}
# Width of TransJect at size=matched, with at most the Transformer's parameters.
MATCHED_WIDTHS = dict.fromkeys(POOLS, 116) | {"lra": 186, "s4": 112}


def get_config(arg=None):
  args = lra.parse_arguments(arg)
  config = lra.make_config(
    args,
    task={
      "name": "retrieval",
      "archive": "",
      # 0: the protocol's length.
      "max_len": LENGTHS.get(args.size, 0),
      "num_train": 147_086,
      "num_validation": 18_090,
      "num_test": 17_437,
    },
    pools=POOLS,
    heads=HEADS,
    length=4_096,
    matched_widths=MATCHED_WIDTHS,
    inputs=INPUTS,
    original=ORIGINAL,
    batch_size=16,
    eval_batch_size=20,
    eval_examples=4_800,
    buckets=4,
    learning_rate=2e-4,
    warmup_steps=800,
    tiny={"learning_rate": 5e-3, "total_steps": 2_000, "batch_size": 32},
    laptop={
      "total_steps": 3_200,
      "eval_steps": 200,
      "eval_examples": 2_000,
      "weight_decay": 0.2,
      "buckets": 8,
      "ema_decay": 0.99,
    },
  )
  if args.size == "laptop" and find_traits(args.model).recurrence:
    # A maximum keeps the rare words that two papers share.
    config.model.update(pool="max", dropout_rate=0.1)
    # Dropout inside the mixer was not tried.
    if "dropout_rate" in config.model.mixer:
      config.model.mixer.dropout_rate = 0.0
    if args.model == "lru":
      config.model.mixer.state_size = 64
  if args.is_small and find_traits(args.model).is_transject:
    # Make the model wide enough to distinguish bytes.
    config.model.update(d_model=64, num_layers=1)
  return pretraining(config, args)
