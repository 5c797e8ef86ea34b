"""The text of a compiled program as data: computations of instructions, loops with their counts, stack frames.

Reads what `jax.stages.Compiled.as_text()` prints for CPU, TPU and GPU, and of that only what a report needs. An
instruction is a line `%name = type opcode(operands), attributes`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?[)\]}]) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array of an instruction's type."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Without the padding that a layout may add."""
        bits = 8 if self.dtype == "pred" else int((re.findall(r"\d+", self.dtype) or ["0"])[0])
        return math.prod(self.shape) * bits // 8


def arrays_of(type_: str) -> tuple[Array, ...]:
    """The arrays of a type such as `(f32[2,3]{1,0}, bf16[8]{0})`, in order; tokens are none."""
    return tuple(
        Array(dtype=dtype, shape=tuple(int(size.lstrip("<=")) for size in shape.split(",") if size))
        for dtype, shape in _ARRAY.findall(type_)
        if dtype != "token"
    )


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    rest: str  # operands, their closing bracket, attributes
    is_root: bool

    @cached_property
    def _end(self) -> int:
        depth = 0
        for at, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if depth < 0:
                return at
        return len(self.rest)

    @property
    def operands(self) -> list[str]:
        """Names of the operands; for a constant or a parameter nothing."""
        return re.findall(r"%([\w.\-]+)", self.rest[: self._end])

    @property
    def literal(self) -> str:
        """What stands between the brackets of a constant or a parameter."""
        return self.rest[: self._end]

    @property
    def attributes(self) -> str:
        """What follows the operands."""
        return self.rest[self._end + 1 :]

    def attribute(self, name: str) -> str | None:
        """The value of `name=value`, without quotes and `%`."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|%?([\w.\-]+))', self.attributes)
        return None if found is None else found[1] if found[1] is not None else found[2]

    @property
    def called(self) -> list[str]:
        """The computations that it runs: of a fusion, a call, a conditional or an asynchronous start."""
        names = r"(?:calls|to_apply|called_computations|branch_computations|true_computation|false_computation)"
        return [
            name
            for group in re.findall(rf"\b{names}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
            for name in re.findall(r"%([\w.\-]+)", group)
        ]


Computation = dict[str, Instruction]


@dataclass(frozen=True, eq=False)
class Program:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: str
    frames: dict[int, tuple[str, int, int]]  # stack frame -> file, line, the frame that called it (0: none)

    def trips(self, loop: Instruction, where: Computation) -> int | None:
        """How often a `while` of the computation `where` runs; None where the text does not tell.

        Without XLA's own count it is read from the condition `counter < bound`, with a counter that starts at a
        constant and, as jax's loops do, grows by 1.
        """
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        condition = self.computations.get(loop.attribute("condition") or "", {})
        test = next((instruction for instruction in condition.values() if instruction.is_root), None)
        names: dict[str, str] = {}
        if test is not None and test.opcode == "fusion" and test.called:
            inner = self.computations.get(test.called[0], {})
            parameters = [i.name for i in sorted(inner.values(), key=_place) if i.opcode == "parameter"]
            names = dict(zip(parameters, test.operands, strict=False))
            condition = {**condition, **inner}
            test = next((instruction for instruction in inner.values() if instruction.is_root), None)
        if test is None or test.opcode != "compare" or len(test.operands) != 2:
            return None
        first, second = (names.get(name, name) for name in test.operands)
        direction = test.attribute("direction")
        if direction in ("GT", "GE"):
            first, second, direction = second, first, {"GT": "LT", "GE": "LE"}[direction]
        if direction not in ("LT", "LE"):
            return None
        carried = where.get(loop.operands[0]) if loop.operands else None

        def value(name: str) -> int | None:
            """The constant that a name stands for: in the condition, or what the loop was started with."""
            instruction = condition.get(name)
            if instruction is not None and instruction.opcode == "get-tuple-element":
                index = int(instruction.attribute("index") or 0)
                if carried is None or carried.opcode != "tuple" or index >= len(carried.operands):
                    return None
                return _constant(where, carried.operands[index])
            return _constant(condition, name)

        counter, bound = condition.get(first), value(second)
        if counter is None or counter.opcode != "get-tuple-element" or not re.match(r"[su]\d+\[\]", counter.type):
            return None
        start = value(first)
        return None if bound is None or start is None else max(0, bound - start + (direction == "LE"))

    def stack(self, instruction: Instruction) -> list[tuple[str, int]]:
        """(file, line) of the code that made an instruction, innermost first; empty where the text does not tell."""
        frame = int(instruction.attribute("stack_frame_id") or 0)
        found: list[tuple[str, int]] = []
        while frame in self.frames and len(found) < 100:
            file, line, frame = self.frames[frame]
            found.append((file, line))
        if not found and (file_ := instruction.attribute("source_file")):
            found.append((file_, int(instruction.attribute("source_line") or 0)))
        return found


def parse(text: str) -> Program:
    """Reads the text of a compiled program.

    Raises:
      ValueError: the text is not that of a compiled program.
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, current, table = "", None, None
    for line in text.splitlines():
        if current is not None:
            if (
                line.rstrip() == "}"
            ):  # a Pallas kernel's settings go over several lines, of which one begins with it too
                current = None
            elif found := _INSTRUCTION.match(line):
                root, name, type_, opcode, rest = found.groups()
                current[name] = Instruction(name, type_, opcode, rest, root is not None)
        elif found := _COMPUTATION.match(line):
            current = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
            table = None
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None and (row := re.match(r"(\d+) (.*)$", line)):
            table[int(row[1])] = row[2]
    if not entry:
        raise ValueError(
            "this is not the text of a compiled program: it has no ENTRY computation; pass Compiled.as_text(), not "
            "that of a lowered program"
        )
    return Program(computations, entry, _frames(tables))


def _frames(tables: dict[str, dict[int, str]]) -> dict[int, tuple[str, int, int]]:
    def field(row: str, name: str) -> int:
        found = re.search(rf"\b{name}=(\d+)", row)
        return int(found[1]) if found else 0

    files = {number: name.strip('"') for number, name in tables.get("FileNames", {}).items()}
    places = {
        number: (files.get(field(row, "file_name_id"), ""), field(row, "line"))
        for number, row in tables.get("FileLocations", {}).items()
    }
    rows = tables.get("StackFrames", {})
    # a caller's number is printed one too high where the first frame, which has none, points at itself
    shift = 1 if field(rows.get(1, ""), "parent_frame_id") == 1 else 0
    return {
        number: (*places.get(field(row, "file_location_id"), ("", 0)), field(row, "parent_frame_id") - shift)
        for number, row in rows.items()
    }


def _constant(where: Computation, name: str) -> int | None:
    for _ in range(10):
        instruction = where.get(name)
        if instruction is None:
            return None
        if instruction.opcode == "constant":
            return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
        if instruction.opcode not in ("copy", "bitcast", "convert") or not instruction.operands:
            return None
        name = instruction.operands[0]
    return None


def _place(instruction: Instruction) -> int:
    return int(instruction.literal) if instruction.opcode == "parameter" else -1
