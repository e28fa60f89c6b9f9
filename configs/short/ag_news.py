r"""AG's News, title and description as word pieces, four classes.

Downloads through tensorflow-datasets, or takes a local archive:

jaxformers train short/ag_news \
    --workdir runs/ag_news --config.task.archive=PATH/ag_news_csv.tar.gz

The paper reports 88.8 for TransJect and 90.2 for Random-TransJect. size=tiny
reaches 87.0 under "test_only" with BERT's vocabulary, on 1,000 articles. See
docs/results.md for more.

Arguments: model=NAME, one that jaxformers models lists;
size=paper|tiny, protocol=jaxformers|paper|test_only, seed=0,
objective=masked|causal for pre-training on the inputs. Under "paper" the test
split selects the checkpoint, by its loss. "test_only" needs only test.csv, and
its numbers are not comparable with published ones.

The vocabulary is trained on the training split. For BERT's vocabulary, which
the paper uses, set --config.task.vocabulary=PATH/vocab.txt.
"""

from jaxformers.recipes import short

# Examples of the training split, by protocol.
NUM_TRAIN = {"jaxformers": 108_000, "paper": 120_000, "test_only": 5_600}


def get_config(arg=None):
  return short.make_config(
    arg,
    "ag_news",
    num_train=NUM_TRAIN,
    tiny={"total_steps": 2_500, "eval_steps": 100},
  )
