"""Plans of the papers' tables: the runs and the data that they need."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.sweep.grid import Axis, Cell, Pairs, expand
from jaxformers.tasks import mad

VOCABULARIES = ("vocab.txt", "bert-base-uncased-vocab.txt")
LRA_RELEASE = ("lra_release.gz", "lra_release")
IMDB = ("aclImdb_v1.tar.gz", "aclImdb")
CIFAR10 = (
  "cifar-10-binary.tar.gz",
  "cifar-10-batches-bin",
  "cifar10_jpeg.tar.xz",
)


class Data(NamedTuple):
  """Facts about a task that are known before its data are prepared.

  Attributes:
    sizes: sizes of the task at size=paper, as `models.build` takes them.
    validation: number of examples that every evaluation scores.
    archives: names of the archive or folder, as its authors publish it.
    is_generated: True if the data can be generated without an archive.
  """

  sizes: Mapping[str, Any]
  validation: int
  archives: tuple[str, ...]
  is_generated: bool = False


def _tokens(
  vocab_size: int, max_len: int, num_classes: int, **more: Any
) -> dict[str, Any]:
  return {
    "vocab_size": vocab_size,
    "max_len": max_len,
    "num_classes": num_classes,
    **more,
  }


def _image(size: int, num_classes: int, **more: Any) -> dict[str, Any]:
  return _tokens(0, 0, num_classes, image=(size, size, 3), **more)


# Data of the tasks, by the name of the config's file.
DATA = {
  "imdb": Data(_tokens(30_522, 512, 2), 25_000, IMDB),
  "ag_news": Data(
    _tokens(30_522, 512, 4),
    7_600,
    ("ag_news_csv.tar.gz", "ag_news_csv", "ag_news"),
  ),
  "listops": Data(_tokens(15, 2_000, 10), 2_000, LRA_RELEASE, True),
  "text": Data(_tokens(257, 4_000, 2), 25_000, IMDB),
  "retrieval": Data(
    _tokens(257, 4_000, 2, num_inputs=2),
    18_090,
    (*LRA_RELEASE, "retrieval_pairs.tar.xz"),
  ),
  "pathfinder": Data(_tokens(256, 1_024, 2), 20_000, LRA_RELEASE, True),
  "image": Data(_tokens(256, 1_024, 10), 5_000, CIFAR10),
  "imagenet": Data(_image(224, 1_000), 50_000, ("imagenet2012", "imagenet")),
  "ade20k": Data(
    _image(512, 150, objective="segmentation"),
    2_000,
    ("ADEChallengeData2016", "ADEChallengeData2016.tar"),
  ),
  "state_tracking": Data(
    _tokens(61, 64, 60, objective="token_classification"), 500, (), True
  ),
  "recall": Data(
    _tokens(257, 64, 256, objective="token_classification"), 500, (), True
  ),
  "mad": Data(
    _tokens(17, 128, 16, objective="token_classification"), 1_280, (), True
  ),
  "cifar10": Data(_image(32, 10), 5_000, CIFAR10),
  "wikitext103": Data(
    _tokens(267_736, 256, 0, objective="language_model"),
    850,
    ("wikitext-103",),
  ),
  "figure2": Data(
    _tokens(1_001, 256, 0, objective="language_model"), 1_000, ("text",)
  ),
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """Runs of a published table or figure.

  Attributes:
    title: paper, number and subject.
    configs: configs as path.py or path.py:key=value,...
    axes: axes of the grid.
    rows: (arguments, fields) of rows outside of a grid; each runs in every
      config.
    tuned: axis whose best value is chosen with the first seed.
    has_sizes: True if the configs have the argument `size`.
    note: remark on what the command leaves out.
  """

  title: str
  configs: tuple[str, ...]
  axes: tuple[Axis, ...] = ()
  rows: tuple[tuple[Pairs, Pairs], ...] = ()
  tuned: Axis | None = None
  has_sizes: bool = True
  note: str = ""


def _models(*names: str) -> tuple[Axis, ...]:
  return (("model", names),)


def _row(model: str, *arguments: str, **fields: Any) -> tuple[Pairs, Pairs]:
  """Returns a row: a model, arguments of the config, options of its mixer."""
  options_of_config = ((k, v) for k, v in (a.split("=") for a in arguments))
  all_arguments = (("model", model), *options_of_config)
  options = ((f"model.mixer.{k}", str(v)) for k, v in fields.items())
  return all_arguments, tuple(options)


_LRA_TASKS = ("listops", "text", "retrieval", "pathfinder", "image")
_ADAPTED = (
  "The adapted model starts from a finished run, and is not part of this plan."
)
_SEGMENTED = (
  "Encoders start untrained here; NeuTRENO's start from ImageNet runs "
  "(--config.pretrained=FOLDER). The paper scores by sliding windows: "
  "jaxformers segmentation RUN, and with --scales "
  "0.5,0.75,1,1.25,1.5,1.75 --flip."
)
LAMBDAS = ("0.1", "0.2", "0.4", "0.5", "0.6", "0.8", "1.0", "2.0")
# Sym-DeiT and Sym-NeuTRENO.
_SYMMETRIC = (
  _row("symmetric_transformer"),
  _row("symmetric_transformer", fidelity=0.6),
)

PLANS = {
  "transject_1": Plan(
    "TransJect, table 1: short text",
    tuple(
      f"configs/short/{task}.py:protocol=paper" for task in ("imdb", "ag_news")
    ),
    _models(
      "transformer",
      "transformer_rezero",
      "transformer_orthogonal",
      "linformer",
      "synthesizer",
      "transject",
      "random_transject",
    ),
  ),
  "transject_2": Plan(
    "TransJect, table 2: Long Range Arena",
    tuple(f"configs/lra/{task}.py:protocol=paper" for task in _LRA_TASKS),
    _models(
      "transformer",
      "transformer_rezero",
      "transformer_orthogonal",
      "reformer",
      "bigbird",
      "linformer",
      "informer",
      "nystromformer",
      "performer",
      "skyformer",
      "transject",
      "random_transject",
    ),
  ),
  "lra": Plan(
    "Long Range Arena, by its own code's sizes and training",
    tuple(f"configs/lra/{task}.py:protocol=lra" for task in _LRA_TASKS),
    _models(
      "transformer",
      "local",
      "linear_transformer",
      "reformer",
      "sparse",
      "linformer",
      "performer",
      "synthesizer",
      "longformer",
      "bigbird",
      "sinkhorn",
    ),
  ),
  "neutreno_1": Plan(
    "NeuTRENO, table 1: ImageNet, DeiT-tiny",
    ("configs/vision/imagenet.py:protocol=paper",),
    rows=(
      _row("transformer"),
      _row("neutreno"),
      _row("transformer", feat_scale="true"),
      _row("neutreno", feat_scale="true"),
    ),
    has_sizes=False,
    note=_ADAPTED,
  ),
  "neutreno_2": Plan(
    "NeuTRENO, table 2: ADE20K, Segmenter on DeiT-tiny",
    ("configs/vision/ade20k.py:protocol=paper",),
    _models("transformer", "neutreno"),
    has_sizes=False,
    note=_SEGMENTED,
  ),
  "neutreno_3": Plan(
    "NeuTRENO, table 3: WikiText-103",
    ("configs/lm/wikitext103.py",),
    _models("transformer", "neutreno"),
    has_sizes=False,
    note="The paper's perplexities use a window that moves by one word: "
    "jaxformers perplexity RUN --strides 1, also with --split validation.",
  ),
  "neutreno_4": Plan(
    "NeuTRENO, table 4: cosine of attention's slope and J's, ImageNet",
    ("configs/vision/imagenet.py:protocol=paper",),
    rows=(_row("symmetric_transformer"), _row("transformer")),
    has_sizes=False,
    note="Compute each cosine by jaxformers smoothness RUN --samples 1000, "
    "also with --split train. For Sym-DeiT it is 1 by construction.",
  ),
  "neutreno_5": Plan(
    "NeuTRENO, table 5: ImageNet, symmetric attention",
    ("configs/vision/imagenet.py:protocol=paper",),
    rows=_SYMMETRIC,
    has_sizes=False,
  ),
  "neutreno_6": Plan(
    "NeuTRENO, table 6: ADE20K, symmetric attention",
    ("configs/vision/ade20k.py:protocol=paper",),
    rows=_SYMMETRIC,
    has_sizes=False,
    note=_SEGMENTED,
  ),
  "neutreno_7": Plan(
    "NeuTRENO, table 7: ImageNet, DeiT-small",
    ("configs/vision/imagenet.py:protocol=paper,deit=small",),
    rows=(
      _row("transformer"),
      _row("transformer", feat_scale="true"),
      _row("neutreno"),
    ),
    has_sizes=False,
  ),
  "neutreno_8": Plan(
    "NeuTRENO, table 8: CIFAR-10, attention with a kernel",
    ("configs/vision/cifar10.py",),
    rows=(
      _row("kernelized", normalize="true"),
      _row("kernelized", normalize="true", fidelity=0.6),
    ),
    note="The paper does not give lambda, sizes and training: these are ours.",
  ),
  "neutreno_12": Plan(
    "NeuTRENO, table 12: ImageNet-C, -A and -R",
    ("configs/vision/imagenet.py:protocol=paper",),
    _models("transformer", "neutreno"),
    has_sizes=False,
    note="Compute the scores by jaxformers robustness RUN --imagenet_c, "
    "--imagenet_a and --imagenet_r. The runs are the same as for table 1.",
  ),
  "neutreno_13": Plan(
    "NeuTRENO, table 13: ADE20K by lambda",
    ("configs/vision/ade20k.py:protocol=paper",),
    rows=(
      _row("transformer"),
      *(_row("neutreno", fidelity=float(value)) for value in LAMBDAS),
    ),
    has_sizes=False,
    note="The lambdas are not in the paper's text: these are our reading. "
    + _SEGMENTED,
  ),
  "levine_2": Plan(
    "Levine et al., figure 2: depth against width",
    ("configs/depth/figure2.py",),
    (("depth", ("6", "12", "24")), ("size", ("1", "2", "3", "4"))),
    tuned=("rate", ("5e-4", "1e-3", "2e-3")),
    has_sizes=False,
    note="Draw the figure by jaxformers depth.",
  ),
}
# Every encoder with each problem, and five with options that decide.
ENCODERS = (
  "transformer",
  "transformer_rezero",
  "transformer_orthogonal",
  "capped_transformer",
  "symmetric_transformer",
  "neutreno",
  "kernelized",
  "linear_transformer",
  "linearized",
  "performer",
  "linformer",
  "nystromformer",
  "skyformer",
  "local",
  "longformer",
  "bigbird",
  "sparse",
  "sinkhorn",
  "reformer",
  "informer",
  "synthesizer",
  "mega",
  "s4d",
  "certified_s4d",
  "s5",
  "lru",
  "linoss",
  "damped_linoss",
  "rglru",
  "mamba",
  "mamba2",
  "gla",
  "retnet",
  "hgrn2",
  "mlstm",
  "deltanet",
  "gated_deltanet",
  "deltaproduct",
  "lstm",
  "gru",
  "mingru",
  "injective_transformer",
  "l2_transformer",
  "allpass",
  "isometric",
  "transject",
  "random_transject",
)
PLANS["diagnostics"] = Plan(
  "Diagnostics: state tracking and recall of every encoder",
  (
    *(
      f"configs/diagnostics/state_tracking.py:problem={problem}"
      for problem in ("Z2", "Z3", "S3", "A5")
    ),
    *(
      f"configs/diagnostics/recall.py:problem={problem}"
      for problem in ("mqar", "induction_heads")
    ),
  ),
  rows=(
    *map(_row, ENCODERS),
    _row("mamba", signed="true"),
    _row("rglru", signed="true"),
    _row("deltanet", signed="true"),
    # Without decay and convolution, as in the groups of the paper.
    _row("deltaproduct", forget="false", conv_width="0"),
    ((("model", "transformer"),), (("model.coupled", "true"),)),
  ),
  has_sizes=False,
)
PLANS["mad"] = Plan(
  "MAD: six problems, each in several settings, of every encoder",
  tuple(
    f"configs/diagnostics/mad.py:problem={problem}"
    + "".join(f",{name}={value}" for name, value in setting.items())
    for problem in mad.VARIED
    for setting in mad.settings(problem)
  ),
  (
    ("model", ENCODERS),
    ("lr", ("1e-4", "5e-4", "1e-3")),
    ("weight_decay", ("0.0", "0.1")),
  ),
  has_sizes=False,
  note="An encoder has 396 runs of thousands of steps: choose some encoders by "
  "--models, and see --dry_run. The source has one seed: --seeds 0.",
)
# Short names of TransJect's tables.
SHORT = {"1": "transject_1", "2": "transject_2"}


def find_plan(name: str) -> Plan:
  """Returns the plan of a name; UserError for an unknown one."""
  return PLANS[choose("table", SHORT.get(name, name), PLANS)]


def make_cells(
  plan: Plan,
  archives: Path | None,
  *,
  size: str = "paper",
  models: Sequence[str] = (),
) -> list[Cell]:
  """Returns the cells of a plan, with the archives that a folder holds.

  Args:
    plan: one of `PLANS`.
    archives: folder of archives under their authors' names; None to let every
      task find its own data.
    size: argument `size` of the configs.
    models: names of the only models to run; () for all.

  Raises:
    UserError: for a size that the configs do not have, a model that is not in
      the table, or a folder that does not exist.
  """
  if size != "paper" and not plan.has_sizes:
    raise UserError(f"--size={size}: {plan.title} has one size; remove --size.")
  if archives is not None and not archives.is_dir():
    raise UserError(f"--archives={archives} is not a folder: give one.")
  cells = []
  # Begin with the arguments of the config.
  for spec in plan.configs:
    start = expand([spec], [("size", (size,))] if size != "paper" else [])[0]
    # Take the listed rows, or else all combinations of the grid.
    values = itertools.product(*(values for _, values in plan.axes))
    grid = [
      tuple(zip((k for k, _ in plan.axes), v, strict=True)) for v in values
    ]
    rows = [(*a, *f) for a, f in plan.rows] or list(grid)
    for row in rows:
      cell = start
      for key, value in row:
        cell = cell.extended(key, value)
      # Add the paths of the data.
      settings = data_settings(Path(cell.path).stem, archives)
      cells.append(dataclasses.replace(cell, settings=settings))
  # Keep the models that are asked for.
  names = [dict(cell.arguments).get("model", "") for cell in cells]
  for model in models:
    choose("model of the table", model, sorted({*names}))
  pairs = zip(cells, names, strict=True)
  return [cell for cell, name in pairs if not models or name in models]


def data_settings(task: str, archives: Path | None) -> Pairs:
  """Returns the fields of a task's archive and vocabulary, if they exist."""
  if archives is None:
    return ()
  # Take the first name of each that exists in the folder.
  fields = {"task.archive": DATA[task].archives}
  if task in ("imdb", "ag_news"):
    fields["task.vocabulary"] = VOCABULARIES
  settings = []
  for field, names in fields.items():
    paths = (archives / name for name in names)
    if path := next((path for path in paths if path.exists()), None):
      settings.append((field, str(path.absolute())))
  return tuple(settings)
