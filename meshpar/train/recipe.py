"""Recipes: everything that a run is, as one frozen tree of values that can be overridden by name and saved as JSON.

A recipe is made by a function; `--set train.steps=200` replaces one value of its tree, read by the type of its field.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from meshpar.layout.rules import did_you_mean
from meshpar.train.run import Recipe
from meshpar.train.values import dataclass_members, fields, from_text, has_default, load_module, show, type_name

T = TypeVar("T")

# Keys of this part may leave its name out: mesh is plan.mesh, precision.compute is plan.precision.compute.
SHORT: Final = "plan"


def load_recipe(name: str, *, default_module: str = "experiments.recipes") -> Recipe:
    """The recipe that "NAME" (a function of the default module) or "module:function" makes.

    Raises:
        ValueError: there is no such module, it defines no such function, or that one needs arguments or returns
            something else.
    """
    module_name, _, function = name.partition(":") if ":" in name else (default_module, "", name)
    module = load_module(module_name)
    known = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    if function not in known:
        hint = did_you_mean(function, known) or ";"
        raise ValueError(f"unknown recipe {name!r}{hint} {module_name} has {', '.join(known)}")
    needed = [
        argument.name
        for argument in inspect.signature(known[function]).parameters.values()
        if argument.default is argument.empty and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(f"recipe {name!r} needs {', '.join(needed)}; name a function that is called without arguments")
    recipe = known[function]()
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"recipe {name!r} returned a {type(recipe).__name__}, not a meshpar.Recipe; name a function that does"
        )
    return recipe


def apply_overrides(recipe: T, overrides: Iterable[str]) -> T:
    """The recipe with `key=value` strings applied, a later one over an earlier one.

    All are set before the tree is built again, so what its dataclasses check is checked about the final values, in
    whatever order they were given.

    Args:
        recipe: a frozen dataclass, its parts dataclasses or plain values.
        overrides: for example "train.steps=1_000", "mesh=data=2 tensor=4", "mesh.tensor=4" or "zero=none"; how a value
            is spelled, `meshpar.train.values.from_text` says.

    Raises:
        ValueError: an entry is not `key=value`, its key does not exist or its value is of another type, or what the
            dataclasses themselves say about the new values.
    """
    root = _open(recipe, "")
    for text in overrides:
        key, equals, value = (piece.strip() for piece in text.partition("="))
        if not (key and equals):
            raise ValueError(f"override {text!r} is not key=value; write for example train.steps=200")
        part, name = _find(root, key, recipe)
        now = part.values.get(name)
        part.values[name] = from_text(
            value, fields(part.cls)[name], key, now.close() if isinstance(now, _Open) else now
        )
    closed: T = root.close()
    return closed


@dataclass
class _Open:
    """A dataclass while it is edited: its class, the values of its fields so far, and the key that leads to it."""

    cls: type
    values: dict[str, Any]
    key: str

    def close(self) -> Any:
        """The edited dataclass, built from the inside out."""
        missing = [name for name in fields(self.cls) if name not in self.values and not has_default(self.cls, name)]
        if missing:
            raise ValueError(
                f"{self.key} is none in this recipe, and its {missing[0]} has no default; set {self.key}.{missing[0]}"
            )
        return self.cls(**{n: value.close() if isinstance(value, _Open) else value for n, value in self.values.items()})


def _open(value: Any, key: str) -> _Open:
    return _Open(type(value), {name: getattr(value, name) for name in fields(type(value))}, key)


def _find(root: _Open, key: str, recipe: Any) -> tuple[_Open, str]:
    """The part that holds what `key` names, and its field; every part on the way is opened."""
    part, names = root, key.split(".")
    if names[0] not in root.values and names[0] in _short_names(recipe):
        names = [SHORT, *names]
    for depth, name in enumerate(names):
        if name not in fields(part.cls):
            raise ValueError(_unknown(key, part, recipe))
        if depth < len(names) - 1:
            inner = _open_field(part, name, key)
            part.values[name] = inner
            part = inner
    return part, names[-1]


def _open_field(part: _Open, name: str, key: str) -> _Open:
    value, path = part.values.get(name), f"{part.key}.{name}".lstrip(".")
    if isinstance(value, _Open):
        return value
    if dataclasses.is_dataclass(value):
        return _open(value, path)
    kinds = dataclass_members(fields(part.cls)[name])
    if value is None and len(kinds) == 1:
        return _Open(kinds[0], {}, path)  # none so far: its defaults, and what is set
    raise ValueError(f"unknown key {key!r}: {path} is {show(value)} and has no parts; set {path} itself")


def _short_names(recipe: Any) -> list[str]:
    return list(fields(type(getattr(recipe, SHORT)))) if hasattr(recipe, SHORT) else []


def _unknown(key: str, part: _Open, recipe: Any) -> str:
    here = list(fields(part.cls))
    path = part.key if key.startswith(f"{SHORT}.") else part.key.removeprefix(f"{SHORT}.")
    known = [f"{path}.{name}".lstrip(".") for name in here] + [entry.key for entry in describe_keys(recipe)]
    same = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    hint = f"; did you mean {same[0]!r}?" if same else did_you_mean(key, dict.fromkeys(known)) or ";"
    return f"unknown key {key!r}{hint} {path or 'the recipe'} has {', '.join(here)}"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key that can be overridden: what it takes, what it is now, and the comment in its class."""

    key: str
    type: str
    value: str
    comment: str


def describe_keys(recipe: Any) -> list[Key]:
    """Every key of a recipe, in the order of its fields."""
    return _describe(recipe, "", frozenset(fields(type(recipe))))


def _describe(part: Any, prefix: str, root_names: frozenset[str]) -> list[Key]:
    found = []
    comments = _comments(type(part))
    for name, hint in fields(type(part)).items():
        value, key = getattr(part, name), prefix + name
        if dataclasses.is_dataclass(value) and not hasattr(value, "parse"):
            found += _describe(value, f"{key}.", root_names)
        else:
            short = key.removeprefix(f"{SHORT}.")
            key = key if short.split(".")[0] in root_names else short
            found.append(Key(key=key, type=type_name(hint), value=show(value), comment=comments.get(name, "")))
    return found


def _comments(cls: type) -> dict[str, str]:
    """The first sentence of the comment behind or above each field."""
    try:
        lines = inspect.getsource(cls).splitlines()
    except OSError:  # a class made without a file
        return {}
    found, above = {}, []
    for line in lines:
        if comment := re.fullmatch(r"\s+#\s*(.*)", line):
            above.append(comment[1])
        elif field := re.match(r"    (\w+)\s*:[^#]*(?:#\s*(.*))?", line):
            found[field[1]] = re.split(r"(?<=[.]) ", " ".join(above) or field[2] or "")[0]
            above = []
        else:
            above = []
    return found
