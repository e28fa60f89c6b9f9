"""Trained models in use: predictions, hidden states, inverses, certificates.

A model is loaded from the workdir of a run, or from a folder that
`TrainedModel.save` or `python -m jaxformers export` has written. Neither its
data set nor its optimiser is needed.
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
from jaxformers.models import Model, certificates, inverse
from jaxformers.models.batches import apply_in_batches, in_batches
from jaxformers.models.capture import capture
from jaxformers.models.decode import at_least
from jaxformers.models.variables import make_variables, outputs
from jaxformers.tasks import Task, rows
from jaxformers.tasks import inputs as task_inputs
from jaxformers.training import exported, zoo
from jaxformers.training.weights import read_weights

if TYPE_CHECKING:
  from jaxformers.training.run import Run

_RANGES = ranges.of(RunConfig)


class _Padded(NamedTuple):
  """Inputs as read, the same padded, and how many to take at a time."""

  inputs: np.ndarray
  padded: np.ndarray
  size: int


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


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a method say which weights do not fit, if that is why it fails.

  The comparison traces the whole model, which takes longer than a load.
  """

  @functools.wraps(method)
  def call_method(self: TrainedModel, *args: Any, **options: Any) -> Any:
    try:
      return method(self, *args, **options)
    except UserError:
      raise
    except Exception:
      _require_fitting(self.folder, self.model, self.params)
      raise

  return call_method


@dataclasses.dataclass(frozen=True, repr=False)
class TrainedModel:
  """A trained model with what it needs to read its inputs.

  Inputs are texts (or pairs of texts) for a model of text, and otherwise arrays
  as `inputs.expected()` says. Programs are kept by shapes: batches and lengths
  of ids are padded to powers of two, up to `batch_size` and `max_len`, so a
  method compiles a few for each of (1 + log2(batch_size)) * (1 + log2(max_len))
  shapes.

  The model of a run also has its data: `task`, which is opened when it is first
  needed, and `sample`.

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
    trained_on: description of the data of its run; see `Task.description`.
    normalise: changes the task of the run for other weights, whose pixels were
      normalised otherwise; None for the weights of the run.
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
    """Returns the fields: what is cached has devices and open files."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

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
  def run(self) -> Run:
    """The run that trained the model, with its config and its data.

    Raises:
      UserError: for a folder without a run; for data that cannot be opened, or
        that have changed since.
    """
    # Training needs an optimiser, which a model in use does not.
    from jaxformers.training import resume
    from jaxformers.training.run import open_trained_run

    run = open_trained_run(self.folder)
    now = {**run.task.description(), "sizes": configs.plain(run.task.sizes())}
    before = {**self.trained_on, "sizes": self.about["sizes"]}
    resume.check_description(self.folder, before, now)
    return run

  @functools.cached_property
  def task(self) -> Task:
    """Task of the run, with its splits.

    Raises:
      UserError: as `run`.
    """
    return self.normalise(self.run.task) if self.normalise else self.run.task

  @functools.cached_property
  def start(self) -> Any:
    """Parameters that the run began with; None if they cannot be had any more.

    Those of `config.pretrained`, if it names any, are read again.
    """
    from jaxformers.training.run import first_params

    try:
      return first_params(self.run)
    except UserError:
      return None

  def sample(
    self, count: int, length: int, split: str = "test", seed: int = 0
  ) -> np.ndarray:
    """Draws examples of a split: ids [count, (2,) n], cut to `length`.

    They are drawn without repetition, by a generator of `seed`; all of the
    split if it has fewer. n is `length` or the task's greatest.

    Raises:
      UserError: for less than one example or token, or an unknown split; and as
        `run`.
    """
    if count < 1 or length < 1:
      raise UserError(
        f"{count} samples of {length} tokens: give at least one of both, by "
        "--samples and --length."
      )
    source = self.task.splits[choose("split", split, self.task.splits)]
    rng = np.random.default_rng(seed)
    count = min(count, len(source))
    # Sorted, because that is the order in which examples lie on disk.
    chosen = np.sort(rng.choice(len(source), count, replace=False))
    return source.batch(chosen, min(length, self.task.max_len))["inputs"]

  def apply(self, batch_size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the model in evaluation as a function of arrays as it reads them.

    Args:
      batch_size: inputs at a time; the last batch repeats its last input.

    Returns:
      A function from any number of inputs [k, ...] to outputs [k, ...].
    """
    forward = functools.partial(outputs, self.model, self._variables)
    return lambda x: apply_in_batches(forward, x, batch_size)

  @functools.cached_property
  def _params(self) -> Any:
    return jax.device_put(self.params)  # Once: they are arguments of each call.

  @functools.cached_property
  def _variables(self) -> Any:
    return make_variables(self.model, self._params)

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

  def _read(self, inputs: Any, batch_size: int) -> _Padded:
    """Returns inputs in shapes of which there are few, so few are compiled."""
    _RANGES["batch_size"].check("batch_size", batch_size)
    x = self.encode(inputs)
    _require_tokens(x, "inputs")
    length, size = x.shape[-1], min(batch_size, at_least(len(x)))
    padded = x
    if x.dtype == np.int32:
      rest = at_least(length, self.inputs.max_len) - length
      padded = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, rest)])
    return _Padded(x, padded, size)

  def decode(self, ids: Any) -> list[str]:
    """Returns the texts of ids [b, n], without padding."""
    return [self.inputs.decode(row) for row in np.asarray(ids)]

  @check_keywords
  @_explained
  def outputs(self, inputs: Any, *, batch_size: int = 32) -> np.ndarray:
    """Returns what the model computes: logits [b, c], or log p [b, n, v].

    Args:
      inputs: texts or arrays.
      batch_size: inputs at a time.
    """
    x, padded, size = self._read(inputs, batch_size)
    forward = functools.partial(outputs, self.model, self._variables)
    results = apply_in_batches(forward, padded, size)
    has_tokens = x.dtype == np.int32 and x.ndim == 2 and results.ndim == 3
    rest = padded.shape[-1] - x.shape[-1]
    return results[:, : results.shape[1] - rest] if has_tokens else results

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
      Prediction(self._label(k), float(row[k]), row.astype(np.float32))
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
    """Returns how a language model continues texts.

    Args:
      prompts: texts.
      num_tokens: number of tokens to draw for each.
      temperature, top_k: see `models.generate`.
      seed: seed of what is drawn.
    """
    self._require("language_model", "generate", "`predict` has its classes")
    _RANGES["seed"].check("seed", seed)
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

  @check_keywords
  @_explained
  def hidden_states(self, inputs: Any, *, batch_size: int = 32) -> HiddenStates:
    """Returns the embedded tokens and the output of every layer.

    Args:
      inputs: texts or arrays.
      batch_size: inputs at a time.
    """
    x, padded, size = self._read(inputs, batch_size)
    captured = [
      capture(self.model, self._variables, batch)
      for batch in in_batches(padded, size)
    ]
    states = [np.stack([np.asarray(x) for x in c.hidden]) for c in captured]
    masks = [np.asarray(c.mask) for c in captured]
    # The two sequences of a pair are two samples.
    samples = len(x) * self.model.config.num_inputs
    tokens = masks[0].shape[1] - (padded.shape[-1] - x.shape[-1])
    return HiddenStates(
      np.concatenate(states, 1)[:, :samples, :tokens],
      np.concatenate(masks)[:samples, :tokens],
    )

  @check_keywords
  @_explained
  def invert(self, inputs: Any, *, batch_size: int = 32) -> Inversion:
    """Runs the layers on inputs, and then backwards from the last output.

    Args:
      inputs: texts or arrays.
      batch_size: inputs at a time.

    Raises:
      UserError: for a model whose layers cannot be undone.
    """
    x, padded, size = self._read(inputs, batch_size)
    model = models.in_float32(self.model)
    first = model.config.cls
    parts, masks, error = [], [], 0.0
    for batch in in_batches(padded, size):
      hidden, side = inverse.forward(model, self._params, jnp.asarray(batch))
      back = inverse.inverse(model, self._params, hidden[-1], side)
      parts.append(inverse.tokens(model, self._params, back)[0])
      mask = np.asarray(side.mask)
      masks.append(mask[:, first:])
      difference = np.abs(np.asarray(back - hidden[0]))[mask]
      error = max(error, float(difference.max(initial=0)))
    samples, length = x.size // x.shape[-1], x.shape[-1]
    mask = np.concatenate(masks)[:samples, :length]
    values = np.concatenate(parts)[:samples, :length]
    values = np.where(mask, values, 0)
    recovered = np.isclose(values, x.reshape(mask.shape), atol=1e-4)[mask]
    return Inversion(
      values,
      tuple(self.decode(values)) if self.inputs.tokenizer else (),
      float(recovered.mean()),
      error,
    )

  @check_keywords
  @_explained
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
    x, padded, size = self._read(inputs, batch_size)
    model = models.in_float32(self.model)
    if labels is None:
      numbers = self.outputs(x, batch_size=batch_size).argmax(-1)
    else:
      numbers = self._numbers(labels, len(x))
    greatest = certificates.certify(model, self._params, padded, numbers, size)
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
      folder: folder to write: a new one, or one with a saved model, which is
        replaced as a whole.

    Raises:
      UserError: for a folder with other files.
    """
    path = paths.expand(folder).absolute()
    content = {"model": self.config, "task": self.about, "step": self.step}
    content["imports"] = self.imports
    with exported.writing(path, content) as staged:
      exported.write_parameters(staged, self.params)
      workdirs.write_record(staged, self.about, self.inputs.tokenizer_json)
      if self.results:
        workdirs.write(staged, "results.json", self.results)
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


def _require_numbers(folder: Path, params: Any) -> None:
  """Raises UserError for weights of another type, or that are not finite."""
  for name, leaf in flax.traverse_util.flatten_dict(params, sep="/").items():
    if leaf.dtype != np.float32:
      raise _misfit(folder, f"{name} is {leaf.dtype}, not float32")
    if not np.isfinite(leaf).all():
      raise _misfit(folder, f"{name} is not finite")


def _require_fitting(folder: Path, model: Model, params: Any) -> None:
  """Raises UserError for weights of other names or shapes than the model's."""
  needed, found = (
    flax.traverse_util.flatten_dict(tree, sep="/")
    for tree in (models.shapes(model), params)
  )
  for name in needed.keys() ^ found.keys():
    what = "missing" if name in needed else "not in the model"
    raise _misfit(folder, f"{name} is {what}")
  for name, leaf in found.items():
    have, want = list(leaf.shape), list(needed[name].shape)
    if have != want:
      raise _misfit(folder, f"{name} is {have}, and the model needs {want}")


def _misfit(folder: Path, problem: str) -> UserError:
  return UserError(
    f"The weights in {folder} do not fit its model: {problem}. Write the "
    "folder again from the run."
  )


@check_keywords
def load(folder: str | Path, *, trust: bool = False) -> TrainedModel:
  """Returns a trained model, ready for use.

  Args:
    folder: workdir of a run, of which the best checkpoint is read; or a folder
      that `TrainedModel.save` or `python -m jaxformers export` has written; or
      "zoo:NAME", a small trained model that `python -m jaxformers zoo` lists.
    trust: True to import the modules of code that the folder names, which run
      with your rights; see SECURITY.md. Modules that are imported already need
      no trust.

  Raises:
    UserError: for another folder; for a folder that names code, without
      `trust`.
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
  with user_code.trusting(trust):
    return _open(path)


def load_run(workdir: str | Path) -> TrainedModel:
  """Returns the model of a run, as `load`, for commands that need its data.

  Code that the run names is imported inside of `user_code.trusting`.

  Raises:
    UserError: as `load`; and for a folder without a run.
  """
  if str(workdir).startswith(zoo.PREFIX):
    raise UserError(
      f"{workdir} is a model without a run and its data: open it in Python, "
      f"jaxformers.load({str(workdir)!r}), or give the workdir of a run."
    )
  # Training needs an optimiser, which a model in use does not.
  from jaxformers.training import resume

  path = Path(workdir).absolute()
  workdirs.check_trained(path)
  config = RunConfig.from_dict(workdirs.read_config(path))
  trained = _open(path)
  resume.check_workdir(path, config)
  _require_fitting(path, trained.model, trained.params)
  # Measurements use the weights many times: they lie on the device.
  return dataclasses.replace(trained, params=jax.device_put(trained.params))


def _open(path: Path) -> TrainedModel:
  weights = read_weights(path)
  if weights is None:
    raise UserError(
      f"{path} has no trained model of this package: give the workdir of a "
      "run, or the folder of an exported model. Folders of Hugging Face are "
      "read by jaxformers.models.pretrained.load."
    )
  record = weights.record
  if "sizes" not in record:
    raise UserError(
      f"{path / 'vocabulary.json'} does not say the sizes of the model: run "
      "the training command again, which writes the file."
    )
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
