r"""IMDb reviews as word pieces, two classes.

Downloads through tensorflow-datasets, or takes a local archive:

python -m jaxformers.main --config configs/short/imdb.py --workdir runs/imdb \
    --config.task.archive=PATH/aclImdb_v1.tar.gz

The paper gives 88.1 for TransJect and 81.3 for the Transformer. A logistic
regression on which pieces occur has 87.9 with BERT's vocabulary. At size=tiny:
87.6 with it, in eight minutes on two cores. More in docs/results.md.

Arguments: model=NAME, one of those that python -m jaxformers models lists;
size=paper|tiny, protocol=jaxformers|paper, seed=0. Under "paper" the test split
chooses the checkpoint, by its loss.

The vocabulary is trained on the training split, or BERT's as in the paper:
--config.task.vocabulary=PATH/vocab.txt.
"""

from jaxformers import config as c

NUM_TRAIN = {"jaxformers": 22_500, "paper": 25_000}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  tiny = c.is_tiny(arg.size)
  protocol = c.choose("protocol", arg.protocol, NUM_TRAIN)
  config = c.base(
    seed=arg.seed,
    task={
      "name": "imdb",
      "protocol": protocol,
      "archive": "",
      "vocabulary": "",  # A vocab.txt as BERT's; "" trains one.
      "vocab_size": 30_522,  # Of the one that is trained.
      "max_len": 512,
      "special_tokens": False,
    },
    **c.short_models(arg.model, tiny=tiny),
    eval_batch_size=100,
    buckets=4,
    select="loss" if protocol == "paper" else "accuracy",
    **c.short_schedule(NUM_TRAIN[protocol]),
  )
  if tiny:
    rate = c.tiny_rate(arg.model, 3e-3)
    config.update(c.tiny_schedule(rate, total_steps=2_812))
    config.patience = 0
  return config
