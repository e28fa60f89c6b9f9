"""Small trained models that come with the package, and their recipes.

`jaxformers.load("zoo:NAME")` opens one; `launch/zoo.py` trains them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

FOLDER = Path(__file__).parents[1] / "models_to_try"
PREFIX = "zoo:"
MOST_BYTES = 1_000_000  # Greatest size of a model's files.


class Recipe(NamedTuple):
  """Command that trains a model of the zoo.

  Attributes:
    config: value of --config.
    fields: further arguments, such as --config.total_steps=1500.
    archive: name of the data's file in a folder of archives; "" for generated
      data.
    about: description of the model in one line.
  """

  config: str
  fields: tuple[str, ...] = ()
  archive: str = ""
  about: str = ""

  def command(self, workdir: str, archives: str = "PATH") -> list[str]:
    """Returns the arguments for `jaxformers train`."""
    data = f"--config.task.archive={archives}/{self.archive}"
    more = [data] if self.archive else []
    return ["--config", self.config, "--workdir", workdir, *self.fields, *more]


def _steps(total: int) -> tuple[str, str]:
  warmup = f"--config.schedule.warmup_steps={total // 10}"
  return f"--config.total_steps={total}", warmup


# Reviews are cut to 500 bytes, and images use protocol=s4, as in the tables
# of docs/results.md.
_TEXT = ("--config.task.max_len=500",)
RECIPES = {
  "pairs-isometric": Recipe(
    "synthetic/planted_pairs",
    about="planted pairs: token mixing with a certificate",
  ),
  "listops-transject": Recipe(
    "lra/listops:size=tiny", about="TransJect, the paper's encoder"
  ),
  "listops-s5": Recipe(
    "lra/listops:size=tiny,model=s5",
    _steps(900),
    about="S5, a linear recurrence",
  ),
  "text-random_transject": Recipe(
    "lra/text:size=tiny,model=random_transject,seed=2",
    (*_TEXT, *_steps(6_900)),
    "aclImdb_v1.tar.gz",
    "Random-TransJect on bytes of reviews",
  ),
  "text-certified": Recipe(
    "lra/text:size=tiny,model=random_transject",
    (*_TEXT, "--config.model.mixer.num_experts=1", *_steps(2_800)),
    "aclImdb_v1.tar.gz",
    "Random-TransJect of one expert, certified against changed bytes",
  ),
  "text-transformer": Recipe(
    "lra/text:size=tiny,model=transformer,seed=1",
    (*_TEXT, *_steps(850)),
    "aclImdb_v1.tar.gz",
    "softmax attention on bytes of reviews",
  ),
  "image-s5": Recipe(
    "lra/image:size=tiny,model=s5,protocol=s4,seed=1",
    _steps(1_500),
    "cifar-10-binary.tar.gz",
    "S5 on grey pixels of CIFAR-10",
  ),
  "image-isometric": Recipe(
    "lra/image:size=tiny,model=isometric,protocol=s4,seed=2",
    _steps(1_500),
    "cifar-10-binary.tar.gz",
    "isometric on grey pixels: injective, bounded, with token mixing",
  ),
  "text-lru": Recipe(
    "lra/text:size=tiny,model=lru",
    (
      "--config.task.max_len=256",
      *_steps(1_000),
      "--config.eval_steps=100",
      "--config.checkpoint_steps=100",
      "--config.eval_examples=1000",
    ),
    "aclImdb_v1.tar.gz",
    "LRU, a linear recurrence, on 256 bytes of reviews",
  ),
  "cifar10-neutreno": Recipe(
    "vision/cifar10:size=tiny,model=neutreno",
    ("--config.model.num_layers=6", *_steps(1_406)),
    "cifar-10-binary.tar.gz",
    "NeuTRENO on patches of CIFAR-10, two epochs",
  ),
  "language-allpass": Recipe(
    "lm/text:size=tiny,model=allpass",
    ("--config.model.d_model=48", *_steps(1_500)),
    "aclImdb_v1.tar.gz",
    "a causal injective language model of reviews, in byte pairs",
  ),
}


def find(name: str) -> Path:
  """Returns the folder of a model of the zoo.

  Args:
    name: name after "zoo:".

  Raises:
    UserError: for an unknown name, with the choices.
  """
  return FOLDER / choose("model of the zoo", name, RECIPES)


def require(name: str) -> Path:
  """Returns the folder of a model, which must be in this installation.

  Raises:
    UserError: for an unknown name, or for a model that is not installed.
  """
  folder = find(name)
  if not folder.is_dir():
    raise UserError(
      f"The model {name!r} of the zoo is not in this installation. "
      f"Train it: python launch/zoo.py --workdir runs/zoo --names {name}"
    )
  return folder
