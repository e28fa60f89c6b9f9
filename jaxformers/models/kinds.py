"""Kinds of parameters, which optimisers may train apart.

A mixer, or a block without one, declares the kinds of its parameters by a
class attribute `kinds`, a mapping from names of parameters to kinds; others
have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

EIGENVALUES = "eigenvalues"  # What a recurrence multiplies its state by.
STEP = "step"  # Step sizes of a discretisation.
INPUT = "input"  # From input to state, B.
OUTPUT = "output"  # From state to output, C.

KINDS = (EIGENVALUES, STEP, INPUT, OUTPUT)
# Kinds that weight decay leaves alone unless a config says otherwise: decay
# would move them to a value that is no smaller model.
UNDECAYED = (EIGENVALUES, STEP)


def find_kinds(stacks: Mapping[str, nn.Module], params: Any) -> Any:
  """Returns a tree with the kind of every parameter, "" for none.

  Args:
    stacks: an unbound block of each stack of layers, by its parameters.
    params: a tree of parameters, or a tree of their structure.
  """
  declared = {}
  for stack, block in stacks.items():
    make = getattr(block, "mixer", None)
    owner, folder = (
      (block, "") if make is None else (make(parent=None), "mixer")
    )
    declared[stack] = folder, getattr(owner, "kinds", {})

  def kind(path: Any, _: Any) -> str:
    stack, *names = [str(getattr(key, "key", key)) for key in path]
    folder, kinds = declared.get(stack, ("", {}))
    if not names or (folder and folder not in names):
      return ""
    return kinds.get(names[-1], "")

  return jax.tree_util.tree_map_with_path(kind, params)
