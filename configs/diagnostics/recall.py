r"""Recall: which value stood after this key? Generated.

In multi-query associative recall (problem=mqar) a sequence begins with pairs of
a key and a value, and asks for the value of each key later on. Attention looks
the pair up; a recurrence must keep all pairs in its state, so that its accuracy
falls with the number of pairs over the size of the state (Arora et al. 2023).
Queries and keys have rotary positions, since attention has to find the token
before a value.
`results.json` has the bytes of the state as `state_bytes`.

jaxformers train diagnostics/recall:model=transformer --workdir runs/recall

The default has 64 tokens, 4 pairs and a vocabulary of 256. protocol=zoology has
the sizes of figure 2 of Arora et al., a vocabulary of 8,192 and 100,000
examples; protocol=based is mqar as Arora et al. 2024 train it, on 64 to 256
tokens with 4 to 64 pairs, and tests 64 to 1,024 tokens with up to 256 pairs.
Both are too much for two cores.

Arguments: problem=mqar|associative_recall|induction_heads; model=NAME, in its
causal form if it has one; layers=2; width=64, the number of channels; pairs=4,
for mqar; protocol=jaxformers|zoology|based; seed=0.
"""

from jaxformers import config as c
from jaxformers.recipes import diagnostics
from jaxformers.recipes.traits import find_traits


def get_config(arg=None):
  arg = c.parse_arg(
    arg,
    problem="mqar",
    model="transformer",
    layers=2,
    width=64,
    pairs=4,
    protocol="jaxformers",
    seed=0,
  )
  is_mqar = arg.problem == "mqar"
  task = {
    "name": "recall",
    "protocol": arg.protocol,
    "problem": arg.problem,
    "seed": 0,  # Seed of the data, not of the run.
    "num_train": 20_000,
    "num_validation": 500,
    "num_test": 500,
    "length": 64,
    "vocab_size": 256 if is_mqar else 16,
    "num_pairs": arg.pairs if is_mqar else 0,
    "test_lengths": diagnostics.readable(arg.model, (64, 128, 256)),
    "causal": find_traits(arg.model).has_causal,
  }
  fields = diagnostics.training(total_steps=2_000)
  if arg.protocol == "zoology":  # The data of figure 2; the rest is ours.
    task.update(num_train=100_000, num_test=3_000, vocab_size=8_192)
    fields = diagnostics.training(total_steps=12_500, learning_rate=1e-3)
    fields |= {"batch_size": 512}
  if arg.protocol == "based":  # Lengths, pairs and counts; the rest is ours.
    task.update(num_train=180_000, num_test=1_000, vocab_size=8_192)
    task.update(length=256, num_pairs=0)
    task["test_lengths"] = diagnostics.readable(
      arg.model, (256, 64, 128, 512, 1024)
    )
    fields = diagnostics.training(total_steps=22_500, learning_rate=1e-3)
    fields |= {"batch_size": 256}
  return c.base(
    seed=arg.seed,
    task=task,
    **diagnostics.model_fields(
      arg.model, width=arg.width, num_layers=arg.layers, rotary=True
    ),
    **fields,
  )
