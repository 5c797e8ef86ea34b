"""Cross-entropy of next tokens: over a vocabulary split between devices, and over pieces of the sequence.

`cross_entropy` never gathers logits. The target's logit is found by comparing a counter with the target and summing,
so that maximum, sum and target are per-device reductions and one number a token is all-reduced (Megatron-LM, Shoeybi
et al. 2019, section 3). Its backward writes the gradient of the logits once, in their dtype. `chunked_cross_entropy`
makes logits for a piece of the sequence at a time and makes them again in the backward.

Cost with the vocabulary over n devices: all-reduces of 3 fp32 numbers a token (4 with smoothing), forward only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

Parts = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class _Options:
    vocab: int
    z_loss: float
    label_smoothing: float


def cross_entropy(
    logits: jax.Array, targets: jax.Array, *, vocab: int, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[jax.Array, Parts]:
    """Loss of each token: (1 - label_smoothing) * nll + label_smoothing * mean nll of the vocabulary + z_loss * lse².

    Args:
      logits: `[batch, seq, vocab_padded]`, any float dtype, `vocab_padded` >= `vocab`; entries from `vocab` on are
        padding and count as -inf.
      targets: int32 `[batch, seq]`; one outside `[0, vocab)` has the logit 0, so give it the weight 0.
      vocab: the true size of the vocabulary, global whatever the layout.
      z_loss: weight of the squared log-sum-exp (PaLM, Chowdhery et al. 2022, section 5; 1e-4 there).
      label_smoothing: share of the target spread evenly over the true vocabulary (Szegedy et al. 2016, section 7).

    Returns:
      The loss, fp32 `[batch, seq]`, and its parts of the same shape: "nll", the plain negative log likelihood, and
      "z", z_loss * lse².

    Raises:
      ValueError: shapes or options that do not fit.
    """
    if logits.ndim != targets.ndim + 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {logits.shape} must be the shape of targets {targets.shape} with the vocabulary behind; check both"
        )
    if not 0 < vocab <= logits.shape[-1]:
        raise ValueError(
            f"vocab={vocab} must be between 1 and the {logits.shape[-1]} logits of a token; pass the true vocabulary"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 1; 0.1 is usual")
    if z_loss < 0.0:
        raise ValueError(f"z_loss={z_loss} must not be negative; 1e-4 is usual")
    options = _Options(vocab=vocab, z_loss=z_loss, label_smoothing=label_smoothing)
    loss, nll, z = _cross_entropy(options, logits, targets)
    return loss, {"nll": nll, "z": z}


Triple = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(options: _Options, logits: jax.Array, targets: jax.Array) -> Triple:
    return _forward(options, logits, targets)[0]


def _forward(
    options: _Options, logits: jax.Array, targets: jax.Array
) -> tuple[Triple, tuple[jax.Array, jax.Array, jax.Array]]:
    values = _true_logits(options, logits, -jnp.inf)
    highest = values.max(axis=-1)
    lse = highest + jnp.log(jnp.exp(values - highest[..., None]).sum(axis=-1))
    nll = lse - jnp.where(_is_target(logits, targets), logits.astype(jnp.float32), 0.0).sum(axis=-1)
    z = options.z_loss * lse * lse
    loss = nll + z
    if options.label_smoothing:
        even = lse - _true_logits(options, logits, 0.0).sum(axis=-1) / options.vocab
        loss = loss + options.label_smoothing * (even - nll)
    return (loss, nll, z), (logits, targets, lse)


def _backward(options: _Options, residuals: Triple, cotangents: Triple) -> tuple[jax.Array, None]:
    logits, targets, lse = residuals
    d_loss, d_nll, d_z = cotangents
    # the loss is linear in lse, lse², the target's logit and the mean logit; their factors, one number a token each
    d_target = d_loss * (1.0 - options.label_smoothing) + d_nll
    d_mean = d_loss * options.label_smoothing
    d_lse = d_target + d_mean + 2.0 * options.z_loss * lse * (d_loss + d_z)
    softmax = jnp.exp(logits.astype(jnp.float32) - lse[..., None])
    gradient = softmax * d_lse[..., None] - jnp.where(_is_target(logits, targets), d_target[..., None], 0.0)
    if options.label_smoothing:
        gradient = gradient - d_mean[..., None] / options.vocab
    gradient = _true_logits(options, gradient, 0.0)
    # without the barrier XLA would make the gradient once for each of the two products that read it
    return jax.lax.optimization_barrier(gradient.astype(logits.dtype)), None


_cross_entropy.defvjp(_forward, _backward)


def _true_logits(options: _Options, logits: jax.Array, padding: float) -> jax.Array:
    """Logits in fp32 with the vocabulary's padding replaced."""
    logits = logits.astype(jnp.float32)
    if logits.shape[-1] == options.vocab:
        return logits
    return jnp.where(_counter(logits) < options.vocab, logits, padding)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return _counter(logits) == targets[..., None]


def _counter(logits: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def chunked_cross_entropy(
    head: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk: int | None,
    vocab: int,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, Parts, jax.Array]:
    """Weighted sum of the loss over all tokens, with logits for `chunk` positions of each row at a time.

    Args:
      head: hidden states `[batch, any, embed]` to logits `[batch, any, vocab_padded]`.
      x: `[batch, seq, embed]`, the last hidden states.
      targets, weights: int32 and fp32 `[batch, seq]`; a token of weight 0 adds exactly 0 to every sum, whatever its
        target.
      chunk: positions of a row in one piece; None, or seq and more, makes all logits at once and keeps them for the
        backward.
      vocab, z_loss, label_smoothing: as in `cross_entropy`.

    Returns:
      Three fp32 sums over tokens: weight * loss, weight * part for each part by name, and the weights themselves.

    Raises:
      ValueError: shapes or options that do not fit.
    """
    batch, seq = targets.shape
    if x.shape[:2] != targets.shape or weights.shape != targets.shape:
        raise ValueError(
            f"x {x.shape}, targets {targets.shape} and weights {weights.shape} must share [batch, seq]; "
            "check how the batch was cut"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1; use None for one piece")

    def sums(
        head: Callable[[jax.Array], jax.Array], x: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, Parts]:
        loss, parts = cross_entropy(head(x), targets, vocab=vocab, z_loss=z_loss, label_smoothing=label_smoothing)

        def weighted(values: jax.Array) -> jax.Array:
            return jnp.where(weights == 0.0, 0.0, weights * values).sum()

        return weighted(loss), {name: weighted(part) for name, part in parts.items()}

    if chunk is None or chunk >= seq:
        return *sums(head, x, targets, weights), weights.sum()
    # A piece is every count-th position, not a run of neighbours: it then takes the same share of each device's part
    # of a split sequence.
    count = -(-seq // chunk)
    # The head's weights go through fp32, so that their gradients are summed over the pieces in fp32.
    head, constants = jax.closure_convert(head, x[:, :chunk])
    wide = [c.astype(jnp.float32) if jnp.issubdtype(c.dtype, jnp.floating) else c for c in constants]

    def piece_sums(wide: list[jax.Array], *piece: jax.Array) -> tuple[jax.Array, Parts]:
        narrow = [w.astype(c.dtype) for w, c in zip(wide, constants, strict=True)]
        return sums(lambda x: head(x, *narrow), *piece)

    def pieces(values: jax.Array) -> jax.Array:
        padded = jnp.pad(values, [(0, 0), (0, count * chunk - seq)] + [(0, 0)] * (values.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, chunk, count, *values.shape[2:]), 2, 0)

    def add(total: tuple[jax.Array, Parts], piece: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, Parts], None]:
        return jax.tree.map(jnp.add, total, jax.checkpoint(piece_sums, prevent_cse=False)(wide, *piece)), None

    zero = jnp.zeros((), jnp.float32)
    start = (zero, {"nll": zero, "z": zero})
    (loss, parts), _ = jax.lax.scan(add, start, (pieces(x), pieces(targets), pieces(weights)))
    return loss, parts, weights.sum()
