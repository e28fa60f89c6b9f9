r"""LRA Pathfinder: two discs on one dashed snake, or not, in 32 x 32 pixels.

Nothing is downloaded: images are generated once from LRA's distribution, which
takes a minute for all 200,000 on two cores. The paper reports 71.5 for
TransJect and 65.2 for the Transformer. size=laptop with model=s5 and
protocol=s4 reaches 69.8 on one core in an hour, and 88.1 to 90.1 on the easy
level. See docs/results.md and docs/laptop.md for more.

jaxformers train lra/pathfinder:size=tiny \
    --workdir runs/pathfinder

Arguments: model=NAME, one that jaxformers models lists;
size=paper|matched|tiny|laptop|published,
protocol=jaxformers|lra|skyformer|s4|paper, objective=masked|causal for
pre-training on the inputs, seed=0.
Easier levels: --config.task.difficulty=intermediate|easy, or the number of
paddles of a snake; longer sequences: --config.task.resolution=64|128|256.
size=laptop first trains on shorter snakes, which are not in Long Range Arena;
with an easier level, set --config.task.short_paddles to fewer paddles.
"""

from jaxformers.recipes import lra
from jaxformers.recipes.pretraining import pretraining
from jaxformers.recipes.traits import find_traits

# LRA's code treats black pixels as padding, but pools them as well.
POOLS = lra.POOLS | {"lra": "all_mean"}
# Sizes of LRA by model, and its training of 200 epochs.
ORIGINAL = lra.Original(
  {
    "transformer": lra.Shape(32, 4, 4, 16, 32, 0.2),
    "bigbird": lra.Shape(64, 2, 4, 32, 64, 0.2),
    "linear_transformer": lra.Shape(128, 2, 1, 64, 128, 0.2),
    "linformer": lra.Shape(32, 2, 1, 16, 32, 0.2),
    "local": lra.Shape(64, 4, 2, 32, 64),
    "longformer": lra.Shape(32, 2, 2, 16, 32),
    "performer": lra.Shape(32, 8, 4, 16, 32, 0.2),
    "reformer": lra.Shape(64, 8, 2, 32, 64, 0.2),
    "sinkhorn": lra.Shape(32, 4, 2, 16, 64, 0.2),
    "sparse": lra.Shape(32, 8, 1, 16, 32, 0.2),
    "synthesizer": lra.Shape(64, 4, 2, 32, 64, 0.2),
  },
  lra.original_schedule("cosine", 1e-3, 312, 62_400, batch_size=512),
  block_size=64,
)
# Vocabulary, greatest length and classes, by protocol.
INPUTS = {
  "jaxformers": lra.Inputs(257, 1_024, 2),
  "lra": lra.Inputs(256, 1_024, 2),
  "s4": lra.Inputs(0, 1_024, 2),
}
# Width of TransJect at size=matched, with at most the Transformer's parameters.
MATCHED_WIDTHS = dict.fromkeys(POOLS, 80) | {"lra": 30, "s4": 78}


def get_config(arg=None):
  args = lra.parse_arguments(arg)
  config = lra.make_config(
    args,
    task={
      "name": "pathfinder",
      "archive": "",  # LRA's release or a folder of it; "" generates.
      "resolution": 32,
      "difficulty": "hard",
      "num_images": 200_000,
      "seed": 0,  # Seed of the data, which the seed of the run does not change.
      # Images with shorter snakes for the first steps of the training.
      "num_short": 24_000 if args.size == "laptop" else 0,
      "short_paddles": "3 4 5 6 7 9 11" if args.size == "laptop" else "",
    },
    pools=POOLS,
    length=1_024,
    matched_widths=MATCHED_WIDTHS,
    inputs=INPUTS,
    original=ORIGINAL,
    batch_size=128,
    eval_batch_size=100,
    learning_rate=2e-4,
    warmup_steps=312,
    tiny={"learning_rate": 5e-3, "total_steps": 1_500, "batch_size": 32},
    laptop={
      "total_steps": 10_000,
      "short_steps": 4_900,
      "warmup_steps": 200,
      "eval_steps": 500,
      "eval_examples": 2_000,
    },
  )
  # The decision depends on few pixels, which a mean over all would hide.
  if args.size == "laptop" and find_traits(args.model).recurrence:
    config.model.pool = "max"
  return pretraining(config, args)
