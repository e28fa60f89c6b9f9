"""Numbers of the papers' tables, and the runs with which they compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Column(NamedTuple):
  """A column of a table: the score of a task on its published test examples.

  Attributes:
    title: title of the column.
    task: name of the task.
    score: name of the score in `results.json`.
    examples: number of test examples; 0 for any.
    length: number of tokens that the published models read; 0 for any.
    options: published values of the task's options that change the examples.
    source: text that the name of the data must contain.
  """

  title: str
  task: str
  score: str = "accuracy"
  examples: int = 0
  length: int = 0
  options: Mapping[str, Any] = {}
  source: str = ""

  @property
  def scale(self) -> float:
    """Factor of a score in the table: 100 for shares, shown in percent."""
    return 1.0 if self.score == "perplexity" else 100.0


class Table(NamedTuple):
  """A published table.

  Attributes:
    name: short name, for files.
    title: paper, number and subject.
    columns: columns with numbers.
    scores: numbers by row, in the order of the columns; None for no number. A
      row is named after the model, unless `rows` has its fields.
    protocols: protocols under which runs compare.
    own_protocols: protocols of single models, where they differ.
    rows: fields of the config, by dotted name, that a run of the row has. A
      value of True or False stands for any that is or is not empty, and a
      tuple for any in it; None is a field that the config leaves out.
    has_average: True for a column with the mean of all.
  """

  name: str
  title: str
  columns: tuple[Column, ...]
  scores: Mapping[str, tuple[float | None, ...]]
  protocols: tuple[str, ...]
  own_protocols: Mapping[str, tuple[str, ...]] = {}
  rows: Mapping[str, Mapping[str, Any]] = {}
  has_average: bool = False


LISTOPS = Column(
  "ListOps",
  "listops",
  examples=2_000,
  options={
    **{"min_length": 500, "max_length": 2_000, "test_min_length": 0},
    **{"test_max_length": 0, "max_depth": 10, "max_args": 10},
    "operators": "MIN MAX MED SM",
  },
)
TEXT = Column("Text", "text", examples=25_000, length=4_000)
RETRIEVAL = Column("Retrieval", "retrieval", examples=17_437, length=4_000)
PATHFINDER = Column(
  "Pathfinder",
  "pathfinder",
  examples=20_000,
  options={"difficulty": "hard", "resolution": 32},
)
IMAGE = Column("Image", "image", examples=10_000)
PATHX = Column(
  "Path-X",
  "pathx",
  examples=20_000,
  options={"difficulty": "hard", "resolution": 128},
)
TOP_1 = Column("top-1", "imagenet2012", examples=50_000)
MEAN_IOU = Column("mIoU, one scale", "ade20k", "mean_iou", examples=2_000)

TRANSJECT_1 = Table(
  "transject_1",
  "TransJect, table 1: short text",
  (
    Column("IMDb", "imdb", examples=25_000, length=512),
    Column("AG's News", "ag_news", examples=7_600, length=512),
  ),
  {
    "transformer": (81.3, 88.8),
    "transformer_rezero": (83.4, 89.6),
    "transformer_orthogonal": (85.1, 86.3),
    "linformer": (82.8, 86.5),
    "synthesizer": (84.6, 89.1),
    "transject": (88.1, 88.8),
    "random_transject": (86.5, 90.2),
  },
  ("paper",),
)
# The baselines' numbers are those of Chen et al. 2021, in Skyformer's code.
TRANSJECT_2 = Table(
  "transject_2",
  "TransJect, table 2: Long Range Arena",
  (LISTOPS, TEXT, RETRIEVAL, PATHFINDER, IMAGE),
  {
    "transformer": (38.4, 61.9, 80.7, 65.2, 40.6),
    "transformer_rezero": (38.3, 59.1, 79.2, 68.3, 38.6),
    "transformer_orthogonal": (39.6, 58.1, 81.4, 68.9, 42.2),
    "reformer": (37.7, 62.9, 79.0, 66.5, 48.9),
    "bigbird": (39.3, 63.9, 80.3, 68.7, 43.2),
    "linformer": (37.4, 58.9, 78.2, 60.9, 38.0),
    "informer": (32.5, 62.6, 77.6, 57.8, 38.1),
    "nystromformer": (38.5, 64.8, 80.5, 69.5, 41.3),
    "performer": (38.0, 64.2, 80.0, 66.3, 41.4),
    "skyformer": (38.7, 64.7, 82.1, 70.7, 40.8),
    "transject": (42.2, 64.9, 80.3, 71.5, 38.9),
    "random_transject": (40.1, 64.6, 80.2, 72.6, 40.2),
  },
  ("paper", "skyformer"),
  # They pool otherwise than the baselines.
  dict.fromkeys(("transject", "random_transject"), ("paper",)),
  has_average=True,
)
# Of the leaderboard in LRA's repository. No model is above chance on Path-X.
LRA = Table(
  "lra",
  "Long Range Arena (Tay et al. 2021)",
  (LISTOPS, TEXT._replace(length=1_000), RETRIEVAL, IMAGE, PATHFINDER),
  {
    "transformer": (36.37, 64.27, 57.46, 42.44, 71.40),
    "local": (15.82, 52.98, 53.39, 41.46, 66.63),
    "linear_transformer": (16.13, 65.90, 53.09, 42.34, 75.30),
    "reformer": (37.27, 56.10, 53.40, 38.07, 68.50),
    "sparse": (17.07, 63.58, 59.59, 44.24, 71.71),
    "sinkhorn": (33.67, 61.20, 53.83, 41.23, 67.45),
    "linformer": (35.70, 53.94, 52.27, 38.56, 76.34),
    "performer": (18.01, 65.40, 53.82, 42.77, 77.05),
    "synthesizer": (36.99, 61.68, 54.67, 41.61, 69.45),
    "longformer": (35.63, 62.85, 56.89, 42.22, 69.71),
    "bigbird": (36.05, 64.02, 59.29, 40.83, 74.87),
  },
  ("lra",),
  has_average=True,
)
STATE_SPACES = Table(
  "state_spaces",
  "Long Range Arena: state spaces and recurrences, by their papers; mamba "
  "and rglru (Griffin) by others",
  (
    LISTOPS,
    TEXT,
    RETRIEVAL,
    IMAGE,
    PATHFINDER,
    PATHX,
  ),
  # S4: its repository. S4D: Gu et al. 2022. LRU: table 3, whose Image is in
  # colour. Mamba: MetaLA's table 7. Griffin: that of MS-SSM.
  {
    "s4": (59.5, 86.5, 91.0, 88.5, 94.0, 96.0),
    "s4d": (60.47, 86.18, 89.46, 88.19, 93.06, 91.95),
    "s4d, inv": (60.18, 87.34, 91.09, 87.83, 93.78, 92.80),
    "s4d, lin": (60.52, 86.97, 90.96, 87.93, 93.96, None),
    "s5": (62.15, 89.31, 91.40, 88.00, 95.33, 98.58),
    "lru": (60.2, 89.4, 89.9, None, 95.1, 94.2),
    "mega": (63.14, 90.43, 91.25, 90.44, 96.01, 97.98),
    "mega, chunks": (58.76, 90.19, 90.97, 85.80, 94.41, 93.81),
    "sgconv": (61.45, 89.20, 91.11, 87.97, 95.46, 97.83),
    "liquid-s4": (62.75, 89.02, 91.20, 89.50, 94.80, 96.66),
    "hgrn": (59.95, 88.14, 94.23, 88.69, 92.92, 97.50),
    "metala": (59.34, 89.27, 91.28, 91.88, 91.66, 96.57),
    "mamba": (38.02, 82.98, 72.14, 69.82, 69.26, 67.32),
    "rglru": (32.34, 71.75, 66.58, 61.15, 73.38, 69.53),
  },
  ("s4",),
  rows={
    "s4d": {"model.name": "s4d", "model.mixer.start": (None, "legs")},
    "s4d, inv": {"model.name": "s4d", "model.mixer.start": "inv"},
    "s4d, lin": {"model.name": "s4d", "model.mixer.start": "lin"},
    "mega": {"model.name": "mega", "model.mixer.attention_chunk": (None, 0)},
    "mega, chunks": {"model.name": "mega"},
    **{name: {"model.name": name} for name in ("s4", "s5", "lru", "mamba")},
    **{name: {"model.name": name} for name in ("rglru", "sgconv", "hgrn")},
    **{name: {"model.name": name} for name in ("liquid-s4", "metala")},
  },
  has_average=True,
)


def _deit(width: int, model: str, **fields: Any) -> dict[str, Any]:
  """Returns the fields of an encoder of DeiT in a table of NeuTRENO."""
  features = {"model.mixer.feat_scale": False, "pretrained": False}
  return {"model.d_model": width, "model.name": model, **features, **fields}


_SCALED = {"model.mixer.feat_scale": True}
_SYMMETRIC = "symmetric_transformer"
_FIDELITY = "model.mixer.fidelity"
NEUTRENO_1 = Table(
  "neutreno_1",
  "NeuTRENO, table 1: ImageNet, DeiT-tiny",
  (TOP_1, TOP_1._replace(title="top-5", score="accuracy_top5")),
  {
    "DeiT": (72.17, 91.02),
    "NeuTRENO": (73.01, 91.56),
    "NeuTRENO, adapted": (72.63, 91.38),
    "DeiT + FeatScale": (72.346, 91.22),
    "NeuTRENO + FeatScale": (73.23, 91.73),
  },
  ("paper",),
  rows={
    "DeiT": _deit(192, "transformer"),
    "NeuTRENO": _deit(192, "neutreno"),
    "NeuTRENO, adapted": _deit(192, "neutreno", pretrained=True),
    "DeiT + FeatScale": _deit(192, "transformer", **_SCALED),
    "NeuTRENO + FeatScale": _deit(192, "neutreno", **_SCALED),
  },
)
NEUTRENO_2 = Table(
  "neutreno_2",
  "NeuTRENO, table 2: ADE20K, Segmenter on DeiT-tiny",
  (MEAN_IOU,),
  {"transformer": (35.72,), "neutreno": (37.24,)},
  ("paper",),
)
NEUTRENO_3 = Table(
  "neutreno_3",
  "NeuTRENO, table 3: WikiText-103",
  (
    Column(
      "test perplexity",
      "language",
      "perplexity",
      options={"tokens": "words", "max_len": 256, "vocab_size": 0},
      source="103",
    ),
  ),
  {"transformer": (34.29,), "neutreno": (33.70,)},
  ("jaxformers",),
)
NEUTRENO_5 = Table(
  "neutreno_5",
  "NeuTRENO, table 5: ImageNet, symmetric attention",
  NEUTRENO_1.columns,
  {"Sym-DeiT": (71.14, 90.54), "Sym-NeuTRENO": (72.07, 91.22)},
  ("paper",),
  rows={
    "Sym-DeiT": _deit(192, _SYMMETRIC, **{_FIDELITY: False}),
    "Sym-NeuTRENO": _deit(192, _SYMMETRIC, **{_FIDELITY: True}),
  },
)
NEUTRENO_6 = Table(
  "neutreno_6",
  "NeuTRENO, table 6: ADE20K, symmetric attention",
  (MEAN_IOU,),
  {"Sym-DeiT": (35.18,), "Sym-NeuTRENO": (35.68,)},
  ("paper",),
  rows={
    "Sym-DeiT": {"model.name": _SYMMETRIC, _FIDELITY: False},
    "Sym-NeuTRENO": {"model.name": _SYMMETRIC, _FIDELITY: True},
  },
)
NEUTRENO_7 = Table(
  "neutreno_7",
  "NeuTRENO, table 7: ImageNet, DeiT-small",
  NEUTRENO_1.columns,
  {
    "DeiT-small": (79.97, 95.05),
    "DeiT-small + FeatScale": (79.96, 95.06),
    "NeuTRENO-small": (80.68, 95.30),
  },
  ("paper",),
  rows={
    "DeiT-small": _deit(384, "transformer"),
    "DeiT-small + FeatScale": _deit(384, "transformer", **_SCALED),
    "NeuTRENO-small": _deit(384, "neutreno"),
  },
)
TABLES = (
  *(TRANSJECT_1, TRANSJECT_2, LRA, STATE_SPACES),
  *(NEUTRENO_1, NEUTRENO_2, NEUTRENO_3, NEUTRENO_5, NEUTRENO_6, NEUTRENO_7),
)
