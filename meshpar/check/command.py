"""Runs a recipe on two meshes and compares everything that must not depend on where a step runs.

    python -m meshpar check experiments.recipes:llama_tiny_stdlib --mesh "data=2 tensor=4"
    python -m meshpar check experiments.recipes:llama_tiny_stdlib --mesh "fsdp=4 tensor=2" --against "tensor=2"
    python -m meshpar check mypackage.recipes:mine --mesh "data=2 fsdp=2" --set accumulate=2 --set remat=full
    python -m meshpar check llama_micro --fuzz 20 --seconds 300                     # random meshes and features
    python -m meshpar check llama_micro --mesh "tensor=4" --plant "local softmax"   # a fault, to see it found

Activations, losses, raw gradients, their norm and parameters must agree to rounding; copies and repeated steps to the
bit. The reference has none of the plan's features: one microbatch, ZeRO 0, no loss scale, nothing rematerialised. On
CPU the larger mesh is emulated. Where something differs, axes and features are taken away until only the cause is left.

Exit codes: 0 equal; 1 something differs; 2 a bad value, before anything ran.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from meshpar.check.case import Case
from meshpar.check.explain import WHERE_TO_LOOK
from meshpar.check.faults import FAULTS, plant
from meshpar.check.fuzz import fuzz
from meshpar.check.invariance import Checker, Findings, find_cause
from meshpar.layout.rules import did_you_mean
from meshpar.mesh.devices import choose_devices, use_compilation_cache
from meshpar.mesh.distributed import joined
from meshpar.mesh.spec import MeshSpec
from meshpar.train.recipe import apply_overrides, load_recipe


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m meshpar check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="module:function, or a function of experiments.recipes")
    parser.add_argument("--mesh", help="the mesh to check (default: the recipe's)")
    parser.add_argument("--against", default="data=1", help="the mesh of the reference (default: %(default)s)")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a value of the recipe, such as accumulate=2; may be given again",
    )
    parser.add_argument("--steps", type=int, default=2, help="how many to compare (default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=("fp32", "plan"),
        default="fp32",
        help="compute in fp32, where few faults hide behind rounding, or as the plan says (default: %(default)s)",
    )
    parser.add_argument("--random-data", action="store_true", help="random tokens instead of the recipe's text")
    parser.add_argument("--no-masks", action="store_true", help="every target counts (default: four fifths of them)")
    parser.add_argument("--no-shrink", action="store_true", help="report a difference without looking for its cause")
    parser.add_argument("--devices", type=int, help="CPU devices to emulate (default: the mesh's product, or 8)")
    parser.add_argument("--fuzz", type=int, metavar="N", help="check N random meshes and features, on random tokens")
    parser.add_argument("--seconds", type=float, default=math.inf, help="with --fuzz: stop after so long")
    parser.add_argument("--seed", type=int, default=0, help="of --fuzz (default: %(default)s)")
    parser.add_argument("--plant", metavar="FAULT", help=f"run with a deliberate fault: {', '.join(FAULTS)}")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON and nothing else")
    options = parser.parse_args(arguments)
    say = (lambda text: None) if options.json else (lambda text: print(f"... {text}", file=sys.stderr, flush=True))
    try:
        planted = _planted(options.plant)
        with planted:
            return _fuzz(options, say) if options.fuzz is not None else _check(options, say)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _planted(name: str | None) -> contextlib.AbstractContextManager[Any]:
    if name is None:
        return contextlib.nullcontext()
    if name not in FAULTS:
        hint = did_you_mean(name, FAULTS) or ";"
        raise ValueError(f"unknown fault {name!r}{hint} there are: {', '.join(FAULTS)}")
    return plant(FAULTS[name])


def _case(options: argparse.Namespace) -> Case:
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps} is below 1; 2 shows what the first update did")
    against = MeshSpec.parse(options.against)
    if against.has_free_axis:
        raise ValueError(f"--against {against} has a free axis; give its size")
    if joined().processes > 1:
        raise ValueError(f"check runs in one process and there are {joined().processes}; start it by itself")
    base = load_recipe(options.recipe)
    changes = {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in options.overrides)}
    of_mesh = [key for key in changes if key.removeprefix("plan.").split(".")[0] == "mesh"]
    if options.mesh is not None:
        if of_mesh:
            raise ValueError(f"--mesh {options.mesh} and --set {of_mesh[0]} both give the mesh; leave one of them out")
        mesh = MeshSpec.parse(options.mesh)
        apply_overrides(base, [*options.overrides, f"mesh={mesh}"])
    else:
        mesh = apply_overrides(base, options.overrides).plan.mesh
    for key in of_mesh:
        del changes[key]
    return Case(
        name=options.recipe,
        base=base,
        mesh=mesh,
        against=against,
        changes=changes,
        precision=options.precision,
        masked=not options.no_masks,
        random_data=options.random_data,
        steps=options.steps,
        planted=options.plant,
    )


def _check(options: argparse.Namespace, say: Any) -> int:
    case = _case(options)
    larger = max(case.mesh, case.against, key=lambda mesh: math.inf if mesh.has_free_axis else mesh.product)
    devices = choose_devices(larger, options.devices)
    case = dataclasses.replace(case, mesh=case.mesh.resolve(len(devices)) if case.mesh.has_free_axis else case.mesh)
    case.check()
    use_compilation_cache()
    checker = Checker(say=say)
    findings = checker.check(case)
    if not findings.ok and not options.no_shrink:
        findings = find_cause(checker, findings, say)
    if options.json:
        print(json.dumps(findings.to_json(), indent=1))
    else:
        print_findings(findings)
    return 0 if findings.ok else 1


def _fuzz(options: argparse.Namespace, say: Any) -> int:
    case = _case(options)
    if options.fuzz < 1:
        raise ValueError(f"--fuzz {options.fuzz} is below 1; give a number of cases")
    if options.mesh is not None:
        raise ValueError(f"--fuzz draws meshes and --mesh {options.mesh} gives one; leave one of them out")
    devices = len(choose_devices(MeshSpec(data=-1), options.devices))
    if case.against.product > devices:
        raise ValueError(f"--against {case.against} needs {case.against.product} of {devices} devices; give --devices")
    use_compilation_cache()
    checker = Checker()

    def on_case(number: int, findings: Findings) -> None:
        drawn = f"{findings.case.mesh}  {_spelled(findings.case.changes)}"
        say(f"{number}/{options.fuzz}  {findings.worst:5.2f} of what is allowed  {drawn}")

    found = fuzz(
        case,
        count=options.fuzz,
        seconds=options.seconds,
        seed=options.seed,
        devices=devices,
        on_case=on_case,
        checker=checker,
    )
    findings = found.failure
    if findings is not None and not options.no_shrink:
        findings = find_cause(checker, findings, say)
    if options.json:
        print(
            json.dumps(
                {
                    "cases": found.cases,
                    "seconds": found.seconds,
                    "drawn": dict(found.drawn),
                    "failure": None if findings is None else findings.to_json(),
                },
                indent=1,
            )
        )
    elif findings is not None:
        print_findings(findings)
    else:
        refused = f"{found.skipped} more were drawn and refused by the plan"
        print(f"{found.cases} random cases equal their references, in {found.seconds:.0f} s; {refused}")
    return 1 if findings is not None else 0


def print_findings(findings: Findings) -> None:
    """A table of what was compared, then a verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    case = findings.case
    table = Table(title=f"{case.name}: {case.mesh} against {case.against}", title_justify="left")
    table.add_column("compared")
    table.add_column("how many", justify="right")
    table.add_column("worst, of what is allowed", justify="right")
    table.add_column("result")
    for row in findings.rows:
        worst = "" if math.isnan(row.worst) else f"{row.worst:.2g}"
        result = f"[red]{row.differences} differ[/red]" if row.differences else "[green]equal[/green]"
        table.add_row(row.stage, str(row.compared), worst, result)
    console.print(table)
    console.print(f"allowed: {findings.tolerance}", highlight=False)
    if findings.ok:
        console.print(f"[green]equal[/green]: {case.mesh} computes what {case.against} does", highlight=False)
        return
    first = findings.first
    assert first is not None
    console.print(f"[red]first difference[/red], in the order of computation: {_plain(first)}", highlight=False)
    console.print(f"where to look: {WHERE_TO_LOOK[first.stage]}", highlight=False)
    others = findings.differences[1:]
    for difference in others[:12]:
        console.print(f"  {_plain(difference)}", highlight=False)
    if len(others) > 12:
        console.print(f"  and {len(others) - 12} more; --json lists all", highlight=False)
    if findings.smallest is not None:
        needs = ", ".join(findings.cause) or "neither a mesh nor a feature: one device shows it too"
        console.print(f"[bold]cause[/bold]: it needs {needs}", highlight=False)
        if findings.there is not None and findings.there.text != first.text:
            console.print(f"  there: {_plain(findings.there)}", highlight=False)
        console.print("smallest command that shows it:", highlight=False)
        console.print(f"  {findings.smallest.command()}", highlight=False, soft_wrap=True, markup=False)


def _plain(difference: Any) -> str:
    return str(difference).replace("[", r"\[")


def _spelled(changes: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in changes.items())
