"""Four virtual CPU devices for every test, and data for seconds."""

# First of all: importing it closes the handlers of logs that exist by then.
import submitit  # noqa: F401, I001

import gc
import os
import subprocess
import sys
from pathlib import Path

from tests.marks import FAST_COMPILE

# Both before JAX is imported: XLA's thread pool starves with virtual devices.
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=4",
    FAST_COMPILE,
  ]
)
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import settings

from jaxformers import config as configs
from jaxformers.foundations import user_code
from jaxformers.foundations.errors import UserError
from jaxformers.models.mixer import MIXERS
from jaxformers.training import compilers
from tests import reuse

ROOT = Path(__file__).parents[1]

# Most of what JAX traces lives until the end: looking for what does not, as
# often as Python does by itself, takes a twentieth of the time.
gc.set_threshold(50_000, 20, 50)

settings.register_profile("suite", deadline=None, max_examples=15)
settings.load_profile("suite")
jax.config.update(
  "jax_compilation_cache_dir",
  str(Path("~/.cache/jaxformers/tests").expanduser()),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# What XLA makes faster is not what is tested, and takes a third of the time; a
# test of memory or of rounding asks for `optimized`.
jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser):
  """--all and --long, for what takes longer; --imports, for other mixers."""
  parser.addoption(
    "--all", action="store_true", help="also run what is marked slow"
  )
  parser.addoption(
    "--long", action="store_true", help="also run what is marked slow or long"
  )
  parser.addoption(
    "--imports",
    default="",
    metavar="MODULE,...",
    help="run the property tests of the mixers that these modules register",
  )


PROPERTIES = ROOT / "tests" / "models" / "test_attention.py"
imported = set()  # Mixers that the modules of --imports have registered.


def pytest_configure(config):
  """Imports the modules of --imports before the tests list the mixers."""
  if names := config.getoption("imports"):
    before = {*MIXERS}
    try:
      user_code.import_modules(names)
    except UserError as error:
      message = str(error).replace("config.imports", "--imports")
      raise pytest.UsageError(message) from None
    imported.update({*MIXERS} - before)
    if not imported:
      raise pytest.UsageError(
        f"--imports={names} registers no mixer: decorate one with "
        "jaxformers.attention or jaxformers.MIXERS.register."
      )


def pytest_ignore_collect(collection_path, config):
  """With --imports, no other file than that of the properties is read."""
  if config.getoption("imports") and collection_path.suffix == ".py":
    return collection_path != PROPERTIES
  return None


def is_imported(item):
  """Returns True for a test of a mixer that --imports has registered."""
  values = item.callspec.params.values() if hasattr(item, "callspec") else ()
  return any(isinstance(v, str) and v in imported for v in values)


# Files that take longest, first: or one process ends long after the other.
LONGEST = (
  "tests/test_main.py",
  "tests/training/test_loop.py",
  "tests/models/test_attention.py",
  "tests/test_documents.py",
  "tests/models/test_models.py",
  "tests/training/test_steps.py",
  "tests/test_benchmarks.py",
  "tests/launch/test_cluster.py",
)


def pytest_collection_modifyitems(config, items):
  """Leaves out what was not asked for, and puts long files first."""
  if imported:
    left = [item for item in items if not is_imported(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if is_imported(item)]
  # All of them for a mixer from elsewhere.
  is_long = config.getoption("long") or bool(imported)
  is_slow = is_long or config.getoption("all")
  if not is_long:
    kept = {"long": is_long, "slow": is_slow}
    marks = [mark for mark, is_kept in kept.items() if not is_kept]
    left = {item for item in items if any(map(item.get_closest_marker, marks))}
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]

  def place(item):
    path = item.path.relative_to(ROOT).as_posix()
    return LONGEST.index(path) if path in LONGEST else len(LONGEST)

  items.sort(key=place)


MOST_MAPPINGS = 30_000  # Of memory, by a process: Linux allows 65,530.
MOST_MEMORY = 4 * 2**30  # Bytes of a process of tests, of which there are two.


@pytest.fixture(autouse=True, scope="module")
def few_programs():
  """Drops the programs of a file, before the process has too many of them.

  A program that XLA compiles for the CPU takes about nine mappings of memory.
  Where Linux grants no more, the process ends by a segmentation fault, usually
  while a program is written to the cache on disk. Programs that tests share
  take gigabytes by and by.
  """
  yield
  mappings = Path("/proc/self/maps")
  if not mappings.exists():
    return
  _, pages, *_ = Path("/proc/self/statm").read_text().split()
  memory = int(pages) * os.sysconf("SC_PAGE_SIZE")
  count = mappings.read_bytes().count(b"\n")
  if count > MOST_MAPPINGS or memory > MOST_MEMORY:
    reuse.forget()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def repeated_once():
  """Does once what most tests would repeat: see `reuse`."""
  with pytest.MonkeyPatch.context() as patch:
    reuse.install(patch)
    yield


@pytest.fixture
def strict():
  """No implicit type or rank promotion."""
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


@pytest.fixture
def optimized():
  """The programs that users run, with all of XLA's optimisations."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def one_device(monkeypatch):
  """The whole of a test on the first device alone."""
  monkeypatch.setattr(compilers, "devices", lambda: jax.devices()[:1])


@pytest.fixture
def prints_alike(tmp_path):
  """A function: code prints the same with three hash seeds, and not nothing.

  Each process has a folder of its own, sys.argv[1].
  """

  def check(code):
    prints = {
      subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / f"hash_seed_{seed}")],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        capture_output=True,
        check=True,
      ).stdout
      for seed in ("0", "1", "2")
    }
    assert len(prints) == 1
    assert prints != {b""}

  return check


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
  """Where the small ListOps of `smoke` is generated, once."""
  return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def smoke(data_dir):
  """A function that makes a config of seconds; `**fields` override it."""

  def make(model="transject", **fields):
    config = configs.load(
      f"{ROOT}/configs/lra/listops.py:size=tiny,model={model}"
    )
    config.data_dir = str(data_dir)
    config.task.update(num_train=64, num_validation=10, num_test=13)
    config.task.update(min_length=5, max_length=60)
    config.model.update(d_model=16, head_dim=8)
    config.update(batch_size=8, eval_batch_size=8, total_steps=10)
    config.buckets = 1  # Every length is compiled.
    config.update(log_steps=2, eval_steps=5, checkpoint_steps=5)
    config.schedule.warmup_steps = min(4, fields.get("total_steps", 10))
    config.update_from_flattened_dict(fields)
    return config

  return make


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, worker_id):
  """Where real archives are prepared, once for all tests in all processes."""
  base = tmp_path_factory.getbasetemp()
  # Those of pytest-xdist have folders of their own, side by side.
  folder = (base if worker_id == "master" else base.parent) / "prepared"
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope="session")
def archives():
  """The folder with real archives; the test is skipped where there is none."""
  default = ROOT.parent / "shared" / "data"
  folder = Path(os.environ.get("JAXFORMERS_DATA_ARCHIVES", default))
  if not (folder / "aclImdb_v1.tar.gz").exists():
    pytest.skip(f"no aclImdb_v1.tar.gz in {folder} (JAXFORMERS_DATA_ARCHIVES)")
  return folder
