"""Counts of a compiled program, with the bodies of loops times their trips.

XLA's own counts visit the body of a loop once. The functions of this module
read the text of an optimised program instead.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformers.foundations.errors import UserError

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(
  r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|[^ ]+) ([\w\-]+)\((.*)$"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = r"calls=%?([\w.\-]+)"
COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
# Instructions that move no data. Of an asynchronous pair, the first half is
# counted, and the second half, `-done`, is not.
_FREE = {
  "parameter",
  "constant",
  "tuple",
  "get-tuple-element",
  "bitcast",
  "while",
  "call",
  "conditional",
  "after-all",
  "partition-id",
  "replica-id",
  "opt-barrier",
  "domain",
  "add-dependency",
  "iota",
}
_SLICING = ("dynamic-slice", "slice", "gather")
_PASSING = ("bitcast", "copy", "convert", "reshape", "transpose")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program.

  Attributes:
    is_root: True for the result of its computation.
    name: name, unique in its computation.
    shape: text of the type of the result.
    kind: operation, such as "fusion".
    rest: operands and attributes, as text.
  """

  is_root: bool
  name: str
  shape: str
  kind: str
  rest: str

  @property
  def operands(self) -> list[str]:
    """Names of the operands."""
    # The operands end with the parenthesis that closes the first one.
    depth, end = 1, 0
    while depth and end < len(self.rest):
      depth += {"(": 1, ")": -1}.get(self.rest[end], 0)
      end += 1
    return re.findall(r"%([\w.\-]+)", self.rest[:end])

  def attribute(self, pattern: str) -> str:
    """Returns the first group of a pattern in the attributes, or ""."""
    match = re.search(pattern, self.rest)
    return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Collective:
  """Instructions of one kind that communicate between devices.

  Attributes:
    kind: one of `COLLECTIVES`.
    group: number of devices that exchange data with each other.
    crosses_slices: True if a group has devices of several slices.
    count: number of instructions, with loops by their trips.
    bytes: bytes of the results on one device, in all of them.
  """

  kind: str
  group: int
  crosses_slices: bool
  count: int
  bytes: int


@dataclasses.dataclass(frozen=True)
class Counts:
  """Work of one device in one call of a program.

  Attributes:
    flops: operations in products and convolutions, 2 for each product and sum.
    bytes: bytes that instructions read from and write to the main memory,
      with the padding of tiles.
    cycles: cycles that the TPU compiler estimates; 0 for other devices. The
      estimate leaves out FFTs, communication, and some copies.
    loops: numbers of trips of the loops, outermost first, in program order. 0
      marks a loop whose number of trips is not in the program: its body is
      counted once.
    collectives: communication, by kind and group.
  """

  flops: int
  bytes: int
  cycles: int
  loops: tuple[int, ...]
  collectives: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True)
class Array:
  """Type of one array of a program.

  Attributes:
    dims: lengths of its axes.
    bits: bits of an entry.
    size: bytes that it takes, with the padding of tiles.
    is_main: True if it is in the main memory, and not in a memory of the core,
      such as the vector memory of a TPU, which the text marks as S(1).
  """

  dims: tuple[int, ...]
  bits: int
  size: int
  is_main: bool


def arrays(shape: str) -> list[Array]:
  """Returns the arrays in a type such as "(f32[8,16]{1,0}, bf16[4])"."""
  types = []
  for dtype, listed, layout in _ARRAY.findall(shape):
    dims = tuple(_numbers(listed))
    digits = re.match(r"[a-z]+?(\d+)", dtype)
    bits = 8 if dtype == "pred" else int(digits[1]) if digits else 0
    order, _, tiling = layout.partition(":")
    padded = [*dims]
    # Tiles cover the minor axes, which the layout names first.
    if tile := re.search(r"T\(([\d,]+)\)", tiling):
      lengths = reversed(_numbers(tile[1]))
      for axis, length in zip(_numbers(order), lengths, strict=False):
        padded[axis] = -(-padded[axis] // length) * length
    size = math.prod(padded) * bits // 8
    types.append(Array(dims, bits, size, not re.search(r"S\([1-9]", tiling)))
  return types


def _main_bytes(each: Array) -> int:
  return each.size if each.is_main else 0


def _entries(each: Array) -> int:
  return math.prod(each.dims)


# Instructions of each computation, by their names.
Program = dict[str, dict[str, Instruction]]


def parse(text: str) -> tuple[str, Program]:
  """Returns the name of the entry, and the instructions of computations."""
  entry, current = "", {}
  computations: Program = {}
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      current = computations.setdefault(head[2], {})
      entry = head[2] if head[1] else entry
    elif match := _INSTRUCTION.match(line):
      root, name, *others = match.groups()
      current[name] = Instruction(bool(root), name, *others)
  return entry, computations


class _Reader:
  """Counts the instructions of a program, from its entry."""

  def __init__(self, computations: Program, slices: Mapping[int, int]) -> None:
    self.computations, self.slices = computations, slices
    self.flops = self.bytes = self.cycles = 0
    self.loops: list[int] = []
    self.collectives: Counter[tuple[str, int, bool]] = Counter()
    self.sent: Counter[tuple[str, int, bool]] = Counter()

  def visit(self, name: str, times: int) -> None:
    """Adds the instructions of a computation, which runs `times` times."""
    instructions = self.computations[name]
    for each in instructions.values():
      # A loop runs its body as often as its condition says.
      if each.kind == "while":
        trips = self._trips(each, instructions)
        self.loops.append(trips)
        body = each.attribute(r"body=%?([\w.\-]+)")
        self.visit(body, times * max(trips, 1))
      elif each.kind == "call":
        self.visit(each.attribute(r"to_apply=%?([\w.\-]+)"), times)
      elif each.kind == "conditional":
        # Count the branch that computes most.
        self._visit_branches(each, times)
      cycles = each.attribute(r'"estimated_cycles":"(\d+)"')
      self.cycles += times * int(cycles or 0)
      self.flops += times * self._flops(each, instructions)
      self.bytes += times * self._bytes(each, instructions)
      self._add_collectives(each, times)

  def _visit_branches(self, each: Instruction, times: int) -> None:
    names = re.findall(r"_computation=%?([\w.\-]+)", each.rest)
    listed = each.attribute(r"branch_computations=\{([^}]*)\}")
    names += re.findall(r"[\w.\-]+", listed)
    branches = [_Reader(self.computations, self.slices) for _ in names]
    for branch, name in zip(branches, names, strict=True):
      branch.visit(name, times)
    if branches:
      self._add_work(max(branches, key=lambda b: (b.flops, b.bytes, b.cycles)))

  def _add_work(self, other: _Reader) -> None:
    self.flops += other.flops
    self.bytes += other.bytes
    self.cycles += other.cycles
    self.loops += other.loops
    self.collectives.update(other.collectives)
    self.sent.update(other.sent)

  def _trips(
    self, loop: Instruction, instructions: Mapping[str, Instruction]
  ) -> int:
    """Returns the trips of a loop that counts by one; 0 if it is unknown."""
    if trips := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}'):
      return int(trips)
    condition = self.computations[loop.attribute(r"condition=%?([\w.\-]+)")]
    direction, sides = self._compared(_root(condition), condition)
    # One side is a limit, and the other a counter in the state of the loop.
    values = [_integer(side) for side in sides]
    if direction in ("GT", "GE"):
      values, sides = values[::-1], sides[::-1]
    if direction not in ("LT", "LE", "GT", "GE") or len(values) != 2:
      return 0
    counter = next((k for k, value in enumerate(values) if value is None), None)
    limit = values[1 - counter] if counter is not None else None
    start = None
    if counter is not None:
      start = self._start(sides[counter], loop, instructions)
    if limit is None or start is None:
      return 0
    # The counter rises to a limit on its right, or falls to one on its left.
    distance = limit - start if counter == 0 else start - limit
    return max(distance + (direction in ("LE", "GE")), 0)

  def _compared(
    self, root: Instruction, scope: Mapping[str, Instruction]
  ) -> tuple[str, list[Instruction]]:
    """Returns the direction and the sides of a comparison, maybe fused."""
    if root.kind == "compare":
      sides = [scope[name] for name in root.operands]
      return root.attribute(r"direction=(\w+)"), sides
    if root.kind != "fusion":
      return "", []
    inner = self.computations[root.attribute(_CALLED)]
    direction, sides = self._compared(_root(inner), inner)
    # Replace the parameters of the fusion by its operands.
    outer = [
      scope[root.operands[int(side.rest.partition(")")[0])]]
      if side.kind == "parameter"
      else side
      for side in sides
    ]
    return direction, outer

  def _start(
    self,
    counter: Instruction,
    loop: Instruction,
    instructions: Mapping[str, Instruction],
  ) -> int | None:
    """Returns the first value of a counter; None if it is no constant."""
    place = counter.attribute(r"index=(\d+)")
    state = instructions.get(loop.operands[0])
    if not place or state is None or state.kind != "tuple":
      return None
    first = instructions.get(state.operands[int(place)])
    # The compiler may copy the constant first.
    while first is not None and first.kind in _PASSING:
      first = instructions.get(first.operands[0])
    return None if first is None else _integer(first)

  def _flops(
    self, each: Instruction, instructions: Mapping[str, Instruction]
  ) -> int:
    """Returns the operations of a product, or of the products in a fusion."""
    if each.kind in ("fusion", "async-start"):
      inner = self.computations[each.attribute(_CALLED)]
      return sum(self._flops(part, inner) for part in inner.values())
    if each.kind not in ("dot", "convolution"):
      return 0
    (result,) = arrays(each.shape)
    left, right = (
      arrays(instructions[name].shape)[0].dims for name in each.operands[:2]
    )
    if each.kind == "convolution":
      return 2 * _convolved(each, left, right, result.dims)
    axes = _numbers(each.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
    return 2 * _entries(result) * math.prod(left[k] for k in axes)

  def _bytes(
    self, each: Instruction, instructions: Mapping[str, Instruction]
  ) -> int:
    """Returns the bytes of the main memory that an instruction moves."""
    if each.kind in _FREE or each.kind.endswith("-done"):
      return 0
    if "AllocateBuffer" in each.rest:
      return 0
    results = arrays(each.shape)
    operands = [
      instructions[name].shape for name in each.operands if name in instructions
    ]
    read = [arrays(shape) for shape in operands]
    if each.kind == "fusion":
      return self._fused_bytes(each, results, read)
    # A copy has the type (destination, source, flag), and a slice has the type
    # ((source), destination, flag).
    if each.kind.endswith("-start") and results:
      nested = sum(map(len, read)) if each.shape.startswith("((") else 0
      moved = results[nested]
      source = read[0][0] if read and read[0] else moved
      return _main_bytes(moved) + (moved.size if source.is_main else 0)
    # Slices read and write as much as they take.
    if each.kind in _SLICING and read:
      taken = results[0].size
      return _main_bytes(results[0]) + (taken if read[0][0].is_main else 0)
    if each.kind == "dynamic-update-slice":
      update = read[1][0]
      return _main_bytes(update) + (update.size if results[0].is_main else 0)
    if each.kind == "scatter":
      return 3 * _main_bytes(read[-1][0])
    return sum(map(_main_bytes, results + [a for part in read for a in part]))

  def _fused_bytes(
    self,
    each: Instruction,
    results: list[Array],
    read: list[list[Array]],
  ) -> int:
    """Returns the bytes that a fusion reads and writes, slices as slices."""
    scope = self.computations[each.attribute(_CALLED)]
    root = _root(scope)
    roots = [root]
    if root.kind == "tuple":
      roots = [scope[name] for name in root.operands]
    total = 0
    for result, part in zip(results, roots, strict=False):
      if result.is_main:
        total += self._written(part, scope, result)
    for place, sources in enumerate(read):
      if not sources or not sources[0].is_main:
        continue
      size = sum(map(_main_bytes, sources))
      entries = self._read_entries(scope, _parameter(scope, place))
      taken = size if entries is None else entries * sources[0].bits // 8
      total += min(size, taken)
    return total

  def _written(
    self, part: Instruction, scope: Mapping[str, Instruction], result: Array
  ) -> int:
    """Returns the bytes that a result takes, or the slice that it updates."""
    while part.kind in _PASSING and part.operands[0] in scope:
      part = scope[part.operands[0]]
    if part.kind == "dynamic-update-slice":
      (update,) = arrays(scope[part.operands[1]].shape)
      return min(result.size, _entries(update) * result.bits // 8)
    return result.size

  def _read_entries(
    self, scope: Mapping[str, Instruction], name: str
  ) -> int | None:
    """Returns the entries of an array that a fusion reads; None for all."""
    total = 0
    for user in scope.values():
      if name not in user.operands:
        continue
      if user.kind in _SLICING and user.operands[0] == name:
        total += sum(map(_entries, arrays(user.shape)))
        continue
      if user.kind == "dynamic-update-slice" and user.operands[0] == name:
        continue  # Updated in place.
      inner: int | None = None
      if user.kind in _PASSING and not user.is_root:
        inner = self._read_entries(scope, user.name)
      elif user.kind == "fusion":
        called = self.computations[user.attribute(_CALLED)]
        place = user.operands.index(name)
        inner = self._read_entries(called, _parameter(called, place))
      if inner is None:
        return None
      total += inner
    return total

  def _add_collectives(self, each: Instruction, times: int) -> None:
    """Adds a collective, or the collectives in a fusion."""
    kind = each.kind.removesuffix("-start")
    if called := each.attribute(_CALLED):
      inner = self.computations.get(called, {})
      kinds = {part.kind for part in inner.values()}
      # A TPU writes a reduce-scatter as a slice of an all-reduce.
      if {"all-reduce", "dynamic-slice"} <= kinds:
        part = next(p for p in inner.values() if p.kind == "all-reduce")
        self._add("reduce-scatter", part, arrays(each.shape), times)
        return
      for part in inner.values():
        self._add_collectives(part, times)
    elif kind in COLLECTIVES:
      results = arrays(each.shape)
      # Asynchronous collectives, except all-reduce, return their operands,
      # then the results, and maybe flags, which are scalars.
      if each.kind.endswith("-start") and kind != "all-reduce":
        moved = [a for a in results if a.dims]
        results = moved[len(moved) // 2 :]
      self._add(kind, each, results, times)

  def _add(
    self, kind: str, each: Instruction, results: list[Array], times: int
  ) -> None:
    groups = _groups(each) or [[*self.slices]]
    group = max(map(len, groups))
    crosses = any(
      len({self.slices.get(device, 0) for device in devices}) > 1
      for devices in groups
    )
    key = (kind, group, crosses)
    self.collectives[key] += times
    sent = sum(_entries(a) * a.bits // 8 for a in results)
    self.sent[key] += times * sent


def _root(scope: Mapping[str, Instruction]) -> Instruction:
  """Returns the instruction whose result a computation returns."""
  return next(each for each in scope.values() if each.is_root)


def _convolved(
  each: Instruction,
  left: Sequence[int],
  right: Sequence[int],
  result: Sequence[int],
) -> int:
  """Returns the number of products of a convolution.

  The TPU compiler writes a batch of products as a convolution over a dilated
  window, of which only one entry meets an input. So windows are counted where
  they meet one.

  Args:
    each: convolution.
    left, right, result: lengths of the axes of the input, of the kernel and of
      the output.
  """
  names = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)
  assert names is not None
  inputs, kernel, outputs = (
    dict(zip(labels, lengths, strict=True))
    for labels, lengths in zip(
      names.groups(), (left, right, result), strict=True
    )
  )
  total = kernel["i"] * outputs["b"] * outputs["f"]
  axes = sorted(name for name in kernel if name.isdigit())
  window = each.attribute(r"window=\{([^}]*)\}")
  for place, axis in enumerate(axes):
    # Read the options of the window along this axis.
    stride, before, spread, step = (
      int(_option(window, name, place, default))
      for name, default in (
        ("stride", "1"),
        ("pad", "0"),
        ("lhs_dilate", "1"),
        ("rhs_dilate", "1"),
      )
    )
    # Position of every entry of the window at every output.
    starts = np.arange(outputs[axis]) * stride - before
    places = starts[:, None] + step * np.arange(kernel[axis])
    meets = (places >= 0) & (places % spread == 0)
    total *= int((meets & (places // spread < inputs[axis])).sum())
  return total


def _option(window: str, name: str, place: int, default: str) -> str:
  """Returns an option of a window along an axis, such as its stride."""
  match = re.search(rf"\b{name}=(\S+)", window)
  if not match:
    return default
  # Padding has two numbers for each axis: before and after the input.
  return match[1].split("x")[place].partition("_")[0]


def _parameter(scope: Mapping[str, Instruction], place: int) -> str:
  """Returns the name of a parameter of a fusion."""
  return next(
    each.name
    for each in scope.values()
    if each.kind == "parameter" and each.rest.startswith(f"{place})")
  )


def _integer(each: Instruction) -> int | None:
  """Returns the value of an integer constant; None for anything else."""
  value = each.rest.partition(")")[0]
  is_integer = each.kind == "constant" and re.match(r"[su]\d+\[\]", each.shape)
  return int(value) if is_integer and re.fullmatch(r"-?\d+", value) else None


def _groups(each: Instruction) -> list[list[int]]:
  """Returns the groups of devices of a collective."""
  if pairs := each.attribute(r"source_target_pairs=\{(\{.*?\})\}"):
    return [_numbers(pair) for pair in re.findall(r"\{([\d,]+)\}", pairs)]
  if listed := each.attribute(r"replica_groups=\{(\{.*?\})\}"):
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed)]
  # Axes of a mesh: mesh['a'=4,'b'=2] {'a'}.
  if axes := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", each.rest):
    mesh = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
    if ":(" in axes[2] or " device_ids=(" in each.rest:
      raise UserError(
        f"The compiled program has groups of a part of an axis ({axes[0]}), "
        "which cannot be read: choose another config.mesh."
      )
    over = re.findall(r"'(\w+)'", axes[2])
    kept = [name for name in mesh if name not in over]
    places = {name: k for k, name in enumerate(mesh)}
    size = math.prod(int(mesh[name]) for name in over)
    return _iota_groups(
      math.prod(map(int, mesh.values())) // size,
      size,
      [*map(int, mesh.values())],
      [places[name] for name in (*kept, *over)],
    )
  # Compact form: [groups,size]<=[shape]T(order).
  match = re.search(
    r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?",
    each.rest,
  )
  if not match:
    return []
  shape, order = _numbers(match[3]), _numbers(match[4] or "")
  return _iota_groups(int(match[1]), int(match[2]), shape, order)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


def _iota_groups(
  count: int, size: int, shape: list[int], order: list[int]
) -> list[list[int]]:
  """Returns groups of consecutive devices, after a transposition."""
  devices = np.arange(math.prod(shape)).reshape(shape)
  devices = devices.transpose(order or None).reshape(count, size)
  return devices.tolist()


def count(program: Any, devices: Sequence[Any] = ()) -> Counts:
  """Returns the counts of a compiled program, loops by their trips.

  Args:
    program: result of `jax.jit(...).lower(...).compile()`, or its text.
    devices: devices of the mesh in their order, for the slices that a
      collective crosses.

  Returns:
    The counts of one device.
  """
  text = program if isinstance(program, str) else program.as_text()
  number = re.search(r"num_partitions=(\d+)", text)
  slices = dict.fromkeys(range(int(number[1]) if number else 1), 0)
  slices |= {k: getattr(d, "slice_index", 0) for k, d in enumerate(devices)}
  entry, computations = parse(text)
  reader = _Reader(computations, slices)
  reader.visit(entry, 1)
  collectives = tuple(
    Collective(*key, number, reader.sent[key])
    for key, number in sorted(reader.collectives.items())
  )
  return Counts(
    reader.flops,
    reader.bytes,
    reader.cycles,
    tuple(reader.loops),
    collectives,
  )
