r"""BERT fine-tuned on IMDb or AG's News, with or without NeuTRENO's term.

PATH/bert-base-uncased is the folder from Hugging Face's hub, with config.json,
model.safetensors and vocab.txt:

jaxformers train short/bert:model=neutreno \
    --workdir runs/bert --config.pretrained=PATH/bert-base-uncased \
    --config.task.archive=PATH/aclImdb_v1.tar.gz

The folder determines the sizes and the vocabulary.

The training is three epochs of AdamW at 2e-5, with a linear warm-up over a
tenth of the steps and a linear decay to 0. Dropout is 0.1, also of the pooled
vector (Devlin et al. 2019, appendices A.2 and A.3). Differs from their code:
Adam corrects the bias of its means, and the hidden units of the feed-forward
have dropout. The model has 109 million parameters and needs an accelerator; we
have not run it.

Arguments: model=transformer|neutreno, task=imdb|ag_news, seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import short

# Examples of the training split.
NUM_TRAIN = {"imdb": 22_500, "ag_news": 108_000}


def get_config(arg=None):
  arg = c.parse_arg(arg, model="transformer", task="imdb", seed=0)
  task = c.choose("task", arg.task, NUM_TRAIN)
  # Steps of an epoch in batches of 32, rounded up.
  epoch = -(-NUM_TRAIN[task] // 32)
  # BERT's pooler is a tanh layer on the first token.
  model = {
    **short.bert_base(arg.model),
    "pool": "first",
    "head_dim": 768,
    "head_activation": "tanh",
    "head_init_std": 0.02,
    "head_dropout_rate": 0.1,
  }
  return c.base(
    seed=arg.seed,
    task={
      "name": task,
      "protocol": "jaxformers",
      "archive": "",
      "vocabulary": "",
      "vocab_size": 30_522,
      "max_len": 512,
      "special_tokens": True,
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
      "learning_rate": 2e-5,
      "warmup_steps": 3 * epoch // 10,
    },
    batch_size=32,
    buckets=4,
    total_steps=3 * epoch,
    log_steps=50,
    eval_steps=epoch // 2,
    checkpoint_steps=epoch // 2,
  )
