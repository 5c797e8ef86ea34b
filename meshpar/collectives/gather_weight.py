"""A weight is gathered in the compute dtype and its gradient reduced in fp32: ZeRO 3 inside a `shard_map`.

Left to autodiff both would have the dtype of the gathered weight. Cost over n devices: an all-gather of (n-1) shards
in the compute dtype, a reduce-scatter of (n-1) shards in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

Dims = tuple[tuple[int, tuple[str, ...]], ...]  # which dims are split, over which mesh axes, the slowest first


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_weight(shard: jax.Array, dtype: Any, dims: Dims) -> jax.Array:
    """The whole weight of a shard, cast to `dtype`; its gradient is summed over the devices and scattered in fp32.

    Args:
      shard: this device's block, inside a `shard_map` that has made the axes of `dims` manual.
      dims: where the shard is cut. An empty tuple only casts.
    """
    whole = shard.astype(dtype)
    for dim, axes in dims:
        whole = jax.lax.all_gather(whole, axes, axis=dim, tiled=True)
    return whole


def _forward(shard: jax.Array, dtype: Any, dims: Dims) -> tuple[jax.Array, jax.Array]:
    return gather_weight(shard, dtype, dims), jnp.zeros((), shard.dtype)


def _backward(dtype: Any, dims: Dims, stored: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    gradient = gradient.astype(jnp.float32)
    for dim, axes in reversed(dims):
        gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
    return (gradient.astype(stored.dtype),)


gather_weight.defvjp(_forward, _backward)
