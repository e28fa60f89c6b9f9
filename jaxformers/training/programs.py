"""Counts of a compiled program, with the bodies of loops times their trips.

XLA's own counts visit the body of a loop once. The functions of this module
read the text of an optimised program instead.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)
# Instructions that move no data.
_FREE = {
  "parameter",
  "constant",
  "tuple",
  "get-tuple-element",
  "bitcast",
  "while",
  "call",
  "conditional",
  "opt-barrier",
  "add-dependency",
  "iota",
}
# Attributes with the computations that an instruction runs, besides fusions.
_RUNS = {
  "while": r"body=%?([\w.\-]+)",
  "call": r"(?:to_apply|calls)=%?([\w.\-]+)",
  "conditional": r"_computation=%?([\w.\-]+)",
}
# Options of a window along each axis, with their defaults.
_WINDOW = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
_SLICING = ("dynamic-slice", "slice", "gather")
_UPDATE = "dynamic-update-slice"
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
    scope: instructions of its computation, by their names.
  """

  is_root: bool
  name: str
  shape: str
  kind: str
  rest: str
  scope: dict[str, Instruction] = dataclasses.field(repr=False, compare=False)

  @property
  def operands(self) -> list[str]:
    """Names of the operands."""
    return re.findall(r"%([\w.\-]+)", self.rest.partition("), ")[0])

  @property
  def sources(self) -> list[Instruction]:
    """Instructions that compute the operands."""
    return [self.scope[name] for name in self.operands if name in self.scope]

  def attribute(self, pattern: str) -> str:
    """Returns the first group of a pattern in the attributes, or ""."""
    match = re.search(pattern, self.rest)
    return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Collective:
  """Instructions of one kind that communicate between devices.

  Attributes:
    kind: one of `COLLECTIVES`.
    group: number of devices that exchange data with each other; for hosts that
      exchange it between slices, the number of slices.
    crosses_slices: True if data cross slices. A TPU writes a sum over slices as
      a sum inside each, an exchange of the parts, and an all-gather inside.
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
      Kernels, and calls of libraries other than cuBLAS, count none.
    precise: the part of them in products of float32 at the highest precision.
    library: the part of them in calls of cuBLAS.
    bytes: bytes that instructions read from and write to the main memory,
      with the padding of tiles.
    cycles: cycles that the TPU compiler estimates; 0 for other devices. The
      estimate leaves out Pallas kernels, communication and some copies.
    loops: numbers of trips of the loops, outermost first, in program order.
      Loops are assumed to count by one, as JAX writes them. 0 marks a loop
      whose number of trips is not in the program: its body is counted once.
    collectives: communication, by kind and group.
  """

  flops: int
  precise: int
  library: int
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

  @property
  def entries(self) -> int:
    """Number of entries."""
    return math.prod(self.dims)

  @property
  def data(self) -> int:
    """Bytes without padding."""
    return self.entries * self.bits // 8

  @property
  def main(self) -> int:
    """Bytes that it takes in the main memory."""
    return self.size if self.is_main else 0


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


_WORK = ("flops", "precise", "library", "bytes", "cycles")
# Instructions of each computation, by their names.
Program = dict[str, dict[str, Instruction]]
# Numbers by the names of `_WORK`; and numbers of instructions and of bytes, by
# the kind, the group and crosses_slices of a `Collective`.
_Total = Counter[Any]


def parse(text: str) -> tuple[str, Program]:
  """Returns the name of the entry, and the instructions of computations."""
  entry, scope = "", {}
  computations: Program = {}
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      scope = computations.setdefault(head[2], {})
      entry = head[2] if head[1] else entry
    elif match := _INSTRUCTION.match(line):
      root, name, shape, kind, rest = match.groups()
      # Read an asynchronous pair as one instruction, at its end.
      if kind.endswith(("-done", "-update")):
        kind = kind.rpartition("-")[0]
        begun = scope.get(re.findall(r"%([\w.\-]+)", rest)[0])
        if begun and begun.kind in (kind, f"{kind}-start"):
          rest = scope.pop(begun.name).rest
      scope[name] = Instruction(bool(root), name, shape, kind, rest, scope)
  return entry, computations


class _Reader:
  """Counts the instructions of the computations of a program."""

  def __init__(self, computations: Program, slices: Mapping[int, int]) -> None:
    self.computations, self.slices = computations, slices

  def total(self, name: str) -> tuple[_Total, list[int]]:
    """Returns the counts of a computation, and the trips of its loops."""
    total: _Total = Counter()
    loops: list[int] = []
    for each in self.computations[name].values():
      times = 1
      # A loop runs its body as often as its condition says.
      if each.kind == "while":
        times = self._trips(each)
        loops.append(times)
      if each.kind in _RUNS:
        names = re.findall(_RUNS[each.kind], each.rest)
        listed = each.attribute(r"branch_computations=\{([^}]*)\}")
        names += re.findall(r"[\w.\-]+", listed)
        # Of branches, count the one that computes most.
        inside = map(self.total, names)
        more, trips = max(inside, key=lambda t: [t[0][k] for k in _WORK])
        loops += trips
        for key, number in more.items():
          total[key] += max(times, 1) * number
      if each.kind != "call":  # Whose instructions are counted.
        cycles = each.attribute(r'"estimated_cycles":"(\d+)"')
        total["cycles"] += int(cycles or 0)
        for product in self._products(each):
          flops = _flops(product)
          total["flops"] += flops
          total["precise"] += flops * _is_precise(product)
          total["library"] += flops * _is_library(product)
        total["bytes"] += self._bytes(each)
        self._add_collectives(each, total)
    return total, loops

  def _called(self, each: Instruction) -> dict[str, Instruction]:
    """Returns the instructions in a fusion or an asynchronous call, or {}."""
    return self.computations.get(each.attribute(_CALLED), {})

  def _trips(self, loop: Instruction) -> int:
    """Returns the trips of a loop that counts by one; 0 if it is unknown."""
    if trips := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}'):
      return int(trips)
    condition = self.computations[loop.attribute(r"condition=%?([\w.\-]+)")]
    direction, sides = self._compared(_root(condition))
    if direction != "LT":
      return 0
    # The counter is in the state of the loop, and rises to the limit.
    start, limit = _start(sides[0], loop), _integer(sides[1])
    return 0 if start is None or limit is None else max(limit - start, 0)

  def _compared(self, root: Instruction) -> tuple[str, list[Instruction]]:
    """Returns the direction and the sides of a comparison, maybe fused."""
    if root.kind == "compare":
      return root.attribute(r"direction=(\w+)"), root.sources
    if root.kind != "fusion":
      return "", []
    direction, sides = self._compared(_root(self._called(root)))
    # Replace the parameters of the fusion by its operands.
    outer = [
      root.sources[int(side.rest.partition(")")[0])]
      if side.kind == "parameter"
      else side
      for side in sides
    ]
    return direction, outer

  def _products(self, each: Instruction) -> Iterator[Instruction]:
    """Yields a product or a convolution, or those in a fusion."""
    if each.kind in ("fusion", "async"):
      for part in self._called(each).values():
        yield from self._products(part)
    elif each.kind in ("dot", "convolution") or _is_library(each):
      yield each

  def _bytes(self, each: Instruction) -> int:
    """Returns the bytes of the main memory that an instruction moves."""
    is_start = each.kind.endswith("-start")
    if each.kind in _FREE or is_start or "AllocateBuffer" in each.rest:
      return 0
    results = arrays(each.shape)
    # The workspace of a library, which is no result, has entries of a byte.
    if _is_library(each):
      results = [a for a in results if a.bits > 8]
    read = [arrays(source.shape) for source in each.sources]
    if each.kind == "fusion":
      return self._fused_bytes(each, results, read)
    # A slice moves its entries, and not the whole operand.
    if each.kind in _SLICING and read:
      taken = results[0].size
      return results[0].main + (taken if read[0][0].is_main else 0)
    if each.kind == _UPDATE:
      update = read[1][0]
      return update.main + (update.size if results[0].is_main else 0)
    if each.kind == "scatter":
      return 3 * read[-1][0].main
    return sum(a.main for a in [*results, *itertools.chain(*read)])

  def _fused_bytes(
    self, each: Instruction, results: list[Array], read: list[list[Array]]
  ) -> int:
    """Returns the bytes that a fusion reads and writes, slices as slices."""
    scope = self._called(each)
    total = 0
    for result, part in zip(results, _roots(scope), strict=False):
      if result.is_main:
        total += _written(part, result)
    for place, sources in enumerate(read):
      if not sources or not sources[0].is_main:
        continue
      size = sum(a.main for a in sources)
      entries = self._read_entries(_parameter(scope, place))
      taken = size if entries is None else entries * sources[0].bits // 8
      total += min(size, taken)
    return total

  def _read_entries(self, each: Instruction) -> int | None:
    """Returns the entries of an array that a fusion reads; None for all."""
    total = 0
    for user in each.scope.values():
      if each.name not in user.operands:
        continue
      if user.kind in _SLICING and user.operands[0] == each.name:
        total += sum(a.entries for a in arrays(user.shape))
        continue
      is_base = user.kind == _UPDATE and user.operands[0] == each.name
      if is_base and any(_source(part) is user for part in _roots(user.scope)):
        continue  # Updated in place.
      inner: int | None = None
      if (is_base or user.kind in _PASSING) and not user.is_root:
        inner = self._read_entries(user)
      elif user.kind == "fusion":
        place = user.operands.index(each.name)
        inner = self._read_entries(_parameter(self._called(user), place))
      if inner is None:
        return None
      total += inner
    return total

  def _add_collectives(self, each: Instruction, total: _Total) -> None:
    """Adds a collective, or the collectives in a fusion."""
    inner = self._called(each).values()
    # A TPU writes a reduce-scatter as a slice of an all-reduce.
    for part in inner:
      summed = _source(part, (*_PASSING, "dynamic-slice"))
      if part.kind == "dynamic-slice" and summed.kind == "all-reduce":
        self._add("reduce-scatter", summed, each.shape, total)
        return
    for part in inner:
      self._add_collectives(part, total)
    if each.kind in COLLECTIVES:
      self._add(each.kind, each, each.shape, total)
    elif each.kind == "recv" and "_xla_megascale" in each.rest:
      # Hosts exchange data between slices: count what is received.
      name = each.attribute(r'_transfer_type="(\w+)"').lower().replace("_", "-")
      kind = name.replace("one-to-one", "collective-permute")
      self._add(kind, each, each.shape, total)

  def _add(
    self, kind: str, each: Instruction, shape: str, total: _Total
  ) -> None:
    # The first group of slices, as {1,2}x{0:3} or {{100000,200000},...}.
    target = each.attribute(r'_xla_megascale_target="?\{+([^{}]+)')
    groups = _groups(each) or [[*self.slices]]
    group = max(map(len, groups))
    crosses = any(
      len({self.slices.get(device, 0) for device in devices}) > 1
      for devices in groups
    )
    if target:
      group, crosses = len(re.findall(r"\d+", target)), True
    key = (kind, group, crosses)
    total["count", key] += 1
    total["sent", key] += sum(a.data for a in arrays(shape))


def _start(counter: Instruction, loop: Instruction) -> int | None:
  """Returns the first value of a counter; None if it is no constant."""
  place = counter.attribute(r"index=(\d+)")
  state = next(iter(loop.sources), None)
  if not place or state is None or state.kind != "tuple":
    return None
  # The compiler may copy the constant first.
  return _integer(_source(state.sources[int(place)]))


def _written(part: Instruction, result: Array) -> int:
  """Returns the bytes that a result takes, or the slices that it updates."""
  part, entries = _source(part), 0
  while part.kind == _UPDATE:
    entries += arrays(part.sources[1].shape)[0].entries
    part = _source(part.sources[0])
  # Only an array from outside the fusion is updated in place.
  is_updated = entries and part.kind == "parameter"
  size = entries * result.bits // 8
  return min(result.size, size) if is_updated else result.size


def _source(each: Instruction, kinds: Sequence[str] = _PASSING) -> Instruction:
  """Returns the instruction whose entries another one passes on."""
  while each.kind in kinds and each.sources:
    each = each.sources[0]
  return each


def _root(scope: Mapping[str, Instruction]) -> Instruction:
  """Returns the instruction whose result a computation returns."""
  return next(each for each in scope.values() if each.is_root)


def _roots(scope: Mapping[str, Instruction]) -> list[Instruction]:
  """Returns the instructions whose results a computation returns."""
  root = _root(scope)
  return root.sources if root.kind == "tuple" else [root]


def _flops(each: Instruction) -> int:
  """Returns the operations of a product or a convolution."""
  result = arrays(each.shape)[0]
  left, right = (arrays(source.shape)[0].dims for source in each.sources[:2])
  if each.kind == "convolution":
    return 2 * _convolved(each, (left, right, result.dims))
  axes = _numbers(_listed(each, "lhs_contracting_dim"))
  return 2 * result.entries * math.prod(left[k] for k in axes)


def _is_precise(each: Instruction) -> bool:
  """Returns True if a product of float32 has the highest precision."""
  is_short = any(arrays(part.shape)[0].bits < 32 for part in each.sources[:2])
  precision = _listed(each, "operand_precision").lower()
  return precision == "highest,highest" and not is_short


def _listed(each: Instruction, name: str) -> str:
  """Returns the list of an attribute, such as "0,1"; cuBLAS writes JSON."""
  return each.attribute(name + r'\w*"?[=:][\[{]([\w,"]*)').replace('"', "")


def _is_library(each: Instruction) -> bool:
  """Returns True if cuBLAS computes a product."""
  return each.kind == "custom-call" and 'target="__cublas$' in each.rest


def _convolved(each: Instruction, shapes: Sequence[Sequence[int]]) -> int:
  """Returns the number of products of a convolution.

  The TPU compiler writes a batch of products as a convolution over a dilated
  window, of which only one entry meets an input. So windows are counted where
  they meet one.

  Args:
    each: convolution.
    shapes: lengths of the axes of the input, of the kernel and of the output.
  """
  names = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)[0]
  inputs, kernel, outputs = (
    dict(zip(labels, lengths, strict=True))
    for labels, lengths in zip(names, shapes, strict=True)
  )
  axes = sorted(filter(str.isdigit, kernel))
  window = each.attribute(r"window=\{([^}]*)\}")
  written = dict(re.findall(r"(\w+)=(\S+)", window))

  total = kernel["i"] * outputs["b"] * outputs["f"]
  for place, axis in enumerate(axes):
    # Padding has two numbers for each axis: before and after the input.
    stride, before, spread, step = (
      int(written[name].split("x")[place].partition("_")[0])
      if name in written
      else default
      for name, default in _WINDOW.items()
    )
    # Position of every entry of the window at every output.
    starts = np.arange(outputs[axis]) * stride - before
    places = starts[:, None] + step * np.arange(kernel[axis])
    meets = (places >= 0) & (places % spread == 0)
    total *= int((meets & (places // spread < inputs[axis])).sum())
  return total


def _parameter(scope: Mapping[str, Instruction], place: int) -> Instruction:
  """Returns a parameter of a fusion."""
  return next(
    each
    for each in scope.values()
    if each.kind == "parameter" and each.rest.startswith(f"{place})")
  )


def _integer(each: Instruction) -> int | None:
  """Returns the value of an integer constant; None for anything else."""
  value = each.rest.partition(")")[0]
  is_integer = each.kind == "constant" and re.match(r"[su]\d+\[\]", each.shape)
  return int(value) if is_integer and re.fullmatch(r"-?\d+", value) else None


def _groups(each: Instruction) -> list[list[int]]:
  """Returns the groups of devices of a collective; [] for all devices."""
  if listed := each.attribute(
    r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}"
  ):
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed)]
  # Axes of a mesh: mesh['a'=4,'b'=2] {'a'}.
  if axes := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", each.rest):
    if ":(" in axes[2] or " device_ids=(" in each.rest:
      raise UserError(
        f"The compiled program has groups of a part of an axis ({axes[0]}), "
        "which cannot be read: choose another config.mesh."
      )
    names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", axes[1]), strict=True)
    over = [names.index(name) for name in re.findall(r"'(\w+)'", axes[2])]
    shape = [*map(int, sizes)]
    order = [k for k in range(len(shape)) if k not in over] + over
    size = math.prod(shape[k] for k in over)
  # Compact form: [groups,size]<=[shape]T(order).
  elif compact := re.search(
    r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", each.rest
  ):
    size, shape = int(compact[1]), _numbers(compact[2])
    order = _numbers(compact[3] or "")
  else:
    return []
  # Groups are consecutive devices, after a transposition.
  devices = np.arange(math.prod(shape)).reshape(shape).transpose(order or None)
  return [row.tolist() for row in devices.reshape(-1, size)]


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


def count(text: str, devices: Sequence[Any] = ()) -> Counts:
  """Returns the counts of a compiled program, loops by their trips.

  Args:
    text: text of the program, `jax.jit(...).lower(...).compile().as_text()`.
    devices: devices of the mesh in their order, for the slices that a
      collective crosses.

  Returns:
    The counts of one device.
  """
  slices = {k: getattr(d, "slice_index", 0) for k, d in enumerate(devices)}
  entry, computations = parse(text)
  total, loops = _Reader(computations, slices).total(entry)
  keys: list[tuple[str, int, bool]] = sorted(
    key[1] for key in total if key[0] == "count"
  )
  collectives = tuple(
    Collective(*key, total["count", key], total["sent", key]) for key in keys
  )
  work = {name: total[name] for name in _WORK}
  return Counts(**work, loops=tuple(loops), collectives=collectives)
