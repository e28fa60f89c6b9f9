"""Trained models: predictions, hidden states, inverses and certificates.

A model is loaded from the workdir of a run, from a folder that
`TrainedModel.save` or `jaxformers export` has written, or from a GPT-2 of
Hugging Face. Loading needs neither the data set nor the optimiser of the run.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers as numbers_abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jaxformers import config as configs
from jaxformers import models
from jaxformers.config import RunConfig
from jaxformers.foundations import (
  paths,
  ranges,
  requirements,
  user_code,
  workdirs,
)
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import call, check_keywords, choose
from jaxformers.models import Model, certificates, inverse, sipit
from jaxformers.models.batches import apply_in_batches, in_batches
from jaxformers.models.blocks.invertible import layers_of
from jaxformers.models.capture import capture
from jaxformers.models.decode import at_least
from jaxformers.models.streams import Stream
from jaxformers.models.variables import make_variables, outputs
from jaxformers.tasks import Task, arrays, rows
from jaxformers.tasks import inputs as task_inputs
from jaxformers.training import exported, zoo
from jaxformers.training.weights import read_published, read_weights

if TYPE_CHECKING:
  from jaxformers.training.run import Run

_RANGES = ranges.of(RunConfig)


class _Padded(NamedTuple):
  """Inputs with and without padding, and the batch size.

  Attributes:
    inputs: ids or numbers, as `TrainedModel.encode` returns them.
    padded: inputs, padded to a length that few other inputs differ from.
    size: number of inputs per batch.
  """

  inputs: np.ndarray
  padded: np.ndarray
  size: int

  @property
  def num_added(self) -> int:
    """Number of tokens that the padding has added to each row."""
    return sum(self.padded.shape) - sum(self.inputs.shape)


class Prediction(NamedTuple):
  """Predicted class of one input.

  Attributes:
    label: name of the likeliest class, or its number if classes have no names.
      For a language model, the text of the likeliest next token.
    probability: probability of the likeliest class.
    probabilities: probabilities of all classes, float32 [c].
  """

  label: str | int
  probability: float
  probabilities: np.ndarray


class TokenPrediction(NamedTuple):
  """Predicted classes of the tokens of one input.

  Attributes:
    labels: name or number of the likeliest class of each token, [n].
    probabilities: probabilities of all classes, float32 [n, c].
  """

  labels: tuple[str | int, ...]
  probabilities: np.ndarray


class HiddenStates(NamedTuple):
  """Hidden states of all layers.

  Attributes:
    states: embedded tokens and the output of every layer, float32
      [l + 1, b, n, d]. Each of the two sequences of a pair is one sample.
    mask: mask of the tokens, bool [b, n], True at tokens.
  """

  states: np.ndarray
  mask: np.ndarray


class Inversion(NamedTuple):
  """Inputs that were reconstructed from the output of a layer.

  Attributes:
    inputs: reconstructed inputs, int32 ids or float32 numbers, [b, n], or
      steps of time series, [b, n, channels], 0 where a number is missing.
    texts: decoded `inputs`; () if the model does not read text.
    recovered: share of the tokens that were recovered exactly; None if only
      states are known.
    error: largest absolute error of the reconstructed embedding; or for tokens
      that were found one after the other, the largest distance of a state of
      the found tokens from the given state.
    margins: for tokens that were found one after the other, the distance of the
      second nearest candidate over the distance of the nearest, float32 [b, n],
      where 1 is a collision, and NaN at padding; None otherwise.
  """

  inputs: np.ndarray
  texts: tuple[str, ...]
  recovered: float | None
  error: float
  margins: np.ndarray | None = None


class Certificate(NamedTuple):
  """Largest changes of one input that provably keep its prediction.

  Attributes:
    label: name of the certified class, or its number.
    tokens: greatest k such that replacing any k tokens keeps the prediction.
      0 if the model predicts another class; None if the inputs are numbers.
    radius: norm of the largest perturbation of the embedded sequence that keeps
      the prediction, as a share of the norm of the embedded sequence.
  """

  label: str | int
  tokens: int | None
  radius: float


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a failing method name the weights that do not fit the model.

  The weights are compared only after a failure, because the comparison traces
  the whole model and takes longer than loading it.
  """

  @functools.wraps(method)
  def call_method(self: TrainedModel, *args: Any, **options: Any) -> Any:
    try:
      return method(self, *args, **options)
    except UserError:
      raise
    # Replace an internal error by the misfit of the weights, if there is one.
    except Exception:
      _require_fitting(self.folder, self.model, self.params)
      raise

  return call_method


@dataclasses.dataclass(frozen=True, repr=False)
class TrainedModel:
  """A trained model together with its tokenizer, classes and results.

  `load` and `train` return it. Inputs are texts, or pairs of texts, if the
  model reads text. Otherwise they are arrays, which `inputs.expected()`
  describes. Compiled programs are cached by shape. Batch sizes and lengths of
  ids are padded to powers of two, up to `batch_size` and `max_len`, so a method
  compiles a few programs for each of at most
  (1 + log2(batch_size)) * (1 + log2(max_len)) shapes.

  The model of a run also gives access to its data by `task`, which is opened
  at its first use, and by `sample`.

  Attributes:
    folder: folder that the model was loaded from.
    config: section `config.model` of the run.
    model: Linen module, applied with `params`.
    params: tree of parameters.
    inputs: reader of texts and arrays; see `tasks.inputs.Inputs`.
    classes: names of the classes; () if they have none.
    about: task, protocol, digests of the data, sizes and tokens.
    step: training step of the checkpoint.
    results: content of `results.json`; {} if the run is not finished.
    imports: modules of a user's code that the model needs.
    trained_on: description of the data of the run; see `Task.description`.
    normalise: function that adapts the task of the run to other weights, which
      were trained with another normalisation of pixels; None for the weights of
      the run.

  Example:
    >>> import jaxformers as jf
    >>> model = jf.load("zoo:listops-s5")
    >>> model.step
    900
    >>> model.classes[:3]
    ('0', '1', '2')
  """

  folder: Path
  config: Mapping[str, Any]
  model: Model
  params: Any
  inputs: task_inputs.Inputs
  classes: tuple[str, ...]
  about: Mapping[str, Any]
  step: int
  results: Mapping[str, Any]
  imports: str = ""
  trained_on: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  normalise: Callable[[Task], Task] | None = None

  def __getstate__(self) -> dict[str, Any]:
    """Returns the fields without cached values.

    Cached values refer to devices and open files, which cannot be pickled.
    """
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

  def __repr__(self) -> str:
    """Describes model, task and score on one line."""
    # A finished run has a test score.
    score = ""
    if metric := self.results.get("metric", ""):
      # Own examples without a test split are scored on those that select.
      is_held_out = self.about["task"] == arrays.NAME and self.results[
        "selection"
      ].startswith("test")
      split = "held-out" if is_held_out else "test"
      score = f", {split} {metric} {self.results[metric]:.4g}"
    return (
      f"<TrainedModel {self.config['name']} on {self.about['task']} "
      f"({self.about['protocol']}), step {self.step:,}, "
      f"{models.size(self.model):,} parameters{score}>"
    )

  @functools.cached_property
  def run(self) -> Run:
    """Returns the run that trained the model, with its config and its data.

    Raises:
      UserError: If the folder has no run, if the data cannot be opened, or if
        the data have changed since the training.
    """
    # Import here: only training needs optimisers.
    from jaxformers.training import resume
    from jaxformers.training.run import open_trained_run

    run = open_trained_run(self.folder)
    # Compare the data of the training with the data that were opened now.
    now = {**run.task.description(), "sizes": configs.plain(run.task.sizes())}
    before = {**self.trained_on, "sizes": self.about["sizes"]}
    resume.check_description(self.folder, before, now)
    return run

  @functools.cached_property
  def task(self) -> Task:
    """Returns the task of the run, with its splits.

    Raises:
      UserError: In the cases in which `run` raises it.
    """
    return self.normalise(self.run.task) if self.normalise else self.run.task

  @functools.cached_property
  def start(self) -> Any:
    """Returns the parameters that the run started from.

    Weights that `config.pretrained` names are read again. The result is None if
    the parameters are no longer available.
    """
    from jaxformers.training.run import first_params

    try:
      return first_params(self.run)
    except UserError:
      return None

  def sample(
    self, count: int, length: int, split: str = "test", seed: int = 0
  ) -> np.ndarray:
    """Draws examples of a split at random, without replacement.

    Args:
      count: Number of examples. A smaller split is returned as a whole.
      length: Number of tokens to which each example is cut.
      split: Name of the split.
      seed: Seed of the draw.

    Returns:
      Inputs [count, n], or [count, 2, n] for pairs. n is `length` or the
      maximum length of the task, whichever is smaller.

    Raises:
      UserError: If `count` or `length` is below 1, if the split is unknown, and
        in the cases in which `run` raises it.
    """
    return self.draw(count, length, split, seed)["inputs"]

  def draw(
    self, count: int, length: int, split: str, seed: int = 0
  ) -> dict[str, np.ndarray]:
    """Draws examples as `sample` does; returns all arrays of a batch."""
    if count < 1 or length < 1:
      raise UserError(
        f"{count} samples of {length} tokens: give at least one of both, by "
        "--samples and --length."
      )
    _RANGES["seed"].check("seed", seed)
    # Draw indices of the split without replacement.
    source = self.task.splits[choose("split", split, self.task.splits)]
    rng = np.random.default_rng(seed)
    count = min(count, len(source))
    # Sort the indices to read the examples in their order on the disk.
    chosen = np.sort(rng.choice(len(source), count, replace=False))
    batch = source.batch(chosen, min(length, self.task.max_len))
    # Tasks with labels for tokens give them weights; other examples count 1.
    return {"weights": np.ones(len(chosen), np.float32), **batch}

  def apply(self, batch_size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the evaluation of the model as a function of arrays.

    Args:
      batch_size: Number of inputs per batch. The last batch is filled up with
        copies of its last input.

    Returns:
      A function that maps any number of encoded inputs [k, ...] to outputs
      [k, ...].
    """
    forward = functools.partial(outputs, self.model, self._variables)
    return lambda x: apply_in_batches(forward, x, batch_size)

  @functools.cached_property
  def _params(self) -> Any:
    # Move the parameters to the device once: each call takes them as arguments.
    return jax.device_put(self.params)

  @functools.cached_property
  def _variables(self) -> Any:
    return make_variables(self.model, self._params)

  def encode(self, inputs: Any) -> np.ndarray:
    """Encodes inputs as the arrays that the model reads.

    Args:
      inputs: Texts or arrays.

    Returns:
      Ids (int32) or numbers (float32) of shape [b, n], [b, 2, n] for pairs, or
      [b, height, width, c] for images. The padding id is 0.

    Raises:
      UserError: If the inputs have another kind or shape.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:listops-s5")
      >>> model.encode(["[MAX 2 9 ]"])
      array([[ 2,  7, 14, 15]], dtype=int32)
    """
    return self.inputs.batch(inputs)

  def _read(self, inputs: Any, batch_size: int) -> _Padded:
    """Encodes inputs and pads them, so that few shapes have to be compiled."""
    _RANGES["batch_size"].check("batch_size", batch_size)
    x = self.encode(inputs)
    _require_tokens(x, "inputs")
    return self._pad(x, batch_size)

  def _pad(self, x: np.ndarray, batch_size: int) -> _Padded:
    """Pads encoded inputs, so that few shapes have to be compiled."""
    size = min(batch_size, at_least(len(x)))
    is_series = bool(self.inputs.channels)
    if x.dtype != np.int32 and not is_series:
      return _Padded(x, x, size)
    # Pad ids and series to the next power of two, at most `max_len`.
    axis = 1 if is_series else x.ndim - 1
    widths = [(0, 0)] * x.ndim
    length = x.shape[axis]
    widths[axis] = 0, at_least(length, self.inputs.max_len) - length
    blank = np.nan if is_series else 0
    return _Padded(x, np.pad(x, widths, constant_values=blank), size)

  def decode(self, ids: Any) -> list[str]:
    """Decodes ids into texts.

    Args:
      ids: Ids [b, n]. Padding is removed.

    Returns:
      A list of b texts.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:listops-s5")
      >>> model.decode([[2, 7, 14, 15, 0]])
      ['[MAX 2 9 ]']
    """
    return [self.inputs.decode(row) for row in np.asarray(ids)]

  @check_keywords
  @_explained
  def outputs(self, inputs: Any, *, batch_size: int = 32) -> np.ndarray:
    """Computes the outputs of the model.

    Args:
      inputs: Texts or arrays.
      batch_size: Number of inputs per batch.

    Returns:
      Logits [b, c] of a classifier, logits [b, n, c] of a model with a label
      per token, or log probabilities [b, n, v] of the
      tokens of a language model.

    Raises:
      UserError: If the inputs do not fit, or if the weights do not fit the
        model.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:listops-s5")
      >>> model.outputs(["[MAX 2 9 ]"]).shape
      (1, 10)
    """
    return self._outputs(self._read(inputs, batch_size))

  def _outputs(self, read: _Padded) -> np.ndarray:
    """Returns the outputs of inputs that are encoded and padded."""
    x = read.inputs
    forward = functools.partial(outputs, self.model, self._variables)
    results = apply_in_batches(forward, read.padded, read.size)
    # Outputs for each token: remove those at the padding added by `_read`.
    is_series = bool(self.inputs.channels)
    has_tokens = is_series or (x.dtype == np.int32 and x.ndim == 2)
    has_tokens = has_tokens and results.ndim == 3
    if not has_tokens:
      return results
    return results[:, : results.shape[1] - read.num_added]

  @check_keywords
  def predict(
    self, inputs: Any, *, batch_size: int = 32
  ) -> list[Prediction] | list[TokenPrediction]:
    """Predicts the class of every input, of every token, or the next token.

    Args:
      inputs: Texts or arrays.
      batch_size: Number of inputs per batch.

    Returns:
      A `Prediction` for every input. If the model was trained on a label per
      token, a `TokenPrediction` for every input, without padding. The classes
      of a language model are the tokens that may follow the input; their
      probabilities are in the order of the ids.

    Raises:
      UserError: If the model is neither a classifier nor a language model, if
        the inputs do not fit, or if a text is longer than a language model
        reads.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:listops-s5")
      >>> (prediction,) = model.predict(["[MAX 2 9 ]"])
      >>> prediction.label
      '9'
    """
    if self.model.objective == "token_classification":
      return self._predict_tokens(inputs, batch_size)
    if self.model.objective == "language_model":
      return self._predict_next(inputs, batch_size)
    self._require("classification", "predict", "use `outputs`")
    logits = self.outputs(inputs, batch_size=batch_size)
    # Softmax in float64, [b, c].
    shares = scipy.special.softmax(logits.astype(np.float64), -1)
    # The likeliest class of each input.
    best = shares.argmax(-1)
    return [
      Prediction(self._label(k), float(row[k]), row.astype(np.float32))
      for k, row in zip(best, shares, strict=True)
    ]

  def _predict_tokens(
    self, inputs: Any, batch_size: int
  ) -> list[TokenPrediction]:
    read = self._read(inputs, batch_size)
    logits = self._outputs(read)
    shares = scipy.special.softmax(logits.astype(np.float64), -1)
    # Numbers have no padding; ids and series may have it anywhere.
    x = read.inputs
    is_token = np.ones(x.shape, bool) if x.dtype != np.int32 else x > 0
    if self.inputs.channels:
      is_token = ~np.isnan(x).all(-1)
    return [
      TokenPrediction(
        tuple(self._label(k) for k in row[mask].argmax(-1)),
        row[mask].astype(np.float32),
      )
      for row, mask in zip(shares, is_token, strict=True)
    ]

  def _predict_next(self, inputs: Any, batch_size: int) -> list[Prediction]:
    """Predicts the token after each input; see `predict`."""
    _RANGES["batch_size"].check("batch_size", batch_size)
    x = self.inputs.batch(inputs, closed=False)
    _require_tokens(x, "inputs")

    def after_last(ids: np.ndarray) -> jax.Array:
      """Returns log probabilities after the last token, [b, v]."""
      last = ids.shape[1] - 1 - (ids[:, ::-1] > 0).argmax(1)
      log_p = outputs(self.model, self._variables, ids)
      return log_p[np.arange(len(ids)), last]

    read = self._pad(x, batch_size)
    shares = np.exp(apply_in_batches(after_last, read.padded, read.size))
    return [
      Prediction(self._token(k), float(row[k]), row)
      for k, row in zip(shares.argmax(-1), shares, strict=True)
    ]

  def _token(self, k: int) -> str:
    """Returns the text of an id, or the token itself if it is no text."""
    text = self.inputs.decode(np.array([k]))
    # A part of a character in UTF-8 is no text.
    return self.inputs.vocabulary[k] if text in ("", "\ufffd") else text

  def _label(self, k: int) -> str | int:
    return self.classes[k] if self.classes else int(k)

  def _require(self, objective: str, method: str, advice: str) -> None:
    if self.model.objective != objective:
      raise UserError(
        f"{method} needs a model of the objective {objective!r}, and this "
        f"model has {self.model.objective!r}: {advice}."
      )

  @check_keywords
  @_explained
  def generate(
    self,
    prompts: Sequence[str],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
  ) -> list[str]:
    """Continues texts with a language model.

    Args:
      prompts: Texts to continue.
      num_tokens: Number of tokens to draw for each prompt.
      temperature: Divisor of the log probabilities. 0 takes the likeliest
        token.
      top_k: Number of likeliest tokens to draw from. 0 draws from all tokens.
      seed: Seed of the draws.

    Returns:
      The continuation of every prompt, without the prompt.

    Raises:
      UserError: If the model is not a language model, if its mixer has no
        cache, if a prompt is empty, or if prompt and continuation are longer
        than the model allows.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:language-allpass")
      >>> texts = model.generate(["a good film"], 4, temperature=0.0)
      >>> len(texts)
      1
    """
    self._require(
      "language_model", "generate", "use `predict` for a classifier"
    )
    _RANGES["seed"].check("seed", seed)
    # Encode the prompts without an end token, and draw the continuations.
    ids = self.inputs.batch(prompts, closed=False)
    _require_tokens(ids, "prompts")
    drawn = models.generate(
      self.model,
      self._params,
      ids,
      num_tokens,
      key=jax.random.key(seed),
      temperature=temperature,
      top_k=top_k,
    )
    return self.decode(drawn)

  def stream(self) -> Stream:
    """Returns a reader of sequences whose tokens come one after the other.

    Raises:
      UserError: If the model reads later tokens, or the time of each step in
        its series.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:language-allpass")
      >>> model.stream().feed([[5, 7, 3]]).shape[:2]
      (1, 3)
    """
    if self.inputs.channels and self.inputs.reading.get("include_time"):
      raise UserError(
        "include_time=True gives each step its time in the whole series, which "
        "a stream does not know: train without it."
      )
    return Stream(self.model, self._variables, self.inputs.normalise)

  @check_keywords
  @_explained
  def hidden_states(self, inputs: Any, *, batch_size: int = 32) -> HiddenStates:
    """Computes the embedded tokens and the output of every layer.

    Args:
      inputs: Texts or arrays.
      batch_size: Number of inputs per batch.

    Returns:
      The hidden states [l + 1, b, n, d] and the mask [b, n].

    Raises:
      UserError: If the inputs do not fit, or if the weights do not fit the
        model.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:listops-s5")
      >>> hidden = model.hidden_states(["[MAX 2 9 ]"])
      >>> hidden.states.shape, hidden.mask.shape
      ((3, 1, 4, 64), (1, 4))
    """
    read = self._read(inputs, batch_size)
    # Run the batches, and keep the states of all layers.
    captured = [
      capture(self.model, self._variables, batch)
      for batch in in_batches(read.padded, read.size)
    ]
    states = [np.stack([np.asarray(x) for x in c.hidden]) for c in captured]
    masks = [np.asarray(c.mask) for c in captured]
    # Remove repeated samples and padding; a pair counts as two samples.
    samples = len(read.inputs) * self.model.config.num_inputs
    tokens = masks[0].shape[1] - read.num_added
    return HiddenStates(
      np.concatenate(states, 1)[:, :samples, :tokens],
      np.concatenate(masks)[:samples, :tokens],
    )

  @check_keywords
  @_explained
  def invert(
    self,
    inputs: Any = None,
    *,
    states: Any = None,
    mask: Any = None,
    layer: int | None = None,
    policy: str = "all",
    batch_size: int = 32,
    progress: bool = False,
  ) -> Inversion:
    """Reconstructs inputs from the output of a layer.

    Invertible layers run forwards on the inputs, and then backwards from the
    output of the last layer. The backward pass uses the side information of the
    forward pass (see `models.inverse`). Other causal models, and all causal
    models from `states` or a chosen layer, are inverted token by token: each
    token is the candidate whose state is nearest (see `models.sipit`).

    Args:
      inputs: Texts or arrays; None if states are given.
      states: Output of a layer for b sequences, float [b, n, d], as
        `hidden_states` returns it. It may be noisy.
      mask: Mask of the tokens of the states, bool [b, n], as `hidden_states`
        returns it: tokens come first in each row. None for no padding.
      layer: Number of the layer, from 1, or 0 for the embedded tokens. None for
        the last layer.
      policy: Candidates of a token, "all" or "gradient"; see `sipit.recover`.
      batch_size: Number of inputs per batch.
      progress: True to show the batches of a search token by token, if stderr
        is a terminal.

    Returns:
      The reconstructed inputs and their errors.

    Raises:
      UserError: If the layers of the model are not invertible and the model is
        not causal, or if the states do not fit the model.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:listops-transject")
      >>> model.invert(["[MAX 2 9 ]"]).texts
      ('[MAX 2 9 ]',)
    """
    if (inputs is None) == (states is None):
      raise UserError("Give either inputs or states.")
    if states is None and mask is not None:
      raise UserError("mask= belongs to states=, but inputs have their own.")
    _RANGES["batch_size"].check("batch_size", batch_size)
    is_whole = states is None and layer is None and policy == "all"
    if not is_whole or layers_of(self.model.stacks()["encoder"]) is None:
      more = {"layer": layer, "policy": policy, "progress": progress}
      return self._search(inputs, states, mask, batch_size, more)
    x, padded, size = self._read(inputs, batch_size)
    model = models.in_float32(self.model)
    # A [CLS] token in front is not part of the inputs.
    first = model.config.cls
    # Run each batch forwards and backwards, and map the result to tokens.
    parts, masks, error = [], [], 0.0
    for batch in in_batches(padded, size):
      # Hidden states [l + 1, b, n, d], and the reconstructed embedding.
      hidden, side = inverse.forward(model, self._params, jnp.asarray(batch))
      back = inverse.inverse(model, self._params, hidden[-1], side)
      parts.append(inverse.tokens(model, self._params, back)[0])
      mask = np.asarray(side.mask)
      masks.append(mask[:, first:])
      # Largest error of the embedding at the tokens.
      difference = np.abs(np.asarray(back - hidden[0]))[mask]
      error = max(error, float(difference.max(initial=0)))
    # Remove repeated samples and padding, and compare at the tokens.
    channels = self.inputs.channels
    original = np.nan_to_num(x) if channels else x.reshape(-1, x.shape[-1])
    samples, length = original.shape[:2]
    mask = np.concatenate(masks)[:samples, :length]
    values = np.concatenate(parts)[:samples, :length]
    # Numbers count as recovered if they are within 1e-4; ids must be equal.
    is_token = mask[..., None] if channels else mask
    values = np.where(is_token, values, 0)
    recovered = np.isclose(values, original, atol=1e-4)[mask]
    return Inversion(
      values,
      tuple(self.decode(values)) if self.inputs.tokenizer else (),
      float(recovered.mean()),
      error,
    )

  def _search(
    self,
    inputs: Any,
    states: Any,
    mask: Any,
    batch_size: int,
    search: dict[str, Any],
  ) -> Inversion:
    """Finds tokens one after the other; see `invert`.

    Args:
      inputs, states, mask, batch_size: arguments of `invert`.
      search: further arguments of `sipit.recover`.
    """
    ids = None
    if states is None:
      x, padded, size = self._read(inputs, batch_size)
      ids, mask, states = sipit.find_states(
        self.model, self._params, padded, search["layer"], size
      )
    recovered = sipit.recover(
      self.model,
      self._params,
      states,
      mask=mask,
      batch_size=batch_size,
      **search,
    )
    share = None if ids is None else float((recovered.ids == ids)[mask].mean())
    n = recovered.ids.shape[1] if ids is None else x.shape[1]
    return Inversion(
      recovered.ids[:, :n],
      tuple(self.decode(recovered.ids)) if self.inputs.tokenizer else (),
      share,
      float(recovered.distances.max(where=recovered.ids > 0, initial=0)),
      recovered.margins[:, :n],
    )

  @check_keywords
  @_explained
  def certify(
    self, inputs: Any, labels: Any = None, *, batch_size: int = 32
  ) -> list[Certificate]:
    """Certifies how far each input may change before its prediction can.

    The certificate applies to the model in float32. A model that computes in
    bfloat16 rounds more, and may predict another class.

    Args:
      inputs: Texts or arrays.
      labels: Names or numbers of the right classes, [b]. An input with another
        prediction gets a certificate of 0. None certifies the predicted
        classes.
      batch_size: Number of inputs per batch.

    Returns:
      A `Certificate` for every input.

    Raises:
      UserError: If the layers of the model have no bound that holds for all
        sequences, if the model is not a classifier, or if a label is not a
        class of the model.

    Example:
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:text-certified")
      >>> (certificate,) = model.certify(["a good film"])
      >>> certificate.tokens
      0
    """
    self._require("classification", "certify", "only classifiers have labels")
    read = self._read(inputs, batch_size)
    x, padded, size = read
    model = models.in_float32(self.model)
    # Numbers of the classes to certify, [b].
    if labels is None:
      logits = certificates.Evaluation(model, self._params).logits
      parts = [logits(part) for part in in_batches(padded, size)]
      numbers = np.concatenate(parts)[: len(x)].argmax(-1)
    else:
      numbers = self._numbers(labels, len(x))
    # Largest number of tokens and largest radius of each input.
    greatest = certificates.certify(model, self._params, padded, numbers, size)
    return [
      Certificate(self._label(k), count, radius)
      for k, (count, radius) in zip(numbers, greatest, strict=True)
    ]

  def _numbers(self, labels: Any, expected: int) -> np.ndarray:
    """Returns the numbers of classes that are given by name or by number."""
    labels = rows.values(labels, "labels")
    if len(labels) != expected:
      raise UserError(
        f"{len(labels)} labels for {expected} inputs: give one for each."
      )
    # Map names to numbers, and check that every number is a class.
    count = self.model.config.num_classes
    numbers = []
    for label in labels:
      is_name = isinstance(label, str) and label in self.classes
      number = self.classes.index(label) if is_name else label
      is_number = isinstance(number, numbers_abc.Integral)
      if not is_number or not 0 <= number < count:
        raise UserError(
          f"{label!r} is not a class of this model: give one of "
          f"{', '.join(self.classes) or f'0 to {count - 1}'}."
        )
      numbers.append(int(number))
    return np.array(numbers)

  def save(self, folder: str | Path) -> Path:
    """Saves the model to a folder that `load` reads.

    The folder receives model.json, parameters.safetensors and vocabulary.json.
    It also receives tokenizer.json if the model reads word pieces or byte
    pairs, and results.json if the run is finished.

    Args:
      folder: Folder to write. It must be new, or hold a saved model, which is
        replaced.

    Returns:
      The absolute path of the folder.

    Raises:
      UserError: If the folder holds other files.

    Example:
      >>> import tempfile
      >>> import jaxformers as jf
      >>> model = jf.load("zoo:listops-s5")
      >>> folder = model.save(f"{tempfile.mkdtemp()}/listops")
      >>> jf.load(folder).step
      900
    """
    path = paths.expand(folder).absolute()
    content = {"model": self.config, "task": self.about, "step": self.step}
    content["imports"] = self.imports
    # Write all files, and then give the complete folder its name.
    with exported.writing(path, content) as staged:
      exported.write_parameters(staged, self.params)
      workdirs.write_record(staged, self.about, self.inputs.tokenizer_json)
      if self.results:
        workdirs.write(staged, "results.json", self.results)
    return path


def _require_tokens(x: np.ndarray, what: str) -> None:
  """Raises UserError if a sequence of ids has no tokens."""
  # Only ids have padding. Every sequence of a pair needs a token.
  if x.dtype != np.int32:
    return
  has_tokens = (x > 0).any(-1).reshape(len(x), -1).all(-1)
  if not has_tokens.all():
    raise UserError(
      f"{what}[{int(has_tokens.argmin())}] has no tokens: give a text or ids "
      "with at least one."
    )


def _require_numbers(folder: Path, params: Any) -> None:
  """Raises UserError for weights that are not finite or not float32."""
  for name, leaf in flax.traverse_util.flatten_dict(params, sep="/").items():
    if leaf.dtype != np.float32:
      raise _misfit(folder, f"{name} is {leaf.dtype}, not float32")
    if not np.isfinite(leaf).all():
      raise _misfit(folder, f"{name} is not finite")


def _require_fitting(folder: Path, model: Model, params: Any) -> None:
  """Raises UserError if names or shapes of the weights differ from the model's.

  Args:
    folder: folder of the weights, for the message.
    model: model that the weights are for.
    params: tree of the weights.
  """
  needed, weights = (
    flax.traverse_util.flatten_dict(tree, sep="/")
    for tree in (models.shapes(model), params)
  )
  # Compare the names, and then the shapes.
  for name in needed.keys() ^ weights.keys():
    what = "missing" if name in needed else "not in the model"
    raise _misfit(folder, f"{name} is {what}")
  for name, leaf in weights.items():
    have, want = list(leaf.shape), list(needed[name].shape)
    if have != want:
      raise _misfit(
        folder, f"{name} has the shape {have}, and the model needs {want}"
      )


def _misfit(folder: Path, problem: str) -> UserError:
  """Returns the error for weights that do not fit the model of a folder."""
  return UserError(
    f"The weights in {folder} do not fit its model: {problem}. Save the model "
    "again from its run."
  )


@check_keywords
def load(folder: str | Path, *, trust: bool = False) -> TrainedModel:
  """Loads a trained model.

  Args:
    folder: Workdir of a run, from which the best checkpoint is read. Or a
      folder that `TrainedModel.save` or `jaxformers export` has
      written. Or a folder of Hugging Face with a GPT-2: config.json,
      safetensors, and tokenizer.json for texts. Or "zoo:NAME" for a small
      trained model of the package; the command `jaxformers zoo` lists the
      names.
    trust: True imports the code modules that the folder names. They run with
      your rights; see SECURITY.md. Modules that are already imported need no
      trust.

  Returns:
    The trained model, ready for use.

  Raises:
    UserError: If the folder holds no trained model, or if it names code modules
      and `trust` is False.

  Example:
    >>> import jaxformers as jf
    >>> model = jf.load("zoo:listops-s5")
    >>> model.predict(["[MAX 2 9 ]"])[0].label
    '9'
  """
  requirements.require_device()
  # Find the folder: a model of the zoo, or a path.
  if str(folder).startswith(zoo.PREFIX):
    path = zoo.require(str(folder).removeprefix(zoo.PREFIX))
  else:
    path = paths.expand(folder).absolute()
  if not path.is_dir():
    raise UserError(
      f"There is no folder {path}: give the workdir of a run, or the folder of "
      "an exported model."
    )
  with user_code.trusting(trust):
    return _open(path)


def load_run(workdir: str | Path) -> TrainedModel:
  """Loads the model of a run for a command that needs the data of the run.

  The code modules that the run names are imported only inside
  `user_code.trusting`.

  Args:
    workdir: folder of the run.

  Raises:
    UserError: if the folder has no run, and in the cases in which `load` raises
      it.
  """
  if str(workdir).startswith(zoo.PREFIX):
    raise UserError(
      f"{workdir} is a model without a run, and this command needs the data of "
      "a run: give the workdir of a run, or open the model in Python by "
      f"jaxformers.load({str(workdir)!r})."
    )
  # Import here: only training needs optimisers.
  from jaxformers.training import resume

  # Check that the workdir has a run, and that the weights fit its config.
  path = Path(workdir).absolute()
  workdirs.check_trained(path)
  config = RunConfig.from_dict(workdirs.read_config(path))
  trained = _open(path)
  resume.check_workdir(path, config)
  _require_fitting(path, trained.model, trained.params)
  # Keep the weights on the device: measurements use them many times.
  return dataclasses.replace(trained, params=jax.device_put(trained.params))


def _open(path: Path) -> TrainedModel:
  """Opens the model of a run or of an exported folder.

  Raises:
    UserError: if the folder has no trained model, or a damaged one.
  """
  weights = read_weights(path)
  if weights is None and (path / "config.json").is_file():
    weights = read_published(path)
  if weights is None:
    raise UserError(
      f"{path} has no trained model: give the workdir of a run, the folder of "
      "an exported model, or a folder of Hugging Face with a language model."
    )
  record = weights.record
  if "sizes" not in record:
    raise UserError(
      f"{path / 'vocabulary.json'} has no sizes of the model: run the training "
      "command again, which writes the file."
    )
  # The sizes of the data complete the fields of the model.
  options = {**weights.model, **record["sizes"]}
  _require_numbers(path, weights.params)
  return TrainedModel(
    path,
    weights.model,
    call("config.model", models.build, options),
    weights.params,
    task_inputs.from_record(record, weights.tokenizer),
    tuple(record.get("classes", ())),
    record,
    weights.step,
    weights.results,
    weights.imports,
    weights.task,
  )
