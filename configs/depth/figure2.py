r"""Depth against width at equal parameters: figure 2 of Levine et al. 2020.

python launch/sweep.py --config depth/figure2 \
    --workdir runs/figure2 --grid depth=6,12,24 --grid size=1,2,3,4 \
    --tune rate=5e-4,1e-3,2e-3 --seeds 0,1,2 --config.task.archive=PATH
jaxformers depth runs/figure2 --out figure2

The models are decoders over 1,000 byte pairs. Each size has a model of 6, of 12
and of 24 layers with (nearly) the same parameters: 12 L d^2 = 1.2, 2.2, 4.7,
9.3, 19 or 38 million besides the embedding. Models of one size differ only in
depth and width. Depths of 1 to 5 are not in the figure; the theory gives depth
the advantage up to log_3 d layers, which is 4.4 for d = 128.

The paper trains on English Wikipedia. Give any folder of text, or a set of
texts that tensorflow-datasets has prepared. There is no dropout: use enough
text that none is read twice. The paper's widths, lengths and steps are in an
appendix that we do not have. Our widths are about d sqrt(6 / L), where d is the
width of the model with 6 layers. They are even, because all models have two
heads.

Arguments: depth=1|2|3|4|5|6|12|24, size=1 to 6, rate=0 (peak learning rate; 0
means 0.1 / d, a first guess: tune it for each depth and size), tokens=1e9
(seen in training), length=256 (tokens of a window), batch=64 (windows), seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import language

# Widths by depth. The widths in a column have nearly equal parameters.
WIDTHS = {
  1: (314, 432, 628, 882, 1_254, 1_774),
  2: (222, 304, 444, 624, 886, 1_254),
  3: (182, 248, 362, 510, 724, 1_024),
  4: (156, 216, 314, 440, 628, 886),
  5: (140, 192, 280, 394, 560, 794),
  6: (128, 176, 256, 360, 512, 724),
  12: (90, 124, 180, 256, 362, 512),
  24: (64, 88, 128, 180, 256, 362),
}


def get_config(arg=None):
  arg = c.parse_arg(
    arg, depth=6, size=1, rate=0.0, tokens=1e9, length=256, batch=64, seed=0
  )
  # Look up the width, and check the arguments.
  widths = WIDTHS[c.choose("depth", arg.depth, WIDTHS)]
  d = widths[c.choose("size", arg.size, range(1, len(widths) + 1)) - 1]
  if arg.length < 1 or arg.batch < 1 or arg.rate < 0:
    raise c.UserError(
      f"length={arg.length}, batch={arg.batch}, rate={arg.rate:g}: give a "
      "length and a batch of at least 1, and a rate that is not negative."
    )
  # Refuse infinity and more than 1e15 tokens.
  tokens = arg.tokens if arg.tokens < 1e15 else 0
  # Convert tokens to steps.
  steps = round(tokens / (arg.length * arg.batch))
  if steps < 1:
    raise c.UserError(
      f"tokens={arg.tokens:g} is not between one batch of {arg.batch} windows "
      f"of {arg.length} tokens and 1e15: give a number such as 1e9."
    )
  # Warm up for a tenth of the run, save at every tenth, evaluate at every
  # fifth.
  tenth = max(steps // 10, 1)
  config = c.base(
    seed=arg.seed,
    task=language.task(
      tokens="byte_pairs", vocab_size=1_000, max_len=arg.length
    ),
    **language.model_fields(
      "transformer", d_model=d, num_layers=arg.depth, num_heads=2, mlp_dim=4 * d
    ),
    optimizer={"name": "adam", "clip_norm": 1.0},
    schedule={
      "name": "cosine",
      "learning_rate": arg.rate or 0.1 / d,
      "warmup_steps": tenth,
    },
    batch_size=arg.batch,
    select="loss",
    total_steps=steps,
    log_steps=max(steps // 100, 10),
    eval_steps=2 * tenth,
    checkpoint_steps=tenth,
  )
  # Leave out dropout: the text should be long enough to be read only once.
  for model in (config.model, config.reference):
    model.dropout_rate = model.block.dropout_rate = 0.0
    model.mixer_defaults.dropout_rate = 0.0
  return config
