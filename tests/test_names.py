"""Documents and docstrings name files, tests and objects that exist."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxformers", "launch", "benchmarks", "configs", "tests", "docs")
FILES = sorted(
  {
    path
    for folder in (*FOLDERS, "examples", ".ci", ".github", "results")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
  }
  | {path for path in ROOT.iterdir() if path.is_file()}
)
SOURCES = [path for path in FILES if path.suffix == ".py"]
PAGES = [path for path in FILES if path.suffix == ".md"]
# A path with an ending of the repository's files.
PATH = re.compile(
  r"(?<![\w./:*>-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|cfg|toml|ya?ml|ipynb))\b"
)
TEST = re.compile(r"\btest_\w+")
DOTTED = re.compile(r"`((?:[a-z_]\w*\.)+[A-Za-z_]\w*)(?:\(|`)")
# Pages on how to add a part name files, tests and objects that a reader writes.
ADDED = re.compile(r"add_a_|python\.md$")
# Files that a user has, and files of the reference implementations.
OTHERS = {
  "path.py",
  "average.py",
  "mine.py",
  "configs/mine.py",
  "file.py",
  "path/to/file.py",
}
OTHERS |= {"run_squad.py", "run_classifier.py", "run_lra_listops.sh"}
OTHERS |= {"segm/model/utils.py", "segm/config.yml", "snakes2.py"}
OTHERS |= {"s4-cifar.yaml", "s4-listops.yaml"}
# Sections of a config, whose fields other tests check, and endings of files.
SECTIONS = {"config", "task", "model", "mixer", "block", "schedule"}
SUFFIXES = {"json", "npy", "py", "raw", "safetensors", "sbatch", "sh"}
PARTS_OF_ARCHIVES = {"test_data"}
ARGUMENTS = {"dropout.fold"}  # A method of the tool `dropout` of a mixer.


def name_of(path):
  return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path):
  return ast.parse(path.read_text())


def texts():
  """Yields the file, the line and the text of pages, docstrings, comments."""
  for path in PAGES:
    yield path, path.read_text()
  for path in SOURCES:
    lines = path.read_text().splitlines()
    comments = [line.partition("# ")[2] for line in lines if "# " in line]
    documents = [
      ast.get_docstring(node) or ""
      for node in ast.walk(tree(path))
      if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    yield path, "\n".join([*documents, *comments])


TEXTS = [text for text in texts() if text[0] != Path(__file__)]


def missing(find):
  """Returns the places whose names do not exist.

  Args:
    find: function of the file and its text that yields stale names.
  """
  return {
    f"{name_of(path)}: {name}"
    for path, text in TEXTS
    if not ADDED.search(name_of(path))
    for name in find(path, text)
  }


def stale_files(path, text):
  """Yields the named files that no folder has; capitals are placeholders."""
  for name in PATH.findall(text):
    stem = Path(name).stem
    known = re.sub(r"^(\.\.?/)+", "", name) in ENDS or name in OTHERS
    if not known and not stem.isupper():
      yield name


def path_ends():
  """Yields the ends of all paths: a/b/c.py, b/c.py and c.py."""
  for path in FILES:
    parts = path.relative_to(ROOT).parts
    yield from ("/".join(parts[start:]) for start in range(len(parts)))


ENDS = {*path_ends()}


def identifiers():
  """Yields names, arguments, keywords and words in quotes of all sources."""
  for path in SOURCES:
    yield path.stem
    for node in ast.walk(tree(path)):
      match node:
        case ast.FunctionDef(name=name) | ast.Name(id=name):
          yield name
        case ast.arg(arg=name) | ast.keyword(arg=name):
          yield name
        case ast.Constant(value=str(name)):
          yield name


IDENTIFIERS = {*identifiers()}


def stale_tests(path, text):
  """Yields the named tests that no file has."""
  return (
    name
    for name in TEST.findall(text)
    if name not in IDENTIFIERS | PARTS_OF_ARCHIVES
  )


def test_named_files_exist():
  assert not missing(stale_files)


def test_named_tests_exist():
  assert not missing(stale_tests)


def bound_names(body):
  """Yields the names that statements bind, and attributes of classes."""
  for node in body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      yield node.name
      if isinstance(node, ast.ClassDef):
        members = {*bound_names(node.body)} | {
          target.attr
          for target in ast.walk(node)
          if isinstance(target, ast.Attribute)
          and isinstance(target.value, ast.Name)
          and target.value.id == "self"
        }
        yield from (f"{node.name}.{member}" for member in members)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      for target in targets:
        names = [n for n in ast.walk(target) if isinstance(n, ast.Name)]
        yield from (name.id for name in names)
    elif isinstance(node, ast.Import | ast.ImportFrom):
      yield from (a.asname or a.name.partition(".")[0] for a in node.names)
    elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
      yield from bound_names(node.body)


@functools.cache
def modules():
  """Returns the names that each module of the repository has, by its name."""
  found = defaultdict(set)
  for path in SOURCES:
    parts = [*path.relative_to(ROOT).with_suffix("").parts]
    if parts[-1] == "__init__":
      parts.pop()
      siblings = path.parent.iterdir()
      found[".".join(parts)] |= {sibling.stem for sibling in siblings}
    found[".".join(parts)] |= {*bound_names(tree(path).body)}
  return found


def exists(name):
  """Returns whether a module has a dotted name; None if it names no module."""
  words = name.split(".")
  if words[0] == "jf":
    words[0] = "jaxformers"
  is_module = None
  for module, names in modules().items():
    stem = module.split(".")
    for count in range(1, len(words) + 1):
      if stem[-count:] == words[:count]:
        # One level of attributes of a class is known.
        rest = ".".join(words[count : count + 2])
        if not rest or rest in names:
          return True
        is_module = False
  return is_module


@functools.cache
def variables(path):
  """Returns the names of variables and arguments of a file."""
  if path.suffix != ".py":
    return frozenset()
  nodes = [*ast.walk(tree(path))]
  names = {
    node.id
    for node in nodes
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  }
  return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def stale_objects(path, text):
  """Yields the dotted names that no module has."""
  for name in DOTTED.findall(text):
    first, *_, last = name.split(".")
    is_value = {first, last} & (SECTIONS | SUFFIXES | variables(path))
    if not is_value and name not in ARGUMENTS and exists(name) is False:
      yield name


def test_named_objects_exist():
  assert not missing(stale_objects)


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("jaxformers.scan", True),
    ("jf.linear_scan", True),
    ("jaxformers.models.build", True),
    ("scan.linear_scan", True),
    ("scan.no_such", False),
    ("jax.lax", None),
  ],
)
def test_exists_tells_a_stale_name_from_others(name, expected):
  assert exists(name) is expected


def test_stale_names_of_a_text_are_found():
  text = "See no_such.py, test_no_such_property and `scan.no_such`; scan.py."
  page = ROOT / "jaxformers" / "training" / "ahead.py"
  assert [*stale_files(page, text)] == ["no_such.py"]
  assert [*stale_tests(page, text)] == ["test_" + "no_such_property"]
  assert [*stale_objects(page, text)] == ["scan.no_such"]
