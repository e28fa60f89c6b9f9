r"""Planted pairs: do two kinds of marks stand at a fixed distance? Generated.

Each example has 16 marks "a" and 16 marks "b" among 256 places. Either each b
is 19 places after an a, or the marks are anywhere. A model without token mixing
reaches 50; `isometric` reaches 100.0 in a minute on one core.

jaxformers train synthetic/planted_pairs \
    --workdir runs/pairs

Arguments: model=NAME, one that jaxformers models lists; seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import lra, shared


def get_config(arg=None):
  arg = c.parse_arg(arg, model="isometric", seed=0)
  return c.base(
    seed=arg.seed,
    task={
      "name": "planted_pairs",
      "protocol": "jaxformers",
      "seed": 0,  # Seed of the data, which the seed of the run does not change.
      "num_train": 20_000,
      "num_validation": 1_000,
      "num_test": 2_000,
      "length": 256,
      "num_pairs": 16,
      "distance": 19,
    },
    **lra.model_fields(
      arg.model,
      pools={"jaxformers": "mean"},
      protocol="jaxformers",
      size="tiny",
      matched={"jaxformers": 94},
    ),
    batch_size=32,
    eval_batch_size=50,
    **shared.tiny_schedule(
      shared.tiny_rate(arg.model, 5e-3), total_steps=1_500
    ),
  )
