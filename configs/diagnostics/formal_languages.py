r"""Formal languages: fifteen maps of strings. Generated.

The tasks of Deletang et al. 2023, by the level of their language. Recurrences
with a state of fixed size can learn the regular ones if their factors allow it;
the others need a stack or a tape, and no model of this package has one. A model
is trained on strings of 3 to 40 symbols; its score, `accuracy_beyond`, is the
mean accuracy over greater lengths.

jaxformers train diagnostics/formal_languages:problem=parity_check,model=lru \
    --workdir runs/parity_check

Arguments: problem=modular_arithmetic, parity_check, even_pairs,
cycle_navigation, modular_arithmetic_brackets, reverse_string, solve_equation,
stack_manipulation, duplicate_string, missing_duplicate_string, odds_first,
binary_addition, binary_multiplication, compute_sqrt or bucket_sort; model=NAME,
in its causal form if it has one; layers=2; width=64, the number of channels;
seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import diagnostics
from jaxformers.recipes.traits import find_traits


def get_config(arg=None):
  arg = c.parse_arg(
    arg, problem="reverse_string", model="mamba", layers=2, width=64, seed=0
  )
  return c.base(
    seed=arg.seed,
    task={
      "name": "formal_languages",
      "protocol": "jaxformers",
      "problem": arg.problem,
      "seed": 0,  # Seed of the data, not of the run.
      "num_train": 20_000,
      "num_validation": 500,
      "num_test": 500,
      "min_length": 3,
      "length": 40,
      "test_lengths": diagnostics.readable(
        arg.model, (40, 50, 60, 70, 80, 90, 100)
      ),
      "causal": find_traits(arg.model).has_causal,
    },
    **diagnostics.model_fields(
      arg.model, width=arg.width, num_layers=arg.layers
    ),
    **diagnostics.training(total_steps=2_000),
  )
