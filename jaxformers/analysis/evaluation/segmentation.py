"""Scores of a segmenter on whole scenes, by windows that slide over them.

Source: the multi-scale evaluation of Segmenter's code, which NeuTRENO's table 2
uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from jaxformers.data.images.scenes import Scenes, short_side, windows
from jaxformers.foundations.errors import UserError
from jaxformers.inference import TrainedModel
from jaxformers.training.losses import overlap

Score = Callable[[np.ndarray], np.ndarray]


def interpolate(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Resizes x [h, w, c] bilinearly -> float32 [size[0], size[1], c].

  Interpolates between the middles of pixels, and is constant beyond the
  outermost, as in PyTorch with align_corners=False.
  """
  for axis, new in enumerate(size):
    old = x.shape[axis]
    # Middles of the new pixels, in units of the old.
    at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.floor(at).astype(int)
    high = np.minimum(low + 1, old - 1)
    # Weight of the upper neighbour, along one axis.
    share = (at - low).astype(np.float32)
    share = share.reshape([-1 if k == axis else 1 for k in range(3)])
    x = (1 - share) * x.take(low, axis) + share * x.take(high, axis)
  return x.astype(np.float32)


def enlarge(pixels: np.ndarray, window: tuple[int, int]) -> np.ndarray:
  """Returns pixels resized so that they hold at least one window.

  The tighter side becomes that of the window, and the other one keeps the
  aspect, rounded down. Pixels that hold a window are returned as they are.

  Source: Strudel et al. 2021, `resize` in segm/model/utils.py of their code.

  Args:
    pixels: [h, w, c].
    window: (height, width).
  """
  height, width = pixels.shape[:2]
  if height >= window[0] and width >= window[1]:
    return pixels
  # Compare the ratios of the sides without a division.
  if window[0] * width >= window[1] * height:
    return interpolate(pixels, (window[0], width * window[0] // height))
  return interpolate(pixels, (height * window[1] // width, window[1]))


def sliding(
  score: Score, pixels: np.ndarray, window: tuple[int, int], stride: int
) -> np.ndarray:
  """Returns the scores of all pixels, the mean over the windows around them.

  Args:
    score: function from windows [b, height, width, 3] to scores
      [b, height, width, c].
    pixels: [h, w, 3], normalised; smaller ones than a window are enlarged.
    window: (height, width).
    stride: pixels from one window to the next; the last stands at the end.

  Returns:
    float32 [h, w, c]; h and w are those of the enlarged pixels.
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
  # Add up the scores of each pixel, and count its windows.
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

  Probabilities are averaged over scales and mirror images.

  Args:
    score: function of windows, see `sliding`.
    source: scenes of the split, for their window and normalisation.
    pixels: uint8 [h, w, 3].
    scales: lengths of the short side, 1 being that of a window.
    flip: True to add mirror images.
    stride: pixels from one window to the next.
  """
  window, size = source.shape[:2], pixels.shape[:2]
  total: Any = 0.0
  for scale in scales:
    # The short side gets the length of `scale` windows.
    scaled_size = short_side(size[::-1], scale * min(window))
    picture = Image.fromarray(pixels)
    picture = picture.resize(scaled_size, Image.Resampling.BILINEAR)
    scaled = source.normalised(np.asarray(picture))
    for direction in (1, -1) if flip else (1,):
      scores = sliding(score, scaled[:, ::direction], window, stride)
      # Turn mirrored scores back, then take the softmax at the scene's size.
      scores = interpolate(scores[:, ::direction], size)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      total = total + weights / weights.sum(-1, keepdims=True)
  return total.argmax(-1)


def count_areas(
  predicted: np.ndarray, labels: np.ndarray, classes: int
) -> dict[str, np.ndarray]:
  """Counts the pixels of every class: `hits`, `predicted`, `labelled`.

  The sums of `losses.confusion_areas`, on the host: scenes have many shapes,
  and a compiled function would be compiled for each.

  Args:
    predicted, labels: [h, w]; -1 in labels is not counted.
    classes: number of classes c.

  Returns:
    Arrays int64 [c].
  """
  # Predictions for unlabelled pixels do not count either.
  is_labelled = labels >= 0
  predicted, labels = predicted[is_labelled], labels[is_labelled]
  hits = labels[predicted == labels]
  pixels = {"hits": hits, "predicted": predicted, "labelled": labels}
  return {k: np.bincount(v, minlength=classes) for k, v in pixels.items()}


def default_stride(source: Scenes) -> int:
  """Returns 32 less than the side of a window, as in Segmenter."""
  return max(min(source.shape[:2]) - 32, 1)


def evaluate_segmenter(
  run: TrainedModel,
  scales: Sequence[float] = (1.0,),
  *,
  flip: bool = False,
  stride: int = 0,
  split: str = "test",
  count: int = 0,
  batch_size: int = 8,
) -> dict[str, Any]:
  """Returns `mean_iou`, pixel `accuracy` and `count` of a split.

  Args:
    run: trained segmenter.
    scales, flip: see `predict`.
    stride: pixels from one window to the next; 0 for 32 less than a window, as
      in Segmenter.
    split: name of the task's split.
    count: number of scenes from its start; 0 for all.
    batch_size: windows at a time.

  Raises:
    UserError: for a model of another kind, or a stride or scale out of range.
  """
  source = run.task.splits[split]
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
  score = run.apply(batch_size)
  areas = []
  scenes = range(min(count or len(source), len(source)))
  for k in tqdm(scenes, split, disable=None):
    pixels, labels = source.scene(k)
    predicted = predict(score, source, pixels, scales, flip=flip, stride=stride)
    areas.append(count_areas(predicted, labels, source.num_classes))
  # Sum areas over scenes: mean IoU is that of the whole split.
  total = {name: sum(area[name] for area in areas) for name in areas[0]}
  return {**overlap(total), "count": len(scenes)}
