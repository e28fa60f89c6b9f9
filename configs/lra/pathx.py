r"""LRA Path-X: Pathfinder in 128 x 128 pixels, 16,384 tokens.

Nothing is downloaded: images are generated, with the distribution of LRA's,
once (half an hour for all 200,000 on two cores).
No model of the papers compared here is above chance; S4 has 96. More in
docs/results.md.

python -m jaxformers.main --config configs/lra/pathx.py:size=tiny \
    --workdir runs/pathx

Arguments: model=NAME, one of those that python -m jaxformers models lists;
size=paper|matched|tiny, protocol=jaxformers|lra|skyformer|s4, seed=0. Easier
levels: --config.task.difficulty=intermediate|easy; other sizes:
--config.task.resolution=32|64|256. At size=tiny there are 2,000 images, made in
seconds.
"""

from jaxformers import config as c

# TransJect's pooling on the task, and those of the code bases.
POOLS = {
  "jaxformers": "max",
  "lra": "all_mean",
  "skyformer": "padded_mean",
  "s4": "mean",
}
# Width of TransJect at size=matched: no more parameters than the Transformer.
MATCHED = dict.fromkeys(POOLS, 224)


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  tiny = c.is_tiny(arg.size, c.LRA_SIZES)
  config = c.base(
    seed=arg.seed,
    task={
      "name": "pathx",
      "protocol": arg.protocol,
      "archive": "",  # LRA's release or a folder of it; "" generates.
      "resolution": 128,
      "difficulty": "hard",
      "num_images": 2_000 if tiny else 200_000,
      "seed": 0,  # Of the data; the run's seed leaves them as they are.
    },
    **c.lra_models(
      arg.model,
      pools=POOLS,
      protocol=arg.protocol,
      size=arg.size,
      matched=MATCHED,
    ),
    batch_size=64,
    eval_batch_size=20,
    **c.skyformer_schedule(2e-4, warmup_steps=312),
  )
  if tiny:
    rate = c.tiny_rate(arg.model, 5e-3)
    config.update(c.tiny_schedule(rate, total_steps=100))
    config.batch_size = 8
  return config
