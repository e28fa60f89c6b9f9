r"""Trains and scores: flags to config to `training.loop.run`, nothing else.

python -m jaxformers.main --config configs/lra/listops.py:size=tiny \
    --workdir runs/listops
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from jaxformers import config as configs
from jaxformers import interrupts, paths
from jaxformers.errors import UserError

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "Path of a config with its arguments, path.py:key=value,key=value; fields "
  "are overridden by --config.section.field=value.",
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder for checkpoints, metrics and results."
)
_EVAL_ONLY = flags.DEFINE_bool(
  "eval_only", False, "Score the best checkpoint of the workdir again."
)
_PROFILE = flags.DEFINE_bool(
  "profile", False, "Write a trace of ten steps to WORKDIR/profile."
)
_SEEDS = flags.DEFINE_list(
  "seeds", [], "Run several seeds, such as 0,1,2, each in WORKDIR/seed_N."
)


_COORDINATOR = flags.DEFINE_string(
  "coordinator", "", "host:port of the first of several processes."
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", -1, "How many processes train together."
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", -1, "Which of them this is, from 0."
)
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "Several processes of a cluster that JAX knows."
)
_START_SECONDS = flags.DEFINE_integer(
  "start_seconds", 300, "To wait for all processes to arrive.", lower_bound=1
)
_SILENCE_SECONDS = flags.DEFINE_integer(
  "silence_seconds",
  60,
  "After which a silent process counts as dead, and all end.",
  lower_bound=1,
)
_STALL_SECONDS = flags.DEFINE_integer(
  "stall_seconds",
  1800,
  "After which one of several processes that hangs ends itself; 0: never.",
  lower_bound=0,
)


def _seeds() -> list[int]:
  try:
    return [int(seed) for seed in _SEEDS.value]
  except ValueError:
    raise UserError(
      f"--seeds={','.join(_SEEDS.value)}: give integers, such as 0,1,2."
    ) from None


def _prepare_jax() -> None:
  """Sets what has to be set before JAX starts."""
  # With several CPU devices on few cores XLA's thread pool can starve.
  if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
    os.environ.setdefault("NPROC", "16")
  import jax

  if not jax.config.jax_compilation_cache_dir:
    # Without a home directory every process compiles its own programs.
    with contextlib.suppress(ValueError):
      cache = paths.expand("~/.cache/jaxformers/xla")
      jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  from jaxformers.training import processes

  cluster = processes.find_cluster(
    coordinator=_COORDINATOR.value,
    num_processes=_NUM_PROCESSES.value,
    process_id=_PROCESS_ID.value,
    start_seconds=_START_SECONDS.value,
    silence_seconds=_SILENCE_SECONDS.value,
    stall_seconds=_STALL_SECONDS.value,
  )
  if _DISTRIBUTED.value or cluster.num_processes > 0:
    processes.start(cluster)


def _run() -> None:
  workdir, config = Path(_WORKDIR.value), _CONFIG.value
  seeds = _seeds()
  _prepare_jax()
  from jaxformers.training import loop, processes, summary

  jobs = [(config, workdir)]
  if seeds:
    jobs = []
    for seed in seeds:
      own = config.copy_and_resolve_references()
      own.seed = seed
      jobs.append((own, workdir / f"seed_{seed}"))
  for own, folder in jobs:
    results = loop.run(
      own, folder, eval_only=_EVAL_ONLY.value, profile=_PROFILE.value
    )
    if processes.is_first():
      print(summary.table(results), flush=True)


def _may_pass(error: Exception) -> bool:
  """True for an error of the file system, which may be well later."""
  if "jax" not in sys.modules:
    return False
  from jaxformers.training import disk

  return isinstance(error, OSError) and disk.error_number(error) > 0


def _message(error: Exception) -> str | None:
  """Returns the message shown to the user, or None for an internal error."""
  if _may_pass(error):
    return f"error: {error}\nRun the same command again when that is mended."
  # A file that cannot be read or written is named by the error.
  names_file = isinstance(error, OSError) and error.filename is not None
  is_users = isinstance(error, UserError) or names_file
  return f"error: {error}" if is_users else None


# Status of a process whose disk or whose peer fails, so that starting it again
# may help; and of a mistake, where that does not help.
RETRY, MISTAKE = 75, 2


def _leave_others(error: Exception) -> None:
  """Ends this process if it is one of several, with a status for a launcher."""
  if "jax" not in sys.modules:
    return
  from jaxformers.training import processes

  if not processes.has_peers():
    return
  message = _message(error)
  status = 1 if message is None else MISTAKE
  if _may_pass(error):
    status = RETRY
  if lost := processes.explain_lost(error):
    status, message = RETRY, f"error: {lost}"
  print(message or traceback.format_exc(), file=sys.stderr)
  processes.leave(status)


def _unraisable(unraisable: Any) -> None:
  """Leaves out the writes under way when one failed, which was raised."""
  if str(unraisable.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def main(argv: list[str]) -> None:
  """Runs what the flags ask for; a user's mistake ends in one message."""
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments {argv[1:]}: flags start by --.")
  # orbax warns of what is meant, and logs at length what it raises as well.
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = _unraisable
  try:
    _run()
  except KeyboardInterrupt:
    interrupts.leave("it goes on from the latest checkpoint.")
  except Exception as error:
    _leave_others(error)
    message = _message(error)
    if message is None:
      raise
    if _may_pass(error):
      print(message, file=sys.stderr)
      sys.exit(RETRY)
    sys.exit(message)


def _parse(argv: list[str]) -> list[str]:
  """Parses flags; a mistake in them ends in one message within a moment."""
  try:
    spec = _spec(argv)
    options: dict[str, Any] = {}
    if {"--help", "--helpfull", "-help", "-h"} & {*argv}:
      print(_help(spec))
      sys.exit(0)
    if spec is not None:
      config = configs.load(spec)
      argv, options = configs.take_options(config, argv)
      sys.argv = argv  # Where ml_collections looks for overrides.
      configs.check_overrides(config, argv)
    rest = flags.FLAGS(argv)
    if _CONFIG.value is None or _WORKDIR.value is None:
      raise UserError(
        "--config and --workdir are needed, such as --config "
        "configs/lra/listops.py:size=tiny --workdir runs/listops. All flags: "
        "--help"
      )
    configs.set_options(_CONFIG.value, options)
    return rest
  except (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    flags.Error,
  ) as error:
    sys.stderr.write(f"config error: {error}\n")
    sys.exit(2)


def _help(spec: str | None) -> str:
  """Returns the text of --help: flags, and the fields of a config.

  Args:
    spec: value of --config; None for the fields that every config has.
  """
  fields = configs.base() if spec is None else configs.load(spec)
  of = "every config; with --config those of one" if spec is None else spec
  return (
    f"{__doc__}\n{flags.FLAGS.module_help(sys.modules[__name__])}\n\n"
    f"Fields of {of}, set by --config.FIELD=VALUE:\n"
    f"{configs.describe(fields)}\n\n"
    "Models: python -m jaxformers models. Options of mixers and blocks: "
    "docs/mixers.md."
  )


def _spec(argv: list[str]) -> str | None:
  for arg, following in zip(argv, [*argv[1:], ""], strict=True):
    if arg in ("--config", "-config"):
      return following
    if arg.startswith(("--config=", "-config=")):
      return arg.partition("=")[2]
  return None


def console() -> None:
  """The entry point of the command line."""
  app.run(main, flags_parser=_parse)


if __name__ == "__main__":
  console()
