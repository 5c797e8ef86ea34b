"""The flags that scripts share: which recipe, and which of its values are changed."""

from __future__ import annotations

import argparse


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
