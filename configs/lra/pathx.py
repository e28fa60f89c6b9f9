r"""LRA Path-X: Pathfinder in 128 x 128 pixels, 16,384 tokens.

Nothing is downloaded: images are generated once from LRA's distribution, which
takes half an hour for all 200,000 on two cores. In LRA's paper no model is
above chance; S4's paper reports 96. See docs/results.md for more.

jaxformers train lra/pathx:size=tiny \
    --workdir runs/pathx

Arguments: model=NAME, one that jaxformers models lists;
size=paper|matched|tiny|published, protocol=jaxformers|lra|skyformer|s4|paper,
objective=masked|causal for pre-training on the inputs, seed=0.
Easier levels: --config.task.difficulty=intermediate|easy, or the number of
paddles of a snake; other sizes:
--config.task.resolution=32|64|256. At size=tiny there are 2,000 images, made in
seconds.
"""

from jaxformers.recipes import lra
from jaxformers.recipes.pretraining import pretraining

# LRA's code treats black pixels as padding, but pools them as well.
POOLS = lra.POOLS | {"lra": "all_mean"}
# Sizes and training of LRA at 128 pixels a side: 200 epochs.
ORIGINAL = lra.Original(
  {"transformer": lra.Shape(32, 2, 1, 16, 32)},
  lra.original_schedule(
    "cosine", 1e-3, 2_500, 500_000, clip_norm=1.0, batch_size=64
  ),
  positions="learned",
  block_size=64,
)
# Vocabulary, greatest length and classes, by protocol.
INPUTS = {
  "jaxformers": lra.Inputs(257, 16_384, 2),
  "lra": lra.Inputs(256, 16_384, 2),
  "s4": lra.Inputs(0, 16_384, 2),
}
# Width of TransJect at size=matched, with at most the Transformer's parameters.
MATCHED_WIDTHS = dict.fromkeys(POOLS, 224) | {"lra": 154}


def get_config(arg=None):
  args = lra.parse_arguments(arg)
  config = lra.make_config(
    args,
    task={
      "name": "pathx",
      "archive": "",  # LRA's release or a folder of it; "" generates.
      "resolution": 128,
      "difficulty": "hard",
      "num_images": 2_000 if args.is_small else 200_000,
      "seed": 0,  # Seed of the data, which the seed of the run does not change.
      # Images with shorter snakes for the first steps of the training.
      "num_short": 0,
      "short_paddles": "",
    },
    pools=POOLS,
    length=16_384,
    matched_widths=MATCHED_WIDTHS,
    inputs=INPUTS,
    original=ORIGINAL,
    batch_size=64,
    eval_batch_size=20,
    learning_rate=2e-4,
    warmup_steps=312,
    tiny={"learning_rate": 5e-3, "total_steps": 100, "batch_size": 8},
  )
  return pretraining(config, args)
