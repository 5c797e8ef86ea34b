"""RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016); fp32 inside, the input's dtype outside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.module import named


class RMSNorm(nnx.Module):
    """`x / rms(x) * (offset + scale)` over the last dim, whose logical axis is `axis`. Gemma's offset is 1."""

    def __init__(self, size: int, *, eps: float, axis: str = "embed", offset: float = 0.0):
        self.scale = nnx.Param(jnp.full((size,), 1.0 - offset, jnp.float32), axes=(axis,))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        with named(self):
            x32 = x.astype(jnp.float32)
            normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
            scale = self.scale[...].astype(jnp.float32)
            return (normed * (scale + self.offset if self.offset else scale)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """`(x - mean) / std * scale + bias` over the last dim, whose logical axis is `axis`."""

    def __init__(self, size: int, *, eps: float, axis: str = "embed"):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32), axes=(axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        with named(self):
            x32 = x.astype(jnp.float32)
            centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
            normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
            return (normed * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
