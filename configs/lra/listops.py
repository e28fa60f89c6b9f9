r"""LRA ListOps: the value of a nested expression of 501 to 1999 tokens.

Nothing is downloaded: the data are generated, with the distribution of LRA's.
The paper gives 42.2 for TransJect and 38.4 for the Transformer; the rule that
looks at the first token alone reaches 35.6 on our test split. At size=tiny:
36 to 37 on two cores in 5 minutes. More in docs/results.md.

python -m jaxformers.main --config configs/lra/listops.py:size=tiny \
    --workdir runs/listops

Arguments: model=NAME, one of those that python -m jaxformers models lists;
size=paper|matched|tiny, protocol=jaxformers|lra|skyformer|s4, seed=0. Longer
test expressions: --config.task.test_min_length=2000
--config.task.test_max_length=4000.
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
MATCHED = dict.fromkeys(POOLS, 94)


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  tiny = c.is_tiny(arg.size, c.LRA_SIZES)
  config = c.base(
    seed=arg.seed,
    task={
      "name": "listops",
      "protocol": arg.protocol,
      "archive": "",  # LRA's release or a folder of its files; "" generates.
      "seed": 0,  # Of the data; the run's seed leaves them as they are.
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
    },
    **c.lra_models(
      arg.model,
      pools=POOLS,
      protocol=arg.protocol,
      size=arg.size,
      matched=MATCHED,
    ),
    batch_size=32,
    eval_batch_size=40,
    buckets=4,
    **c.skyformer_schedule(1e-4, warmup_steps=1_000),
  )
  if tiny:
    rate = c.tiny_rate(arg.model, 5e-3)
    config.update(c.tiny_schedule(rate, total_steps=1_500))
  return config
