"""Sliding-window evaluation of a segmenter on whole scenes.

Source: the multi-scale evaluation in Segmenter's code, used for NeuTRENO's
table 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from jaxformers.data.images.scenes import Scenes, resized, short_side, windows
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.inference import TrainedModel
from jaxformers.training.losses import overlap

Score = Callable[[np.ndarray], np.ndarray]


def interpolate(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Resizes x [h, w, c] bilinearly -> float32 [size[0], size[1], c].

  Interpolates between the centres of pixels, and is constant beyond the
  outermost centres, as PyTorch with align_corners=False.
  """
  for axis, new in enumerate(size):
    old = x.shape[axis]
    # Compute the centres of the new pixels, in units of the old pixels.
    at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.floor(at).astype(int)
    high = np.minimum(low + 1, old - 1)
    # Weigh the upper neighbour by the distance from the lower one.
    share = (at - low).astype(np.float32)
    share = share.reshape([-1 if k == axis else 1 for k in range(3)])
    x = (1 - share) * x.take(low, axis) + share * x.take(high, axis)
  return x.astype(np.float32)


def enlarge(pixels: np.ndarray, window: tuple[int, int]) -> np.ndarray:
  """Returns pixels that are enlarged if a window does not fit in them.

  The side that is too short by the larger factor gets the length of the
  window. The other side keeps the aspect ratio, rounded down.

  Source: Strudel et al. 2021, `resize` in segm/model/utils.py of their code.

  Args:
    pixels: [h, w, c].
    window: (height, width).
  """
  height, width = pixels.shape[:2]
  if height >= window[0] and width >= window[1]:
    return pixels
  # Compare the factors of both sides without a division.
  if window[0] * width >= window[1] * height:
    return interpolate(pixels, (window[0], width * window[0] // height))
  return interpolate(pixels, (height * window[1] // width, window[1]))


def sliding(
  score: Score, pixels: np.ndarray, window: tuple[int, int], stride: int
) -> np.ndarray:
  """Returns the scores of all pixels, averaged over overlapping windows.

  Args:
    score: function from windows [b, height, width, 3] to scores
      [b, height, width, c].
    pixels: normalised pixels, [h, w, 3]; see `enlarge` if they are smaller than
      a window.
    window: (height, width).
    stride: distance between consecutive windows in pixels. The last window ends
      at the border.

  Returns:
    float32 [h, w, c], with the size of the enlarged pixels.
  """
  pixels = enlarge(pixels, window)
  height, width = pixels.shape[:2]
  # Cut all windows, row by row, and score them together.
  places = [
    np.s_[y : y + window[0], x : x + window[1]]
    for y in windows(height, window[0], stride)
    for x in windows(width, window[1], stride)
  ]
  scores = score(np.stack([pixels[place] for place in places]))
  # Average the scores of each pixel over its windows.
  total = np.zeros((height, width, scores.shape[-1]), np.float32)
  seen = np.zeros((height, width, 1), np.float32)
  for place, window_scores in zip(places, scores, strict=True):
    total[place] += window_scores
    seen[place] += 1
  return total / seen


def predict(
  score: Score,
  source: Scenes,
  pixels: np.ndarray,
  scales: Sequence[float],
  *,
  flip: bool,
  stride: int,
) -> np.ndarray:
  """Returns the class of every pixel of a scene, int [h, w].

  The probabilities are averaged over scales and mirror images.

  Args:
    score: function of windows, see `sliding`.
    source: scenes of the split, which define the window and the normalisation.
    pixels: uint8 [h, w, 3].
    scales: lengths of the scene's short side, in units of the window's side.
    flip: True to add mirror images.
    stride: distance between consecutive windows in pixels.
  """
  window, size = source.shape[:2], pixels.shape[:2]
  total: Any = 0.0
  for scale in scales:
    # Scale the short side to the length of `scale` windows.
    scaled_size = short_side(size[::-1], scale * min(window))
    picture = resized(Image.fromarray(pixels), scaled_size)
    scaled = source.normalised(np.asarray(picture))
    # Direction -1 mirrors the scene horizontally.
    for direction in (1, -1) if flip else (1,):
      scores = sliding(score, scaled[:, ::direction], window, stride)
      # Mirror the scores back, and resize them to the scene.
      scores = interpolate(scores[:, ::direction], size)
      # Add the softmax over classes.
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      total = total + weights / weights.sum(-1, keepdims=True)
  return total.argmax(-1)


def count_areas(
  predicted: np.ndarray, labels: np.ndarray, classes: int
) -> dict[str, np.ndarray]:
  """Returns the pixels of every class: `hits`, `predicted`, `labelled`.

  These are the sums of `losses.confusion_areas`, computed on the host. A
  function on the device would be compiled for every shape of a scene.

  Args:
    predicted, labels: classes of the pixels, [h, w]; a label of -1 is ignored.
    classes: number of classes c.

  Returns:
    Arrays int64 [c].
  """
  # Drop unlabelled pixels.
  is_labelled = labels >= 0
  predicted, labels = predicted[is_labelled], labels[is_labelled]
  hits = labels[predicted == labels]
  pixels = {"hits": hits, "predicted": predicted, "labelled": labels}
  return {k: np.bincount(v, minlength=classes) for k, v in pixels.items()}


def default_stride(source: Scenes) -> int:
  """Returns the side of a window minus 32, as in Segmenter."""
  return max(min(source.shape[:2]) - 32, 1)


def evaluate_segmenter(
  run: TrainedModel,
  scales: Sequence[float] = (1.0,),
  *,
  flip: bool = False,
  stride: int = 0,
  split: str = "test",
  count: Count = 0,
  batch_size: PositiveCount = 8,
) -> dict[str, Any]:
  """Returns `mean_iou`, pixel `accuracy` and `count` of a split.

  Args:
    run: trained segmenter.
    scales, flip: arguments of `predict`.
    stride: distance between consecutive windows in pixels; 0 for the side of a
      window minus 32, as in Segmenter.
    split: name of the task's split.
    count: number of scenes, from the start of the split; 0 for all.
    batch_size: number of windows of a batch.

  Raises:
    UserError: if the model is not a segmenter, or if the stride or a scale is
      out of range.
  """
  ranges.check(evaluate_segmenter, {"count": count, "batch_size": batch_size})
  source = run.task.splits[choose("split", split, run.task.splits)]
  if not isinstance(source, Scenes):
    raise UserError(
      f"The task {run.task.name!r} has no scenes: give the run of a segmenter."
    )
  side = min(source.shape[:2])
  stride = stride or default_stride(source)
  # A stride above the side would leave pixels without a score.
  if not 1 <= stride <= side or not all(scale > 0 for scale in scales):
    raise UserError(
      f"stride={stride}, scales={tuple(scales)}: give a stride of 1 to {side}, "
      "the side of a window, and positive scales."
    )
  # Count the pixels of every class, scene by scene.
  score = run.apply(batch_size)
  areas = []
  scenes = range(min(count or len(source), len(source)))
  for k in tqdm(scenes, split, disable=None):
    pixels, labels = source.scene(k)
    predicted = predict(score, source, pixels, scales, flip=flip, stride=stride)
    areas.append(count_areas(predicted, labels, source.num_classes))
  # Sum over the scenes, and compute the mean IoU of the whole split.
  total = {name: sum(area[name] for area in areas) for name in areas[0]}
  return {**overlap(total), "count": len(scenes)}
