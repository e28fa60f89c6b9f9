r"""LRA Text: IMDb reviews as bytes, two classes.

Downloads through tensorflow-datasets, or takes a local archive:

python -m jaxformers.main --config configs/lra/text.py --workdir runs/text \
    --config.task.archive=PATH/aclImdb_v1.tar.gz

The paper gives 64.9 for TransJect and 61.9 for the Transformer. A logistic
regression on the byte histogram of the whole review reaches 66.4, more than
every model of the papers' tables. At size=tiny: 64.3 on two cores in
ten minutes. More in docs/results.md.

Arguments: model=NAME, one of those that python -m jaxformers models lists;
size=paper|matched|tiny, protocol=jaxformers|lra|skyformer|s4, seed=0. Under the
last three the test split chooses the checkpoint, as it did for the published
numbers.
"""

from jaxformers import config as c

# TransJect's pooling on the task, and those of the code bases.
POOLS = {
  "jaxformers": "mean",
  "lra": "cls",
  "skyformer": "padded_mean",
  "s4": "mean",
}
# Width of TransJect at size=matched: no more parameters than the Transformer.
MATCHED = dict.fromkeys(POOLS, 120) | {"lra": 80}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  tiny = c.is_tiny(arg.size, c.LRA_SIZES)
  config = c.base(
    seed=arg.seed,
    task={
      "name": "text",
      "protocol": arg.protocol,
      "archive": "",
      "max_len": 2_000 if tiny else 0,  # 0: the protocol's.
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
    **c.skyformer_schedule(1e-4, warmup_steps=80),
  )
  if tiny:
    rate = c.tiny_rate(arg.model, 5e-3)
    config.update(c.tiny_schedule(rate, total_steps=3_000))
  return config
