r"""SimCSE without labels on BERT, tested on STS-12, with or without NeuTRENO.

PATH/bert-base-uncased is the folder from Hugging Face's hub, and PATH/simcse
has wiki1m_for_simcse.txt, STS12-en-test and sts-dev.csv (docs/data.md):

jaxformers train short/simcse:model=neutreno \
    --workdir runs/simcse --config.pretrained=PATH/bert-base-uncased \
    --config.task.vocabulary=PATH/bert-base-uncased/vocab.txt \
    --config.task.archive=PATH/simcse

The training follows Gao et al. 2021, appendix A, for BERT-base: an epoch of a
million sentences in batches of 64 at 3e-5, with a linear decay to 0. The first
token is pooled, with a tanh layer only in training. They report 68.40 on STS-12
and choose the checkpoint on STS-B every 250 steps. NeuTRENO's appendix G.9 does
not describe its training, and our text of it lacks the scores. The model has
109 million parameters and needs an accelerator; we have not run it.

Arguments: model=transformer|neutreno, protocol=jaxformers|paper, seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import short

EPOCH = 15_625  # Steps of a million sentences in batches of 64.


def get_config(arg=None):
  arg = c.parse_arg(arg, model="transformer", protocol="jaxformers", seed=0)
  # The head is a tanh layer on the first token.
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
