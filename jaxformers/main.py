r"""Trains the model of a config, and scores it on the test split.

jaxformers train lra/listops:size=tiny
python -m jaxformers.main --config configs/lra/listops.py:size=tiny

Both lines start the same run: a config of the package has a name, and any other
config is the path of its file.

Without --workdir the run gets a folder below runs/, and its path is printed
first. Run the same command again to resume the run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags, logging
from ml_collections import ConfigDict

from jaxformers import config as configs
from jaxformers.config import RunConfig
from jaxformers.foundations import (
  allocator,
  cli,
  interrupts,
  paths,
  ranges,
  requirements,
  user_code,
)
from jaxformers.foundations.errors import UserError

# Exit statuses of errors. launch/README.md describes them.
FAILURE = 1  # An error of the program or of the file system.
MISTAKE = 2  # A mistake of the user: the same command fails again.
RETRY = 75  # A full or absent disk, or a process of the run that has died.
# Errors that ml_collections and the users' config files raise.
_PARSE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, flags.Error)

FLAGS = flags.FLAGS

# Name, default, lower bound and description of each flag.
_FLAGS = (
  (
    "config",
    None,
    None,
    "Config and its arguments: lra/text:size=tiny, or path.py:key=value. "
    "--config.section.field=value overrides a field.",
  ),
  (
    "workdir",
    None,
    None,
    "Folder for checkpoints, metrics and results. "
    "Default: runs/CONFIG-MODEL-ARGUMENTS-PROTOCOL-SEED.",
  ),
  ("seeds", "", None, "Train several seeds, such as 0,1,2, in WORKDIR/seed_N."),
  ("eval_only", False, None, "Score the best checkpoint of the workdir again."),
  ("profile", False, None, "Write a trace of ten steps to WORKDIR/profile."),
  (
    "trust",
    False,
    None,
    "Import the modules that the files in the folder config.pretrained name.",
  ),
  ("distributed", False, None, "Join the processes that JAX detects."),
)
# Flags that are fields of `processes.Cluster`, in the form of `_FLAGS`.
_CLUSTER = (
  ("coordinator", "", None, "host:port of the first of several processes."),
  ("num_processes", -1, -1, "Number of processes that train together."),
  ("process_id", -1, -1, "Index of this process, from 0."),
  ("start_seconds", 300, 1, "Time to wait for all processes to start."),
  (
    "silence_seconds",
    60,
    1,
    "Time after which a silent process counts as dead, and all processes end.",
  ),
  (
    "stall_seconds",
    1800,
    0,
    "Seconds without a step after which one of several processes ends itself; "
    "0: never.",
  ),
)
_DEFINE: dict[type, Any] = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer}

# Define every flag by the type of its default; a default of None is a string.
for _name, _default, _least, _text in (*_FLAGS, *_CLUSTER):
  _bounds = {} if _least is None else {"lower_bound": _least}
  _define = _DEFINE.get(type(_default), flags.DEFINE_string)
  _define(_name, _default, _text, **_bounds)


def _prepare_process() -> None:
  """Sets the environment of JAX and the C library before JAX is imported."""
  # With several CPU devices on few cores XLA's thread pool can starve.
  if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
    os.environ.setdefault("NPROC", "16")
  allocator.keep_freed_memory()  # Before JAX starts its threads.


def _prepare_jax() -> None:
  """Configures JAX and connects this process to the others of the run."""
  with interrupts.importing():
    import jax

  # Cache compiled programs; without a home directory there is no cache.
  if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
    with contextlib.suppress(ValueError):
      cache = paths.expand("~/.cache/jaxformers/xla")
      jax.config.update("jax_compilation_cache_dir", str(cache))
  # Keep small programs too: a run compiles many of them at its start.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  from jaxformers.training import processes

  # Connect to the other processes, if there are any.
  fields: dict[str, Any] = {name: FLAGS[name].value for name, *_ in _CLUSTER}
  cluster = processes.find_cluster(**fields)
  if FLAGS.distributed or cluster.num_processes > 0:
    processes.start(cluster)
  requirements.require_device()


class Command(NamedTuple):
  """Arguments of the command line, parsed and checked.

  Attributes:
    loaded: config as its file returns it.
    config: config after the command line has set fields.
    chosen: paths of the fields that the command line has set.
    seeds: seeds of the runs, in the order of training; [] for the config's
      seed.
  """

  loaded: ConfigDict
  config: ConfigDict
  chosen: Collection[str]
  seeds: list[int]


def _run(command: Command, began: float) -> None:
  """Trains and scores the config, once for each seed if there are seeds.

  Args:
    command: arguments of the command line.
    began: value of `time.perf_counter` at the start of the process.
  """
  _prepare_jax()
  from jaxformers.training import loop, processes, summary
  from jaxformers.training.run import default_workdir

  modes = {"eval_only": FLAGS.eval_only, "profile": FLAGS.profile}
  config, chosen = command.config, command.chosen
  seeds: Sequence[int | None] = command.seeds or [None]
  for seed in seeds:
    if seed is not None:
      config.seed = seed
    # Each seed has its own workdir.
    workdir = FLAGS.workdir and paths.expand(FLAGS.workdir)
    if workdir is None:
      workdir = default_workdir(FLAGS.config, command.loaded, config)
    elif seed is not None:
      workdir = Path(workdir, f"seed_{seed}")
    with user_code.trusting(FLAGS.trust):
      results = loop.run(config, workdir, chosen=chosen, began=began, **modes)
    if processes.is_first():
      print(summary.format_results(results), flush=True)
    began = time.perf_counter()


def _explain(error: Exception) -> tuple[int, str | None]:
  """Returns the exit status of an error, and the message for the user.

  The message is None for an internal error.
  """
  from jaxformers.training import disk

  # The disk is full or absent: the same command may succeed later.
  if isinstance(error, OSError) and disk.error_number(error):
    advice = "Run the same command again once the file system works."
    return RETRY, f"error: {error}\n{advice}"
  # A file-system error that names a file is as clear as a `UserError`.
  has_file = isinstance(error, OSError) and error.filename is not None
  if isinstance(error, UserError) or has_file:
    return MISTAKE, f"error: {error}"
  return FAILURE, None


def _end(error: Exception) -> None:
  """Ends the process after an error, with a status for the launchers.

  Raises:
    SystemExit: after printing one message, for a mistake of the user.
    Exception: the given error with its traceback, for an internal error.
  """
  from jaxformers.training import processes

  status, message = _explain(error)
  # Several processes: the exit status says if the launcher should retry.
  if processes.has_peers():
    if lost := processes.explain_lost(error):
      status, message = RETRY, f"error: {lost}"
    print(message or traceback.format_exc(), file=sys.stderr)
    # A normal exit of Python would wait for the other processes.
    processes.end_at_once(status)
  if message is None:
    raise error
  print(message, file=sys.stderr)
  sys.exit(status)


def _ignore_closed_loop(unraisable: Any) -> None:
  """Hides errors of unfinished writes that follow an error already raised."""
  if str(unraisable.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def main(command: Command, began: float) -> None:
  """Runs the training that the flags describe.

  A mistake of the user ends the process with one message.

  Args:
    command: arguments of the command line.
    began: value of `time.perf_counter` at the start of the process.
  """
  # orbax warns about intended settings, and logs errors that it also raises.
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = _ignore_closed_loop
  interrupts.print_all_letters()
  try:
    _run(command, began)
  except KeyboardInterrupt:
    interrupts.leave("it resumes from the latest checkpoint.")
  except Exception as error:
    _end(error)


def _parse(argv: list[str]) -> Command:
  """Parses the flags before JAX starts.

  A mistake of the user ends the process with one message.
  """
  try:
    # Separate the fields of the config from the flags.
    program, *arguments = argv
    overrides, rest = cli.split_overrides(arguments)
    rest = _name_config(rest)
    if {"--help", "--helpfull", "-help", "-h"} & {*rest}:
      with interrupts.closed_pipe():
        print(_help(_find_spec(rest), overrides))
      sys.exit(0)
    unread = FLAGS([program, *rest])[1:]
    if unread:
      raise UserError(_unexpected(unread))
    if FLAGS.config is None:
      raise UserError(
        "A config is needed, such as jaxformers train lra/listops:size=tiny. "
        "`jaxformers configs` lists the configs, and `jaxformers train --help` "
        "the flags."
      )
    if FLAGS.workdir == "":
      raise UserError(
        "--workdir is empty: name a folder, or leave out the option for a "
        "folder below runs/."
      )
    # Prepare the process: the user's modules and most recipes import JAX. A
    # wrong field or seed is reported here, before JAX starts.
    _prepare_process()
    configs.import_named(overrides)
    loaded = configs.load(FLAGS.config)
    config = configs.override(loaded, overrides)
    # Check the fields now, unless pretrained weights complete the model later.
    if not config.get("pretrained"):
      RunConfig.from_dict(config)
    seeds = _read_seeds()
    if not FLAGS.eval_only:
      logs = [name for name in configs.LOGS if config.get(name)]
      requirements.require_logs(logs)
    return Command(loaded, config, configs.values_of(overrides), seeds)
  except _PARSE_ERRORS as error:
    print(f"config error: {error}", file=sys.stderr)
    sys.exit(MISTAKE)


def _read_seeds() -> list[int]:
  """Returns the seeds of --seeds, and checks flags that contradict each other.

  Raises:
    UserError: for a seed out of range, and for --profile without training.
  """
  seeds = cli.numbers("seeds", FLAGS.seeds)
  for seed in seeds:
    ranges.of(RunConfig)["seed"].check("--seeds", seed)
  if FLAGS.eval_only and FLAGS.profile:
    raise UserError(
      "--profile traces training steps, and --eval_only has none: remove one."
    )
  return seeds


def _name_config(arguments: list[str]) -> list[str]:
  """Puts --config before a first argument that is no flag.

  Raises:
    UserError: --config names a config, too.
  """
  if not arguments or arguments[0].startswith("-"):
    return arguments
  other = _find_spec(arguments[1:])
  if other is not None:
    raise UserError(
      f"Two configs are given, {arguments[0]} and --config {other}: remove one."
    )
  return ["--config", *arguments]


def _unexpected(words: list[str]) -> str:
  """Returns the error message for arguments that are not flags."""
  text = f"Unexpected arguments {' '.join(words)}: flags start with --."
  # Suggest --config if the first argument is the name of a config.
  try:
    configs.find_file(words[0].partition(":")[0])
  except UserError:
    return text
  return f"{text} Write the config {words[0]} before the flags."


def _help(spec: str | None, overrides: Sequence[str]) -> str:
  """Returns the text of --help: flags, and the fields of a config.

  Args:
    spec: value of --config; None for the fields that every config has.
    overrides: arguments that set fields. Only `imports` has an effect here.
  """
  # Select the fields to list, and the function that finds their ranges.
  find: Any
  if spec is None:
    fields, find = configs.base(), ranges.of(RunConfig).get
  else:
    # Import here: modules that define options import JAX.
    from jaxformers.training.run import find_range

    configs.import_named(overrides)
    fields = configs.load(spec)
    find = functools.partial(find_range, fields)
  owner = spec or "every config (with --config: all fields of that config)"
  return (
    f"{__doc__}\n{FLAGS.module_help(sys.modules[__name__])}\n\n"
    f"Fields of {owner}, set by --config.FIELD=VALUE:\n"
    f"{configs.describe(fields, find)}\n\n"
    "Models: jaxformers models. Options of mixers and blocks: "
    "docs/mixers.md."
  )


def _find_spec(argv: list[str]) -> str | None:
  """Returns the value of --config, or None if the flag is absent."""
  # absl accepts `--config PATH` and `--config=PATH`, with one dash or two.
  for arg, following in zip(argv, [*argv[1:], ""], strict=False):
    if arg in ("--config", "-config"):
      return following
    if arg.startswith(("--config=", "-config=")):
      return arg.partition("=")[2]
  return None


def console() -> None:
  """Parses the command line and trains."""
  began = time.perf_counter()
  try:
    app.run(functools.partial(main, began=began), flags_parser=_parse)
  except KeyboardInterrupt:  # Ctrl-C before `main` starts.
    interrupts.leave()


if __name__ == "__main__":
  console()
