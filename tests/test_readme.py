"""The pages are true: their code runs, their command lines and plans are read, their links and names exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax
import pytest

import meshpar as mp
from meshpar.layout.describe import Leaf
from meshpar.train.data import DataConfig
from meshpar.train.optimizer import OptimizerConfig
from meshpar.train.recipe import apply_overrides, load_recipe
from meshpar.train.run import Recipe, RunConfig
from models.llama import LlamaConfig
from tests.test_imports import ROWS

REPOSITORY = Path(__file__).parents[1]
PAGES = ("README.md", "meshpar/README.md", "models/README.md", "experiments/README.md")
TEXT = "".join(f"def function_{i}(x):\n    return x + {i}\n" for i in range(400))


def page(name: str) -> str:
    return (REPOSITORY / name).read_text()


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.DOTALL | re.MULTILINE)


def rows_of_table(name: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first line is `heading`."""
    table = page(name).partition(heading)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def replaced(code: str, replacements: dict[str, str]) -> str:
    """Code with other values in place; each old one must be there once."""
    for old, new in replacements.items():
        assert code.count(old) == 1, f"{old}: {code.count(old)} times"
        code = code.replace(old, new)
    return code


# --- README.md -------------------------------------------------------------------------------------------------------


def test_shortest_run_of_the_readme_trains_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.py").write_text(TEXT)
    (code,) = blocks("README.md", "python")
    tiny = {
        "steps, rows, seq = 100, 16, 128": "steps, rows, seq = 6, 4, 32",
        "vocab=1024, layers=4, embed=128": "vocab=257, layers=1, embed=32",
        "mlp=384": "mlp=64",
        'source="stdlib", tokenizer="bpe:1024"': f'source="{tmp_path / "text.py"}", tokenizer="bytes"',
        "warmup=20": "warmup=1",
        "new_tokens=64": "new_tokens=5",
    }
    names: dict[str, Any] = {"__name__": "shortest"}
    exec(compile(replaced(code, tiny), "README.md", "exec"), names)
    assert int(names["state"].step) == 6
    steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(step) for step, _ in steps[:6]] == [1, 2, 3, 4, 5, 6]
    assert float(steps[5][1]) < float(steps[0][1])
    assert len(names["texts"][0]) == len("def ") + 5


def test_shortest_run_of_the_readme_is_about_fifteen_lines() -> None:
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 18


@pytest.mark.parametrize("row", rows_of_table("README.md", "| what | command line | Python |"), ids=lambda row: row[0])
def test_both_spellings_of_a_plan_in_the_readme_are_equal(row: list[str]) -> None:
    _, command, python = (cell.strip("`") for cell in row)
    plan = eval(python, {name: getattr(mp, name) for name in ("Plan", "MeshSpec", "Policy", "LossScaling")})
    recipe = Recipe(
        model=LlamaConfig(vocab=90, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_seq=32),
        plan=mp.Plan(),
        data=DataConfig(),
        optimizer=OptimizerConfig(),
        train=RunConfig(steps=1, batch=8),
    )
    overridden = apply_overrides(recipe, sets_of(shlex.split(command))).plan
    assert overridden == plan
    plan = plan.on(8 if plan.mesh.has_free_axis else plan.mesh.product)
    plan.check(mp.abstract(recipe.model.build, recipe.model), batch=8, seq=32)


def test_parallelism_table_has_every_field_of_plan() -> None:
    python = " ".join(row[2] for row in rows_of_table("README.md", "| what | command line | Python |"))
    missing = [name for name in mp.Plan.__dataclass_fields__ if f"{name}=" not in python]
    assert missing == []


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, list[str]]]:
    """(module of experiments, arguments) of each command line on the pages."""
    found = []
    for name in PAGES:
        for line in re.findall(r"python -m experiments\.[^`\n]*", page(name)):
            words = shlex.split(line, comments=True)
            found.append((words[2].removeprefix("experiments."), words[3:]))
    return found


def sets_of(words: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[])
    return list(parser.parse_known_args(words)[0].set)


def test_commands_on_the_pages_are_found() -> None:
    files = (REPOSITORY / "experiments").glob("*.py")
    scripts = {path.stem for path in files if 'if __name__ == "__main__":' in path.read_text()}
    assert len(scripts) > 10
    assert {module for module, _ in commands()} == scripts


@pytest.mark.parametrize(("module", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_command_on_a_page_has_known_flags_keys_and_recipe(module: str, words: list[str]) -> None:
    source = page(f"experiments/{module}.py")
    if "add_run(" in source:
        source += page("experiments/arguments.py")
    for name in ("recipe", "set", "devices"):
        source = source.replace(f"add_{name}(", f'"--{name}"')  # see experiments/arguments.py
    for flag in (word for word in words if word.startswith("--")):
        assert f'"{flag}"' in source, flag
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words else "llama_tiny_stdlib"
    if recipe != "NAME" and ":" not in recipe:
        apply_overrides(load_recipe(recipe), sets_of(words))


def test_every_recipe_is_in_the_table() -> None:
    known = re.findall(r"^def ([a-z]\w*)\(\) -> Recipe:", page("experiments/recipes.py"), re.MULTILINE)
    listed = [row[0].strip("`") for row in rows_of_table("experiments/README.md", "| recipe | model |")]
    assert sorted(listed) == sorted(known)


def test_every_script_is_in_the_table() -> None:
    scripts = {path.name for path in (REPOSITORY / "experiments").glob("*.py")} - {"__init__.py", "recipes.py"}
    assert scripts == set(re.findall(r"\]\((\w+\.py)\)", page("experiments/README.md")))


# --- models/README.md ------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's three blocks as a module; importing it trains on two meshes and compares their losses."""
    (tmp_path / "mine_of_the_page.py").write_text("\n\n".join(blocks("models/README.md", "python")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(mp, "emulate", lambda devices: None)  # tests emulate 8
    return importlib.import_module("mine_of_the_page")


def test_own_model_of_the_page_trains_alike_on_a_mesh_and_splits_every_matrix(mine: Any) -> None:
    assert mine.on_mesh == pytest.approx(mine.alone, abs=1e-5)
    assert mine.alone[-1] < mine.alone[0] - 0.05  # equal, and not because nothing happens
    params: list[Leaf] = mp.describe_state(mine.model, optax.sgd(1.0), mine.plan)["params"]
    whole = {leaf.path for leaf in params if leaf.is_whole}
    assert whole == {"positions", "scale", "blocks/scale"}
    recipe = mine.recipe()
    recipe.plan.check(mp.abstract(recipe.model.build, recipe.model), batch=recipe.train.batch, seq=recipe.data.seq)


# --- names and links -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    folder = (REPOSITORY / name).parent
    broken = [link for link in re.findall(r"\]\(([^)#:]+)\)", page(name)) if not (folder / link).exists()]
    assert broken == []


def test_functions_that_the_design_page_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", page("meshpar/README.md"))
    assert len(named) > 30
    missing = [f"{path}:{name}" for path, name in named if name not in defined(path)]
    assert missing == []


def defined(path: str) -> set[str]:
    """Functions, classes and methods of a file; paths are of meshpar/ unless they begin with another folder."""
    here = REPOSITORY / (path if path.startswith(("models/", "experiments/", "tests/")) else f"meshpar/{path}")
    found = set()
    for node in ast.parse(here.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_table_of_layers_is_the_one_that_is_enforced() -> None:
    rows = rows_of_table("meshpar/README.md", "| row | here now | names reserved |")
    assert [set(re.findall(r"`([\w.]+)`", " ".join(row[1:]))) for row in rows] == [set(row.split()) for row in ROWS]
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[1]):
            assert (REPOSITORY / "meshpar" / name).is_dir() or (REPOSITORY / "meshpar" / f"{name}.py").is_file(), name


def test_glossary_lists_the_axes() -> None:
    from meshpar.layout.rules import LOGICAL_AXES
    from meshpar.mesh.axes import AXES

    glossary = page("meshpar/README.md").partition("## Glossary")[2]
    assert f"`{' '.join(AXES)}`" in glossary
    assert f"`{' '.join(LOGICAL_AXES)}`" in glossary
