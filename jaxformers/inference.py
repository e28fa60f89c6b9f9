"""Trained models in use: predictions, hidden states, inverses, certificates.

A model is loaded from the workdir of a run, or from a folder that
`TrainedModel.save` or `python -m jaxformers export` has written. Neither its
data set nor its optimiser is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers as numbers_abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jaxformers import (
  durable,
  models,
  paths,
  ranges,
  requirements,
  workdirs,
  zoo,
)
from jaxformers.analysis.certificates import certified, inverse
from jaxformers.analysis.tokens.capture import capture
from jaxformers.errors import UserError
from jaxformers.models import Model
from jaxformers.models.variables import make_variables
from jaxformers.registry import call, check_keywords
from jaxformers.tasks import inputs as task_inputs
from jaxformers.tasks import rows
from jaxformers.trained import apply_in_batches
from jaxformers.training import origin

_BATCH_SIZE, _SEED = ranges.RANGES["batch_size"], ranges.RANGES["seed"]


class Prediction(NamedTuple):
  """Class of one input.

  Attributes:
    label: name of the likeliest class, or its number if classes have no names.
    probability: its probability.
    probabilities: those of all classes, float32 [c].
  """

  label: str | int
  probability: float
  probabilities: np.ndarray


class HiddenStates(NamedTuple):
  """Hidden states of all layers.

  Attributes:
    states: embedded tokens and the output of every layer, float32
      [l + 1, b, n, d]; the two sequences of a pair are samples of their own.
    mask: [b, n], True at tokens.
  """

  states: np.ndarray
  mask: np.ndarray


class Inversion(NamedTuple):
  """Inputs that were computed from the output of the last layer.

  Attributes:
    inputs: int32 ids or float32 numbers, [b, n].
    texts: the same as texts; () if inputs are not text.
    recovered: share of the tokens that are those of the inputs.
    error: largest absolute error of the embedding.
  """

  inputs: np.ndarray
  texts: tuple[str, ...]
  recovered: float
  error: float


class Certificate(NamedTuple):
  """Changes of one input that cannot change its prediction.

  Attributes:
    label: name of the class that is certified, or its number.
    tokens: greatest k such that no replacement of any k tokens changes it;
      0 for an input that is classified as another; None if inputs are numbers.
    radius: greatest norm of a perturbation of the embedded sequence that does
      not change it, as a share of that sequence's norm.
  """

  label: str | int
  tokens: int | None
  radius: float


@dataclasses.dataclass(frozen=True, repr=False)
class TrainedModel:
  """A trained model with what it needs to read its inputs.

  Inputs are texts (or pairs of texts) for a model of text, and otherwise arrays
  as `inputs.expected()` says.

  Attributes:
    folder: folder that it was loaded from.
    config: section `config.model` of its run.
    model: Linen module, applied with `params`.
    params: tree of parameters.
    inputs: reads texts and arrays; see `tasks.inputs.Inputs`.
    classes: names of the classes; () if they have none.
    about: task, protocol and digests of its data; sizes, tokens.
    step: step of its checkpoint.
    results: content of `results.json`; {} if the run has not ended.
    imports: modules of a user's code that the model needs.
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

  def __repr__(self) -> str:
    """Describes model, task and score on one line."""
    metric = self.results.get("metric", "")
    score = f", test {metric} {self.results[metric]:.4g}" if metric else ""
    return (
      f"<TrainedModel {self.config['name']} on {self.about['task']} "
      f"({self.about['protocol']}), step {self.step:,}, "
      f"{models.size(self.model):,} parameters{score}>"
    )

  @functools.cached_property
  def _variables(self) -> Any:
    return make_variables(self.model, self.params)

  @functools.cached_property
  def _apply(self) -> Any:
    variables = self._variables  # Made before the function is traced.
    return jax.jit(lambda x: self.model.apply(variables, x, train=False))

  def encode(self, inputs: Any) -> np.ndarray:
    """Returns inputs as the model reads them.

    Args:
      inputs: texts or arrays.

    Returns:
      int32 ids or float32 numbers [b, n], [b, 2, n] for pairs, or
      [b, height, width, c]; 0 is padding of ids.

    Raises:
      UserError: for inputs of another kind or shape.
    """
    return self.inputs.batch(inputs)

  def _read(self, inputs: Any, batch_size: int) -> np.ndarray:
    """Returns `encode` of inputs that have tokens, with a size of batches."""
    _BATCH_SIZE.check("batch_size", batch_size)
    x = self.encode(inputs)
    _require_tokens(x, "inputs")
    return x

  def decode(self, ids: Any) -> list[str]:
    """Returns the texts of ids [b, n], without padding."""
    return [self.inputs.decode(row) for row in np.asarray(ids)]

  @check_keywords
  def outputs(self, inputs: Any, *, batch_size: int = 32) -> np.ndarray:
    """Returns what the model computes: logits [b, c], or log p [b, n, v].

    Args:
      inputs: texts or arrays.
      batch_size: inputs at a time.
    """
    x = self._read(inputs, batch_size)
    is_padded = x.dtype == np.int32
    if is_padded:
      # Round the length up, so that few lengths are compiled.
      length = 1 << (x.shape[-1] - 1).bit_length()
      rest = max(0, min(length, self.inputs.max_len) - x.shape[-1])
      x = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, rest)])
    outputs = apply_in_batches(self._apply, x, min(batch_size, len(x)))
    has_tokens = is_padded and x.ndim == 2 and outputs.ndim == 3
    return outputs[:, : outputs.shape[1] - rest] if has_tokens else outputs

  @check_keywords
  def predict(self, inputs: Any, *, batch_size: int = 32) -> list[Prediction]:
    """Returns the class of every input.

    Args:
      inputs: texts or arrays.
      batch_size: inputs at a time.

    Raises:
      UserError: for a model that is not a classifier.
    """
    self._require("classification", "predict", "`outputs` has what it computes")
    logits = self.outputs(inputs, batch_size=batch_size)
    shares = scipy.special.softmax(logits.astype(np.float64), -1)
    best = shares.argmax(-1)
    return [
      Prediction(self._label(k), float(row[k]), np.float32(row))
      for k, row in zip(best, shares, strict=True)
    ]

  def _label(self, k: int) -> str | int:
    return self.classes[k] if self.classes else int(k)

  def _require(self, objective: str, method: str, advice: str) -> None:
    if self.model.objective != objective:
      raise UserError(
        f"{method} is for the objective {objective!r}, and this model has "
        f"{self.model.objective!r}: {advice}."
      )

  @check_keywords
  def generate(
    self,
    prompts: Sequence[str],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
  ) -> list[str]:
    """Returns how a language model continues texts.

    Args:
      prompts: texts.
      num_tokens: number of tokens to draw for each.
      temperature, top_k: see `models.generate`.
      seed: seed of what is drawn.
    """
    self._require("language_model", "generate", "`predict` has its classes")
    _SEED.check("seed", seed)
    ids = self.inputs.batch(prompts, closed=False)
    _require_tokens(ids, "prompts")
    drawn = models.generate(
      self.model,
      self.params,
      ids,
      num_tokens,
      key=jax.random.key(seed),
      temperature=temperature,
      top_k=top_k,
    )
    return self.decode(drawn)

  @check_keywords
  def hidden_states(self, inputs: Any, *, batch_size: int = 32) -> HiddenStates:
    """Returns the embedded tokens and the output of every layer.

    Args:
      inputs: texts or arrays.
      batch_size: inputs at a time.
    """
    x = self._read(inputs, batch_size)
    captured = [
      capture(self.model, self._variables, batch)
      for batch in np.split(x, range(batch_size, len(x), batch_size))
    ]
    states = [np.stack([np.asarray(x) for x in c.hidden]) for c in captured]
    masks = [np.asarray(c.mask) for c in captured]
    return HiddenStates(np.concatenate(states, 1), np.concatenate(masks))

  @check_keywords
  def invert(self, inputs: Any, *, batch_size: int = 32) -> Inversion:
    """Runs the layers on inputs, and then backwards from the last output.

    Args:
      inputs: texts or arrays.
      batch_size: inputs at a time.

    Raises:
      UserError: for a model whose layers cannot be undone.
    """
    x = self._read(inputs, batch_size)
    model = models.in_float32(self.model)
    first = model.config.cls
    parts, masks, error = [], [], 0.0
    for batch in np.split(x, range(batch_size, len(x), batch_size)):
      hidden, side = inverse.forward(model, self.params, jnp.asarray(batch))
      back = inverse.inverse(model, self.params, hidden[-1], side)
      parts.append(inverse.tokens(model, self.params, back)[0])
      mask = np.asarray(side.mask)
      masks.append(mask[:, first:])
      difference = np.abs(np.asarray(back - hidden[0]))[mask]
      error = max(error, float(difference.max(initial=0)))
    mask = np.concatenate(masks)
    values = np.where(mask, np.concatenate(parts), 0)
    recovered = np.isclose(values, x.reshape(mask.shape), atol=1e-4)[mask]
    return Inversion(
      values,
      tuple(self.decode(values)) if self.inputs.tokenizer else (),
      float(recovered.mean()),
      error,
    )

  @check_keywords
  def certify(
    self, inputs: Any, labels: Any = None, *, batch_size: int = 32
  ) -> list[Certificate]:
    """Returns changes that cannot change the prediction of each input.

    Args:
      inputs: texts or arrays.
      labels: names or numbers of the right classes, [b]: an input that is
        classified as another gets a certificate of 0; None for the predicted
        classes.
      batch_size: inputs at a time.

    Raises:
      UserError: for a model whose layers have no bound for all sequences, or
        labels that are no classes of the model.
    """
    self._require("classification", "certify", "only classes are certified")
    x = self._read(inputs, batch_size)
    model = models.in_float32(self.model)
    if labels is None:
      numbers = self.outputs(x, batch_size=batch_size).argmax(-1)
    else:
      numbers = self._numbers(labels, len(x))
    greatest = certified.certify(model, self.params, x, numbers, batch_size)
    return [
      Certificate(self._label(k), count, radius)
      for k, (count, radius) in zip(numbers, greatest, strict=True)
    ]

  def _numbers(self, labels: Any, expected: int) -> np.ndarray:
    """Returns labels, names or numbers, as numbers of classes."""
    labels = rows.values(labels, "labels")
    if len(labels) != expected:
      raise UserError(
        f"{len(labels)} labels for {expected} inputs: give one for each."
      )
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
    """Writes the model into a folder, which `load` reads; returns its path.

    model.json, parameters.safetensors and vocabulary.json; for word pieces and
    byte pairs tokenizer.json, too; and results.json if the run has ended.

    Args:
      folder: folder to write, made if it is missing.
    """
    path = paths.expand(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    origin.write_parameters(path, self.params)
    content = {"model": self.config, "task": self.about, "step": self.step}
    content["imports"] = self.imports
    durable.write_json(path / "model.json", content)
    workdirs.write(path, "vocabulary.json", self.about)
    if self.inputs.tokenizer_json:
      content = json.loads(self.inputs.tokenizer_json)
      durable.write_json(path / "tokenizer.json", content)
    if self.results:
      workdirs.write(path, "results.json", self.results)
    return path


def _require_tokens(x: np.ndarray, what: str) -> None:
  """Raises UserError for ids of a sequence without any token."""
  if x.dtype != np.int32:
    return
  has_tokens = (x > 0).any(-1).reshape(len(x), -1).all(-1)
  if not has_tokens.all():
    raise UserError(
      f"{what}[{int(has_tokens.argmin())}] has no tokens: give a text or ids "
      "with at least one."
    )


@check_keywords
def load(folder: str | Path) -> TrainedModel:
  """Returns a trained model, ready for use.

  Args:
    folder: workdir of a run, of which the best checkpoint is read; or a folder
      that `TrainedModel.save` or `python -m jaxformers export` has written; or
      "zoo:NAME", a small trained model that `python -m jaxformers zoo` lists.

  Raises:
    UserError: for another folder, or one that an older version has written.
  """
  requirements.require_device()
  if str(folder).startswith(zoo.PREFIX):
    path = zoo.require(str(folder).removeprefix(zoo.PREFIX))
  else:
    path = paths.expand(folder).absolute()
  if not path.is_dir():
    raise UserError(
      f"There is no folder {path}: give the workdir of a run, or the folder of "
      "an exported model."
    )
  weights = origin.read(path)
  if weights is None:
    raise UserError(
      f"{path} has no trained model of this package: give the workdir of a "
      "run, or the folder of an exported model. Folders of Hugging Face are "
      "read by jaxformers.models.pretrained.load."
    )
  if "sizes" not in weights.record:
    raise UserError(
      f"{path}/vocabulary.json was written by an older version, without the "
      "sizes of its inputs: run the training command of this run again, which "
      "writes it anew."
    )
  record = weights.record
  options = {**weights.model, **record["sizes"]}
  tokenizer = path / "tokenizer.json"
  results = path / "results.json"
  return TrainedModel(
    path,
    weights.model,
    call("config.model", models.build, options),
    weights.params,
    task_inputs.from_record(
      record, json.loads(tokenizer.read_text()) if tokenizer.exists() else None
    ),
    tuple(record.get("classes", ())),
    record,
    weights.step,
    workdirs.read(path, "results.json") if results.exists() else {},
    weights.imports,
  )
