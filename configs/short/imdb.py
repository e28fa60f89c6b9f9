r"""IMDb reviews as word pieces, two classes.

Downloads through tensorflow-datasets, or takes a local archive:

jaxformers train short/imdb --workdir runs/imdb \
    --config.task.archive=PATH/aclImdb_v1.tar.gz

The paper reports 88.1 for TransJect and 81.3 for the Transformer. A logistic
regression on which pieces occur reaches 87.9 with BERT's vocabulary. With that
vocabulary size=tiny reaches 87.6, in eight minutes on two cores. See
docs/results.md for more.

Arguments: model=NAME, one that jaxformers models lists;
size=paper|tiny, protocol=jaxformers|paper, seed=0,
objective=masked|causal for pre-training on the inputs. Under "paper" the test
split selects the checkpoint, by its loss.

The vocabulary is trained on the training split. For BERT's vocabulary, which
the paper uses, set --config.task.vocabulary=PATH/vocab.txt.
"""

from jaxformers.recipes import short

# Examples of the training split, by protocol.
NUM_TRAIN = {"jaxformers": 22_500, "paper": 25_000}


def get_config(arg=None):
  return short.make_config(
    arg, "imdb", num_train=NUM_TRAIN, tiny={"total_steps": 2_812}
  )
