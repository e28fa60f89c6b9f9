r"""WikiText-103 by words, as in NeuTRENO's table 3.

The data set is not in tensorflow-datasets. Unpack wikitext-103-v1.zip (Merity
et al. 2016), and give the folder with wiki.train.tokens, wiki.valid.tokens and
wiki.test.tokens:

jaxformers train lm/wikitext103:model=neutreno \
    --workdir runs/wikitext --config.task.archive=PATH/wikitext-103

The paper reports validation and test perplexities 33.15 and 34.29 for softmax
attention, and 32.60 and 33.70 for NeuTRENO (model=neutreno, which sets
mixer.fidelity=0.4). These scores use a window that moves by one word at a time;
`jaxformers perplexity` computes them. The model has sixteen layers of
d = 128 and trains for 500,000 steps of 96 windows. We have not run it.

Differs from the paper's code: windows are drawn in random order, and positions
count forwards.

Arguments: model=NAME, seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import language


def get_config(arg=None):
  arg = c.parse_arg(arg, model="transformer", seed=0)
  config = c.base(
    seed=arg.seed,
    # A size of 0 keeps all words: 267,736 with <pad>.
    task=language.task(tokens="words", vocab_size=0, max_len=256),
    **language.model_fields(
      arg.model,
      d_model=128,
      num_layers=16,
      num_heads=8,
      mlp_dim=2_048,
      positions="sinusoid",
    ),
    optimizer={"name": "adam", "clip_norm": 0.25},
    schedule={"name": "cosine", "learning_rate": 2.5e-4, "warmup_steps": 2_000},
    batch_size=96,
    select="perplexity",
    total_steps=500_000,
    log_steps=200,
    eval_steps=4_000,
    checkpoint_steps=4_000,
  )
  # Set the options in which the authors' script differs from our recipe.
  for model in (config.model, config.reference):
    # Cutoffs count <pad>, whose id is 0.
    model.embedding = {
      "cutoffs": (20_001, 40_001, 200_001),
      "div_value": 1,
      "scale": 128**0.5,
    }
    model.block.update(activation="relu", init_std=0.02, norm_first=False)
    model.head.dropout_rate = 0.1
    model.mixer_defaults.update(use_bias=False, init_std=0.02, dropout_rate=0.0)
  if arg.model == "neutreno":  # Lambda of table 3.
    config.model.mixer.fidelity = 0.4
  return config
