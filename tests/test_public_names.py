"""`import meshpar` offers the names that it lists, imports nothing for them, and says what a wrong one should be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshpar

SOURCE = Path(meshpar.__file__)


@pytest.mark.parametrize("name", meshpar.__all__)
def test_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(meshpar, name)
    assert value.__name__ == name
    assert value.__doc__
    assert value.__module__ == f"meshpar.{meshpar._HOME[name]}"


def test_type_checkers_see_the_same_names_from_the_same_files() -> None:
    seen = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("meshpar.")
        for alias in node.names
        if alias.asname
    }
    assert seen == {name: f"meshpar.{home}" for name, home in meshpar._HOME.items()}


def test_dir_lists_the_public_names() -> None:
    assert set(dir(meshpar)) == set(meshpar.__all__)


def test_unknown_name_is_refused_with_the_close_one() -> None:
    with pytest.raises(AttributeError, match="no public name 'Plann'; did you mean 'Plan'"):
        meshpar.Plann  # noqa: B018


def test_import_meshpar_alone_imports_nothing_but_the_standard_library() -> None:
    script = "import sys; before = set(sys.modules); import meshpar; print(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=SOURCE.parents[1], check=True
    )
    tops = {name.split(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    assert tops == {"meshpar"}
