"""`Placement`: what model code may know of the plan while one step is traced.

The step builder enters a placement *inside* the traced function. A context variable that is read in jitted code is not
part of jit's cache key, so a placement entered outside could be ignored by a program that was compiled under another
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from meshpar.layout.rules import Layout
from meshpar.layout.tape import Tape


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The mesh, the layout of activations and weights in use, and the implementation of each shardable operation."""

    mesh: Mesh | AbstractMesh
    layout: Layout
    attention: str = "auto"  # a backend of `attention.attend`
    manual_axes: frozenset[str] = frozenset()  # mesh axes that a surrounding shard_map has made manual
    tape: Tape | None = None  # where `constrain` notes what it sees


_current: ContextVar[Placement | None] = ContextVar("meshpar_placement", default=None)


def current() -> Placement | None:
    """The placement of the step that is being traced; None outside one, where model code runs as plain JAX."""
    return _current.get()


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Makes `placement` current for the code in the `with` block."""
    token = _current.set(placement)
    try:
        yield
    finally:
        _current.reset(token)
