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


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.name))
def test_imports_point_downwards(path):
  dotted = path.relative_to(PACKAGE).with_suffix("").as_posix()
  part = part_of(dotted.replace("/", "."))
  for name in imported(path):
    top, _, rest = name.partition(".")
    assert top not in HEAVY, name
    assert path.name in SLOW.get(top, (path.name,)), name
    used = part_of(rest) if top == "jaxformers" else None
    if part is None or used is None:
      continue
    allowed = ALLOWED[part] | {"foundations", "version", part}
    assert used in allowed or used.split(".")[0] in allowed, f"{part} -> {used}"


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


@pytest.mark.parametrize("module", GRAPH)
def test_no_module_imports_itself_through_others(module):
  assert not path_back(module)


@pytest.mark.parametrize("part", ["tasks", "data", "config", "foundations"])
def test_data_and_configs_run_without_jax(part):
  where = PACKAGE / part
  for path in where.rglob("*.py") if where.is_dir() else [where]:
    # At the top of the file: `requirements` looks for devices when asked.
    names = imported(path, ast.iter_child_nodes)
    tops = {name.split(".")[0] for name in names}
    assert not tops & {"jax", "flax", "optax"}, path


def test_recipes_import_models_only_inside_of_functions():
  for path in (PACKAGE / "recipes").glob("*.py"):
    for node in ast.parse(path.read_text()).body:
      at_import = isinstance(node, ast.Import | ast.ImportFrom)
      text = ast.unparse(node) if at_import else ""
      assert "models" not in text, f"{path}: {text}"


def test_most_configs_are_loaded_without_jax():
  """Those of a model whose traits stand in the recipes."""
  code = (
    "import sys\n"
    "from jaxformers import config\n"
    "for name in config.packaged_names():\n"
    "  if name != 'synthetic/planted_pairs': config.load(name)\n"
    "print(sorted(sys.modules.keys() & {'jax', 'flax', 'jaxformers.models'}))"
  )
  run = [sys.executable, "-c", code]
  out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
  assert out == "[]\n"


def test_a_run_begins_without_what_only_some_runs_need():
  """Numba and SciPy take a second to import, and most runs use neither."""
  code = (
    "import sys, jaxformers.main, jaxformers.training.loop;"
    "print(sorted(sys.modules.keys() & {'numba', 'scipy', 'tensorflow'}))"
  )
  run = [sys.executable, "-c", code]
  out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
  assert out == "[]\n"


def test_configs_import_config_and_recipes_only():
  for path in (ROOT / "configs").rglob("*.py"):
    for name in imported(path):
      is_recipe = name.startswith("jaxformers.recipes.")
      assert is_recipe or name == "jaxformers.config", f"{path}: {name}"


def test_only_configs_and_benchmarks_use_recipes():
  for path in MODULES:
    inside = path.is_relative_to(PACKAGE / "recipes")
    names = [n for n in imported(path) if n.startswith("jaxformers.recipes")]
    assert inside or not names, f"{path}: {names}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.name))
def test_every_module_has_a_twin_that_tests_it(path):
  relative = path.relative_to(PACKAGE)
  if relative.name == "__init__.py":
    if relative.parent == Path("models"):
      assert (ROOT / "tests/models/test_models.py").exists()
    return
  if relative.parent == Path("commands"):
    # A command is tested with what it prints.
    assert [*(ROOT / "tests").rglob(f"test_{relative.name}")]
    return
  # Recipes are tested by the files in configs/ that use them.
  folder = "configs" if relative.parent == Path("recipes") else relative.parent
  assert (ROOT / "tests" / folder / f"test_{relative.name}").exists()


def test_everything_public_has_a_docstring_and_types():
  for path in MODULES:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), path
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    methods = [node for class_ in classes for node in class_.body]
    for node in tree.body + methods:
      if isinstance(node, ast.FunctionDef | ast.ClassDef):
        public = not node.name.startswith("_")
        assert not public or ast.get_docstring(node), f"{path}: {node.name}"
    for node in ast.walk(tree):
      if isinstance(node, ast.FunctionDef):
        assert node.returns is not None, f"{path}: {node.name} -> ?"
        for argument in node.args.args + node.args.kwonlyargs:
          is_typed = argument.annotation or argument.arg in ("self", "cls")
          assert is_typed, f"{path}: {node.name}({argument.arg}: ?)"
