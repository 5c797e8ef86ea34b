"""What the names of an operation tell: its name scopes, where in the step it runs, and from which line of ours it is.

jax writes the scopes into each operation's name (`jit(step)/transpose(jvp(blocks))/while/body/attention/out/dot`), XLA
carries it through its passes and joins the names of operations that it merges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

_STRUCTURE = re.compile(
    r"while|body|cond|scan|closed_call|eval_jaxpr|core_call|checkpoint|rematted_computation|remat\d*|pjit|shard_map|"
    r"shmap_body|custom_[jv][vj]p_call\w*|branch_\d+_fun"
)
_PACKAGE, _ROOT = Path(__file__).parents[1], Path(__file__).parents[2]
_HELPERS = str(Path("meshpar", "layout", "constrain.py"))  # who called it is what a reader wants to know


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


def holds(parts: Iterable[str], wanted: Iterable[str]) -> bool:
    """Whether `wanted` follow one another in `parts`."""
    return f"/{'/'.join(wanted)}/" in f"/{'/'.join(parts)}/"


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


def source_of(stack: list[tuple[str, int]]) -> str:
    """The innermost line of our code, as `file:line` from the root of the repository."""

    def is_ours(path: Path) -> bool:
        return path.is_relative_to(_PACKAGE) or "site-packages" not in path.parts

    lines = [(Path(file), line) for file, line in stack if not file.endswith(_HELPERS)]
    path, line = next((place for place in lines if is_ours(place[0])), lines[0] if lines else (Path(), 0))
    return f"{path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path}:{line}" if line else ""
