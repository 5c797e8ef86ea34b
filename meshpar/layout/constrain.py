"""`constrain` and `einsum`: activations by the names of their axes.

`constrain` is where a model meets its layout: it names the axes of an array and the current placement decides how GSPMD
must split it there. Without a placement both are plain JAX, so a model runs and is tested without a mesh.
"""

from __future__ import annotations

import string

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshpar.layout.context import current
from meshpar.layout.resolve import place


def constrain(x: jax.Array, axes: str, *, name: str = "activation") -> jax.Array:
    """`x` with its dims split as the current placement says of the named axes.

    Args:
      x: any array.
      axes: a logical axis for each dim, as in `"batch seq embed"`; `_` for a dim that is never split.
      name: what the array is called in errors.

    Raises:
      ValueError: an unknown axis, a wrong number of axes, a dim that does not divide, or a mesh axis that would split
        two dims.
    """
    placement = current()
    if placement is None:
        return x
    logical = tuple(None if axis == "_" else axis for axis in axes.split())
    spec = place(
        placement.layout, logical, x.shape, placement.mesh, path=f"{name} {axes!r}", manual_axes=placement.manual_axes
    ).spec
    with jax.named_scope(name.replace(" ", "_")):
        x = split_as(x, spec, placement.mesh, placement.manual_axes)
    if placement.tape is not None:
        placement.tape.record(name, x)
    return x


def split_as(
    x: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh, manual_axes: frozenset[str] = frozenset()
) -> jax.Array:
    """`x` with its dims split as `spec` says; inside a `shard_map` over `manual_axes` the spec names none of them."""
    if mesh.size == 1:  # a constraint would only be in the way of fusion
        return x
    # inside shard_map the mesh in context knows which axes are manual
    return jax.lax.with_sharding_constraint(x, spec if manual_axes else NamedSharding(mesh, spec))


def einsum(equation: str, *operands: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
    """An einsum in axis names, whose result is constrained by them.

    Example: `einsum("batch seq embed, embed mlp -> batch seq mlp", x, w)`.

    Raises:
      ValueError: an equation without "->", or with another number of operands or dims than given.
    """
    if equation.count("->") != 1:
        raise ValueError(f"einsum {equation!r} must have one '->', as in 'batch seq embed, embed mlp -> batch seq mlp'")
    inputs, output = equation.split("->")
    terms = [term.split() for term in inputs.split(",")]
    if len(terms) != len(operands):
        raise ValueError(
            f"einsum {equation!r} names {len(terms)} operands and got {len(operands)}; give one array for each"
        )
    for term, operand in zip(terms, operands, strict=True):
        if len(term) != operand.ndim:
            raise ValueError(
                f"einsum {equation!r}: {' '.join(term)!r} names {len(term)} axes of the shape {operand.shape}; "
                "name each dim once"
            )
    names = dict.fromkeys(name for term in terms for name in term)
    letters = dict(zip(names, string.ascii_letters, strict=False))
    missing = [name for name in output.split() if name not in letters]
    if missing:
        raise ValueError(
            f"einsum {equation!r}: {missing[0]!r} is in the result and in no operand; drop it or name it in an operand"
        )
    formula = (
        ",".join("".join(letters[name] for name in term) for term in terms)
        + "->"
        + "".join(letters[name] for name in output.split())
    )
    result = jnp.einsum(formula, *operands, preferred_element_type=preferred_element_type)
    return constrain(result, output, name="einsum result")
