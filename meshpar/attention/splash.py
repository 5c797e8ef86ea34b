"""Splash attention, JAX's Pallas kernel for TPUs: blocks that the causal or window mask empties are never loaded.

GSPMD cannot look into a Pallas kernel, so it runs in `shard_map` over the mesh axes that split batch and heads in the
placement's layout. The sequence is whole on each device. No collective inside.
Source: jax.experimental.pallas.ops.tpu.splash_attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.layout.context import Placement, current
from meshpar.layout.resolve import place

LANES = 128  # the kernel's blocks are multiples of a TPU vector register's lanes
MAX_BLOCK = 512  # rows and keys of one block: fits VMEM up to a head_dim of 256


def splash_refusal(q: jax.Array, k: jax.Array) -> str | None:
    """Why splash cannot compute this attention, None when it can."""
    for name, seq in (("seq", q.shape[1]), ("kv_seq", k.shape[1])):
        if seq % LANES:
            return f"splash attention takes a {name} that is a multiple of {LANES} and got {seq}"
    return None


def attention_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`attention_reference` without dropout, on TPU. Needs kv heads split like heads: attend.py repeats them if not."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        ids = segments[0] if segments else None
        return _kernel(q, k, v, ids, causal=causal, window=window, scale=scale, softcap=softcap)

    arrays = (q, k, v) if segments is None else (q, k, v, segments)
    placement = current()
    free = frozenset() if placement is None else frozenset(placement.mesh.axis_names) - placement.manual_axes
    if placement is None or placement.mesh.size == 1 or not free:
        return local(*arrays)
    q_spec, kv_spec = _spec(placement, q, "heads"), _spec(placement, k, "kv_heads")
    assert q_spec[2:] == kv_spec[2:], "repeat the kv heads first"
    specs = (q_spec, kv_spec, kv_spec, PartitionSpec(*q_spec[:1]))
    return jax.shard_map(
        local,
        # inside another shard_map only the mesh in context is allowed
        mesh=None if placement.manual_axes else placement.mesh,
        in_specs=specs[: len(arrays)],
        out_specs=q_spec,
        axis_names=free,
        check_vma=False,  # Pallas does not say over which axes its outputs vary
    )(*arrays)


def _spec(placement: Placement, x: jax.Array, heads: str) -> PartitionSpec:
    axes, manual = ("batch", None, heads, None), placement.manual_axes
    return place(placement.layout, axes, x.shape, placement.mesh, path="attention", manual_axes=manual).spec


def _kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    # lazily: importing Pallas costs about a second, and only a TPU needs it
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        CausalMask,
        FullMask,
        LocalMask,
        Mask,
        MultiHeadMask,
        SegmentIds,
        make_splash_mha,
    )

    shape = (q.shape[1], k.shape[1])
    mask: Mask = CausalMask(shape) if causal else FullMask(shape)
    if window is not None:
        mask = LocalMask(shape, (window - 1, 0), offset=0)
    rows, keys = _block(shape[0]), _block(shape[1])
    kernel = make_splash_mha(
        MultiHeadMask([mask] * q.shape[2]),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=BlockSizes(
            block_q=rows,
            block_kv=keys,
            block_q_dkv=rows,
            block_kv_dkv=keys,
            block_kv_dkv_compute=keys,
            block_q_dq=rows,
            block_kv_dq=keys,
        ),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name="attention",  # keeps the output and the log-sum-exp, as blocked.py does
    )
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)  # the kernel has no scale
    heads_first = (x.transpose(0, 2, 1, 3) for x in (scaled, k, v))
    ids = None if segments is None else SegmentIds(q=segments, kv=segments)
    out = jax.vmap(kernel)(*heads_first, ids).transpose(0, 2, 1, 3).astype(q.dtype)
    if segments is None:
        return out
    # the kernel lets padding see padding
    return jnp.where((segments != 0)[:, :, None, None], out, jnp.zeros((), out.dtype))


def _block(seq: int) -> int:
    """The largest block that divides the sequence."""
    return max(size for size in range(LANES, MAX_BLOCK + 1, LANES) if seq % size == 0)
