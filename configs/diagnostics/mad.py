r"""MAD: recall, copying, compression and memorization. Generated.

Six problems of Poli et al. 2024, whose mean score is said to predict how well a
mixer scales as a language model. Three of them look up pairs, which attention
does by its weights, and a recurrence by its state. Selective copying asks to
skip blanks; compression decodes all tokens from the state of the last one; and
memorization asks for a fixed map, which layers without a mixer store as well.
Queries and keys have rotary positions, as in the paper; the number of heads,
the MLP and the end of the schedule are ours.

jaxformers train diagnostics/mad:problem=selective_copying,model=mamba \
    --workdir runs/mad

The score of a problem is the mean over its settings of the best accuracy over
six pairs of learning rate and weight decay:
`python launch/tables.py mad --models mamba --workdir runs/mad`. A setting takes
hours on two cores; num_train=1600,epochs=50 takes minutes.

Arguments: problem=in_context_recall, noisy_recall, fuzzy_recall,
selective_copying, compression or memorization; model=NAME, in its causal form
if it has one; layers=2; width=128, the number of channels; seed=0; lr=5e-4;
weight_decay=0.0; epochs=200; and the settings of the paper, where 0 is the
first of them: vocab_size=0, length=0, num_train=0, noise=0.0, num_copied=0.
"""

from jaxformers import config as c
from jaxformers.recipes import diagnostics
from jaxformers.recipes.traits import find_traits

# First setting of each problem.
RECALL = {"vocab_size": 16, "length": 128, "num_train": 12_800}
SETTINGS = {
  "in_context_recall": RECALL,
  "noisy_recall": {
    **RECALL,
    "vocab_size": 32,
    "noise_tokens": 16,
    "noise": 0.2,
  },
  "fuzzy_recall": RECALL,
  "selective_copying": {**RECALL, "length": 256, "num_copied": 16},
  "compression": {**RECALL, "length": 32},
  "memorization": {"vocab_size": 256, "length": 32, "num_train": 256},
}
NONE = {"noise_tokens": 0, "noise": 0.0, "num_copied": 0}


def get_config(arg=None):
  arg = c.parse_arg(
    arg,
    problem="in_context_recall",
    model="transformer",
    layers=2,
    width=128,
    seed=0,
    lr=5e-4,
    weight_decay=0.0,
    epochs=200,
    vocab_size=0,
    length=0,
    num_train=0,
    noise=0.0,
    num_copied=0,
  )
  task = {**NONE, **SETTINGS[c.choose("problem", arg.problem, SETTINGS)]}
  for name in ("vocab_size", "length", "num_train", "noise", "num_copied"):
    task[name] = arg[name] or task[name]
  fields = diagnostics.model_fields(
    arg.model, width=arg.width, num_layers=arg.layers, rotary=True
  )
  if arg.problem == "compression":
    for model in fields.values():
      model["head"] = {"bottleneck": True}
  return c.base(
    seed=arg.seed,
    task={
      **task,
      "name": "mad",
      "protocol": "paper",
      "problem": arg.problem,
      "num_validation": 1_280,
      "num_test": 1_280,
      "seed": 0,  # Seed of the data, not of the run.
      "causal": find_traits(arg.model).has_causal,
    },
    **fields,
    **diagnostics.mad_training(
      arg.epochs, task["num_train"], arg.lr, arg.weight_decay
    ),
  )
