"""Shows what a recipe's compiled step communicates: every collective, its mesh axis, bytes, and whose it is.

    python -m experiments.collectives --recipe llama_tiny_stdlib --set mesh="data=2 tensor=4"
    python -m experiments.collectives --set mesh="fsdp=8" --rows 60
    python -m experiments.collectives --recipe llama_1b --set mesh="fsdp=16" --set train.batch=16 --topology v5e:4x4
    python -m experiments.collectives --set mesh="fsdp=8" --topology h100:8 --json

The step is compiled for emulated CPU devices, or for the machine that --topology names, which need not be here
(meshpar/mesh/aot.py lists them). Each platform's compiler decides differently what to exchange.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from experiments.arguments import add_recipe, add_set


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 when the step cannot be compiled, 2 after a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(parser)
    add_set(parser)
    parser.add_argument("--devices", type=int, help="emulate so many CPU devices (default: the product of the mesh)")
    parser.add_argument("--topology", metavar="NAME", help="compile for this machine, such as v5e:4x4 or h100:8")
    parser.add_argument("--rows", type=int, default=30, help="rows of the table (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        if options.topology and options.devices:
            raise ValueError(f"--topology {options.topology} says how many devices there are; drop --devices")
        if options.rows < 1:
            raise ValueError(f"--rows {options.rows} shows nothing; give a positive number")
        training, recipe = training_of(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return show(options, training, recipe)


def training_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """The training step that the options ask for, not compiled yet, and its recipe."""
    from meshpar.mesh.aot import topology
    from meshpar.mesh.devices import choose_devices
    from meshpar.train.build import build
    from meshpar.train.recipe import apply_overrides, load_recipe

    recipe = apply_overrides(load_recipe(options.recipe), options.overrides)
    mesh = recipe.plan.mesh
    devices = topology(options.topology) if options.topology else choose_devices(mesh, options.devices)
    if not mesh.has_free_axis and mesh.product < len(devices):
        raise ValueError(
            f"mesh {mesh} is {mesh.product} devices and {options.topology or 'this machine'} has {len(devices)}; "
            "choose one of the same size, or set one axis to -1"
        )
    model = recipe.abstract_model()
    training = build(
        model,
        recipe.optimizer.make(recipe.train.steps, model),
        recipe.plan,
        batch=recipe.train.batch,
        seq=recipe.data.seq,
        objective=recipe.objective,
        devices=devices,
    )
    return training, recipe


def show(options: argparse.Namespace, training: Any, recipe: Any) -> int:
    """Compiles, and prints the report."""
    import jax
    from rich.console import Console

    from meshpar.spelling import format_bytes
    from meshpar.train.describe import step_bytes

    try:
        compiled = training.compile(packed=recipe.data.packed)
    except jax.errors.JaxRuntimeError as error:
        print(f"the step cannot be compiled: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    report = training.collectives(compiled)
    device = training.mesh.devices.flat[0]
    if options.json:
        about = {"recipe": options.recipe, "device": device.device_kind, "bytes_while_running": step_bytes(compiled)}
        print(json.dumps({**about, **report.as_json()}, indent=1))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        f"{options.recipe} on mesh {training.plan.mesh} of {device.device_kind} devices, batch {training.batch} x "
        f"{training.seq}, compute {training.plan.precision.compute}; {format_bytes(step_bytes(compiled))} on each "
        "while it runs\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(report.as_table(rows=options.rows), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
