"""Who may import whom: a file imports from lower rows of `ROWS` and from its own folder.

Inside a row only single files may be imported, by what stands to their right: `mesh` reads `compat`, `forward` reads
`plan`. Folders of a row never import one another, so a folder can be read, tested and replaced alone. Imports inside
functions count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

ROWS = [
    "interfaces compat spelling mesh",
    "layout precision collectives",
    "parallel matmul attention moe losses pipeline",
    "module plan forward pipeline.executor hf",
    "train checkpoint generate",
    "planner check testing",
    "report launch convert",
    "cli __main__ __init__",
]
# What models and experiments see of meshpar. A model knows neither mesh nor plan.
MODELS_SEE = "interfaces module layout.constrain layout.dropout precision attention.attend matmul moe losses hf"

HEAVY = {"grain", "orbax", "matplotlib", "rich", "tokenizers", "gguf"}  # a second or more each: only inside functions

Imports = dict[str, set[str]]  # module -> modules of the repository that it imports


def modules() -> dict[str, Path]:
    """Every module of the three packages, by dotted name; a package is named as its `__init__`."""
    files = [path for top in ("meshpar", "models", "experiments") for path in (REPOSITORY / top).rglob("*.py")]
    return {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in files}


def imports_of(module: str, source: str, known: set[str]) -> set[str]:
    """The modules of the repository that `source`, the text of `module`, imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            package = ".".join(part for part in (base, node.module) if part)
            names = [f"{package}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("meshpar", "models", "experiments"):
                here = {name, f"{name}.__init__", name.rpartition(".")[0]} & known
                found.add(max(here, key=len) if here else f"{name.rpartition('.')[0] or name}.__init__")
    return found - {module}


def place(module: str) -> tuple[int, int] | None:
    """Row and column in `ROWS` of a module of meshpar."""
    name = module.removeprefix("meshpar.")
    for row, entries in enumerate(ROWS):
        for column, entry in enumerate(entries.split()):
            if within(name, entry) and not (entry == "pipeline" and within(name, "pipeline.executor")):
                return row, column
    return None


def within(name: str, entry: str) -> bool:
    return name == entry or name.startswith(entry + ".")


def folder(module: str) -> str:
    """What the table and the search for cycles treat as one thing."""
    top, *rest = module.split(".")
    if top == "meshpar" and (at := place(module)):
        return f"meshpar.{ROWS[at[0]].split()[at[1]]}"
    return ".".join([top, *rest[:1]]) if len(rest) > 1 or top == "meshpar" else top


def violations(imports: Imports, known: set[str]) -> list[str]:
    """Every import that breaks the table, as a sentence."""
    wrong = []
    for module in sorted(known):
        if module.startswith("meshpar.") and place(module) is None:
            wrong.append(f"{module} is in no row; give it a place in ROWS")
    for module, target in [(m, t) for m in sorted(imports) for t in sorted(imports[m])]:
        if not allowed(module, target, known):
            wrong.append(f"{module} may not import {target}")
    return wrong


def allowed(module: str, target: str, known: set[str]) -> bool:
    top, target_top = module.split(".")[0], target.split(".")[0]
    if top == "experiments" or (top == target_top == "models"):
        return True
    if target_top != "meshpar":
        return False  # nothing imports experiments, and meshpar no models
    if top == "models":
        return any(within(target.removeprefix("meshpar."), entry) for entry in MODELS_SEE.split())
    here, there = place(module), place(target)
    if here is None or there is None or folder(module) == folder(target):
        return True  # a missing place is a violation of its own
    return there[0] < here[0] or (there[0] == here[0] and there[1] < here[1] and folder(target) in known)


def read() -> tuple[Imports, set[str]]:
    found = modules()
    return {module: imports_of(module, path.read_text(), set(found)) for module, path in found.items()}, set(found)


def test_every_import_follows_the_table() -> None:
    found = violations(*read())
    assert found == []


def test_folders_do_not_import_in_a_circle() -> None:
    imports, _ = read()
    graph: dict[str, set[str]] = {}
    for module, targets in imports.items():
        graph.setdefault(folder(module), set()).update(folder(target) for target in targets)
    for name, targets in graph.items():
        targets.discard(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("meshpar.mesh.spec", "from meshpar.layout.rules import Rule"),
        ("meshpar.layout.rules", "import meshpar.precision.policy"),
        ("meshpar.parallel.zero", "def f():\n    from meshpar import plan"),
        ("meshpar.plan", "from meshpar.forward import Forward"),
        ("meshpar.module", "from .train import step"),
        ("meshpar.pipeline.table", "from meshpar.pipeline.executor import run"),
        ("meshpar.train.step", "from meshpar.checkpoint.manager import Manager"),
        ("meshpar.checkpoint.manager", "from ..train.state import TrainState"),
        ("meshpar.train.step", "from meshpar import Plan"),
        ("meshpar.train.step", "from models.llama.model import Llama"),
        ("meshpar.train.recipe", "import experiments.recipes"),
        ("meshpar.hf.folder", "from meshpar.train.step import Objective"),
        ("meshpar.hf.folder", "import models.llama.hf"),
        ("meshpar.newcomer", ""),
        ("models.llama.model", "from meshpar.mesh.build import build_mesh"),
        ("models.llama.model", "from meshpar.plan import Plan"),
        ("models.llama.model", "from meshpar.layout.resolve import place"),
        ("models.llama.model", "from meshpar.attention import reference"),
        ("models.nn.norm", "import meshpar"),
        ("models.nn.norm", "from experiments.recipes import llama"),
    ],
)
def test_a_planted_import_is_found(module: str, statement: str) -> None:
    known = set(modules()) | {module, "meshpar.checkpoint.manager", "meshpar.train.state", "meshpar.pipeline.executor"}
    found = violations({module: imports_of(module, statement, known)}, known)
    assert [sentence for sentence in found if sentence.startswith(f"{module} ")]


def test_heavy_packages_are_imported_inside_functions_and_flax_in_one_file() -> None:
    wrong = []
    for module in (name for name in modules() if name.startswith("meshpar.")):
        for package, line, lazy in external_imports(modules()[module].read_text()):
            if (package in HEAVY and not lazy) or (package == "flax" and module != "meshpar.module"):
                wrong.append(f"{module}, line {line}: {package}")
    assert wrong == []


def external_imports(source: str) -> list[tuple[str, int, bool]]:
    """(top package, line, whether it runs only in a call or for a type checker) of each import."""
    found = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found.extend((name.split(".")[0], node.lineno, lazy) for name in names)
        lazy |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        lazy |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, lazy)

    visit(ast.parse(source), False)
    return found


def test_import_meshpar_is_light() -> None:
    script = f"import sys, meshpar; print(*sorted({HEAVY | {'flax'}!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.split() == []
