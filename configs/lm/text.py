r"""A small language model of any folder of text, in byte pairs.

jaxformers train lm/text:model=neutreno \
    --workdir runs/text_lm --config.task.archive=PATH/aclImdb_v1.tar.gz

PATH is a folder of text, a tar, or a set of texts that tensorflow-datasets has
prepared in array_record. Files and folders named train, valid and test become
these splits. Without them, a tenth of the texts is held out for each of valid
and test.

size=paper has six layers of d = 256 and windows of 256 pieces; we have not
trained it. size=tiny has d = 64 and windows of 64 pieces, and trains in ten
minutes on two cores (docs/results.md).

Arguments: model=NAME, one with a causal form (docs/mixers.md);
size=paper|tiny, seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import language, shared


def get_config(arg=None):
  arg = c.parse_arg(arg, model="transformer", size="paper", seed=0)
  tiny = shared.is_tiny(arg.size)
  config = c.base(
    seed=arg.seed,
    task=language.task(
      tokens="byte_pairs",
      vocab_size=2_000 if tiny else 8_000,
      max_len=64 if tiny else 256,
    ),
    **language.model_fields(
      arg.model,
      d_model=64 if tiny else 256,
      num_layers=6,
      num_heads=2 if tiny else 4,
      mlp_dim=256 if tiny else 1_024,
    ),
    # AdamW, with a cosine after 1,000 steps of warm-up.
    optimizer={"name": "adam", "weight_decay": 0.1, "clip_norm": 1.0},
    schedule={"name": "cosine", "learning_rate": 1e-3, "warmup_steps": 1_000},
    batch_size=32,
    select="perplexity",
    total_steps=40_000,
    log_steps=100,
    eval_steps=2_000,
    checkpoint_steps=2_000,
  )
  if tiny:  # Train for ten minutes on two cores.
    config.update(total_steps=2_000, eval_steps=1_000, checkpoint_steps=500)
    config.schedule.update(learning_rate=6e-3, warmup_steps=200)
  return config
