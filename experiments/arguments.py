"""The flags that scripts share: which recipe, and which of its values are changed."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_recipe(
    parser: argparse.ArgumentParser,
    default: str = "llama_tiny_stdlib",
    what: str = "a function of experiments.recipes, or module:function",
) -> None:
    """`--recipe NAME`."""
    parser.add_argument("--recipe", default=default, help=f"{what} (default: %(default)s)")


def add_set(parser: argparse.ArgumentParser, what: str = "override one value of the recipe; repeat for more") -> None:
    """`--set KEY=VALUE`, any number of them, as `overrides`."""
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=what)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """`--devices N`."""
    parser.add_argument("--devices", type=int, help="emulate so many CPU devices, or use only so many accelerators")


def add_run(parser: argparse.ArgumentParser) -> None:
    """The flags of every run that trains, whatever its recipe is made from."""
    add_set(parser)
    add_devices(parser)
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/RECIPE-TIME)")
    parser.add_argument(
        "--resume",
        choices=("auto", "always", "never"),
        default="auto",
        help="go on from the newest checkpoint in --out; auto starts a run where there is none (default: %(default)s)",
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 of several listens; usually detected"
    )
    parser.add_argument("--processes", type=int, help="how many processes there are, with --coordinator")
    parser.add_argument("--process", type=int, help="which one this is, from 0, with --coordinator")
    parser.add_argument("--keys", action="store_true", help="list what --set takes, with its value in this recipe")
