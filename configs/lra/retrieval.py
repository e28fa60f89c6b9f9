r"""LRA Retrieval: does one of two papers cite the other, from their bytes?

The papers are those of the ACL Anthology Network, in LRA's release of 7.7 GB:

python -m jaxformers.main --config configs/lra/retrieval.py \
    --workdir runs/retrieval --config.task.archive=PATH/lra_release.gz

The paper gives 80.3 for TransJect and 80.7 for the Transformer. At size=tiny on
the stand-in of 8,000 pairs of reviews: 56.0, where the similarity of byte
histograms has 53.1. More in docs/results.md.

Arguments: model=NAME, one of those that python -m jaxformers models lists;
size=paper|matched|tiny, protocol=jaxformers|lra|skyformer|s4, seed=0. Another
number of pairs than LRA's is named by --config.task.num_train=8000 and so on.
"""

from jaxformers import config as c

# What becomes of the two pooled documents. Ours: a citation has no order. LRA:
# two hidden layers, 512 and 256 wide; S4: one as wide as its encoder.
HEADS = {
  "jaxformers": {"interaction": "symmetric"},
  "skyformer": {"interaction": "nli"},
  "lra": {"interaction": "concat", "head_dim": 512, "head_layers": 2},
  "s4": {"interaction": "nli", "head_dim": 256, "head_activation": "gelu"},
}
# TransJect's pooling on the task, and those of the code bases.
POOLS = {
  "jaxformers": "max",
  "lra": "first",
  "skyformer": "padded_mean",
  "s4": "mean",
}
# Width of TransJect at size=matched: no more parameters than the Transformer.
MATCHED = dict.fromkeys(POOLS, 116) | {"lra": 114, "s4": 112}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  tiny = c.is_tiny(arg.size, c.LRA_SIZES)
  head = HEADS[c.choose("protocol", arg.protocol, HEADS)]
  config = c.base(
    seed=arg.seed,
    task={
      "name": "retrieval",
      "protocol": arg.protocol,
      "archive": "",
      "max_len": 1_000 if tiny else 0,  # 0: the protocol's.
      "num_train": 147_086,
      "num_validation": 18_090,
      "num_test": 17_437,
    },
    **c.lra_models(
      arg.model,
      pools=POOLS,
      protocol=arg.protocol,
      size=arg.size,
      matched=MATCHED,
      **head,
    ),
    batch_size=16,
    eval_batch_size=20,
    buckets=4,
    **c.skyformer_schedule(2e-4, warmup_steps=800),
  )
  if tiny:
    rate = c.tiny_rate(arg.model, 5e-3)
    config.update(c.tiny_schedule(rate, total_steps=2_000))
    config.batch_size = 32
    if arg.model in c.TRANSJECTS:  # Wide enough to tell bytes apart.
      config.model.update(d_model=64, num_layers=1)
  return config
