r"""AG's News, title and description as word pieces, four classes.

Downloads through tensorflow-datasets, or takes a local archive:

python -m jaxformers.main --config configs/short/ag_news.py \
    --workdir runs/ag_news --config.task.archive=PATH/ag_news_csv.tar.gz

The paper gives 88.8 for TransJect and 90.2 for Random-TransJect. At size=tiny:
87.0 under "test_only", on 1,000 articles. More in docs/results.md.

Arguments: model=NAME, one of those that python -m jaxformers models lists;
size=paper|tiny, protocol=jaxformers|paper|test_only, seed=0. Under "paper" the
test split chooses the checkpoint, by its loss; "test_only" needs nothing but
test.csv, and compares with no other number.

The vocabulary is trained on the training split, or BERT's as in the paper:
--config.task.vocabulary=PATH/vocab.txt.
"""

from jaxformers import config as c

NUM_TRAIN = {"jaxformers": 108_000, "paper": 120_000, "test_only": 5_600}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  tiny = c.is_tiny(arg.size)
  protocol = c.choose("protocol", arg.protocol, NUM_TRAIN)
  config = c.base(
    seed=arg.seed,
    task={
      "name": "ag_news",
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
    config.update(c.tiny_schedule(rate, total_steps=2_500))
    config.eval_steps = 100
    config.patience = 0
  return config
