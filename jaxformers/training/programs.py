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

_BITS = {
  "pred": 8,
  "s4": 4,
  "u4": 4,
  "bf16": 16,
  "c64": 64,
  "c128": 128,
}
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(
  r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|[^ ]+) ([\w\-]+)\((.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\](\{[^}]*\})?")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
# Instructions that move no data of their own.
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
}


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program.

  Attributes:
    name: name, unique in its computation.
    shape: text of the type of the result.
    kind: operation, such as "fusion".
    rest: operands and attributes, as text.
  """

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
    bytes: bytes that instructions read from and write to the main memory.
    cycles: cycles that the TPU compiler estimates; 0 for other devices.
    loops: numbers of trips of the loops, outermost first, in program order.
    collectives: communication, by kind and group.
  """

  flops: int
  bytes: int
  cycles: int
  loops: tuple[int, ...]
  collectives: tuple[Collective, ...]


def array_bytes(shape: str, *, main_memory: bool = False) -> int:
  """Returns the bytes of the arrays in the text of a type.

  Args:
    shape: type such as "(f32[8,16]{1,0}, bf16[4])".
    main_memory: True to leave out arrays in a memory space of their own, such
      as the vector memory of a TPU, which the text marks as S(1).
  """
  total = 0
  for dtype, dims, layout in _ARRAY.findall(shape):
    if main_memory and re.search(r"S\([1-9]", layout):
      continue
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype)[:2] or 0)
    total += math.prod(map(int, filter(None, dims.split(",")))) * bits // 8
  return total


def parse(text: str) -> tuple[str, dict[str, dict[str, Instruction]]]:
  """Returns the name of the entry, and the instructions of computations."""
  entry, current = "", {}
  computations: dict[str, dict[str, Instruction]] = {}
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      current = computations.setdefault(head[2], {})
      entry = head[2] if head[1] else entry
    elif match := _INSTRUCTION.match(line):
      current[match[1]] = Instruction(*match.groups())
  return entry, computations


class _Reader:
  """Counts the instructions of a program, from its entry."""

  def __init__(self, text: str, slices: Mapping[int, int]) -> None:
    self.entry, self.computations = parse(text)
    self.slices = slices
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
        trips = self._trips(each)
        self.loops.append(trips)
        self.visit(each.attribute(r"body=%?([\w.\-]+)"), times * trips)
      elif each.kind == "call":
        self.visit(each.attribute(r"to_apply=%?([\w.\-]+)"), times)
      elif each.kind == "conditional":
        # Count the branch that computes most.
        self._visit_branches(each, times)
      self.cycles += times * int(each.attribute(_CYCLES.pattern) or 0)
      self.flops += times * self._flops(each, instructions)
      if each.kind not in _FREE:
        self.bytes += times * self._bytes(each, instructions)
      self._add_collective(each, times)

  def _visit_branches(self, each: Instruction, times: int) -> None:
    names = re.findall(r"_computation=%?([\w.\-]+)", each.rest)
    listed = each.attribute(r"branch_computations=\{([^}]*)\}")
    names += re.findall(r"[\w.\-]+", listed)
    before = self._totals()
    results = []
    for name in names:
      self._restore(before)
      self.visit(name, times)
      results.append(self._totals())
    if results:
      self._restore(max(results, key=lambda total: total[:3]))

  def _totals(self) -> tuple[Any, ...]:
    numbers = (self.flops, self.bytes, self.cycles)
    return (
      *numbers,
      [*self.loops],
      self.collectives.copy(),
      self.sent.copy(),
    )

  def _restore(self, totals: tuple[Any, ...]) -> None:
    self.flops, self.bytes, self.cycles, loops, collectives, sent = totals
    self.loops = [*loops]
    self.collectives, self.sent = collectives.copy(), sent.copy()

  def _trips(self, loop: Instruction) -> int:
    """Returns the trips of a loop; 1 if its condition has no limit."""
    if trips := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}'):
      return int(trips)
    condition = self.computations[loop.attribute(r"condition=%?([\w.\-]+)")]
    limits = [
      int(each.rest.partition(")")[0])
      for each in condition.values()
      if each.kind == "constant" and each.rest.partition(")")[0].isdigit()
    ]
    return max(limits, default=1)

  def _flops(
    self, each: Instruction, instructions: Mapping[str, Instruction]
  ) -> int:
    """Returns the operations of a product, or of the products in a fusion."""
    if each.kind == "fusion":
      inner = self.computations[each.attribute(r"calls=%?([\w.\-]+)")]
      return sum(self._flops(part, inner) for part in inner.values())
    if each.kind not in ("dot", "convolution"):
      return 0
    result = math.prod(_dimensions(each.shape))
    left, right = (
      _dimensions(instructions[name].shape) for name in each.operands[:2]
    )
    if each.kind == "dot":
      axes = each.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
      return 2 * result * math.prod(left[int(k)] for k in axes.split(",") if k)
    return 2 * _convolved(each, left, right)

  def _bytes(
    self, each: Instruction, instructions: Mapping[str, Instruction]
  ) -> int:
    """Returns the bytes that an instruction reads and writes."""
    total = array_bytes(each.shape, main_memory=True)
    inner: Sequence[Instruction] = ()
    if each.kind == "fusion":
      called = self.computations[each.attribute(r"calls=%?([\w.\-]+)")]
      inner = [*called.values()]
      # A fused update in place writes only the slice.
      for part in inner:
        if part.kind == "dynamic-update-slice":
          update = called[part.operands[1]]
          total -= array_bytes(called[part.operands[0]].shape, main_memory=True)
          total += array_bytes(update.shape)
    for place, name in enumerate(each.operands):
      operand = instructions.get(name)
      if operand is not None:
        total += _read_bytes(operand.shape, place, inner)
    return max(total, 0)

  def _add_collective(self, each: Instruction, times: int) -> None:
    kind = each.kind.removesuffix("-start")
    if kind not in COLLECTIVES:
      return
    groups = _groups(each)
    group = max(map(len, groups), default=1)
    crosses = any(
      len({self.slices.get(device, 0) for device in devices}) > 1
      for devices in groups
    )
    key = (kind, group, crosses)
    self.collectives[key] += times
    self.sent[key] += times * array_bytes(each.shape)


def _dimensions(shape: str) -> list[int]:
  match = _ARRAY.search(shape)
  return [int(n) for n in match[2].split(",") if n] if match else []


def _convolved(each: Instruction, left: list[int], right: list[int]) -> int:
  """Returns the number of products of a convolution.

  The TPU compiler writes a batch of products as a convolution over a dilated
  window, of which only one entry meets an input. So windows are counted where
  they meet one.

  Args:
    each: convolution.
    left, right: lengths of the axes of the input and of the kernel.
  """
  names = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)
  assert names is not None
  inputs, kernel, outputs = (
    dict(zip(labels, lengths, strict=True))
    for labels, lengths in zip(
      names.groups(), (left, right, _dimensions(each.shape)), strict=True
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


def _read_bytes(shape: str, place: int, inner: Sequence[Instruction]) -> int:
  """Returns the bytes of an operand that a fusion reads: all, or slices."""
  whole = array_bytes(shape, main_memory=True)
  parameter = next(
    (
      part.name
      for part in inner
      if part.kind == "parameter" and part.rest.startswith(f"{place})")
    ),
    None,
  )
  users = [part for part in inner if parameter in part.operands]
  slicing = ("dynamic-slice", "dynamic-update-slice")
  if not whole or not users or any(u.kind not in slicing for u in users):
    return whole
  return sum(
    array_bytes(user.shape) for user in users if user.kind == "dynamic-slice"
  )


def _groups(each: Instruction) -> list[list[int]]:
  """Returns the groups of devices of a collective."""
  if pairs := each.attribute(r"source_target_pairs=\{(\{.*?\})\}"):
    return [_numbers(pair) for pair in re.findall(r"\{([\d,]+)\}", pairs)]
  if listed := each.attribute(r"replica_groups=\{(\{.*?\})\}"):
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed)]
  # Axes of a mesh: mesh['a'=4,'b'=2] {'a'}.
  if axes := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", each.rest):
    mesh = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
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
  slices = {k: getattr(d, "slice_index", 0) for k, d in enumerate(devices)}
  reader = _Reader(text, slices)
  reader.visit(reader.entry, 1)
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
