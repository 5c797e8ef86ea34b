"""Attention in plain XLA, in blocks of queries, that keeps no score for the backward.

Idea: the forward keeps the output and the log-sum-exp of each row (FlashAttention, Dao et al. 2022, algorithms 1 and
4); the backward makes the probabilities again from q, k and that one number. Each block of queries reads only the
keys that its causal and window bounds leave, as static slices: about half the work of a full matrix. A block's scores
are whole rows, so no online softmax is needed; the largest array is `[batch, heads, BLOCK, kv_seq]` in fp32.

Up to `GROUPS` blocks are written out one by one. Longer sequences scan over the blocks of a group, which all read the
keys of the whole group.

Inside, arrays are `[batch, kv_heads, group, rows, head_dim]`: batch and kv heads are batch
dims of every product, so splitting them over devices needs no communication.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from meshpar.attention.masks import attention_mask, check_attention
from meshpar.precision.remat import save_name

T = TypeVar("T")

BLOCK = 128  # rows of queries in one product
GROUPS = 32  # so many blocks are written out; more are scanned

Flags: TypeAlias = tuple[jax.Array | None, jax.Array | None]  # segments, and whether the window is in force
Residuals: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, Flags, jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class _Options:
    causal: bool
    window: int | None
    scale: float
    softcap: float | None


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """`blocks` blocks of `rows` queries from `start` on, and the keys `[low, high)` that any of them may see."""

    start: int
    rows: int
    blocks: int
    low: int
    high: int


def attention_blocked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    windowed: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`attention_reference` without dropout: the same arguments, the same result up to rounding, memory linear in the
    sequence.

    The output and the log-sum-exp are tagged "attention" here, because the backward needs both: a caller's own tag
    would keep only the first.
    """
    check_attention(q, k, v, segments=segments, causal=causal, window=window, softcap=softcap)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    windowed = None if window is None else windowed
    options = _Options(causal=causal, window=window, scale=scale, softcap=softcap)
    return _attention(options, q, k, v, (segments, windowed))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, flags: Flags) -> jax.Array:
    return _forward(options, q, k, v, flags)[0]


def _by_window(windowed: jax.Array | None, options: _Options, compute: Callable[..., T], *arrays: jax.Array) -> T:
    """`compute(options, *arrays)`, without the window where `windowed` is false: each has its own static slices, and
    one of them runs.

    Inside the custom derivative, because that of `cond` would keep what both branches need.
    """
    if windowed is None:
        return compute(options, *arrays)
    far = functools.partial(compute, dataclasses.replace(options, window=None))
    result: T = jax.lax.cond(windowed, functools.partial(compute, options), far, *arrays)
    return result


def _forward(options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, flags: Flags) -> tuple[jax.Array, Residuals]:
    segments, windowed = flags
    out, log_sum = _by_window(windowed, options, functools.partial(_forward_rows, segments), q, k, v)
    out, log_sum = save_name(out, "attention"), save_name(log_sum, "attention")
    return out, (q, k, v, flags, out, log_sum)


def _forward_rows(
    segments: jax.Array | None, options: _Options, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output, and the log-sum-exp of each row, `[batch, kv_heads, group, seq, 1]`."""
    queries, keys, values = _grouped(q, k.shape[2]), _heads_first(k), _heads_first(v)
    outs, log_sums = [], []
    for piece in _pieces(q.shape[1], k.shape[1], options):
        block = functools.partial(_forward_block, options, piece, segments, _seen(piece, keys), _seen(piece, values))
        out, log_sum = _over_blocks(block, piece, queries)
        outs.append(out)
        log_sums.append(log_sum)
    return _ungrouped(jnp.concatenate(outs, axis=3)), jnp.concatenate(log_sums, axis=3)


def _forward_block(
    options: _Options,
    piece: _Piece,
    segments: jax.Array | None,
    keys: jax.Array,
    values: jax.Array,
    start: int | jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The output of some rows of queries, and the log-sum-exp of each."""
    scores, _ = _scores(options, piece, segments, keys, start, rows)
    highest = scores.max(axis=-1, keepdims=True)
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights = jnp.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    # A query that sees nothing has only scores of -inf: with finite `highest` and `total` its probabilities and output
    # are exactly 0, here and in the backward.
    total = jnp.where(total == 0.0, 1.0, total)
    out = _product("bngrk,bnkd->bngrd", weights.astype(values.dtype), values) / total
    return out.astype(rows.dtype), highest + jnp.log(total)


def _backward(
    options: _Options, residuals: Residuals, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, (segments, windowed), out, log_sum = residuals
    rows = functools.partial(_backward_rows, segments)
    return (*_by_window(windowed, options, rows, q, k, v, out, log_sum, d_out), None)


def _backward_rows(
    segments: jax.Array | None,
    options: _Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_sum: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v."""
    queries, keys, values = _grouped(q, k.shape[2]), _heads_first(k), _heads_first(v)
    # sum_k p dp of the softmax's gradient is the same number as out . d_out, known without any score
    inner = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    d_outs, inner = _grouped(d_out, k.shape[2]), _grouped(inner, k.shape[2])
    d_queries = []
    d_keys = d_values = jnp.zeros((*keys.shape[:2], keys.shape[3], keys.shape[2]), jnp.float32)
    for piece in _pieces(q.shape[1], k.shape[1], options):
        block = functools.partial(_backward_block, options, piece, segments, _seen(piece, keys), _seen(piece, values))
        d_query, d_key, d_value = _over_blocks(block, piece, queries, d_outs, inner, log_sum, summed=2)
        d_queries.append(d_query)
        d_keys = d_keys.at[..., piece.low : piece.high].add(d_key)
        d_values = d_values.at[..., piece.low : piece.high].add(d_value)
    d_q = _ungrouped(jnp.concatenate(d_queries, axis=3))
    return d_q, d_keys.transpose(0, 3, 1, 2).astype(k.dtype), d_values.transpose(0, 3, 1, 2).astype(v.dtype)


def _backward_block(
    options: _Options,
    piece: _Piece,
    segments: jax.Array | None,
    keys: jax.Array,
    values: jax.Array,
    start: int | jax.Array,
    rows: jax.Array,
    d_rows: jax.Array,
    inner: jax.Array,
    log_sum: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What some rows of queries add to the gradients of themselves, the keys and the values (both `[..., d, keys]`)."""
    scores, slope = _scores(options, piece, segments, keys, start, rows)
    weights = jnp.exp(scores - log_sum)
    d_scores = weights * (_product("bngrd,bnkd->bngrk", d_rows, values) - inner) * options.scale
    if slope is not None:
        d_scores = d_scores * slope
    d_scores, weights = d_scores.astype(rows.dtype), weights.astype(rows.dtype)
    d_query = _product("bngrk,bnkd->bngrd", d_scores, keys).astype(rows.dtype)
    # The narrow operand comes first: XLA:CPU writes the first one transposed.
    return d_query, _product("bngrd,bngrk->bndk", rows, d_scores), _product("bngrd,bngrk->bndk", d_rows, weights)


_attention.defvjp(_forward, _backward)


def _scores(
    options: _Options,
    piece: _Piece,
    segments: jax.Array | None,
    keys: jax.Array,
    start: int | jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Scores `[batch, kv_heads, group, rows, keys]` in fp32, -inf where masked; the softcap's derivative or None."""
    scores = _product("bngrd,bnkd->bngrk", rows, keys) * options.scale
    slope = None
    if options.softcap is not None:
        capped = jnp.tanh(scores / options.softcap)
        scores, slope = options.softcap * capped, 1.0 - capped * capped
    if not (options.causal or segments is not None):
        return scores, slope
    q_segments = kv_segments = None
    if segments is not None:
        q_segments = jax.lax.dynamic_slice_in_dim(segments, start, piece.rows, axis=1)
        kv_segments = segments[:, piece.low : piece.high]
    mask = attention_mask(
        start + jnp.arange(piece.rows),
        jnp.arange(piece.low, piece.high),
        q_segments=q_segments,
        kv_segments=kv_segments,
        causal=options.causal,
        window=options.window,
    )
    return jnp.where(mask[:, None, None], scores, -jnp.inf), slope


def _seen(piece: _Piece, keys: jax.Array) -> jax.Array:
    return keys[:, :, piece.low : piece.high]


def _pieces(q_seq: int, kv_seq: int, options: _Options) -> Iterator[_Piece]:
    """Cuts the queries into pieces of whole blocks and one shorter remainder."""
    blocks = -(-(q_seq // BLOCK) // GROUPS) or 1  # in one piece
    start = 0
    while start < q_seq:
        left = q_seq - start
        rows, count = (BLOCK, min(blocks, left // BLOCK)) if left >= BLOCK else (left, 1)
        low = 0 if options.window is None else min(max(0, start - options.window + 1), kv_seq - 1)
        high = min(start + rows * count, kv_seq) if options.causal else kv_seq
        yield _Piece(start=start, rows=rows, blocks=count, low=low, high=high)
        start += rows * count


def _over_blocks(
    block: Callable[..., tuple[jax.Array, ...]], piece: _Piece, *arrays: jax.Array, summed: int = 0
) -> tuple[jax.Array, ...]:
    """`block(start, *rows)` for each block: results joined along the rows, the last `summed` of them added up."""
    stop = piece.start + piece.rows * piece.blocks
    rows = [x[:, :, :, piece.start : stop] for x in arrays]
    if piece.blocks == 1:
        return block(piece.start, *rows)

    def body(
        sums: tuple[jax.Array, ...], scanned: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        results = block(*scanned)
        joined, added = results[: len(results) - summed], results[len(results) - summed :]
        return tuple(a + b for a, b in zip(sums, added, strict=True)), joined

    starts = piece.start + piece.rows * jnp.arange(piece.blocks)
    blocks = [jnp.moveaxis(x.reshape(*x.shape[:3], piece.blocks, piece.rows, x.shape[4]), 3, 0) for x in rows]
    shapes = jax.eval_shape(block, starts[0], *(x[0] for x in blocks))
    zeros = tuple(jnp.zeros(s.shape, s.dtype) for s in shapes[len(shapes) - summed :])
    sums, joined = jax.lax.scan(body, zeros, (starts, *blocks))
    whole = (jnp.moveaxis(x, 0, 3) for x in joined)
    return (*(x.reshape(*x.shape[:3], -1, x.shape[5]) for x in whole), *sums)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """`[batch, seq, heads, d]` to `[batch, kv_heads, group, seq, d]`."""
    batch, seq, heads, size = x.shape
    return x.reshape(batch, seq, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)


def _ungrouped(x: jax.Array) -> jax.Array:
    """The inverse of `_grouped`."""
    batch, kv_heads, group, seq, size = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, seq, kv_heads * group, size)


def _heads_first(x: jax.Array) -> jax.Array:
    """`[batch, a, b, d]` to `[batch, b, a, d]`: keys and values to heads first, and back."""
    return x.transpose(0, 2, 1, 3)
