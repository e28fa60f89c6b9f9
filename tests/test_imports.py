"""The architecture: who may import whom, and a test file for every module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxformers"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Layers from below; a layer imports those that it names, and `foundations`.
ALLOWED = {
  "foundations": set(),
  "version": set(),
  "config": set(),
  "recipes": {"config", "models"},
  "orthogonal": set(),
  "scan": set(),
  "data.engine": set(),
  "data.generators": {"data.engine"},
  "data.images": {"data.engine"},
  "data.sets": {"data.engine", "data.generators", "data.images"},
  "models": {"config", "orthogonal", "scan"},
  "tasks": {"data"},
  "theory": {"config"},
  "training": {"models", "tasks", "data", "config", "orthogonal"},
  "sweep": {"config", "models", "tasks", "training"},
  "main": {"config", "training"},
  "inference": {"config", "models", "tasks", "training"},
  "api": {"config", "inference", "tasks", "training"},
  "analysis.plotting": set(),
  "analysis.tokens": {"models", "orthogonal", "analysis.plotting"},
  "analysis.certificates": {
    "models",
    "orthogonal",
    "inference",
    "analysis.tokens",
    "analysis.plotting",
  },
  "analysis.evaluation": {
    "models",
    "orthogonal",
    "tasks",
    "data",
    "training",
    "inference",
    "analysis.tokens",
    "analysis.certificates",
  },
  "analysis.tables": {"config", "models", "tasks", "analysis.plotting"},
  "analysis.page": {"analysis", "config", "models", "tasks", "inference"},
  "commands": {
    "main",
    "inference",
    "analysis",
    "theory",
    "training",
    "models",
    "tasks",
    "data",
    "config",
  },
  "__main__": {"commands"},
}
# tensorflow-datasets takes a second to import: where data is prepared only.
SLOW = {"tensorflow_datasets": ("builder.py", "metadata.py")}
HEAVY = {"tensorflow", "torch", "clu", "chex", "hypothesis", "pytest"}


def imported(path, walk=ast.walk):
  for node in walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(name):
  """Returns the layer of a dotted name below jaxformers, or None."""
  parts = name.split(".")
  for count in (2, 1):
    if ".".join(parts[:count]) in ALLOWED:
      return ".".join(parts[:count])
  return None


def may_import(path, name):
  """Returns True if a module may import a dotted name."""
  dotted = path.relative_to(PACKAGE).with_suffix("").as_posix()
  part = part_of(dotted.replace("/", "."))
  top, _, rest = name.partition(".")
  if top in HEAVY or path.name not in SLOW.get(top, (path.name,)):
    return False
  used = part_of(rest) if top == "jaxformers" else None
  if part is None or used is None:
    return True
  allowed = ALLOWED[part] | {"foundations", "version", part}
  return used in allowed or used.split(".")[0] in allowed


def assert_none(offenders):
  """Fails with the offenders, one a line."""
  assert not offenders, "\n".join(["", *offenders])


def test_modules_are_found():
  assert len(MODULES) > 200


def test_modules_import_lower_layers_only():
  assert_none(
    [
      f"{path.relative_to(ROOT)} imports {name}"
      for path in MODULES
      for name in imported(path)
      if not may_import(path, name)
    ]
  )


def module_of(path):
  """Returns the dotted name of a module of the package."""
  dotted = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
  return dotted.removesuffix(".__init__")


# What each module imports of the package, at the top of its file or lazily.
GRAPH = {module_of(path): set() for path in MODULES}
for _path in MODULES:
  for _name in imported(_path):
    # "a.b.c" is the module a.b.c, or the name c in the module a.b.
    _used = _name if _name in GRAPH else _name.rpartition(".")[0]
    if _used in GRAPH and _used != module_of(_path):
      GRAPH[module_of(_path)].add(_used)


def path_back(start):
  """Returns a shortest cycle of imports through a module, or nothing."""
  queue, seen = [[start]], set()
  while queue:
    path = queue.pop(0)
    for name in sorted(GRAPH[path[-1]]):
      if name == start:
        return [*path, start]
      if name not in seen:
        seen.add(name)
        queue.append([*path, name])
  return []


def test_package_has_no_import_cycle():
  cycles = [cycle for module in GRAPH if (cycle := path_back(module))]
  assert_none([" -> ".join(cycle) for cycle in cycles])


def test_data_and_configs_import_no_jax():
  parts = ("tasks", "data", "config", "recipes", "foundations")
  files = [
    path
    for path in MODULES
    if path.relative_to(PACKAGE).with_suffix("").parts[0] in parts
  ]
  assert {path.relative_to(PACKAGE).parts[0] for path in files} == {
    path.name for path in PACKAGE.iterdir() if path.stem in parts
  }
  assert len(files) > len(parts)
  assert_none(
    [
      f"{path.relative_to(ROOT)} imports {name}"
      for path in files
      # At the top of the file: `requirements` looks for devices when asked.
      for name in imported(path, ast.iter_child_nodes)
      if name.split(".")[0] in ("jax", "flax", "optax")
    ]
  )


@pytest.mark.slow
def test_training_loop_imports_no_numba_scipy_or_tensorflow():
  """Numba and SciPy take a second to import, and most runs use neither."""
  code = (
    "import sys, jaxformers.main, jaxformers.training.loop;"
    "print(sorted(sys.modules.keys() & {'numba', 'scipy', 'tensorflow'}))"
  )
  run = [sys.executable, "-c", code]
  out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
  assert out == "[]\n"


def test_configs_import_config_and_recipes_only():
  files = sorted((ROOT / "configs").rglob("*.py"))
  assert files
  assert_none(
    [
      f"{path.relative_to(ROOT)} imports {name}"
      for path in files
      for name in imported(path)
      if not name.startswith("jaxformers.recipes.")
      if name != "jaxformers.config"
    ]
  )


def test_no_package_module_imports_recipes():
  assert_none(
    [
      f"{path.relative_to(ROOT)} imports {name}"
      for path in MODULES
      for name in imported(path)
      if name.startswith("jaxformers.recipes")
      if not path.is_relative_to(PACKAGE / "recipes")
    ]
  )


def find_test_file(path):
  """Returns the file that tests a module; None for one that needs none."""
  relative = path.relative_to(PACKAGE)
  if relative == Path("models/__init__.py"):
    return ROOT / "tests" / "models" / "test_models.py"
  if relative.name == "__init__.py":
    return None
  # A command is tested with what it prints.
  if relative.parent == Path("commands"):
    found = [*(ROOT / "tests").rglob(f"test_{relative.name}")]
    return found[0] if found else ROOT / "tests" / relative
  # Recipes are tested by the files in configs/ that use them.
  folder = "configs" if relative.parent == Path("recipes") else relative.parent
  return ROOT / "tests" / folder / f"test_{relative.name}"


def test_every_module_has_a_test_file():
  files = {path: find_test_file(path) for path in MODULES}
  assert_none(
    [
      f"{path.relative_to(ROOT)} has no {file.relative_to(ROOT)}"
      for path, file in files.items()
      if file and not file.exists()
    ]
  )


def undocumented(tree):
  """Yields the public names of a module without a docstring."""
  if not ast.get_docstring(tree):
    yield "module"
  classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
  methods = [node for class_ in classes for node in class_.body]
  for node in tree.body + methods:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      is_public = not node.name.startswith("_")
      if is_public and not ast.get_docstring(node):
        yield node.name


def untyped(tree):
  """Yields the functions and arguments of a module without a type."""
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef):
      if node.returns is None:
        yield f"{node.name} -> ?"
      for argument in node.args.args + node.args.kwonlyargs:
        if not argument.annotation and argument.arg not in ("self", "cls"):
          yield f"{node.name}({argument.arg}: ?)"


def test_every_public_name_has_a_docstring():
  assert_none(
    [
      f"{path.relative_to(ROOT)}: {name}"
      for path in MODULES
      for name in undocumented(ast.parse(path.read_text()))
    ]
  )


def test_every_function_has_types():
  assert_none(
    [
      f"{path.relative_to(ROOT)}: {name}"
      for path in MODULES
      for name in untyped(ast.parse(path.read_text()))
    ]
  )
