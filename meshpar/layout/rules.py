"""Layouts: which mesh axes carry which logical axis of an array.

A `Rule` maps one logical axis to mesh axes; a `Layout` is a set of rules plus `spread`, the mesh axes that go to
whichever dim of a leaf divides (ZeRO). One mapping *is* the parallel strategy, as in Mesh-TensorFlow (Shazeer et al.
2018) and haliax; a layout knows no devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshpar.spelling import did_you_mean as did_you_mean

LOGICAL_AXES: dict[str, str] = {
    "batch": "rows of a batch",
    "seq": "positions, inside attention, MLP and loss",
    "seq_residual": "positions, in the norm, dropout and residual regions (Megatron SP shards it over tensor)",
    "embed": "the hidden size",
    "mlp": "the inner size of the MLP",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "the size of one head",
    "vocab": "the padded vocabulary",
    "experts": "experts of a mixture",
    "rank": "the inner size of a LoRA adapter",
    "layers": "stacked blocks",
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One logical axis and the mesh axes that split it, outermost first; `source` says in words who asked for it."""

    logical: str
    mesh_axes: tuple[str, ...]
    source: str
    replicate_if_fewer: bool = False  # a dim smaller than the degree is kept whole instead of refused (kv heads)

    def __post_init__(self) -> None:
        _refuse_repeats(self.mesh_axes, str(self))

    def __str__(self) -> str:
        return f"{self.logical} -> {' '.join(self.mesh_axes) or 'whole'} (from {self.source})"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rules by logical axis, at most one each, and the mesh axes to spread over any dim that divides."""

    rules: tuple[Rule, ...] = ()
    spread: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        merge_rules(self.rules)
        _refuse_repeats(self.spread, f"spread over {' '.join(self.spread)}")

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def rule(self, logical: str) -> Rule | None:
        """The rule of a logical axis, None where the axis stays whole. Raises ValueError for a name nobody declared."""
        for rule in self.rules:
            if rule.logical == logical:
                return rule
        if logical in LOGICAL_AXES:
            return None
        known = [*LOGICAL_AXES, *(rule.logical for rule in self.rules)]
        raise ValueError(
            f"unknown logical axis {logical!r}{did_you_mean(logical, known)}; known are {', '.join(known)}, "
            f'and a plan declares more by rules={{"{logical}": ()}}'
        )

    def override(self, rules: Iterable[Rule]) -> Layout:
        """This layout with the given rules in place of its own for the same logical axes."""
        rules = tuple(rules)
        replaced = {rule.logical for rule in rules}
        return replace(self, rules=(*(rule for rule in self.rules if rule.logical not in replaced), *rules))


def merge_rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules of several sources as one set. Raises ValueError when two give one logical axis different mesh axes."""
    merged: dict[str, Rule] = {}
    for rule in rules:
        first = merged.setdefault(rule.logical, rule)
        if first.mesh_axes != rule.mesh_axes:
            raise ValueError(
                f"two rules for {rule.logical!r}: {first} and {rule}; drop one, or state yours in Plan(rules=...)"
            )
    return tuple(merged.values())


def _refuse_repeats(mesh_axes: tuple[str, ...], where: str) -> None:
    for axis in mesh_axes:
        if mesh_axes.count(axis) > 1:
            raise ValueError(f"{where}: mesh axis {axis!r} is named twice and can split a dim once; drop one")
