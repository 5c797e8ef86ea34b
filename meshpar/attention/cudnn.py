"""cuDNN's fused attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`, and what it cannot do.

Batch and heads may be split over devices: JAX's partitioner runs the kernel on each device's part. Packed segments
would need the mask as a dense bias, which costs the memory that the kernel saves, so they are left to blocked.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar.precision.remat import save_name

MAX_HEAD_DIM = 128  # 256 from Hopper on; what every supported card can do


def cudnn_refusal(q: jax.Array, *, segments: jax.Array | None, softcap: float | None) -> str | None:
    """Why cuDNN cannot compute this attention, None when it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention computes in bfloat16 or float16 and q is {q.dtype}"
    if q.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % 8:
        return f"cuDNN attention takes a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM} and got {q.shape[-1]}"
    if segments is not None:
        return "cuDNN attention has no packed segments"
    if softcap is not None:
        return "cuDNN attention has no softcap"
    return None


def attention_cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """`attention_reference` in cuDNN: same arguments as far as `cudnn_refusal` allows, same meaning."""
    # jax counts the tokens to the left of the token itself; our window counts the token too
    local = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, local_window_size=local, implementation="cudnn"
    )
    return save_name(out, "attention")
