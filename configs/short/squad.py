r"""BERT fine-tuned on SQuAD v1.1, with or without NeuTRENO's term.

PATH/bert-base-uncased is the folder from Hugging Face's hub, and PATH/squad has
train-v1.1.json and dev-v1.1.json:

jaxformers train short/squad:model=neutreno \
    --workdir runs/squad --config.pretrained=PATH/bert-base-uncased \
    --config.task.vocabulary=PATH/bert-base-uncased/vocab.txt \
    --config.task.archive=PATH/squad

The training follows Devlin et al. 2019, section 4.2: three epochs of AdamW at
5e-5 in batches of 32, with a linear warm-up over a tenth of the steps and a
linear decay to 0. Windows have 384 word pieces and begin 128 apart, as in their
run_squad.py. Their BERT-base has F1 88.5 and exact match 80.8 on the dev set.
NeuTRENO's appendix G.9 does not describe its training, and our text of it lacks
the scores. The model has 109 million parameters and needs an accelerator; we
have not run it.

Arguments: model=transformer|neutreno, protocol=jaxformers|paper, seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import short

# Number of training questions; a few of them are read in two windows.
NUM_TRAIN = {"jaxformers": 79_599, "paper": 87_599}


def get_config(arg=None):
  arg = c.parse_arg(arg, model="transformer", protocol="jaxformers", seed=0)
  questions = NUM_TRAIN[c.choose("protocol", arg.protocol, NUM_TRAIN)]
  # Steps of an epoch in batches of 32, rounded up.
  epoch = -(-questions // 32)
  model = short.bert_base(arg.model)
  return c.base(
    seed=arg.seed,
    task={
      "name": "squad",
      "protocol": arg.protocol,
      "archive": "",
      "vocabulary": "",
      "vocab_size": 30_522,
      "max_len": 384,
      "stride": 128,
      "question_len": 64,
      "num_train": 87_599,
      "num_test": 10_570,
    },
    model=model,
    reference={**model, "name": "transformer"},
    optimizer={
      "name": "adam",
      "eps": 1e-6,
      "weight_decay": 0.01,
      "clip_norm": 1.0,
    },
    schedule={
      "name": "linear",
      "learning_rate": 5e-5,
      "warmup_steps": 3 * epoch // 10,
    },
    select="f1",
    batch_size=32,
    eval_batch_size=32,
    buckets=3,
    total_steps=3 * epoch,
    log_steps=50,
    eval_steps=epoch // 2,
    checkpoint_steps=epoch // 2,
  )
