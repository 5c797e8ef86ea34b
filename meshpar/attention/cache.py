"""Keys and values of earlier tokens, and the contexts through which `attend` keeps them and reads them.

A model only calls `attend`. Whoever runs it enters one of two contexts around a block, inside the traced function
(layout/context.py says why): `keeping` while a prompt is read, `continuing` while one token follows another. A block
may call `attend` several times; its calls are told apart by their order.

The place in a cache is the position in the row. A row is written one place after another, so the causal rule, which
lets a query see places up to its own, hides what is not written yet or was left there by padding on the right.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

CACHE_AXES = "layers batch _ kv_heads head_dim"  # positions stay whole: a decode step writes one and reads them all


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of one call of `attend` in each block, in the dtype that the model computes in."""

    k: jax.Array  # [layers, batch, length, kv_heads, head_dim]; as `keeping` collects it, without layers
    v: jax.Array  # the same


@dataclass
class _Session:
    trace: Any
    caches: Sequence[KVCache] | None = None  # None while a prompt is read
    layer: jax.Array | int = 0
    positions: jax.Array | None = None  # int32 [batch, 1]
    results: list[KVCache] = field(default_factory=list)


_session: ContextVar[_Session | None] = ContextVar("meshpar_cache", default=None)


@contextmanager
def keeping() -> Iterator[list[KVCache]]:
    """Collects the keys and values that `attend` is given in the `with` block, `[batch, seq, kv_heads, head_dim]`, one
    entry a call. `attend` computes as it does without.
    """
    with _entered(_Session(_trace())) as session:
        yield session.results


@contextmanager
def continuing(caches: Sequence[KVCache], layer: jax.Array | int, positions: jax.Array) -> Iterator[list[KVCache]]:
    """Lets `attend` in the `with` block write its keys and values into `caches` and attend to what is there.

    Args:
      caches: one for each call of `attend` in a block.
      layer: whose block runs, a number or int32 scalar.
      positions: int32 `[batch, 1]`, the place of each row's token.

    Yields:
      The caches with the new places written, one more after each call.
    """
    with _entered(_Session(_trace(), caches, layer, positions)) as session:
        yield session.results


def remember(
    q: jax.Array, k: jax.Array, v: jax.Array, *, refused: Mapping[str, bool]
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """What `attend` asks before it computes.

    Args:
      q, k, v: as `attend` got them.
      refused: the options of `attend` that have no meaning with a cache, and whether each is used.

    Returns:
      None where `attend` computes with the given keys and values, which `keeping` has then collected. In `continuing`
      the keys and values of the layer, `[batch, length, kv_heads, head_dim]`, with the new ones written, and the
      positions of the queries, int32 `[batch, 1]`.

    Raises:
      ValueError: the call cannot be repeated from a cache.
    """
    session = _session.get()
    if session is None:
        return None
    if session.trace != _trace():
        raise ValueError(
            "attend runs inside a jax transformation of the block (scan, checkpoint, jit), which its keys and values "
            "cannot leave; call attend from the block itself to generate text"
        )
    for option, used in refused.items():
        if used:
            raise ValueError(
                f"attend with {option} cannot go on from the keys and values of earlier tokens; leave it out where "
                "batch.segments and the key are None"
            )
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"attend has {q.shape[1]} queries and {k.shape[1]} keys a row; text is generated from a cache of "
            "self-attention only"
        )
    if session.caches is None or session.positions is None:
        session.results.append(KVCache(k=k, v=v))
        return None
    assert len(session.results) < len(session.caches), "a block calls attend as often as when the prompt was read"
    cache = session.caches[len(session.results)]
    written = KVCache(
        k=_write(cache.k, k, session.layer, session.positions), v=_write(cache.v, v, session.layer, session.positions)
    )
    session.results.append(written)
    of_layer = (jax.lax.dynamic_index_in_dim(x, session.layer, axis=0, keepdims=False) for x in (written.k, written.v))
    return (*of_layer, session.positions)


def _write(stack: jax.Array, new: jax.Array, layer: jax.Array | int, positions: jax.Array) -> jax.Array:
    """`stack` with `new` `[batch, 1, kv_heads, head_dim]` at its layer and at the position of each row.

    A scatter with the batch as a batch dim, so that a device writes its own rows: no communication.
    """
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    at = jnp.concatenate([jnp.full_like(positions, layer), positions], axis=1)
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    write = functools.partial(
        jax.lax.scatter, scatter_indices=at, dimension_numbers=numbers, unique_indices=True, mode=mode
    )
    if stack.dtype.itemsize != 2:
        return write(stack, updates=new[:, 0])
    # Half precision as integers of the same bits: XLA:CPU would convert the whole stack to fp32 and back, to write one
    # place.
    operand, updates = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (stack, new[:, 0]))
    return jax.lax.bitcast_convert_type(write(operand, updates=updates), stack.dtype)


@contextmanager
def _entered(session: _Session) -> Iterator[_Session]:
    token = _session.set(session)
    try:
        yield session
    finally:
        _session.reset(token)


def _trace() -> Any:
    return get_opaque_trace_state(convention="meshpar")
