"""`report`: which collectives a compiled step runs, over which mesh axes, how many bytes, whose they are.

    report = training.collectives()
    report.expect_none(kind="all-gather", axis="tensor", inside="attention")
    report.expect_at_most(kind="all-reduce", axis="data", bytes=2 * size)
    rich.print(report.as_table())

The folder's page says what is counted and how. Cost of one collective over n devices, in bytes that a device sends, for
a buffer of B bytes: see `sent`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh

from meshpar.collectives import budget
from meshpar.collectives.groups import axes_of, between_slices, groups_of
from meshpar.collectives.hlo import Array, Computation, Instruction, Program, arrays_of, parse
from meshpar.spelling import did_you_mean

if TYPE_CHECKING:
    from rich.console import Group

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_MARKS = ("weights", "gradients", "optimizer", "parameters")  # scopes of the step that precede a parameter's path
_STRUCTURE = re.compile(
    r"while|body|cond|scan|closed_call|eval_jaxpr|core_call|checkpoint|rematted_computation|remat\d*|pjit|shard_map|"
    r"shmap_body|custom_[jv][vj]p_call\w*|branch_\d+_fun"
)
_PACKAGE, _ROOT = Path(__file__).parents[1], Path(__file__).parents[2]
_HELPERS = str(Path("meshpar", "layout", "constrain.py"))  # who called it is what a reader wants to know


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One buffer that devices exchange. Bytes are of one device."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # the mesh axes that it crosses, outermost first
    degree: int  # devices in a group
    times: int  # in one step, all passes of the loops around it
    dtype: str
    shape: tuple[int, ...]  # of the buffer: gathered for all-gather and reduce-scatter, else the local one
    buffer_bytes: int
    sent_bytes: int  # by one device, each time
    phase: str  # "forward", "again" (recomputed for the backward), "backward", or "step" outside of gradients, or empty
    scopes: tuple[str, ...]  # name scopes, such as "blocks/attention/out"; several where XLA joined buffers
    parameters: tuple[str, ...]  # paths of the parameters that the scopes name
    source: str  # "meshpar/forward.py:118", or empty where the text does not tell
    op: str  # the instruction; buffers of one operation share it
    between_slices: bool = False  # over the data-centre network

    @property
    def bytes(self) -> int:
        """What a device sends for it in one step."""
        return self.times * self.sent_bytes

    @property
    def axis(self) -> str:
        """The axes in one word, as `data*fsdp`; `data (slices)` between slices."""
        return "*".join(self.axes) + (" (slices)" if self.between_slices else "")

    @property
    def of(self) -> str:
        """The parameter or the place it belongs to; empty where the text does not tell."""
        names = self.parameters or self.scopes
        return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""


@dataclass(frozen=True, kw_only=True)
class Total:
    """Sums over the collectives of one kind over the same axes."""

    kind: str
    axis: str
    operations: int  # that a device starts in one step; one may hold several buffers
    buffers: int
    bytes: int  # that a device sends in one step


@dataclass(frozen=True, kw_only=True)
class Report:
    """The collectives of one compiled step, in the order of the text."""

    mesh: Mapping[str, int]
    collectives: tuple[Collective, ...]
    scopes: frozenset[str]  # every part of a name scope of the program, those without collectives too
    unknown_loops: tuple[str, ...] = ()  # loops of unknown length; what is in them is counted once

    @property
    def bytes(self) -> int:
        """What a device sends in one step."""
        return sum(collective.bytes for collective in self.collectives)

    def select(
        self,
        *,
        kind: str | None = None,
        axis: str | None = None,
        inside: str | None = None,
        larger_than: int = -1,
    ) -> list[Collective]:
        """The collectives of a kind, that cross a mesh axis, in a name scope, with a buffer of more bytes.

        Args:
          kind: one of KINDS.
          axis: a mesh axis, or several as `"data fsdp"`; a collective that crosses these and others is among them.
          inside: a part of a name scope, such as `"attention"`, or some that follow one another: `"attention/out"`.
          larger_than: bytes of the buffer.

        Raises:
          ValueError: no such kind, mesh axis or scope.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"unknown collective {kind!r}{did_you_mean(kind, KINDS)}; kinds are {', '.join(KINDS)}")
        axes = set((axis or "").replace("*", " ").replace(",", " ").split())
        for name in axes - set(self.mesh):
            raise ValueError(
                f"unknown mesh axis {name!r}{did_you_mean(name, self.mesh)}; axes are {', '.join(self.mesh)}"
            )
        parts = (inside or "").strip("/").split("/") if inside else []
        for part in parts:
            if part not in self.scopes:
                raise ValueError(
                    f"no name scope {part!r} in this program{did_you_mean(part, self.scopes)}; "
                    f"there are {', '.join(sorted(self.scopes))}"
                )
        return [
            collective
            for collective in self.collectives
            if (kind is None or collective.kind == kind)
            and axes <= set(collective.axes)
            and (not parts or any(_holds(scope.split("/"), parts) for scope in collective.scopes))
            and collective.buffer_bytes > larger_than
        ]

    def totals(self) -> list[Total]:
        """Sums by kind and axes, the most bytes first."""
        found: dict[tuple[str, str], list[Collective]] = {}
        for collective in self.collectives:
            found.setdefault((collective.kind, collective.axis), []).append(collective)
        totals = [
            Total(
                kind=kind,
                axis=axis,
                operations=sum({one.op: one.times for one in some}.values()),
                buffers=sum(one.times for one in some),
                bytes=sum(one.bytes for one in some),
            )
            for (kind, axis), some in found.items()
        ]
        return sorted(totals, key=lambda total: (-total.bytes, total.kind, total.axis))

    def expect_none(
        self, *, kind: str | None = None, axis: str | None = None, inside: str | None = None, larger_than: int = -1
    ) -> None:
        """Raises `BudgetBroken`, a sentence with the operation, its bytes and its source line, when there is one.

        `select` explains the arguments and what else it raises.
        """
        found = self.select(kind=kind, axis=axis, inside=inside, larger_than=larger_than)
        budget.expect_none(found, budget.words(kind, axis, inside, larger_than))

    def expect_at_most(
        self,
        *,
        kind: str | None = None,
        axis: str | None = None,
        inside: str | None = None,
        larger_than: int = -1,
        bytes: int | None = None,
        times: int | None = None,
    ) -> None:
        """Raises `BudgetBroken` when a device sends more than `bytes`, or more than `times` buffers, in one step.

        `select` explains the other arguments and what else it raises.
        """
        if bytes is None and times is None:
            raise ValueError("expect_at_most needs a limit; give bytes= or times=, or use expect_none")
        found = self.select(kind=kind, axis=axis, inside=inside, larger_than=larger_than)
        budget.expect_at_most(found, budget.words(kind, axis, inside, larger_than), bytes, times)

    def as_table(self, *, rows: int | None = 30, title: str = "") -> Group:
        """A rich table: alike collectives in one row, the most bytes first, then totals by kind and by axis."""
        from meshpar.collectives.table import as_table

        return as_table(self, rows=rows, title=title)

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "mesh": dict(self.mesh),
            "bytes": self.bytes,
            "totals": [dataclasses.asdict(total) for total in self.totals()],
            "collectives": [dataclasses.asdict(one) | {"bytes": one.bytes} for one in self.collectives],
            "unknown_loops": list(self.unknown_loops),
        }


def report(compiled: jax.stages.Compiled | str, mesh: Mesh | AbstractMesh, parameters: Iterable[str] = ()) -> Report:
    """The collectives of a compiled program.

    Args:
      compiled: from `jit(...).lower(...).compile()`, or its `as_text()`.
      mesh: the mesh that the program was compiled for; its axes name the groups.
      parameters: paths such as `blocks/mlp/up/kernel`, to tell a parameter by the name scopes.

    Raises:
      ValueError: the text is not that of a compiled program.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    program = parse(text)
    sizes = dict(mesh.shape)
    paths = [tuple(path.split("/")) for path in parameters]
    walk = _Walk(program, sizes, paths)
    found = tuple(walk.computation(program.entry, 1, None))
    names = {
        part
        for name in set(re.findall(r'op_name="([^"]*)"', text))
        for scope in scopes_of(name)
        for part in scope.split("/")
    }
    return Report(
        mesh=sizes, collectives=found, scopes=frozenset(names) - {""}, unknown_loops=tuple(dict.fromkeys(walk.unknown))
    )


def sent(kind: str, buffer: int, degree: int) -> int:
    """Bytes that one device sends: of the gathered n·b, all-gather and reduce-scatter (n-1)·b, all-reduce 2(n-1)·b; of
    a local buffer, all-to-all (n-1)/n and a permute or broadcast all.
    """
    if kind in ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return buffer * (degree - 1) // degree
    return 2 * buffer * (degree - 1) // degree if kind == "all-reduce" else buffer


def scopes_of(op_name: str) -> tuple[str, ...]:
    """The name scopes in an operation's name, without what jax adds; `(a:b)`, of joined operations, are several."""
    return tuple(dict.fromkeys(_scope(name) for name in _alternatives(op_name)))


def phase_of(op_name: str) -> str:
    """Where in the step an operation with this name runs; empty for no name."""
    if not op_name:
        return ""
    if "rematted_computation" in op_name:
        return "again"
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "step"


Caller = tuple[Instruction, Computation]  # a call and the computation that it stands in


class _Walk:
    """Follows a program through its loops and calls."""

    def __init__(self, program: Program, mesh: Mapping[str, int], parameters: list[tuple[str, ...]]) -> None:
        self.program, self.mesh, self.parameters = program, mesh, parameters
        self.devices = math.prod(mesh.values())
        self.unknown: list[str] = []

    def computation(self, name: str, times: int, caller: Caller | None) -> Iterator[Collective]:
        where = self.program.computations.get(name, {})
        # A TPU shows a collective again in each fusion that runs beside it, and where it ends: the start counts.
        repeats = name.startswith("async_collective_fusion") or any(
            i.attribute("custom_call_target") == "AsyncCollectiveDone"
            for i in where.values()
            if i.opcode == "custom-call"
        )
        for instruction in where.values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = self.program.trips(instruction, where)
                if trips is None:
                    self.unknown.append(instruction.name)
                passes = 1 if trips is None else trips
                yield from self.computation(instruction.attribute("condition") or "", times * (passes + 1), None)
                yield from self.computation(instruction.attribute("body") or "", times * passes, None)
            elif opcode in ("fusion", "call", "conditional", "async-start", "custom-call"):
                for called in instruction.called:
                    yield from self.computation(called, times, (instruction, where))
            elif opcode == "send":
                yield from self._sent_by_host(instruction, where, times)
            elif opcode.removesuffix("-start") in KINDS and not repeats:
                kind = opcode.removesuffix("-start")
                if kind == "all-reduce" and "all-reduce-scatter" in name:
                    kind = "reduce-scatter"
                yield from self._of(kind, instruction, where, times, caller)

    def _of(
        self, kind: str, instruction: Instruction, where: Computation, times: int, caller: Caller | None
    ) -> Iterator[Collective]:
        groups = groups_of(instruction.attributes, self.devices)
        axes = axes_of(groups, self.mesh)
        pairs = kind == "collective-permute"
        degree = math.prod(self.mesh[axis] for axis in axes) if pairs else max(map(len, groups), default=1)
        if degree == 1:
            return  # a group of one exchanges nothing
        operands = [(name, array) for name in instruction.operands for array in arrays_of(_type_of(where, name))]
        if kind == "all-to-all" and len(operands) == degree and "dimensions=" not in instruction.attributes:
            name, part = operands[0]  # one buffer, given as the part for each device
            operands = [(name, Array(dtype=part.dtype, shape=(degree, *part.shape)))]
        for name, array in operands:
            # of operations that XLA merged, each buffer is known by what computed it
            own = len(operands) == 1 and instruction.attribute("op_name")
            told = instruction if own else _told(where, name, caller) or instruction
            buffer = _gathered(kind, array, instruction, degree)
            yield self._collective(kind, axes, degree, times, buffer, told, instruction)

    def _sent_by_host(self, instruction: Instruction, where: Computation, times: int) -> Iterator[Collective]:
        """A collective between TPU slices, or a permute that a GPU writes as sends."""
        attributes = instruction.attributes
        (array, *_) = arrays_of(instruction.type) or (None,)
        if array is None:
            return
        if found := re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes):
            kind = found[1].lower().replace("_", "-")
            slices = _slices(attributes)
            if kind not in KINDS or slices < 2 or self.devices % slices:
                return
            groups = between_slices(slices, self.devices)
            if kind == "all-gather":
                array = Array(dtype=array.dtype, shape=(slices, *array.shape))
            told = _told(where, instruction.operands[0], None) or instruction
            one = self._collective(kind, axes_of(groups, self.mesh), slices, times, array, told, instruction)
            yield dataclasses.replace(one, between_slices=True)
        elif found := re.search(r'_xla_send_recv_source_target_pairs="?(\{.*?\}\})', attributes):
            axes = axes_of(groups_of(f"source_target_pairs={found[1]}", self.devices), self.mesh)
            degree = math.prod(self.mesh[axis] for axis in axes)
            yield self._collective("collective-permute", axes, degree, times, array, instruction, instruction)

    def _collective(
        self,
        kind: str,
        axes: tuple[str, ...],
        degree: int,
        times: int,
        array: Array,
        told: Instruction,
        op: Instruction,
    ) -> Collective:
        op_name = told.attribute("op_name") or op.attribute("op_name") or ""
        scopes = tuple(scope for scope in scopes_of(op_name) if scope)
        parameters = dict.fromkeys(path for scope in scopes if (path := self._parameter(scope)))
        return Collective(
            kind=kind,
            axes=axes,
            degree=degree,
            times=times,
            dtype=array.dtype,
            shape=array.shape,
            buffer_bytes=array.bytes,
            sent_bytes=sent(kind, array.bytes, degree),
            phase=phase_of(op_name),
            scopes=scopes,
            parameters=tuple(parameters) if len(parameters) == len(scopes) else (),
            source=_source(self.program.stack(told) or self.program.stack(op)),
            op=op.name,
        )

    def _parameter(self, scope: str) -> str:
        """The parameter whose path stands in a scope, or nothing."""
        parts = [part for part in scope.split("/") if part not in _MARKS]
        named = [path for path in self.parameters if _holds(parts, path)]
        return max(("/".join(path) for path in named), key=len, default="")


def _gathered(kind: str, array: Array, instruction: Instruction, degree: int) -> Array:
    """The buffer of an operand: the gathered array, of which an all-gather's operand is a part."""
    if kind != "all-gather":
        return array
    found = re.search(r"\bdimensions=\{(\d+)", instruction.attributes)
    dim = int(found[1]) if found else 0
    shape = tuple(size * degree if place == dim else size for place, size in enumerate(array.shape))
    return Array(dtype=array.dtype, shape=shape)


def _type_of(where: Computation, name: str) -> str:
    return where[name].type if name in where else ""


def _told(where: Computation, name: str, caller: Caller | None) -> Instruction | None:
    """The instruction that computed `name` and has a name of its own: through copies and changes of type, and for what
    a fusion was given in the computation that calls it.
    """
    for _ in range(8):
        instruction = where.get(name)
        if instruction is None:
            return None
        if instruction.attribute("op_name"):
            return instruction
        if instruction.opcode == "parameter" and caller is not None:
            call, outside = caller
            place = int(instruction.literal)
            found = _told(outside, call.operands[place], None) if place < len(call.operands) else None
            return found or (call if call.attribute("op_name") else None)
        if not instruction.operands or instruction.opcode in ("while", "tuple"):
            return None
        name = instruction.operands[0]
    return None


def _slices(attributes: str) -> int:
    """How many slices a transfer names: `{1,2}x{0:3}` are the slices 1 and 2, and the devices 0 to 3 of each."""
    found = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', attributes)
    count = 0
    for entry in found[1].split(",") if found else []:
        first, _, last = entry.partition(":")
        count += int(last or first) - int(first) + 1
    return count


def _alternatives(name: str) -> list[str]:
    """`a/(b:c)/d` as `a/b/d` and `a/c/d`; brackets of a transformation, as in `jvp(a)`, stay."""
    for found in re.finditer(r"(?<![\w)])\(", name):
        depth, cuts = 0, [found.start()]
        for at in range(found.start(), len(name)):
            depth += (name[at] == "(") - (name[at] == ")")
            if depth == 1 and name[at] == ":":
                cuts.append(at)
            if depth == 0:
                cuts.append(at)
                break
        if depth == 0 and len(cuts) > 2:
            before, after = name[: cuts[0]], name[cuts[-1] + 1 :]
            inner = [name[first + 1 : last] for first, last in pairwise(cuts)]
            return [whole for part in inner for whole in _alternatives(before + part + after)]
    return [name]


def _scope(name: str) -> str:
    plain = re.sub(r"\bp?jit\([^()]*\)", "", name)  # a function that is jitted is no scope
    plain = re.sub(r"\b\w+\(", "", plain).replace(")", "").replace("(", "")
    *parts, _ = plain.split("/")  # the last is the operation
    parts = [part for part in parts if part and not _STRUCTURE.fullmatch(part)]
    for length in range(1, len(parts) // 2 + 1):  # a backward of its own is named after its place twice
        if parts[:length] == parts[length : 2 * length]:
            parts = parts[length:]
    return "/".join(parts)


def _holds(parts: Iterable[str], wanted: Iterable[str]) -> bool:
    """Whether `wanted` follow one another in `parts`."""
    return f"/{'/'.join(wanted)}/" in f"/{'/'.join(parts)}/"


def _source(stack: list[tuple[str, int]]) -> str:
    """The innermost line of our code, as `file:line` from the root of the repository."""

    def is_ours(path: Path) -> bool:
        return path.is_relative_to(_PACKAGE) or "site-packages" not in path.parts

    lines = [(Path(file), line) for file, line in stack if not file.endswith(_HELPERS)]
    path, line = next((place for place in lines if is_ours(place[0])), lines[0] if lines else (Path(), 0))
    return f"{path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path}:{line}" if line else ""
