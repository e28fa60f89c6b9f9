r"""SimCSE without labels on BERT, tested on STS-12, with or without NeuTRENO.

PATH/bert-base-uncased is the folder from Hugging Face's hub, and PATH/simcse
has wiki1m_for_simcse.txt, STS12-en-test and sts-dev.csv (docs/data.md):

python -m jaxformers.main --config configs/short/simcse.py:model=neutreno \
    --workdir runs/simcse --config.pretrained=PATH/bert-base-uncased \
    --config.task.vocabulary=PATH/bert-base-uncased/vocab.txt \
    --config.task.archive=PATH/simcse

Gao et al. 2021, appendix A, for BERT-base: an epoch of a million sentences in
batches of 64 at 3e-5, down to 0 in a straight line, the first token with a tanh
layer only in training; 68.40 on STS-12. They choose the checkpoint on STS-B
every 250 steps. NeuTRENO's appendix G.9 says nothing of its training, and its
scores are lost from our text of it. 109 million parameters: for accelerators,
and not run by us.

Arguments: model=transformer|neutreno, protocol=jaxformers|paper, seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import short

EPOCH = 15_625  # Steps of a million sentences in batches of 64.


def get_config(arg=None):
  arg = c.parse_arg(arg, model="transformer", protocol="jaxformers", seed=0)
  model = {
    **short.bert_base(arg.model),
    "pool": "first",
    "head_dim": 768,
    "head_activation": "tanh",
    "head_init_std": 0.02,
  }
  return c.base(
    seed=arg.seed,
    task={
      "name": "simcse",
      "protocol": c.choose("protocol", arg.protocol, ("jaxformers", "paper")),
      "archive": "",
      "vocabulary": "",
      "vocab_size": 30_522,
      "max_len": 128,
      "train_len": 32,
    },
    model=model,
    reference={**model, "name": "transformer"},
    optimizer={
      "name": "adam",
      "eps": 1e-8,
      "weight_decay": 0.0,
      "clip_norm": 1.0,
    },
    schedule={"name": "linear", "learning_rate": 3e-5, "warmup_steps": 0},
    select="spearman",
    batch_size=64,
    eval_batch_size=64,
    buckets=4,
    total_steps=EPOCH,
    log_steps=50,
    eval_steps=250,
    checkpoint_steps=250,
  )
