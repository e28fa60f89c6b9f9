"""Parameters of one model in another: the encoder's, and a head that fits.

A classifier can begin with the encoder of a language model, a segmenter with
that of a classifier, NeuTRENO with that of a softmax Transformer, and a model
of longer sequences or larger images with that of a smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError

ENCODER = "encoder/"
_EMBEDDING = "encoder/embedding/"
# Parameters of terms that other models do not have; zero is no term.
ADDED = ("/fidelity", "/feat_scale_mean", "/feat_scale_rest", "/segments")
SHOWN = 8  # Differences that a message lists.
# Advice where a causal model meets one that reads in both directions.
CAUSAL_ADVICE = (
  "These weights predict the next token from earlier ones alone: set "
  "--config.model.mixer.causal=true for a model that reads so, too."
)


class Transplant(NamedTuple):
  """Parameters with those of another model in them, by their paths.

  Attributes:
    params: tree of parameters.
    kept: paths that are the other model's.
    resized: paths that are the other model's, cut or interpolated.
    new: paths that are as they were.
    unused: paths of the other model's head that no parameter took.
  """

  params: Any
  kept: tuple[str, ...]
  resized: tuple[str, ...]
  new: tuple[str, ...]
  unused: tuple[str, ...]


def transplant(
  start: Any,
  source: Any,
  *,
  image: Sequence[int] = (),
  vocabulary: Sequence[str] = (),
  source_vocabulary: Sequence[str] = (),
  same_task: bool = False,
  name: str = "The source",
  advice: str = "",
) -> Transplant:
  """Returns parameters that begin with those of another model.

  All of the encoder is taken over, and must be there. Where sizes differ,
  positions of images and the filters of patches are interpolated on their grid;
  positions of sequences are cut for shorter sequences, and stretched along the
  sequence for longer ones; rows of the embedding are added or left out at the
  end of the vocabulary. Whatever is not of the encoder is the head: it is taken
  over from a model of the same task if all of its shapes fit, and new
  otherwise.

  Args:
    start: parameters of the model at its start.
    source: parameters of the other model.
    image: (height, width, channels) of the model's inputs; () for sequences.
    vocabulary: meaning of the model's ids; () if it has none.
    source_vocabulary: likewise of the other model.
    same_task: True if both models predict the same, so that a head fits.
    name: what the other model is, for messages.
    advice: sentence for the message about another encoder.

  Raises:
    UserError: for another encoder, naming the parameters that differ; or for
      another vocabulary.
  """
  ours, theirs = (
    flax.traverse_util.flatten_dict(tree, sep="/") for tree in (start, source)
  )
  _check_vocabulary(tuple(source_vocabulary), tuple(vocabulary), name)
  takes_head = same_task and _same_shapes(*map(_head, (ours, theirs)))
  # A class token is a vector; several tokens in front are a matrix.
  tokens = ours.get(f"{_EMBEDDING}cls")
  front = 0 if tokens is None else 1 if tokens.ndim == 1 else len(tokens)
  params, groups, differences = _take_over(
    ours, theirs, takes_head=takes_head, image=tuple(image), front=front
  )
  unused = [path for path in theirs if path not in ours]
  differences += [
    f"{path} {theirs[path].shape} is there alone"
    for path in unused
    if path.startswith(ENCODER)
  ]
  if differences:
    raise refuse(name, differences, advice)
  tree = flax.traverse_util.unflatten_dict(params, sep="/")
  named = (*groups, unused)
  return Transplant(tree, *(tuple(sorted(group)) for group in named))


def _take_over(
  ours: Mapping[str, Any],
  theirs: Mapping[str, Any],
  *,
  takes_head: bool,
  image: tuple[int, ...],
  front: int,
) -> tuple[dict[str, Any], tuple[list[str], ...], list[str]]:
  """Returns parameters by path, taken over where they fit.

  Args:
    ours: parameters of the model at its start.
    theirs: parameters of the other model.
    takes_head: True if the head is taken over.
    image: sizes of the model's images; () for sequences.
    front: number of tokens in front of those of the inputs.

  Returns:
    The parameters; the paths that are kept, resized and new; and the
    differences of the encoders, for a message.
  """
  params: dict[str, Any] = {}
  kept: list[str] = []
  resized: list[str] = []
  new: list[str] = []
  differences: list[str] = []
  for path, leaf in ours.items():
    # Find the other model's parameter of the same path.
    value: Any = theirs.get(path)
    if not path.startswith(ENCODER):
      is_taken, value = takes_head, value if takes_head else leaf
    elif value is None:
      # A term that is zero at its start changes nothing.
      if not path.endswith(ADDED):
        differences.append(f"{path} {leaf.shape} is not there")
      is_taken, value = False, leaf
    else:
      is_taken = True
    # Change its size where that is possible.
    if value.shape != leaf.shape:
      array = np.asarray(value)
      changed = _resize(path, array, leaf, image, front)
      if changed is None:
        differences.append(f"{path} is {value.shape} there, not {leaf.shape}")
        changed = leaf
      value = changed
    group = kept if is_taken else new
    if is_taken and theirs[path].shape != leaf.shape:
      group = resized
    group.append(path)
    params[path] = jnp.asarray(value, leaf.dtype)
  return params, (kept, resized, new), differences


def refuse(
  name: str, differences: Sequence[str], advice: str = ""
) -> UserError:
  """Returns the error for parameters of another architecture.

  Args:
    name: what they are of.
    differences: one line for each parameter that differs.
    advice: sentence that follows the usual advice.
  """
  more = ["..."] if len(differences) > SHOWN else []
  listed = "\n  ".join([*differences[:SHOWN], *more])
  message = (
    f"{name} has another architecture; {len(differences)} tensors differ:\n"
    f"  {listed}\nBuild the model with the same sizes and options. {advice}"
  )
  return UserError(message.strip())


def _head(flat: Mapping[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in flat.items() if not k.startswith(ENCODER)}


def _same_shapes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
  shapes = [{k: v.shape for k, v in flat.items()} for flat in (ours, theirs)]
  return shapes[0] == shapes[1]


def _check_vocabulary(
  theirs: tuple[str, ...], ours: tuple[str, ...], name: str
) -> None:
  """Raises UserError if neither vocabulary begins with the other.

  Args:
    theirs, ours: both vocabularies; () for inputs that are not ids.
    name: what the other model is, for messages.
  """
  shared = min(len(theirs), len(ours))
  if theirs[:shared] != ours[:shared]:
    first = next(i for i in range(shared) if theirs[i] != ours[i])
    raise UserError(
      f"{name} has another vocabulary: id {first} is {theirs[first]!r} there "
      f"and {ours[first]!r} here. Prepare the task with the same vocabulary."
    )


def _resize(
  path: str,
  value: np.ndarray,
  leaf: Any,
  image: tuple[int, ...],
  front: int,
) -> Any | None:
  """Returns a parameter in the size of a leaf; None if it cannot be resized.

  Args:
    path: path of the parameter.
    value: parameter of the other model.
    leaf: the model's own, whose shape the result has.
    image: (height, width, channels) of the model's inputs; () for sequences.
    front: number of learned tokens before the input.
  """
  if value.ndim != leaf.ndim or value.shape[-1] != leaf.shape[-1]:
    return None
  if path == f"{_EMBEDDING}positions":
    if image:
      return resize_positions(value, len(leaf), front)
    return _resize_sequence(value, len(leaf), front)
  if path == f"{_EMBEDDING}patches/kernel" and image:
    return resize_patches(value, len(leaf), image[-1])
  # Rows of ids at the end of the vocabulary, such as that of masked tokens; and
  # the second row of numbers, for masked ones.
  if path in (f"{_EMBEDDING}tokens/embedding", f"{_EMBEDDING}values/kernel"):
    return jnp.concatenate([value[: len(leaf)], leaf[len(value) :]])
  return None


def resize_positions(
  table: np.ndarray, count: int, front: int | None = None
) -> np.ndarray:
  """Returns the positions of square images for another size of image.

  Interpolates the positions of patches bicubically, and keeps the positions of
  tokens before the patches.

  Source: `finetune` of DeiT's main.py, which calls PyTorch's `interpolate` with
  mode="bicubic" and align_corners=False.

  Args:
    table: positions, k^2 patches last, [front + k^2, d].
    count: new number of positions, front + m^2.
    front: number of tokens before the patches; None for 0 if the number of
      positions is a square, and 1 otherwise.

  Raises:
    UserError: if the counts differ, and one of them is not that of a square.
  """
  if len(table) == count:
    return table
  if front is None:
    front = int(math.isqrt(len(table)) ** 2 != len(table))
  old, new = (math.isqrt(max(n - front, 0)) for n in (len(table), count))
  if (old**2 + front, new**2 + front) != (len(table), count):
    raise UserError(
      f"{len(table)} positions cannot become {count}: both must be those of a "
      "square image, both with or both without a class token. Give an image of "
      "another size."
    )
  # Interpolate the patches on their grid; tokens in front have no place in it.
  grid = np.asarray(table[front:]).reshape(old, old, -1)
  weights = _cubic_weights(old, new).astype(grid.dtype)
  grid = np.einsum("ij,kl,jlc->ikc", weights, weights, grid, optimize=True)
  return np.concatenate([table[:front], grid.reshape(new**2, -1)])


def _cubic_weights(old: int, new: int) -> np.ndarray:
  """Returns the map of `old` points to `new` ones, float64 [new, old].

  Cubic convolution (Keys 1981) with PyTorch's a = -0.75: without smoothing for
  fewer points, and with the outermost points repeated beyond the border.
  """
  a = -0.75
  # Place the new points among the old ones, by the middles of their cells.
  places = (np.arange(new) + 0.5) * old / new - 0.5
  weights = np.zeros((new, old))
  for offset in range(-1, 3):
    point = np.floor(places).astype(int) + offset
    x = np.abs(places - point)
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    rows, columns = np.arange(new), np.clip(point, 0, old - 1)
    np.add.at(weights, (rows, columns), np.where(x <= 1, near, far))
  return weights


def _resize_sequence(table: np.ndarray, count: int, extra: int) -> Any:
  """Returns the first positions of a sequence, or stretches them for more.

  Args:
    table: positions, [n, d].
    count: new number of positions.
    extra: number of positions in front that are not stretched, of a class
      token.
  """
  if count <= len(table):
    return table[:count]
  size = (count - extra, table.shape[1])
  rest = jax.image.resize(table[extra:], size, "linear")
  return jnp.concatenate([table[:extra], rest])


def resize_patches(
  kernel: np.ndarray, rows: int, channels: int
) -> np.ndarray | None:
  """Returns the filters of patches for patches of another size.

  Filters whose products with enlarged patches are those with the patches: the
  pseudo-inverse of bilinear interpolation, so that the embedding of an image
  changes as little as can be.

  Source: Beyer et al. 2023 (FlexiViT), https://arxiv.org/abs/2212.08013,
  section 3.4.

  Args:
    kernel: [p^2 channels, d].
    rows: new number of rows, q^2 channels.
    channels: channels of an image.

  Returns:
    [q^2 channels, d]; None if either is not of square patches.
  """
  old, new = (math.isqrt(n // channels) for n in (len(kernel), rows))
  if (old**2 * channels, new**2 * channels) != (len(kernel), rows):
    return None
  # Column k is the patch with 1 at pixel k, enlarged.
  basis = np.eye(old**2, dtype=np.float32).reshape(-1, old, old)
  enlarged = jax.image.resize(basis, (old**2, new, new), "linear")
  inverse = np.linalg.pinv(np.asarray(enlarged).reshape(old**2, new**2))
  filters = kernel.reshape(old**2, -1)
  return (inverse @ filters).reshape(rows, -1)
