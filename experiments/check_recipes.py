"""Is every shipped recipe the same on every kind of mesh? A table of recipes x meshes, from `meshpar check`.

    python -m experiments.check_recipes
    python -m experiments.check_recipes --recipes llama_tiny_stdlib gpt_tiny_stdlib

Each cell is the largest difference of any tensor, in parts of what rounding explains; above 1 is a fault. Recipes for
accelerators are run with fewer layers, narrower, and with fewer and shorter rows; their plan stays.
"""

from __future__ import annotations

import argparse
import sys
import time

from meshpar.check.case import Case
from meshpar.check.invariance import Checker
from meshpar.mesh.devices import use_compilation_cache
from meshpar.mesh.emulate import emulate
from meshpar.mesh.spec import MeshSpec
from meshpar.train.recipe import load_recipe

MESHES = ("data=8", "fsdp=8", "data=2 tensor=4", "fsdp=4 tensor=2", "data=2 fsdp=2 tensor=2", "data=4 fsdp=2")
SMALL = {"model.layers": "2", "model.embed": "128", "model.mlp": "256", "data.seq": "64", "train.batch": "16"}
RECIPES: dict[str, dict[str, str]] = {
    "llama_tiny_stdlib": {},
    "llama_tiny_botocore": {},
    "llama_6m_stdlib": {"train.batch": "8", "data.seq": "64"},
    "gpt_tiny_stdlib": {},
    "llama_micro": {},
    "llama_125m": {**SMALL, "model.heads": "4", "model.kv_heads": "4", "model.vocab": "2048"},
    "llama_1b": {**SMALL, "model.heads": "8", "model.kv_heads": "4", "model.vocab": "2048", "loss_chunk": "16"},
}
RANDOM = ("llama_125m", "llama_1b")  # whose tokenizers take long to train


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns 1 where something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.check_recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    options = parser.parse_args(arguments)
    meshes = [MeshSpec.parse(mesh) for mesh in options.meshes]
    emulate(max(mesh.product for mesh in meshes))
    use_compilation_cache()
    from rich.console import Console
    from rich.table import Table

    table, wrong = Table(), 0
    table.add_column("recipe")
    for mesh in meshes:
        table.add_column(str(mesh), justify="right")
    for name in options.recipes:
        checker, cells = Checker(), []
        for mesh in meshes:
            case = Case(name=name, base=load_recipe(name), mesh=mesh, changes=RECIPES[name], random_data=name in RANDOM)
            begun = time.perf_counter()
            findings = checker.check(case)
            cells.append(f"{findings.worst:.2g}")
            wrong += not findings.ok
            seconds = time.perf_counter() - begun
            print(f"... {name} {mesh}: {findings.first or 'equal'} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        table.add_row(name, *cells)
    Console(width=140).print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
