"""Transfer of parameters between models: the encoder, and a head that fits.

For example, a classifier can be initialized from the encoder of a language
model, a segmenter from a classifier, and NeuTRENO from a softmax Transformer.
A model for longer sequences or larger images can be initialized from a model
for smaller ones.
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
# Parameters of terms that other models may lack. Such a term is off at zero.
ADDED = ("/fidelity", "/feat_scale_mean", "/feat_scale_rest", "/segments")
SHOWN = 8  # Greatest number of differences that a message lists.
# Advice if the weights are causal and the model is bidirectional.
CAUSAL_ADVICE = (
  "These weights belong to a causal model, which reads only earlier tokens: "
  "set --config.model.mixer.causal=true to make this model causal too."
)


class Transplant(NamedTuple):
  """Parameters after a transfer from a source model.

  Attributes:
    params: tree of parameters.
    kept: paths of parameters taken from the source without a change.
    resized: paths of parameters taken from the source, cut or interpolated.
    new: paths of parameters that keep their initial values.
    unused: paths of parameters of the source that are not used, in its head.
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
  source_image: Sequence[int] = (),
  vocabulary: Sequence[str] = (),
  source_vocabulary: Sequence[str] = (),
  same_task: bool = False,
  name: str = "The source",
  advice: str = "",
) -> Transplant:
  """Returns initial parameters replaced by the parameters of a source model.

  The source must have all parameters of the encoder, except terms in `ADDED`.
  If sizes differ, parameters are resized as follows. Positions of images and
  filters of patches are interpolated on their grid. Positions of sequences are
  cut for shorter sequences and interpolated for longer ones. Rows of the
  embedding are added or removed at the end of the vocabulary. All parameters
  outside the encoder form the head. The head is taken from a source of the same
  task if all shapes fit; otherwise it keeps its initial values.

  Args:
    start: initial parameters of the model.
    source: parameters of the source model.
    image: (height, width, channels) of the model's inputs; () for sequences.
    source_image: the same of the source model; () if it is not known.
    vocabulary: tokens of the model by id; () if the inputs are not ids.
    source_vocabulary: tokens of the source model by id; () if its inputs are
      not ids.
    same_task: True if both models have the same task, so that the head may fit.
    name: description of the source, for messages.
    advice: sentence appended to the message about another encoder.

  Raises:
    UserError: for another encoder, listing the parameters that differ; for
      another vocabulary; or for positions of images that are not square and
      have other sizes.
  """
  ours, theirs = (
    flax.traverse_util.flatten_dict(tree, sep="/") for tree in (start, source)
  )
  _check_vocabulary(tuple(source_vocabulary), tuple(vocabulary), name)
  tables = [flat.get(f"{_EMBEDDING}positions") for flat in (ours, theirs)]
  if all(table is not None for table in tables):
    has_same = len({len(table) for table in tables}) == 1
    check_image(source_image, image, name, has_same_count=has_same)
  # Take the head only if all of its shapes fit.
  takes_head = same_task and _same_shapes(*map(_head, (ours, theirs)))
  # Count the prepended tokens: one is a vector, several are a matrix.
  tokens = ours.get(f"{_EMBEDDING}cls")
  front = 0 if tokens is None else 1 if tokens.ndim == 1 else len(tokens)
  params, groups, differences = _take_over(
    ours, theirs, takes_head=takes_head, image=tuple(image), front=front
  )
  # Parameters that only the source's encoder has are differences.
  unused = [path for path in theirs if path not in ours]
  differences += [
    f"{path} {theirs[path].shape} is only in the source"
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
  """Returns parameters by path, taken from the source where they fit.

  Args:
    ours: initial parameters of the model, by path.
    theirs: parameters of the source model, by path.
    takes_head: True to take the head from the source.
    image: (height, width, channels) of the model's images; () for sequences.
    front: number of prepended tokens.

  Returns:
    The parameters by path; the paths that are kept, resized and new; and the
    differences of the encoders, as lines of a message.
  """
  params: dict[str, Any] = {}
  kept: list[str] = []
  resized: list[str] = []
  new: list[str] = []
  differences: list[str] = []
  for path, leaf in ours.items():
    # Choose the parameter of the source, or the initial one.
    value: Any = theirs.get(path)
    if not path.startswith(ENCODER):
      is_taken, value = takes_head, value if takes_head else leaf
    elif value is None:
      # The source may lack a term that is zero at initialization.
      if not path.endswith(ADDED):
        differences.append(f"{path} {leaf.shape} is missing in the source")
      is_taken, value = False, leaf
    else:
      is_taken = True
    # Resize the parameter if possible; otherwise report a difference.
    if value.shape != leaf.shape:
      array = np.asarray(value)
      changed = _resize(path, array, leaf, image, front)
      if changed is None:
        differences.append(
          f"{path} is {value.shape} in the source, but {leaf.shape} here"
        )
        changed = leaf
      value = changed
    # Record what happened to the parameter.
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
    name: description of the source of the parameters.
    differences: one line for each parameter that differs.
    advice: sentence appended to the usual advice.
  """
  more = ["..."] if len(differences) > SHOWN else []
  listed = "\n  ".join([*differences[:SHOWN], *more])
  message = (
    f"{name} has another architecture; {len(differences)} tensors differ:\n"
    f"  {listed}\nBuild the model with the same sizes and options. {advice}"
  )
  return UserError(message.strip())


def check_image(
  theirs: Sequence[int],
  ours: Sequence[int],
  name: str,
  *,
  has_same_count: bool = True,
) -> None:
  """Raises UserError if positions would be resized on a grid of no square.

  Args:
    theirs, ours: (height, width, ...) of the images of both models; () for
      sequences, or if the size is not known.
    name: description of the source, for the message.
    has_same_count: True if both models have the same number of positions.
  """
  sizes = [tuple(image[:2]) for image in (theirs, ours)]
  if not all(sizes) or (sizes[0] == sizes[1] and has_same_count):
    return
  if any(height != width for height, width in sizes):
    (a, b), (c, d) = sizes
    raise UserError(
      f"{name} has positions for images of {a} x {b} pixels, and the model has "
      f"{c} x {d}: positions are interpolated from square images to square "
      "images only. Choose the size of the source."
    )


def _head(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the parameters outside the encoder."""
  return {k: v for k, v in flat.items() if not k.startswith(ENCODER)}


def _same_shapes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
  shapes = [{k: v.shape for k, v in flat.items()} for flat in (ours, theirs)]
  return shapes[0] == shapes[1]


def _check_vocabulary(
  theirs: tuple[str, ...], ours: tuple[str, ...], name: str
) -> None:
  """Raises UserError unless one vocabulary is a prefix of the other.

  Args:
    theirs, ours: tokens of both models by id; () for inputs that are not ids.
    name: description of the source, for messages.
  """
  shared = min(len(theirs), len(ours))
  if theirs[:shared] != ours[:shared]:
    # Report the first id whose tokens differ.
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
  """Returns a parameter resized to the shape of a leaf, or None if impossible.

  Args:
    path: path of the parameter.
    value: parameter of the source model.
    leaf: initial parameter of the model, whose shape the result has.
    image: (height, width, channels) of the model's inputs; () for sequences.
    front: number of prepended tokens.
  """
  if value.ndim != leaf.ndim or value.shape[-1] != leaf.shape[-1]:
    return None
  if path == f"{_EMBEDDING}positions":
    if image:
      is_square = image[0] == image[1]
      return resize_positions(value, len(leaf), front) if is_square else None
    return _resize_sequence(value, len(leaf), front)
  if path == f"{_EMBEDDING}patches/kernel" and image:
    return resize_patches(value, len(leaf), image[-1])
  # Cut rows, or append initial rows: ids at the end of the vocabulary, such as
  # the id of masked tokens, or the second row of `values`, for masked numbers.
  if path in (f"{_EMBEDDING}tokens/embedding", f"{_EMBEDDING}values/kernel"):
    return jnp.concatenate([value[: len(leaf)], leaf[len(value) :]])
  return None


def resize_positions(
  table: np.ndarray, count: int, front: int | None = None
) -> np.ndarray:
  """Returns the positions of a square image, resized for another image size.

  The positions of patches are interpolated bicubically. The positions of tokens
  before the patches do not change.

  Source: `finetune` of DeiT's main.py, which calls PyTorch's `interpolate` with
  mode="bicubic" and align_corners=False.

  Args:
    table: positions of `front` tokens and k^2 patches, [front + k^2, d].
    count: new number of positions, front + m^2.
    front: number of tokens before the patches. None for 0 if the number of
      positions is a square, and for 1 otherwise.

  Raises:
    UserError: if the numbers of positions differ and the patches of one of them
      do not form a square.
  """
  if len(table) == count:
    return table
  if front is None:
    front = int(math.isqrt(len(table)) ** 2 != len(table))
  # Compute the sides k and m of both grids.
  old, new = (math.isqrt(max(n - front, 0)) for n in (len(table), count))
  if (old**2 + front, new**2 + front) != (len(table), count):
    raise UserError(
      f"{len(table)} positions cannot be resized to {count}: both must belong "
      "to a square image, both with or both without a class token. Choose "
      "another image size."
    )
  # Interpolate the patches on their grid, and keep the prepended tokens.
  grid = np.asarray(table[front:]).reshape(old, old, -1)
  weights = _cubic_weights(old, new).astype(grid.dtype)
  grid = np.einsum("ij,kl,jlc->ikc", weights, weights, grid, optimize=True)
  return np.concatenate([table[:front], grid.reshape(new**2, -1)])


def _cubic_weights(old: int, new: int) -> np.ndarray:
  """Returns the matrix that interpolates `old` points to `new` points.

  It computes the cubic convolution of Keys (1981) with PyTorch's a = -0.75. It
  does not smooth if there are fewer new points. Beyond the border, the
  outermost points are repeated.

  Returns:
    float64 [new, old].
  """
  a = -0.75
  # Compute the coordinates of the new cell centres on the old grid.
  places = (np.arange(new) + 0.5) * old / new - 0.5
  weights = np.zeros((new, old))
  for offset in range(-1, 3):
    # Add the weights of one of the four nearest points: Keys' kernel of |x|.
    point = np.floor(places).astype(int) + offset
    x = np.abs(places - point)
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    rows, columns = np.arange(new), np.clip(point, 0, old - 1)
    np.add.at(weights, (rows, columns), np.where(x <= 1, near, far))
  return weights


def _resize_sequence(table: np.ndarray, count: int, extra: int) -> Any:
  """Returns positions of a sequence, cut or interpolated to another number.

  Args:
    table: positions, [n, d].
    count: new number of positions.
    extra: number of prepended tokens, whose positions are not interpolated.
  """
  if count <= len(table):
    return table[:count]
  size = (count - extra, table.shape[1])
  rest = jax.image.resize(table[extra:], size, "linear")
  return jnp.concatenate([table[:extra], rest])


def resize_patches(
  kernel: np.ndarray, rows: int, channels: int
) -> np.ndarray | None:
  """Returns the filters of patches, resized for another patch size.

  The product of a resized filter and an enlarged patch equals the product of
  the filter and the patch, as nearly as possible: filters are multiplied by the
  pseudo-inverse of bilinear interpolation.

  Source: Beyer et al. 2023 (FlexiViT), https://arxiv.org/abs/2212.08013,
  section 3.4.

  Args:
    kernel: filters, [p^2 channels, d].
    rows: new number of rows, q^2 channels.
    channels: number of channels of an image.

  Returns:
    Filters, [q^2 channels, d]; None if the old or the new patches are not
    square.
  """
  old, new = (math.isqrt(n // channels) for n in (len(kernel), rows))
  if (old**2 * channels, new**2 * channels) != (len(kernel), rows):
    return None
  # Enlarge each basis patch (1 at pixel k): the interpolation as a matrix.
  basis = np.eye(old**2, dtype=np.float32).reshape(-1, old, old)
  enlarged = jax.image.resize(basis, (old**2, new, new), "linear")
  inverse = np.linalg.pinv(np.asarray(enlarged).reshape(old**2, new**2))
  # Multiply by the pseudo-inverse, [q^2, p^2] x [p^2, channels d].
  filters = kernel.reshape(old**2, -1)
  return (inverse @ filters).reshape(rows, -1)
