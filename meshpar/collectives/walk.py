"""The text of a program followed through its loops, calls and fusions: every collective, as often as a step runs it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from meshpar.collectives.collective import KINDS, Collective, sent
from meshpar.collectives.groups import axes_of, between_slices, groups_of
from meshpar.collectives.hlo import Array, Computation, Instruction, Program, arrays_of
from meshpar.collectives.scopes import holds, phase_of, scopes_of, source_of

_MARKS = ("weights", "gradients", "optimizer", "parameters")  # scopes of the step that precede a parameter's path

Caller = tuple[Instruction, Computation]  # a call and the computation that it stands in


class Walk:
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
            source=source_of(self.program.stack(told) or self.program.stack(op)),
            op=op.name,
        )

    def _parameter(self, scope: str) -> str:
        """The parameter whose path stands in a scope, or nothing."""
        parts = [part for part in scope.split("/") if part not in _MARKS]
        named = [path for path in self.parameters if holds(parts, path)]
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
