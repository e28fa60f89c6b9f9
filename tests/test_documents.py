"""Every command and Python block of the documents runs, reduced to seconds."""

import argparse
import ast
import configparser
import functools
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxformers import config as configs
from jaxformers import main, models
from jaxformers.commands import console
from jaxformers.commands import rank as rank_command
from jaxformers.foundations import registry
from jaxformers.models import mixers
from jaxformers.models.mixer import MIXERS
from jaxformers.sweep import estimates
from jaxformers.sweep.grid import Cell
from jaxformers.sweep.runs import Sweep
from jaxformers.sweep.slurm import parse_parameters
from jaxformers.tasks import DELETION, PRETRAINING, TASKS
from jaxformers.theory import rank
from jaxformers.training import loop, optim, topologies
from launch import pretrain, sweep, tables
from launch import zoo as zoo_launcher
from tests.configs import test_language, test_lra, test_vision
from tests.models import test_attention as properties

ROOT = Path(__file__).parents[1]
PAGES = [
  *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
  ROOT / "launch" / "README.md",
  ROOT / "examples" / "README.md",
  *sorted((ROOT / "docs").glob("*.md")),
]
EXAMPLE_PAGES = ("docs/add_a_mixer.md", "docs/add_a_task.md")
BLOCK_PAGE = "docs/add_a_block.md"
# Pages with a module that `config.imports` names, which is the block's title.
USERS_MODULES = {"docs/python.md": "# mine.py\n", "README.md": "# average.py\n"}
MIXER_FOLDER = "jaxformers/models/mixers"
SOURCES = [
  *sorted((ROOT / "configs").rglob("*.py")),
  *sorted((ROOT / "jaxformers").rglob("*.py")),
  *sorted((ROOT / "benchmarks").glob("*.py")),
  ROOT / "launch" / "pretrain.py",
  ROOT / "launch" / "sweep.py",
  ROOT / "launch" / "tables.py",
  ROOT / "launch" / "zoo.py",
]
COMMAND = (
  r"(?:jaxformers|python|pip|pytest|sbatch|docker|launch/\w+\.sh)(?: |$)"
)
# Words in capitals for which a reader puts in something.
WORDS = {"MODEL": "transject", "MAP": "expm", "TASK": "listops"}
WORDS |= {"WORKDIR": "runs/listops"}


def name_of(path):
  return path.relative_to(ROOT).as_posix()


def blocks(page):
  """Returns the fenced Python blocks of a page."""
  text = (ROOT / page).read_text()
  return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def commands(path):
  """Yields the shell commands of a page, or of the docstring of a module."""
  text = path.read_text()
  if path.suffix == ".py":
    text = ast.get_docstring(ast.parse(text)) or ""
    indent = " *"
  else:
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    indent = "    "
  text = re.sub(r"\\\n\s*", "", text)
  lines = re.findall(rf"^{indent}({COMMAND}.*)$", text, re.M)
  spans = re.findall(rf"`({COMMAND}[^`]*)`", text)
  for line in lines + [" ".join(span.split()) for span in spans]:
    yield from line.split(" && ")


FOUND = {
  command: name_of(path)
  for path in (*PAGES, *SOURCES)
  for command in commands(path)
}


@pytest.fixture(scope="module", autouse=True)
def examples(tmp_path_factory):
  """The files of the pages on adding a mixer and a task, registered."""
  folder = tmp_path_factory.mktemp("examples")
  with pytest.MonkeyPatch.context() as patch:
    for register in (MIXERS, models.MODELS, TASKS, optim.OPTIMIZERS):
      patch.setattr(register, "data", dict(register.data))
    # The module of a user is found by its name.
    for page, title in USERS_MODULES.items():
      (code,) = (b for b in blocks(page) if b.startswith(title))
      (folder / title[2:-1]).write_text(code)
    patch.syspath_prepend(folder)
    for page in EXAMPLE_PAGES:
      for block in blocks(page):
        title, _, code = block.partition("\n")
        name, _, place = title.removeprefix("# ").partition(", ")
        if place:  # Lines of a file that there is.
          exec(code, vars(importlib.import_module(module_name(name))))
          continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        is_mixer = path.parent == folder / MIXER_FOLDER
        if name.startswith("jaxformers/") and not is_mixer:
          add_module(patch, path, module_name(name))
    # The package finds a new file in its folder by itself.
    patch.setattr(
      mixers, "__path__", [*mixers.__path__, str(folder / MIXER_FOLDER)]
    )
    assert {"mean", "window"} <= {*mixers.import_modules()}
    yield folder
    for title in USERS_MODULES.values():  # The patch removes their models.
      sys.modules.pop(title[2:-4], None)
    for name in ("mean", "window"):
      del sys.modules[f"{mixers.__name__}.{name}"]
      delattr(mixers, name)


def module_name(path):
  return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def add_module(patch, path, name):
  """Imports a file as a module of the package, as if it stood there."""
  parent, _, child = name.rpartition(".")
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  patch.setitem(sys.modules, name, module)  # Before it runs: dataclasses look.
  patch.setattr(sys.modules[parent], child, module, raising=False)
  spec.loader.exec_module(module)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def shorten(config):
  """Two steps of a small model."""
  config.model.update(d_model=16)
  config.update(batch_size=8, eval_batch_size=8, buckets=1)
  config.update(total_steps=2, log_steps=1, eval_steps=2, checkpoint_steps=2)
  config.schedule.warmup_steps = 1
  return config


@pytest.fixture(scope="module")
def finished(smoke, tmp_path_factory):
  """A function: the workdir of a finished run of a kind, trained once."""
  folder = tmp_path_factory.mktemp("finished")

  @functools.cache
  def make(kind):
    if kind == "language":
      text = "\n".join(f"word {k * k % 97} and {k % 13}" for k in range(300))
      (folder / "text").mkdir()
      for split in ("train", "valid", "test"):
        (folder / "text" / f"{split}.txt").write_text(text)
      config = configs.load("configs/lm/text.py:size=tiny")
      config.task.update(archive=str(folder / "text"), vocab_size=300)
      config.model.num_layers = 1
      config.data_dir = str(folder / "data")
    else:
      config = smoke(kind)
    loop.run(shorten(config), folder / kind)
    return str(folder / kind)

  return make


class Parsed(Exception):
  """Arguments were accepted, and nothing was run."""


def parse_only(module):
  """Runs a command until its arguments are parsed."""

  def run(argv, *, monkeypatch, **_):
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args, **kwargs):
      parse(*args, **kwargs)
      raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed):
      importlib.import_module(module).main(argv)

  return run


def with_arguments(module, *more):
  """Runs a command with more arguments, which make it small."""

  def run(argv, **_):
    importlib.import_module(module).main([*argv, *more])

  return run


def once(module, run):
  """Runs the first command of a module; of later ones the arguments alone.

  So of those that name files that are not here.
  """
  has_run = []

  def run_first(argv, **context):
    if has_run or any("PATH/" in argument for argument in argv):
      parse_only(module)(argv, **context)
    else:
      has_run.append(argv)
      run(argv, **context)

  return run_first


def on_runs(module, *more, kind=""):
  """Runs a command on finished runs of seconds.

  Args:
    module: module of the command.
    more: arguments that make it small.
    kind: kind of the finished run; "" for TransJect and the Transformer.
  """

  def run(argv, *, finished, tmp_path, **_):
    kinds, others = [], []
    for argument in argv:
      if argument == "runs/*":
        kinds += ["transject", "transformer"]
      elif argument.startswith("runs/"):
        is_transject = "transject" in argument
        kinds.append(kind or ("transject" if is_transject else "transformer"))
      else:
        others.append(argument)
    workdirs = [finished(name) for name in dict.fromkeys(kinds)]
    importlib.import_module(module).main([*workdirs, *others, *more])
    if "--out" in argv:
      assert list(tmp_path.iterdir())

  return once(module, run)


def run_report(module):
  """Runs the report; with weights that are not here, parses its arguments."""
  run, parse = on_runs(module, "--no_checkpoints"), parse_only(module)

  def check(argv, **fixtures):
    check_arguments = parse if "--pretrained" in argv else run
    check_arguments(argv, **fixtures)

  return check


# Sizes of tasks, by the name of the task.
SIZES = {**test_vision.SIZES, **test_lra.SIZES}
SIZES["imagenet2012"] = SIZES.pop("imagenet")
SIZES["imdb"] = test_language.SIZES["short/bert"]
SIZES["squad"] = test_language.SIZES["short/squad"]
SIZES["simcse"] = test_language.SIZES["short/simcse"]
SIZES["ag_news"] = {**SIZES["imdb"], "num_classes": 4}
SIZES["same_ends"] = {"vocab_size": 3, "max_len": 32, "num_classes": 2}
SIZES["planted_pairs"] = {"vocab_size": 4, "max_len": 256, "num_classes": 2}
_TOKENS = {"objective": "token_classification", "causal": True}
SIZES["state_tracking"] = {"vocab_size": 7, "max_len": 256, "num_classes": 6}
SIZES["recall"] = {"vocab_size": 257, "max_len": 256, "num_classes": 256}
SIZES["formal_languages"] = {"vocab_size": 3, "max_len": 80, "num_classes": 2}
SIZES["time_series"] = {"channels": 6, "max_len": 100, "num_classes": 4}
SIZES["mad"] = {"vocab_size": 17, "max_len": 256, "num_classes": 16}
for _name in ("state_tracking", "recall", "formal_languages", "mad"):
  SIZES[_name] |= _TOKENS
SIZES["language"] = {"vocab_size": 8_000, "objective": "language_model"}
NOTHING = {"vocab_size": 0, "max_len": 256, "num_classes": 0}


def check_training(argv, *, examples, **_):
  """Loads the config with its overrides and builds the model."""
  parser = argparse.ArgumentParser(allow_abbrev=False)
  parser.add_argument("--config", required=True)
  parser.add_argument("--workdir")
  args, rest = parser.parse_known_args(main._name_config(argv))
  overrides = [arg for arg in rest if arg.startswith("--config.")]
  for arg in rest:
    is_flag = arg.startswith("--") and arg not in overrides
    name = arg.removeprefix("--").partition("=")[0]
    assert not is_flag or name in main.flags.FLAGS
  spec = args.config
  if (examples / spec.partition(":")[0]).exists():
    spec = str(examples / spec)
  config = Sweep(Path(), overrides).load_config(Cell(spec), 0)
  name, options = config.task.name, config.task.options
  parameters = inspect.signature(TASKS[name]).parameters
  assert options.keys() <= {*parameters, *PRETRAINING, DELETION}
  assert models.build(**vars(config.model), **NOTHING | SIZES[name])


def run_models(argv, **_):
  """Lists models, or counts TransJect's costs on a small task."""
  small = (
    "--models=transject",
    "--sizes=vocab_size=16,max_len=64,num_classes=10",
  )
  more = small if "--config" in argv else ()
  with_arguments(COMMANDS["models"], *more)(argv)


def check_gpu(argv, **_):
  """The part is one of the script's."""
  script = (ROOT / "launch" / "gpu.sh").read_text()
  assert f"    {argv[0]})\n" in script


def run_preparation(argv, **context):
  """Prepares what the examples generate; parses the arguments of others."""
  module = "jaxformers.commands.prepare"
  if argv[0] != "same_ends":
    return parse_only(module)(argv, **context)
  more = [f"--data_dir={context['tmp_path']}", "--num_train=20"]
  more += ["--num_validation=4", "--num_test=4"]
  return with_arguments(module, *more)(argv)


def run_sweep(argv, *, module=sweep, monkeypatch, tmp_path, capsys, **_):
  """Prints the commands of a sweep, without opening data."""
  monkeypatch.setattr(Sweep, "describe_task", lambda *_: {})
  if "--slurm" in argv:
    at = argv.index("--slurm")
    assert parse_parameters(argv[at + 1])
    del argv[at : at + 2]
  assert "--workdir" in argv
  module.main([*argv, f"--workdir={tmp_path}", "--dry_run"])
  printed = capsys.readouterr().out.splitlines()
  assert all("-m jaxformers.main --config" in line for line in printed)
  assert len(printed) > 1


def run_tables(argv, *, monkeypatch, tmp_path, capsys, **_):
  """Prints the commands of a table, without counting costs."""
  one = estimates.Estimate(1, 1.0, 1.0)
  monkeypatch.setattr(estimates, "measure_rate", lambda: 1e12)
  monkeypatch.setattr(
    estimates, "estimate_all", lambda configs, *_: [one] * len(configs)
  )
  monkeypatch.setattr(estimates, "compiled_hours", lambda *_: 1.0)
  monkeypatch.setattr(topologies, "describe_devices", lambda _: [])
  load_once = functools.cache(Sweep.load_config)
  monkeypatch.setattr(Sweep, "load_config", load_once)
  # Tables of generated data need no archives.
  if "--archives" in argv:
    argv[argv.index("--archives") + 1] = str(tmp_path)
  tables.main([*argv, f"--workdir={tmp_path}", "--dry_run"])
  assert "-m jaxformers.main --config" in capsys.readouterr().out


def run_launcher(script):
  """Runs a launcher with --dry_run, and checks the command that it is given."""

  def run(argv, *, tmp_path, **context):
    at = argv.index("--") if "--" in argv else len(argv)
    # A dry run of a pod compiles for it, which tests/training does.
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    if (script, argv[0]) != ("launch/k8s.sh", "watch"):  # Runs in any case.
      ran = subprocess.run(
        [script, *argv[:at], "--dry_run", *argv[at:]],
        env=os.environ | {"TMPDIR": str(tmp_path), "PATH": path},
        stdout=subprocess.PIPE,
        check=True,
      )
      assert ran.stdout.strip()
    command = argv[at + 1 :]
    if command and script != "launch/local.sh":
      name = ["prepare"] if argv[0] == "prepare" else []
      command = ["python", "-m", "jaxformers", *name, *command]
    if command:
      execute(command, tmp_path=tmp_path, **context)

  return run


def check_sbatch(argv, **context):
  at = next(i for i, arg in enumerate(argv) if not arg.startswith("--"))
  assert (ROOT / argv[at]).exists()
  check_training(argv[at + 1 :], **context)


def check_install(argv, **_):
  """Extras that pip is asked for are those of setup.cfg."""
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  assert argv[0] in ("install", "wheel")
  for extra in re.findall(r"\[(\w+)\]", " ".join(argv)):
    assert extra in setup["options.extras_require"]


def check_zoo(argv, *, monkeypatch, **_):
  """Every model's command is one of training."""
  monkeypatch.setattr(
    zoo_launcher.commands, "call", lambda command: check_command(command[3:])
  )
  monkeypatch.setattr(zoo_launcher, "keep", lambda *_: None)
  zoo_launcher.main(argv)


def check_command(argv):
  config = Sweep(Path(), argv[4:]).load_config(Cell(argv[1]), 0)
  sizes = NOTHING | SIZES[config.task.name]
  assert models.build(**vars(config.model), **sizes)


def check_notebooks(argv, **_):
  """The notebooks are there."""
  for path in (arg for arg in argv if arg.endswith(".ipynb")):
    assert (ROOT / path).exists()


def check_pytest(argv, *, examples, **_):
  """Files of tests are there."""
  for path in re.findall(r"tests/\S+", " ".join(argv)):
    assert (ROOT / path).exists() or (examples / path).exists()


def check_docker(argv, **_):
  assert argv[0] in ("build", "push")
  if "-f" in argv:
    assert (ROOT / argv[argv.index("-f") + 1]).exists()


def check_ranks(argv, *, monkeypatch, **_):
  """Checks what is to be measured; compiling the elimination takes long."""
  monkeypatch.setattr(rank, "rank_table", lambda settings, *_: str(settings))
  rank_command.main(argv)


COMMANDS = console.COMMANDS
FEW = ("--samples=2", "--length=16")
CERTIFIED = ("--samples=2", "--examples=4")


def run_certified(argv, **fixtures):
  """Runs the command with the options of edits, or of replaced tokens."""
  edits = any(argument.startswith("--edits") for argument in argv)
  more = ("--deletion=0.5", "--draws=4,8") if edits else ("--steps=1",)
  on_runs(COMMANDS["certified"], *CERTIFIED, *more)(argv, **fixtures)


# How each program is run here; one that is not in the table fails the test.
RUNNERS = {
  "jaxformers": check_training,
  "jaxformers.main": check_training,
  COMMANDS["models"]: run_models,
  COMMANDS["report"]: run_report(COMMANDS["report"]),
  COMMANDS["configs"]: with_arguments(COMMANDS["configs"]),
  COMMANDS["tasks"]: with_arguments(COMMANDS["tasks"]),
  COMMANDS["zoo"]: with_arguments(COMMANDS["zoo"]),
  COMMANDS["prepare"]: run_preparation,
  COMMANDS["certified"]: run_certified,
  **{
    COMMANDS[name]: on_runs(COMMANDS[name], *more, kind=kind)
    for name, kind, *more in (
      ("results", ""),
      ("published", ""),
      ("smoothness", "", *FEW),
      ("isometry", "", *FEW, "--steps=2"),
      ("depth_use", "", *FEW),
      ("lipschitz", "transject", *FEW, "--steps=2"),
      ("inverse", "transject", *FEW),
      ("price", "isometric"),
      ("export", "transject", "--length=16"),
      ("perplexity", "language", "--tokens=40", "--strides=1,64"),
      ("collisions", "language", "--samples=4", "--length=8", "--longest=8"),
    )
  },
  # They need images, many sizes, or the compiler of TPUs.
  **{
    COMMANDS[name]: parse_only(COMMANDS[name])
    for name in ("segmentation", "robustness", "depth", "compile")
  },
  COMMANDS["advise"]: with_arguments(COMMANDS["advise"]),
  COMMANDS["bounds"]: with_arguments(COMMANDS["bounds"]),
  COMMANDS["rank"]: check_ranks,
  "benchmarks": parse_only("benchmarks.__main__"),
  **{
    f"benchmarks.{path.stem}": parse_only(f"benchmarks.{path.stem}")
    for path in (ROOT / "benchmarks").glob("*.py")
  },
  "launch/sweep.py": run_sweep,
  "launch/pretrain.py": functools.partial(run_sweep, module=pretrain),
  "launch/tables.py": run_tables,
  "launch/gpu.sh": check_gpu,
  **{
    name: run_launcher(name)
    for name in ("launch/local.sh", "launch/tpu_pod.sh", "launch/k8s.sh")
  },
  "sbatch": check_sbatch,
  "launch/zoo.py": check_zoo,
  "examples/run.py": check_notebooks,
  "examples.episodes": lambda *_, **__: None,  # test_examples.py trains it.
  "docs/tables.py": lambda *_, **__: None,  # test_tables.py checks the pages.
  "pip": check_install,
  "pytest": check_pytest,
  "docker": check_docker,
}


def execute(argv, **context):
  """Runs a command by the table, as far as a test can."""
  if argv[0] == "python":
    argv = argv[2:] if argv[1] == "-m" else argv[1:]
  program, *argv = argv
  if program == "jaxformers" and argv[:1] and argv[0] in COMMANDS:
    program, *argv = [COMMANDS[argv[0]], *argv[1:]]
  registry.choose("program of a document", program, RUNNERS)
  # Others are named without their arguments, or with a request for help.
  if not {"...", "--help"} & {*argv} and (
    argv or not program.startswith("jaxformers")
  ):
    RUNNERS[program](argv, **context)


@pytest.mark.parametrize(
  "command",
  FOUND,
  ids=[f"{FOUND[command]}: {command}"[:90] for command in FOUND],
)
@pytest.mark.slow
def test_documented_command_runs(
  command, examples, finished, monkeypatch, tmp_path, capsys
):
  for word, value in WORDS.items():
    command = re.sub(rf"\b{word}\b", value, command)
  command = re.sub(
    r"\[(--[^]]*)\]", r"\1", command
  )  # Options as usage has them.
  argv = shlex.split(command)
  if "--out" in argv:
    at = argv.index("--out") + 1
    argv[at] = str(tmp_path / argv[at])
  execute(
    argv,
    examples=examples,
    finished=finished,
    monkeypatch=monkeypatch,
    tmp_path=tmp_path,
    capsys=capsys,
  )


def test_protocol_table_of_data_page_is_that_of_the_tasks():
  """Columns of the table in docs/data.md, and what a task accepts."""
  lines = (ROOT / "docs" / "data.md").read_text().splitlines()
  start = lines.index(
    next(x for x in lines if x.startswith("| | `jaxformers`"))
  )
  header, _, *rows = lines[start : start + 7]
  protocols = re.findall(r"`(\w+)`", header)
  titles = [row.split("|")[1].strip() for row in rows]
  names = [name for title in titles for name in title.lower().split(", ")]
  names = [name.replace("path-x", "pathx") for name in names]
  assert len(names) == 6
  for name in names:
    module = sys.modules[TASKS[name].__module__]
    assert [*module.PROTOCOLS] == protocols, name


def test_config_table_of_models_page_names_existing_files():
  page = (ROOT / "docs" / "models.md").read_text()
  rows = re.findall(r"^\| (`configs/\S+\.py`.*?) \|", page, re.M)
  assert len(rows) > 10
  for row in rows:
    first, *others = re.findall(r"`(\S+\.py)`", row)
    for name in (first, *(str(Path(first).parent / name) for name in others)):
      assert (ROOT / name).exists(), name


def test_execute_refuses_an_unknown_program():
  with pytest.raises(ValueError, match="program.*'jaxformers.x'"):
    execute(["python", "-m", "jaxformers.x"])


def test_commands_are_found_in_documents():
  assert len(FOUND) > 80
  programs = {command.split()[0] for command in FOUND}
  assert programs >= {"jaxformers", "python", "pip", "pytest", "sbatch"}
  assert any("launch/sweep.py --config" in command for command in FOUND)


# What stands before a block that is a part of a program.
PRELUDES = {
  "docs/mixers.md": """
import jax
import jax.numpy as jnp
from jaxformers import models

sizes = {"vocab_size": 9, "max_len": 8, "num_classes": 2, "d_model": 8}
mixer = {"kind": "fixed_random"}
model = models.build("synthesizer", num_layers=1, mixer=mixer, **sizes)
ids = jnp.ones((2, 8), jnp.int32)
params = model.init(jax.random.key(0), ids, train=False)["params"]
""",
}


@pytest.mark.parametrize(
  ("page", "number"),
  [
    (name_of(page), number)
    for page in PAGES
    if name_of(page) not in (*EXAMPLE_PAGES, BLOCK_PAGE)
    for number, block in enumerate(blocks(page))
    if not block.startswith(tuple(USERS_MODULES.values()))
  ],
)
@pytest.mark.slow
def test_documented_python_block_runs(page, number, finished, tmp_path):
  code = blocks(page)[number]
  vit = ROOT / "tests" / "models" / "pretrained" / "vit"
  code = code.replace("PATH/deit-tiny-patch16-224", str(vit))
  code = code.replace("(21, 512, 512)", "(2, 32, 32)")  # Seconds less.
  code = code.replace("runs/mine", str(tmp_path))
  if "runs/" in code:
    for workdir in ("runs/listops", "runs/transject"):
      code = code.replace(workdir, finished("transject"))
  exec(PRELUDES.get(page, "") + code, {})


CHECKS = [
  properties.test_mixer_keeps_shape_and_evaluation_repeats,
  properties.test_masked_tokens_are_never_read,
  properties.test_mixer_ignores_appended_padding,
  properties.test_mixer_does_not_depend_on_batch_mates,
  properties.test_mixer_gradient_reaches_every_token,
  properties.test_mixer_half_precision_is_near_float32,
  properties.test_mixer_is_finite_for_a_sample_without_tokens,
]


@pytest.mark.parametrize("name", ["window", "mean"])
@pytest.mark.slow
def test_documented_mixers_keep_the_mixer_contract(name):
  for check in CHECKS:
    if "strict" not in inspect.signature(check).parameters:
      check(name)
      continue
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
      check(name, None)
  properties.test_mixer_gradients_match_finite_differences(name, {})


@pytest.mark.slow
def test_documented_window_mixer_is_causal(strict):
  assert {*models.causal_mixers()} >= {"window"}
  properties.test_causal_mixer_does_not_see_later_tokens("window", strict)


@pytest.mark.parametrize(
  "path",
  ["tests/models/mixers/test_window.py", "tests/tasks/test_same_ends.py"],
)
@pytest.mark.slow
def test_documented_tests_pass(path, examples, tmp_path):
  names = runpy.run_path(str(examples / path))
  tests = [names[name] for name in names if name.startswith("test_")]
  assert len(tests) == 2
  for number, test in enumerate(tests):
    folder = tmp_path / str(number)
    folder.mkdir()
    test(*[folder][: len(inspect.signature(test).parameters)])


@pytest.mark.slow
def test_documented_task_is_added_by_three_files(examples, tmp_path):
  """The package is copied, so that nothing but the files is there to help."""
  page = (ROOT / "docs" / "add_a_task.md").read_text()
  ignored = shutil.ignore_patterns("__pycache__")
  shutil.copytree(ROOT / "jaxformers", tmp_path / "jaxformers", ignore=ignored)
  files = [block.partition("\n")[0] for block in blocks("docs/add_a_task.md")]
  assert len(files) == 3
  for name in (title.removeprefix("# ") for title in files):
    assert f"| `{name}` |" in page
    assert not (ROOT / name).exists()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(examples / name, tmp_path / name)
  code = (
    "from jaxformers import config, tasks;"
    "loaded = config.load('configs/same_ends.py:model=transformer');"
    "print(tasks.TASKS[loaded.task.name].__module__)"
  )
  run = subprocess.run(
    [sys.executable, "-c", code],
    check=True,
    capture_output=True,
    text=True,
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(tmp_path)},
  )
  assert run.stdout.split() == ["jaxformers.tasks.same_ends"]


@pytest.mark.slow
def test_documented_block_is_added_by_two_files(tmp_path):
  """In a copy of the package, so that nothing else is there to help."""
  ignored = shutil.ignore_patterns("__pycache__")
  shutil.copytree(ROOT / "jaxformers", tmp_path / "jaxformers", ignore=ignored)
  page = (ROOT / BLOCK_PAGE).read_text()
  files = {block.partition("\n")[0]: block for block in blocks(BLOCK_PAGE)}
  names = [title.removeprefix("# ") for title in files]
  for name, content in zip(names, files.values(), strict=True):
    assert f"| `{name}` |" in page
    assert not (ROOT / name).exists()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content.partition("\n")[2])
  code = (
    f"import runpy; names = runpy.run_path({names[1]!r});"
    "tests = [name for name in names if name.startswith('test_')];"
    "[names[name]() for name in tests]; print(len(tests))"
  )
  run = subprocess.run(
    [sys.executable, "-c", code],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
  )
  assert run.stdout == "2\n"


@pytest.mark.slow
def test_documented_mixer_trains(smoke, tmp_path):
  config = shorten(smoke("window"))
  # As the page has it.
  defaults = {"num_heads": 2, "dropout_rate": 0.1}
  assert (
    f"mixer_defaults = {defaults}".replace("'", '"')
    in (ROOT / "docs" / "add_a_mixer.md").read_text()
  )
  assert config.model.mixer_defaults.to_dict() == defaults
  assert loop.run(config, tmp_path)["model"] == "window"


@pytest.mark.slow
def test_documented_task_trains(examples, tmp_path):
  config = configs.load(f"{examples}/configs/same_ends.py:model=transformer")
  config.task.update(num_train=16, num_validation=8, num_test=8)
  config.data_dir = str(tmp_path / "data")
  results = loop.run(shorten(config), tmp_path / "run")
  assert results["task"] == "same_ends"
  assert {*results["baselines"]} == {"majority class", "first-token rule"}


NAMED_TEST = re.compile(r"tests/[\w/]+\.py(?:::\w+)?")
# Pages that show how to write files.
WRITING_PAGES = (*EXAMPLE_PAGES, BLOCK_PAGE)


def test_tests_that_pages_name_exist():
  offenders = []
  for page in [*PAGES, ROOT / "SECURITY.md"]:
    is_writing = page.relative_to(ROOT).as_posix() in WRITING_PAGES
    for named in sorted(set(NAMED_TEST.findall(page.read_text()))):
      path, _, name = named.partition("::")
      exists = (ROOT / path).exists()
      if not exists and is_writing:
        continue
      if not exists or (
        name and f"def {name}(" not in (ROOT / path).read_text()
      ):
        offenders.append(f"{page.name} names {named}")
  assert not offenders


def test_every_public_name_loads():
  import jaxformers

  for name in dir(jaxformers):
    assert getattr(jaxformers, name) is not None, name
  assert jaxformers.UserError is registry.UserError
