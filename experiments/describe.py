"""Shows how a recipe's training state is spread, without devices: a table of every array, or a picture of one.

    python -m experiments.describe --recipe llama_tiny_stdlib --set mesh="fsdp=4 tensor=2"
    python -m experiments.describe --recipe llama_1b --set zero=1 --json
    python -m experiments.describe --recipe llama_1b --set mesh="fsdp=-1 tensor=4" --devices 64
    python -m experiments.describe --set mesh="fsdp=4 tensor=2" --draw embedding/table
    python -m experiments.describe --set mesh="fsdp=4 tensor=2" --draw embedding/table --out picture.png

In the table `embed=2048/fsdp` is a dim of 2048 that fsdp splits. Bytes are those that stay between steps; gradients and
activations come on top while a step runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from experiments.arguments import add_recipe, add_set


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.describe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(parser)
    add_set(parser)
    parser.add_argument("--devices", type=int, help="how many devices fill a free mesh axis (-1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--draw", metavar="ARRAY", help="show which device holds which block of a parameter")
    parser.add_argument(
        "--layout",
        choices=("params", "compute", "grads", "optimizer"),
        help="with --draw: which layout of the array (default: params, as it is stored)",
    )
    parser.add_argument("--out", type=Path, help="with --draw: the PNG to write, instead of text on the terminal")
    options = parser.parse_args(arguments)
    try:
        for flag, value in (("--out", options.out), ("--layout", options.layout)):
            if value is not None and not options.draw:
                raise ValueError(
                    f"{flag} {value} belongs to a picture; add --draw ARRAY, such as --draw embedding/table"
                )
        if options.json and options.draw:
            raise ValueError("--json and --draw are two different outputs; drop one")
        show(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(options: argparse.Namespace) -> None:
    """Prints or draws what the options ask for."""
    from meshpar.train.recipe import apply_overrides, load_recipe

    recipe = apply_overrides(load_recipe(options.recipe), options.overrides)
    plan = recipe.plan
    if options.devices is not None:
        plan = plan.on(options.devices)
    elif plan.mesh.has_free_axis:
        raise ValueError(
            f"mesh {plan.mesh} has a free axis; say for how many devices with --devices, or give it a size"
        )
    model = recipe.abstract_model()
    plan.check(model)
    if options.draw:
        draw(model, plan, options.draw, options.layout or "params", options.out)
    else:
        tables(model, recipe.optimizer.make(recipe.train.steps, model), plan, as_json=options.json)


def tables(model: Any, tx: Any, plan: Any, *, as_json: bool) -> None:
    """One table for each part of the state, and the sum of all."""
    from meshpar.layout import describe
    from meshpar.train.describe import describe_state

    parts = describe_state(model, tx, plan)
    total = sum(row.bytes_per_device for rows in parts.values() for row in rows)
    if as_json:
        values = {name: describe.as_json(rows) for name, rows in parts.items()}
        print(
            json.dumps(
                {"mesh": str(plan.mesh), "parameters": model.size, "bytes_per_device": total, **values}, indent=1
            )
        )
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{model.size / 1e6:.2f}M parameters on mesh {plan.mesh}, ZeRO {plan.zero_stage}"
        f"{' over ' + ' '.join(plan.zero_over) if plan.zero_stage else ''}, "
        f"compute {plan.precision.compute}, storage {plan.precision.storage}",
        highlight=False,
    )
    for name in ("params", "master", "optimizer"):
        if parts[name]:
            console.print()
            console.print(describe.as_table(parts[name], title=name))
    console.print(f"\n{describe.format_bytes(total)} on each device between steps", style="bold", highlight=False)


def draw(model: Any, plan: Any, array: str, layout_name: str, out: Path | None) -> None:
    """A picture of one parameter, as text or as a PNG."""
    from meshpar.layout.describe import describe
    from meshpar.layout.draw import draw_array, draw_text, save_png
    from meshpar.layout.rules import did_you_mean
    from meshpar.mesh.build import abstract_mesh

    mesh = abstract_mesh(plan.mesh)
    rows = {row.path: row for row in describe(getattr(plan.layouts(), layout_name), model.axes, model.shapes, mesh)}
    if array not in rows:
        raise ValueError(f"no parameter {array!r}{did_you_mean(array, rows) or ';'} the model has {', '.join(rows)}")
    row = rows[array]
    title = f"{array} ({layout_name})"
    if out is None:
        print(draw_text(title, row.shape, row.axes, row.spec, mesh), end="")
    elif out.suffix != ".png":
        raise ValueError(f"--out {out} is not a .png file; pictures are PNG, name it {out.with_suffix('.png')}")
    else:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            save_png(draw_array(title, row.shape, row.axes, row.spec, mesh), out)
        except OSError as error:
            raise ValueError(f"--out {out} cannot be written ({error.strerror}); name another file") from None
        print(f"picture: {out}")


if __name__ == "__main__":
    sys.exit(main())
