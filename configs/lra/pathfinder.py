r"""LRA Pathfinder: two discs on one dashed snake, or not, in 32 x 32 pixels.

Nothing is downloaded: images are generated, with the distribution of LRA's,
once (a minute for all 200,000 on two cores).
The paper gives 71.5 for TransJect and 65.2 for the Transformer. More in
docs/results.md.

python -m jaxformers.main --config configs/lra/pathfinder.py:size=tiny \
    --workdir runs/pathfinder

Arguments: model=NAME, one of those that python -m jaxformers models lists;
size=paper|matched|tiny, protocol=jaxformers|lra|skyformer|s4, seed=0. Easier
levels: --config.task.difficulty=intermediate|easy; longer sequences:
--config.task.resolution=64|128|256.
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
MATCHED = dict.fromkeys(POOLS, 80) | {"s4": 78}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  tiny = c.is_tiny(arg.size, c.LRA_SIZES)
  config = c.base(
    seed=arg.seed,
    task={
      "name": "pathfinder",
      "protocol": arg.protocol,
      "archive": "",  # LRA's release or a folder of it; "" generates.
      "resolution": 32,
      "difficulty": "hard",
      "num_images": 200_000,
      "seed": 0,  # Of the data; the run's seed leaves them as they are.
    },
    **c.lra_models(
      arg.model,
      pools=POOLS,
      protocol=arg.protocol,
      size=arg.size,
      matched=MATCHED,
    ),
    batch_size=128,
    eval_batch_size=100,
    **c.skyformer_schedule(2e-4, warmup_steps=312),
  )
  if tiny:
    rate = c.tiny_rate(arg.model, 5e-3)
    config.update(c.tiny_schedule(rate, total_steps=1_500))
    config.batch_size = 32
  return config
