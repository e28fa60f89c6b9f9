"""Kinds of parameters, for which optimisers may have separate settings.

A mixer, or a block without a mixer, declares the kinds of its parameters in a
class attribute `kinds`, a mapping from names of parameters to kinds. Parameters
that are not in this mapping have no kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

EIGENVALUES = "eigenvalues"  # Factors of the state in a recurrence.
STEP = "step"  # Step sizes of a discretisation.
INPUT = "input"  # Maps B from input to state.
OUTPUT = "output"  # Maps C from state to output.

KINDS = (EIGENVALUES, STEP, INPUT, OUTPUT)
# Kinds without weight decay by default. Decay towards zero does not simplify
# the model for these parameters.
UNDECAYED = (EIGENVALUES, STEP)


def find_kinds(stacks: Mapping[str, nn.Module], params: Any) -> Any:
  """Returns a tree with the kind of every parameter; "" for no kind.

  Args:
    stacks: an unbound block for each stack of layers, by the stack's name in
      `params`.
    params: tree of parameters, or any tree with the same structure.
  """
  # Find the owner of the declaration in each stack: the mixer or the block.
  declared = {}
  for stack, block in stacks.items():
    make = getattr(block, "mixer", None)
    owner, folder = (
      (block, "") if make is None else (make(parent=None), "mixer")
    )
    declared[stack] = folder, getattr(owner, "kinds", {})

  def kind(path: Any, _: Any) -> str:
    # A path is (stack, layer, ..., name). Kinds hold only below `folder`.
    stack, *names = [str(getattr(key, "key", key)) for key in path]
    folder, kinds = declared.get(stack, ("", {}))
    if not names or (folder and folder not in names):
      return ""
    return kinds.get(names[-1], "")

  return jax.tree_util.tree_map_with_path(kind, params)
