"""Golden files: how each shipped recipe's arrays are split on a few meshes, and what its compiled step communicates.

    python -m tests.golden.make                   # all that this machine can make
    python -m tests.golden.make layouts           # or a part: layouts, cpu, tpu, gpu
    python -m tests.golden.make cpu

A golden file is no proof that something is right; it makes a change visible in the diff of a commit. To make it again
is right where a change was meant to move arrays or communication, and where a new jax compiles otherwise; then
`git diff tests/golden` shows what else moved.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from experiments import recipes
from meshpar.collectives.report import Report
from meshpar.collectives.table import alike
from meshpar.layout.describe import describe
from meshpar.mesh.aot import topology
from meshpar.mesh.build import abstract_mesh
from meshpar.mesh.emulate import emulate
from meshpar.module import Model, abstract
from meshpar.train.build import build
from meshpar.train.recipe import apply_overrides
from meshpar.train.run import Recipe

FOLDER = Path(__file__).parent
LAYOUTS = ("params", "compute", "grads", "optimizer")

# Beside its own: every axis at once, and a spread of the optimizer alone. Each fits every recipe.
PLANS = (["mesh=data=2 fsdp=2 tensor=2"], ["mesh=data=8", "zero=1"])
# What is compiled, by platform: recipe -> plans. On CPU the tiny one, in seconds; elsewhere by hand.
_TINY = (
    ["mesh=data=8", "zero=1", "unroll=1"],
    ["mesh=fsdp=8", "unroll=1"],
    ["mesh=data=2 fsdp=2 tensor=2", "sequence_parallel=true", "unroll=1"],
)
_MESHES = {
    "llama_tiny_stdlib": (*_TINY, ["mesh=data=2 tensor=4"]),
    "gpt_tiny_stdlib": (["mesh=data=2 fsdp=2 tensor=2"],),
}
COMPILED: dict[str, dict[str, tuple[list[str], ...]]] = {
    "cpu": {"llama_tiny_stdlib": _TINY},
    "tpu": _MESHES,
    "gpu": _MESHES,
}
_MACHINES = {"tpu": "v5e:2x4", "gpu": "h100:8"}
_PLUG_INS = {"tpu": ("libtpu", 'pip install -e ".[tpu]"'), "gpu": ("jax_cuda13_plugin", 'pip install -e ".[aot-cuda]"')}


def recipe_names() -> list[str]:
    """Every function of experiments/recipes.py that returns a recipe."""
    return [name for name, value in inspect.getmembers(recipes, inspect.isfunction) if name[0] != "_"]


def files(part: str) -> list[str]:
    """Names of the golden files of a part, below the folder and without `.txt`."""
    if part == "layouts":
        return [f"layouts/{name}" for name in recipe_names()]
    return [f"{part}/{name}" for name in COMPILED[part]]


def missing(part: str) -> str | None:
    """Why this machine cannot make a part, None where it can."""
    if part not in _PLUG_INS or importlib.util.find_spec(_PLUG_INS[part][0]):
        return None
    return f"no {_PLUG_INS[part][0]} here to compile for {_MACHINES[part]}: {_PLUG_INS[part][1]}"


def text_of(file: str) -> str:
    """What a golden file should hold."""
    part, name = file.split("/")
    recipe: Recipe = getattr(recipes, name)()
    if part == "layouts":
        return "\n".join(_layouts(name, recipe))
    return "\n".join(_collectives(part, name, recipe))


def _layouts(name: str, recipe: Recipe) -> Iterator[str]:
    model: Model = abstract(recipe.model.build, recipe.model)
    yield f"# Parameters of {name}, their logical axes, and the mesh axes that split each dim in the four layouts"
    for overrides in ([], *PLANS):
        plan = apply_overrides(recipe, list(overrides)).plan
        plan.check(model)
        mesh, layouts = abstract_mesh(plan.mesh), plan.layouts()
        yield f"\n[mesh {plan.mesh}, ZeRO {plan.zero_stage} over {' '.join(plan.zero_over)}]"
        rows = [describe(getattr(layouts, layout), model.axes, model.shapes, mesh) for layout in LAYOUTS]
        for leaves in zip(*rows, strict=True):
            first = leaves[0]
            specs = " ".join(
                f"{layout}({', '.join('*'.join(axes) or '-' for axes in leaf.split)})"
                for layout, leaf in zip(LAYOUTS, leaves, strict=True)
            )
            axes = " ".join(f"{axis}={size}" for axis, size in zip(first.axes, first.shape, strict=True))
            yield f"{first.path} [{axes}] {specs}"
    yield ""


def _collectives(platform: str, name: str, recipe: Recipe) -> Iterator[str]:
    yield f"# What a step of {name} communicates, compiled for {_MACHINES.get(platform, 'CPU')} by jax {_minor()}"
    for overrides in COMPILED[platform][name]:
        made = apply_overrides(recipe, list(overrides))
        model = abstract(made.model.build, made.model)
        training = build(
            model,
            made.optimizer.make(made.train.steps, model),
            made.plan,
            batch=made.train.batch,
            seq=made.data.seq,
            devices=topology(_MACHINES[platform]) if platform in _MACHINES else jax.devices()[: made.plan.mesh.product],
        )
        yield f"\n[{', '.join(overrides)}]"
        yield from rows_of(training.collectives())
    yield ""


def rows_of(report: Report) -> Iterator[str]:
    """A report in lines that change only with what is communicated: no line numbers, no names of instructions."""
    rows = [
        f"{one.kind} over {one.axis}, {one.phase or 'unknown'}, {sum(other.times for other in same)} x "
        f"{one.dtype}[{','.join(map(str, one.shape))}] of {one.of or 'unknown'}"
        for same in alike(report)
        for one in same[:1]
    ]
    yield from sorted(rows)
    for total in sorted(report.totals(), key=lambda total: (total.kind, total.axis)):
        yield f"total {total.kind} over {total.axis}: {total.buffers} buffers, {total.bytes} bytes"


def _minor() -> str:
    return ".".join(jax.__version__.split(".")[:2])


def main(parts: list[str]) -> int:
    """Writes the golden files of the parts, by default of all that can be made here."""
    known = ["layouts", *COMPILED]
    for part in parts:
        if part not in known:
            print(f"error: no part {part!r}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"  # as in tests
    emulate(8)
    for part in parts or known:
        if why := missing(part):
            print(f"{part}: not made, {why}")
            continue
        for file in files(part):
            path = FOLDER / f"{file}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text_of(file))
            print(path.relative_to(FOLDER.parents[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
