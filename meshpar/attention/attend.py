"""`attend`: attention as models call it, computed by the backend that the placement names.

| backend | computed by | on |
| --- | --- | --- |
| auto | splash on TPU, cudnn on GPU, else xla; xla also where the kernel cannot | everywhere |
| reference | reference.py: the whole score matrix | everywhere |
| xla | blocked.py: plain XLA in blocks, no score kept | everywhere |
| cudnn | cudnn.py: cuDNN's fused kernel | NVIDIA GPUs |
| splash | splash.py: Pallas kernel | TPUs |

While text is generated, `attend` also keeps keys and values and attends to kept ones: cache.py.
"""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshpar.attention.blocked import attention_blocked
from meshpar.attention.cache import remember
from meshpar.attention.cudnn import attention_cudnn, cudnn_refusal
from meshpar.attention.masks import attention_mask, check_attention
from meshpar.attention.reference import attention_masked, attention_reference
from meshpar.attention.splash import attention_splash, splash_refusal
from meshpar.compat import has_cudnn
from meshpar.layout.constrain import constrain
from meshpar.layout.context import Placement, current
from meshpar.layout.resolve import place
from meshpar.layout.rules import did_you_mean
from meshpar.precision.remat import save_name

BACKENDS = ("auto", "reference", "xla", "cudnn", "splash")
_PLATFORM = {"cudnn": "gpu", "splash": "tpu"}

_log = logging.getLogger("meshpar.attention")


def attend(
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
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention under the current placement.

    The result is already tagged "attention" for selective rematerialisation. Where kv heads are not split like heads,
    because there are fewer of them than devices, they are repeated first, so that each device computes its own heads.

    Args:
      q: `[batch, seq, heads, head_dim]`, any float dtype.
      k, v: `[batch, seq, kv_heads, head_dim]`, the dtype of q.
      segments: int32 `[batch, seq]`, 0 for padding; masks.py says what it, `causal`, `window` and `windowed` mean.
      scale: factor on the scores before the softmax, 1/sqrt(head_dim) when None.
      softcap: scores become softcap * tanh(scores / softcap).
      dropout: share of the attention probabilities to drop; above 0 only "reference" can, and is used. Needs `key`.

    Returns:
      `[batch, seq, heads, head_dim]` in the dtype of q; exactly zero where a token may attend to nothing.

    Raises:
      ValueError: shapes or options that do not fit, an unknown backend, or one that the platform does not have.
    """
    check_attention(q, k, v, segments=segments, causal=causal, window=window, softcap=softcap)
    placement = current()
    refused = {"causal=False": not causal, "segments": segments is not None, "dropout": dropout > 0.0}
    cached = remember(q, k, v, refused=refused)
    if cached is not None:
        k, v, positions = cached
    if placement is not None:
        k, v = _match_heads(q, k, v, placement)
    if cached is not None:  # one query a row: no backend has a block to skip
        mask = attention_mask(positions, jnp.arange(k.shape[1]), causal=causal, window=window, windowed=windowed)
        return attention_masked(q, k, v, mask, scale=scale, softcap=softcap)
    backend = _choose(q, k, segments, softcap, placement)
    with jax.named_scope("attention"):
        if backend == "reference" or dropout > 0.0:
            out = attention_reference(
                q,
                k,
                v,
                segments=segments,
                causal=causal,
                window=window,
                windowed=windowed,
                scale=scale,
                softcap=softcap,
                dropout=dropout,
                key=key,
            )
            return save_name(out, "attention")
        if backend == "xla":
            return attention_blocked(
                q,
                k,
                v,
                segments=segments,
                causal=causal,
                window=window,
                windowed=windowed,
                scale=scale,
                softcap=softcap,
            )

        def kernel(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if backend == "cudnn":
                return attention_cudnn(q, k, v, causal=causal, window=window, scale=scale)
            return attention_splash(
                q, k, v, segments=segments, causal=causal, window=window, scale=scale, softcap=softcap
            )

        if window is None or windowed is None:
            return kernel(window, q, k, v)
        # The window is part of a kernel, so there are two of them. Without rematerialisation both branches' residuals
        # are kept for the backward.
        return jax.lax.cond(windowed, functools.partial(kernel, window), functools.partial(kernel, None), q, k, v)


def check_backend(name: str, platform: str) -> None:
    """Raises ValueError when the backend `name` does not run on the devices of `platform`."""
    if name in _PLATFORM and platform != _PLATFORM[name]:
        raise ValueError(
            f'attention="{name}" runs on {_PLATFORM[name]} and these devices are {platform}; '
            'use attention="auto" or "xla"'
        )


def _choose(
    q: jax.Array, k: jax.Array, segments: jax.Array | None, softcap: float | None, placement: Placement | None
) -> str:
    asked = "auto" if placement is None else placement.attention
    if asked not in BACKENDS:
        raise ValueError(f"attention={asked!r} is not one of {', '.join(BACKENDS)}{did_you_mean(asked, BACKENDS)}")
    platform = _platform(placement)
    check_backend(asked, platform)
    kernel = {"tpu": "splash", "gpu": "cudnn"}.get(platform) if asked == "auto" else asked
    refusal = None
    if kernel == "cudnn":
        refusal = cudnn_refusal(q, segments=segments, softcap=softcap)
        if refusal is None and asked == "auto" and not has_cudnn():
            refusal = "cuDNN is not installed here"
    elif kernel == "splash":
        refusal = splash_refusal(q, k)
    if refusal is not None:
        _say_once(f'{refusal}: attention="xla" is used instead')
        return "xla"
    return kernel or "xla"


def _platform(placement: Placement | None) -> str:
    """Where the program will run: the mesh's devices may be a topology that is not here."""
    if placement is not None and isinstance(placement.mesh, Mesh):
        return str(placement.mesh.devices.flat[0].platform)
    return jax.default_backend()


def _match_heads(q: jax.Array, k: jax.Array, v: jax.Array, placement: Placement) -> tuple[jax.Array, jax.Array]:
    """Keys and values, repeated to the number of query heads where the layout splits the two differently."""

    def split(x: jax.Array, heads: str) -> tuple[object, ...]:
        manual = placement.manual_axes
        return tuple(
            place(placement.layout, (heads,), x.shape[2:3], placement.mesh, path="attention", manual_axes=manual).spec
        )

    repeats = q.shape[2] // k.shape[2]
    if repeats == 1 or split(q, "heads") == split(k, "kv_heads"):
        return k, v
    named = (("repeated keys", k), ("repeated values", v))
    k, v = (constrain(jnp.repeat(x, repeats, axis=2), "batch seq heads head_dim", name=name) for name, x in named)
    return k, v


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)
