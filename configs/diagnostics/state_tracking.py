r"""State tracking: the product of all group elements so far. Generated.

A token is an element of a group, and its class is the product of all elements
up to it. Which models can learn this for every length is a matter of theory
(Merrill et al. 2024; Grazzi et al. 2025): factors in [0, 1], as in `mamba` and
`rglru`, cannot follow a parity (problem=Z2), and factors in [-1, 1] can
(--config.model.mixer.signed=True); real factors cannot count modulo 3, and
constant factors can follow neither. No constant or diagonal recurrence and no
attention of a fixed depth follows A5 or S5, unless TC0 = NC1.

jaxformers train diagnostics/state_tracking:problem=Z2,model=mamba \
    --config.model.mixer.signed=True --workdir runs/parity

Sequences of groups have 64 tokens in training, and 64, 128 and 256 in the
tests. Sequences of automata have 3 to 40 tokens, and 40, 160 and 256 in the
tests.

Arguments: problem=Z2, Z3, S3, S4, A5, S5, S5_swaps, ..., or parity, even_pairs,
cycle_navigation, modular_arithmetic, modular_arithmetic_brackets; model=NAME,
in its causal form if it has one; layers=2; width=32, the number of channels;
protocol=jaxformers|deltaproduct|xlstm|illusion; seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import diagnostics
from jaxformers.recipes.traits import find_traits

AUTOMATA = (
  "parity",
  "even_pairs",
  "cycle_navigation",
  "modular_arithmetic",
  "modular_arithmetic_brackets",
)


def get_config(arg=None):
  arg = c.parse_arg(
    arg,
    problem="S3",
    model="mamba",
    layers=2,
    width=32,
    protocol="jaxformers",
    seed=0,
  )
  is_automaton = arg.problem in AUTOMATA
  lengths = (40, 160, 256) if is_automaton else (64, 128, 256)
  task = {
    "name": "state_tracking",
    "protocol": arg.protocol,
    "problem": arg.problem,
    "seed": 0,  # Seed of the data, not of the run.
    "num_train": 20_000,
    "num_validation": 500,
    "num_test": 500,
    "min_length": 3 if is_automaton else 64,
    "length": 40 if is_automaton else 64,
    "tokens_per_element": 1,
    "test_min_length": 0,
    "test_max_length": 0,
    "test_lengths": diagnostics.readable(arg.model, lengths),
    "causal": find_traits(arg.model).has_causal,
  }
  fields = diagnostics.training(total_steps=500)
  # The data of the papers; model and training are ours.
  if arg.protocol == "xlstm":  # Grazzi et al. 2025.
    task.update(num_train=200_000, test_min_length=40, test_max_length=256)
    fields = diagnostics.training(total_steps=20_000, learning_rate=1e-3)
    fields |= {"batch_size": 256, "buckets": 6}
  if arg.protocol == "deltaproduct":  # Siems et al. 2025.
    task.update(num_train=100_000, min_length=128, length=128)
    lengths = diagnostics.readable(arg.model, (128, 256, 512))
    task.update(test_lengths=lengths)
    fields = diagnostics.training(total_steps=4_900, learning_rate=1e-3)
    fields |= {"batch_size": 2_048}
  if arg.protocol == "illusion":  # Merrill et al. 2024: Z60, A4xZ5 and A5.
    task.update(num_train=800_000, num_test=20_000, min_length=6, length=20)
    task.update(test_lengths=(10, 15, 20))
    fields = diagnostics.training(total_steps=50_000, learning_rate=1e-4)
    fields |= {"batch_size": 512}
  return c.base(
    seed=arg.seed,
    task=task,
    **diagnostics.model_fields(
      arg.model, width=arg.width, num_layers=arg.layers
    ),
    **fields,
  )
