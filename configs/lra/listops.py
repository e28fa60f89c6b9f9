r"""LRA ListOps: the value of a nested expression of 501 to 1999 tokens.

Nothing is downloaded: the data are generated, with the distribution of LRA's.
The paper gives 42.2 for TransJect and 38.4 for the Transformer; the rule that
looks at the first token alone reaches 35.6 on our test split. At size=tiny:
36.0 +- 0.3 on two cores in 5 minutes. More in docs/results.md.

python -m jaxformers.main --config configs/lra/listops.py:size=tiny \
    --workdir runs/listops

Arguments: model=transject|random_transject|transformer, size=paper|tiny,
protocol=lra|skyformer, seed=0.
"""

from jaxformers import config as c

# Softmax attention without long warm-up stays at chance from 5e-3 on.
TINY_RATES = {"transformer": 1e-3}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="lra", seed=0
  )
  tiny = c.is_tiny(arg.size)
  config = c.base(
    seed=arg.seed,
    task={
      "name": "listops",
      "protocol": arg.protocol,
      "tsv": "",  # A folder of LRA's own files; "" generates.
      "seed": 0,  # Of the data; the run's seed leaves them as they are.
      "num_train": 96_000,
      "num_validation": 2_000,
      "num_test": 2_000,
    },
    **c.lra_models(arg.model, pool="max", tiny=tiny),
    batch_size=32,
    eval_batch_size=40,
    **c.skyformer_schedule(1e-4, warmup_steps=1_000),
  )
  if tiny:
    rate = TINY_RATES.get(arg.model, 5e-3)
    config.update(c.tiny_schedule(rate, total_steps=1_500))
  return config
