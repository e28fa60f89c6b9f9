"""Fixtures and options of all tests, with four virtual CPU devices."""

# Import submitit first: its import closes all log handlers that exist.
import submitit  # noqa: F401, I001

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

from tests.marks import FAST_COMPILE

# Set the environment before JAX is imported. NPROC enlarges XLA's thread pool,
# which starves with virtual devices.
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

# Collect garbage less often: most objects of JAX live until the end, and
# Python's default takes a twentieth of the time.
gc.set_threshold(50_000, 20, 50)

settings.register_profile("suite", deadline=None, max_examples=15)
settings.load_profile("suite")
jax.config.update(
  "jax_compilation_cache_dir",
  str(Path("~/.cache/jaxformers/tests").expanduser()),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Skip most of XLA's optimisations, which take a third of the time. Tests of
# memory or of rounding use the fixture `optimized`.
jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser):
  """Adds --all and --long for slow tests, and --imports for users' mixers."""
  parser.addoption(
    "--all", action="store_true", help="also run the tests marked slow"
  )
  parser.addoption(
    "--long", action="store_true", help="also run tests marked slow or long"
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
  """Imports the modules of --imports, before the tests list the mixers."""
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
  """With --imports, ignores all files except the property tests of mixers."""
  if config.getoption("imports") and collection_path.suffix == ".py":
    return collection_path != PROPERTIES
  return None


def is_imported(item):
  """Returns True for a test of a mixer that --imports has registered."""
  values = item.callspec.params.values() if hasattr(item, "callspec") else ()
  return any(isinstance(v, str) and v in imported for v in values)


# The slowest files. They start first, so that all processes end together.
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
  """Deselects tests that were not asked for, and sorts slow files first."""
  # With --imports, keep the tests of the imported mixers.
  if imported:
    left = [item for item in items if not is_imported(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if is_imported(item)]
  # Imported mixers get all tests; otherwise deselect long and slow tests.
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

  # Sort the slowest files first.
  items.sort(key=place)


MOST_MAPPINGS = 30_000  # Memory mappings of a process. Linux allows 65,530.
MOST_MEMORY = 4 * 2**30  # Bytes of each of the two test processes.


@pytest.fixture(autouse=True, scope="module")
def few_programs():
  """Frees compiled programs after a file, before the process has too many.

  A program that XLA compiles for the CPU takes about nine memory mappings. If
  Linux grants no more mappings, the process ends with a segmentation fault,
  usually while it writes a program to the cache on disk. The programs that
  tests share also take gigabytes over time. The C library keeps freed memory
  for this process unless it is told to return it; without that, a process that
  is once above the limit would free its programs after every file.
  """
  yield
  # Read the number of mappings and the memory of this process.
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
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # It is glibc's.
      library.malloc_trim(0)


@pytest.fixture(autouse=True, scope="session")
def repeated_once():
  """Reuses models and programs that most tests would build; see `reuse`."""
  with pytest.MonkeyPatch.context() as patch:
    reuse.install(patch)
    yield


@pytest.fixture
def strict():
  """Forbids implicit promotion of types and ranks."""
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


@pytest.fixture
def optimized():
  """Compiles programs with all of XLA's optimisations, as for users."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def one_device(monkeypatch):
  """Runs a test on only the first device."""
  monkeypatch.setattr(compilers, "devices", lambda: jax.devices()[:1])


@pytest.fixture
def prints_alike(tmp_path):
  """Returns a check that code prints the same text with three hash seeds.

  Each process gets a separate folder, sys.argv[1].
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
  """Folder in which the small ListOps of `smoke` is generated once."""
  return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def smoke(data_dir):
  """Returns a function that makes the config of a run of a few seconds.

  Its arguments are the name of the model, and `**fields` that replace fields of
  the config.
  """

  def make(model="transject", **fields):
    config = configs.load(
      f"{ROOT}/configs/lra/listops.py:size=tiny,model={model}"
    )
    config.data_dir = str(data_dir)
    config.task.update(num_train=64, num_validation=10, num_test=13)
    config.task.update(min_length=5, max_length=60)
    config.model.update(d_model=16, head_dim=8)
    config.update(batch_size=8, eval_batch_size=8, total_steps=10)
    config.buckets = 1  # A step is compiled for every length of batches.
    config.update(log_steps=2, eval_steps=5, checkpoint_steps=5)
    config.schedule.warmup_steps = min(4, fields.get("total_steps", 10))
    config.update_from_flattened_dict(fields)
    return config

  return make


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, worker_id):
  """Folder in which real archives are prepared once, for all processes."""
  base = tmp_path_factory.getbasetemp()
  # Processes of pytest-xdist have sibling folders: use their parent.
  folder = (base if worker_id == "master" else base.parent) / "prepared"
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope="session")
def archives():
  """Folder with real archives. The test is skipped if there is none."""
  default = ROOT.parent / "shared" / "data"
  folder = Path(os.environ.get("JAXFORMERS_DATA_ARCHIVES", default))
  if not (folder / "aclImdb_v1.tar.gz").exists():
    pytest.skip(f"no aclImdb_v1.tar.gz in {folder} (JAXFORMERS_DATA_ARCHIVES)")
  return folder
