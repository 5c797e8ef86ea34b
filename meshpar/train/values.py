"""Values by their type annotation: from the text of a command line, to text, and to JSON and back.

Both directions know what the fields of frozen dataclasses are: numbers, text, choices, tuples, mappings, paths,
functions, other dataclasses, and unions of these with None. Anything else stays in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from meshpar.layout.rules import did_you_mean

T = TypeVar("T")


def fields(cls: type) -> dict[str, Any]:
    """The type of each field that a dataclass is built from, by name."""
    hints = _hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def members(hint: Any) -> tuple[Any, ...]:
    """What a union is of; any other type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def dataclass_members(hint: Any) -> list[type]:
    """The dataclasses that a field may hold."""
    return [member for member in members(hint) if isinstance(member, type) and dataclasses.is_dataclass(member)]


# --- text ------------------------------------------------------------------------------------------------------------


def from_text(text: str, hint: Any, key: str, now: Any = None) -> Any:
    """The value of type `hint` that `text` spells; `show` is its inverse.

    Args:
        text: "200", "1e3", "true", "none", "a,b" for a tuple, "a:b,c:d" for a mapping (a tuple in it is spaced, as in
            "a:b c"), "module:function", or what the `parse` method of a dataclass reads.
        hint: the resolved annotation of the field. Of a union, the first member that can read the text does.
        key: the field's name, for errors.
        now: the present value, for errors.

    Raises:
        ValueError: no value of that type is spelled so.
    """
    if type(None) in members(hint) and text.lower() in ("none", "null"):
        return None
    try:
        return _read(text, hint)
    except _Mismatch:
        pass
    parts = dataclass_members(hint) or ([type(now)] if dataclasses.is_dataclass(now) else [])
    if parts:
        first = f"{key}.{next(iter(fields(parts[0])))}"
        raise ValueError(
            f"{key}={text} cannot set a {parts[0].__name__} as a whole; set its parts, such as {first}=..."
        )
    example = _example(hint, now)
    if example is None:
        raise ValueError(f"{key}={text} cannot be read, a {type_name(hint)} has no spelling; set {key} in Python")
    choices = [str(choice) for member in members(hint) if get_origin(member) is Literal for choice in get_args(member)]
    hint_at = did_you_mean(text, choices) or ";"
    raise ValueError(f"{key}={text} should be {type_name(hint)}{hint_at} write for example {key}={example}")


class _Mismatch(Exception):
    """The text spells no value of this type; another member of a union may take it."""


def _read(text: str, hint: Any) -> Any:
    for member in members(hint):
        try:
            return _read_member(text, member)
        except _Mismatch:
            continue
    raise _Mismatch


def _read_member(text: str, kind: Any) -> Any:
    origin, args = get_origin(kind) or kind, get_args(kind)
    if dataclasses.is_dataclass(origin) and hasattr(origin, "parse"):
        return origin.parse(text)
    if origin is str:
        return text
    if origin is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if origin is int:
        return _read_int(text)
    if origin is float:
        return _read_float(text)
    if origin is Path and text:
        return Path(text)
    if origin is Literal and text in map(str, args):
        return next(choice for choice in args if str(choice) == text)
    if origin is tuple:
        pieces = text.replace(",", " ").split()
        kinds = args[:1] * len(pieces) if args[-1] is ... else args
        if len(pieces) == len(kinds):
            return tuple(_read(piece, kind) for piece, kind in zip(pieces, kinds, strict=True))
    if _is_mapping(origin):
        pairs = [piece.partition(":") for piece in text.split(",") if piece.strip()]
        if all(colon for _, colon, _ in pairs):
            names = [name.strip() for name, _, _ in pairs]
            if doubled := [name for name in names if names.count(name) > 1]:
                raise ValueError(
                    f"{doubled[0]} is named twice in {text!r}; give all its values once, as in {doubled[0]}:a b"
                )
            return {_read(name.strip(), args[0]): _read(value.strip(), args[1]) for name, _, value in pairs}
    if _is_function(origin) and ":" in text:
        return load(text)
    raise _Mismatch


def _read_int(text: str) -> int:
    if re.fullmatch(r"[+-]?\d+(_\d+)*", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d+(\.\d+)?[eE]\+?\d+", text) and float(text).is_integer():
        return int(float(text))  # 1e6, 2.5e3
    raise _Mismatch


def _read_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _Mismatch from None
    if not math.isfinite(value):
        raise _Mismatch
    return value


def show(value: Any) -> str:
    """A value as `from_text` reads it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{show(inner).replace(',', ' ')}" for name, inner in value.items())
    if isinstance(value, tuple):
        return ",".join(show(inner) for inner in value)
    return function_name(value) if callable(value) else str(value)


def type_name(hint: Any) -> str:
    """A type as the end of "should be ...": "an integer or none"."""
    names = []
    for member in members(hint):
        origin, args = get_origin(member) or member, get_args(member)
        plain = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
        if origin in plain:
            names.append(plain[origin])
        elif origin is type(None):
            names.append("none")
        elif origin is Literal:
            names.append(" or ".join([", ".join(map(str, args[:-1])), str(args[-1])] if args[1:] else [str(args[0])]))
        elif origin is tuple:
            names.append("a list" if args[-1] is ... else f"a list of {len(args)}")
        elif _is_mapping(origin):
            names.append("a list of name:value")
        elif _is_function(origin):
            names.append("a function")
        else:
            names.append(getattr(origin, "__name__", str(origin)))
    return " or ".join(names)


def _example(hint: Any, now: Any) -> str | None:
    """A text that can be read as `hint`: the present value if it says something, else a typical one."""
    candidates = [show(now)] if now not in (None, (), {}, "") else []
    candidates += ["true", "8", "0.1", "a,b", "a:b,c:d", "true,false", "1,2"]
    candidates += [str(choice) for member in members(hint) for choice in get_args(member)]
    if any(_is_function(get_origin(member) or member) for member in members(hint)):
        return "module:function"
    for text in candidates:
        try:
            _read(text, hint)
        except (_Mismatch, ValueError):
            continue
        return text
    return None


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(value: Any, hint: Any = None) -> Any:
    """A dataclass, or a value in one, as JSON values; `from_json` gives an equal one.

    A dataclass with a `parse` method becomes its text. Where the type of a field does not say which dataclass it holds,
    the key "class" does. Functions become "module:name".

    Raises:
        ValueError: a value has no JSON form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if hasattr(type(value), "parse"):
            return str(value)
        known = hint is None or dataclass_members(hint) == [type(value)]
        named = {} if known else {"class": function_name(type(value))}
        return named | {name: to_json(getattr(value, name), kind) for name, kind in fields(type(value)).items()}
    kinds = [get_args(member) for member in members(hint)]
    if isinstance(value, Mapping):
        inner = next((args[1] for args in kinds if len(args) == 2), Any)
        return {str(name): to_json(entry, inner) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        inner = next((args[0] for args in kinds if args), Any)
        return [to_json(entry, inner) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return function_name(value)
    raise ValueError(f"{value!r} has no JSON form; use numbers, text, tuples, mappings, functions and dataclasses")


def from_json(cls: type[T], values: Mapping[str, Any], key: str = "") -> T:
    """The dataclass that `to_json` wrote. A key that is missing takes the default of its field.

    Raises:
        ValueError: a key does not exist, one without a default is missing, or a value is of another type.
    """
    known = fields(cls)
    for name in values:
        if name not in known:
            hint = did_you_mean(key + name, [key + other for other in known]) or ";"
            raise ValueError(
                f"unknown key {key + name!r}{hint} {key.rstrip('.') or cls.__name__} has {', '.join(known)}"
            )
    missing = [name for name in known if name not in values and not has_default(cls, name)]
    if missing:
        raise ValueError(f"{key + missing[0]} is missing and has no default; add it")
    return cls(**{name: _from_json(value, known[name], key + name) for name, value in values.items()})


def _from_json(value: Any, hint: Any, key: str) -> Any:
    kinds = members(hint)
    if isinstance(value, dict) and "class" in value:
        return from_json(load(value["class"]), {name: v for name, v in value.items() if name != "class"}, f"{key}.")
    if isinstance(value, dict) and dataclass_members(hint):
        return from_json(dataclass_members(hint)[0], value, f"{key}.")
    if isinstance(value, dict):
        for args in _args(kinds, _is_mapping):
            return {_from_json(n, args[0], key): _from_json(inner, args[1], f"{key}.{n}") for n, inner in value.items()}
    if isinstance(value, list):
        for args in _args(kinds, lambda kind: kind is tuple):
            inner_kinds = args[:1] * len(value) if args[-1] is ... else args
            if len(inner_kinds) == len(value):
                return tuple(_from_json(inner, kind, key) for inner, kind in zip(value, inner_kinds, strict=True))
    if hint is Any or type(value) in kinds or any(value in args for args in _args(kinds, lambda kind: kind is Literal)):
        return value
    if type(value) is int and float in kinds:
        return float(value)
    if isinstance(value, str):
        return from_text(value, hint, key)
    raise ValueError(f"{key}={value!r} should be {type_name(hint)}; write one of that type")


def _args(kinds: tuple[Any, ...], chosen: Callable[[Any], bool]) -> list[tuple[Any, ...]]:
    """The arguments of the kinds whose origin is chosen: [(str, int)] for the mapping in Mapping[str, int] | None."""
    return [get_args(kind) for kind in kinds if chosen(get_origin(kind))]


# --- functions by name -----------------------------------------------------------------------------------------------


def load(name: str) -> Any:
    """The function or class that "module:name" names.

    Raises:
        ValueError: there is no such module, or nothing of that name in it.
    """
    module_name, _, attribute = name.partition(":")
    module = load_module(module_name)
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ValueError(
            f"{module_name} has no {attribute!r}{did_you_mean(attribute, public) or ';'} name what it defines"
        )
    return getattr(module, attribute)


def load_module(name: str) -> types.ModuleType:
    """Imports a module; one that is not there is a ValueError, an error inside it stays what it is."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"no module {name!r} here; run from the root of a clone, or give module:function") from None


def function_name(value: Any) -> str:
    """ "module:name" of a function or class that `load` finds again.

    Raises:
        ValueError: it is a lambda, a local function or an object, which no name leads to.
    """
    name = getattr(value, "__qualname__", "<object>")
    if "<" in name or "." in name:
        raise ValueError(f"{value!r} cannot be named; use a function of a module's top level")
    return f"{value.__module__}:{name}"


def has_default(cls: type, name: str) -> bool:
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _is_mapping(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _is_function(kind: Any) -> bool:
    return kind is get_origin(Callable[[], None])
