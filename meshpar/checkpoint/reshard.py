"""What restoring a checkpoint into a state will do, told before a byte is read: which leaves stay as they are, which
are split differently, cast, taken from elsewhere, missing or left over.

Pure functions over a manifest and an abstract target: no device, no file. Two precision policies keep the weights
differently, so a leaf of one may come from a leaf of the other: fp32 masters that the checkpoint lacks are its fp32
parameters, and fp32 parameters are read from its masters when it holds bf16 copies beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshpar.checkpoint.manifest import Leaf, Manifest
from meshpar.interfaces import Axes, PyTree
from meshpar.layout.resolve import path_name
from meshpar.layout.rules import did_you_mean

FRESH = ("scale",)  # fields of the state that a run may begin anew: a loss scale finds its level in some steps
_SHOWN = 3  # paths in a sentence


@dataclass(frozen=True, kw_only=True)
class Match:
    """A leaf of the target, and where its values come from."""

    path: str
    source: str | None  # path in the checkpoint; None: it is missing there and starts fresh
    resharded: bool = False
    cast: str = ""  # "float32 -> bfloat16"; empty when the dtype stays


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a restore will do, leaf by leaf."""

    step: int
    written_on: str  # a mesh, as people write it
    onto: str
    matches: tuple[Match, ...]  # in the order of the target's leaves
    left_over: tuple[str, ...]  # paths that only the checkpoint has

    @property
    def fresh(self) -> tuple[str, ...]:
        """Paths that the checkpoint lacks and that start anew."""
        return tuple(match.path for match in self.matches if match.source is None)

    def lines(self) -> list[str]:
        """A short text: counts first, then a few of the paths that are not plainly read."""
        moved = sum(match.resharded for match in self.matches)
        casts = Counter(match.cast for match in self.matches if match.cast)
        same = sum(match.source is not None and not match.resharded and not match.cast for match in self.matches)
        what = [f"{same} leaves as they were"] if same else []
        what += [f"{moved} resharded"] if moved else []
        what += [f"{count} cast {cast}" for cast, count in casts.items()]
        where = f"written on {self.written_on}" + (f", onto {self.onto}" if self.onto != self.written_on else "")
        lines = [f"restoring step {self.step}, {where}: {', '.join(what)}"]
        elsewhere = Counter(
            (_top(match.path), _top(match.source))
            for match in self.matches
            if match.source is not None and _top(match.source) != _top(match.path)
        )
        lines += [f"  {count} leaves of {path} are read from {source}" for (path, source), count in elsewhere.items()]
        if self.fresh:
            lines.append(f"  missing, starts fresh: {_some(self.fresh)}")
        if self.left_over:
            lines.append(f"  only in the checkpoint, not read: {_some(self.left_over)}")
        return lines


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a state by path: "params/blocks/mlp/up/kernel"."""
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def describe_leaf(leaf: Any, axes: Axes | None = None) -> Leaf:
    """An array, or a ShapeDtypeStruct, as a manifest tells it."""
    spec: tuple[tuple[str, ...], ...] = ()
    if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
        entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in sharding.spec]
        spec = tuple(tuple(axis for axis in entry if sharding.mesh.shape[axis] > 1) for entry in entries)
    while spec and not spec[-1]:
        spec = spec[:-1]
    return Leaf(shape=tuple(leaf.shape), dtype=str(leaf.dtype), axes=axes, spec=spec)


def axes_by_path(leaves: Mapping[str, Any], axes: PyTree | None) -> dict[str, Axes]:
    """The logical axes of each leaf that is a parameter or has the path and rank of one: masters and moments too.

    Args:
      axes: a tuple of logical axes for each parameter (`Model.axes`); None: nothing is known.
    """
    found = jax.tree.leaves_with_path(axes, is_leaf=lambda node: isinstance(node, tuple))  # of None: nothing
    known = {path_name(path): names for path, names in found}
    named = {}
    for path, leaf in leaves.items():
        parts = path.split("/")
        for start in range(1, len(parts)):
            names = known.get("/".join(parts[start:]))
            if names is not None and len(names) == len(leaf.shape):
                named[path] = names
                break
    return named


def mesh_of(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Degrees of the mesh that a state lies on; empty when no leaf is on one."""
    for leaf in leaves.values():
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
            return dict(sharding.mesh.shape)
    return {}


def compare(manifest: Manifest, target: Mapping[str, Any]) -> Report:
    """Checks that a checkpoint can become `target`, and says how.

    Args:
      target: arrays or ShapeDtypeStructs with shardings, by path (`named_leaves`). A part of a state will do.

    Raises:
      ValueError: a leaf has another shape or another kind of dtype in the checkpoint, or is missing there and may not
        start fresh. One sentence with the path and both sides.
    """
    mesh = mesh_of(target)
    matches, missing = [], []
    for path, leaf in target.items():
        wanted = describe_leaf(leaf)
        source = _source(path, wanted, manifest.leaves)
        if source is None:
            if _top(path) not in FRESH:
                missing.append(path)
            matches.append(Match(path=path, source=None))
            continue
        stored = manifest.leaves[source]
        _check(manifest.step, path, wanted, source, stored)
        matches.append(
            Match(
                path=path,
                source=source,
                resharded=_blocks(wanted, mesh) != _blocks(stored, manifest.mesh),
                cast="" if wanted.dtype == stored.dtype else f"{stored.dtype} -> {wanted.dtype}",
            )
        )
    used = {match.source for match in matches}
    left_over = tuple(path for path in manifest.leaves if path not in used)
    if missing:
        raise ValueError(_lacks(manifest.step, missing, left_over))
    return Report(
        step=manifest.step,
        written_on=_spell(manifest.mesh),
        onto=_spell(mesh),
        matches=tuple(matches),
        left_over=left_over,
    )


def _source(path: str, wanted: Leaf, stored: Mapping[str, Leaf]) -> str | None:
    """The path in the checkpoint that holds the values of `path`, None when nothing does."""
    top, _, rest = path.partition("/")
    twin = {"params": f"master/{rest}", "master": f"params/{rest}"}.get(top)
    if twin not in stored:
        return path if path in stored else None
    if path not in stored:
        return twin
    return twin if top == "params" and _bits(wanted.dtype) > _bits(stored[path].dtype) else path


def _check(step: int, path: str, wanted: Leaf, source: str, stored: Leaf) -> None:
    where = path if source == path else f"{path} (read from {source})"
    if wanted.shape != stored.shape:
        raise ValueError(
            f"{where} is {stored.shape} in the checkpoint of step {step} and {wanted.shape} here; "
            "give the model and the optimizer that it was written with"
        )
    if wanted.dtype != stored.dtype and (not _is_float(wanted.dtype) or not _is_float(stored.dtype)):
        raise ValueError(
            f"{where} is {stored.dtype} in the checkpoint of step {step} and {wanted.dtype} here, which no cast turns "
            "into one another; give the state that it was written with"
        )


def _lacks(step: int, missing: list[str], left_over: tuple[str, ...]) -> str:
    params = any(_top(path) == "params" for path in missing)
    fix = "give the model that it was written with" if params else "give the optimizer that it was written with"
    hint = did_you_mean(missing[0], left_over).rstrip("?")
    return f"the checkpoint of step {step} has no {_some(missing)}{hint}; {fix}" + (
        "" if params else ", or restore parameters only"
    )


def _blocks(leaf: Leaf, mesh: Mapping[str, int]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """How an array is cut, as axes with degrees: alike for two meshes that cut it alike."""
    return tuple(tuple((axis, mesh.get(axis, 1)) for axis in dim) for dim in leaf.spec)


def _is_float(dtype: str) -> bool:
    return not dtype.startswith("key<") and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def _bits(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize if _is_float(dtype) else 0


def _spell(mesh: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1) or "one device"


def _some(paths: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


def _top(path: str) -> str:
    return path.partition("/")[0]
