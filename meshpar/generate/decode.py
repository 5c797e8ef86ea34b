"""The two programs of generation as pure functions: a prompt to its caches, one token to the next one's logits.

Prompts are padded on the right, so that a token's place in the cache is its position in the row: rotary and learned
positions are those of training, no mask is needed beside the causal one, and the padding that a prompt leaves in the
cache is overwritten before anything may see it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar.attention.cache import CACHE_AXES, KVCache
from meshpar.forward import Forward
from meshpar.interfaces import Batch, LanguageModel, PyTree
from meshpar.layout.constrain import constrain
from meshpar.layout.context import Placement, placed
from meshpar.layout.resolve import place
from meshpar.layout.rules import Rule


def read_prompts(
    forward: Forward, params: PyTree, tokens: jax.Array, ends: jax.Array, *, length: int
) -> tuple[jax.Array, tuple[KVCache, ...]]:
    """Runs whole prompts.

    Args:
      params: in the plan's params layout.
      tokens: int32 `[rows, seq]`, padded on the right with any token.
      ends: int32 `[rows]`, tokens of each prompt.
      length: positions of the caches, at least `seq`.

    Returns:
      fp32 logits `[rows, vocab]` of the token after each prompt, -inf for the padding of the vocabulary; the caches.
    """
    plan, mesh, seq = forward.plan, forward.mesh, tokens.shape[1]
    whole = whole_rows(forward)
    with placed(plan.placement(mesh) if _divides(forward, seq) else whole):
        tokens = constrain(tokens, "batch seq", name="prompts")
        lm, x, caches = forward.prefill(params, _batch(tokens, None))
    if not caches:
        raise ValueError(
            f"the blocks of {type(lm).__name__} never call attend, so there are no keys and values to keep; "
            "attend through meshpar.attend to generate text"
        )
    with placed(whole):
        caches = jax.tree.map(
            lambda kept: constrain(
                jnp.pad(kept, ((0, 0), (0, 0), (0, length - seq), (0, 0), (0, 0))), CACHE_AXES, name="cache"
            ),
            caches,
        )
        last = jnp.take_along_axis(x, (ends - 1)[:, None, None], axis=1)
        return _logits(forward, lm, last), caches


def next_logits(
    forward: Forward, params: PyTree, tokens: jax.Array, positions: jax.Array, caches: tuple[KVCache, ...]
) -> tuple[jax.Array, tuple[KVCache, ...]]:
    """Runs one token of each row, after those that are in the caches.

    Args:
      params: in the plan's params layout.
      tokens, positions: int32 `[rows]`, the tokens and where they stand in their rows.
      caches: what `read_prompts` or this function returned.

    Returns:
      fp32 logits `[rows, vocab]` as of `read_prompts`; the caches with the tokens' keys and values.
    """
    with placed(whole_rows(forward)):
        tokens, positions = (
            constrain(x[:, None], "batch seq", name=name) for x, name in ((tokens, "tokens"), (positions, "positions"))
        )
        lm, x, caches = forward.decode(params, _batch(tokens, positions), caches)
        return _logits(forward, lm, x), caches


def whole_rows(forward: Forward) -> Placement:
    """The plan's placement for arrays that are not split along the sequence, since they have one position."""
    placement = forward.plan.placement(forward.mesh)
    rules = [Rule(logical=name, mesh_axes=(), source="decode, of one position") for name in ("seq", "seq_residual")]
    return Placement(mesh=placement.mesh, layout=placement.layout.override(rules), attention=placement.attention)


def _divides(forward: Forward, seq: int) -> bool:
    """Whether rows of so many positions can be split as the plan splits them."""
    try:
        for name in ("seq", "seq_residual"):
            place(forward.plan.layouts().compute, (name,), (seq,), forward.mesh, path="prompts")
    except ValueError:
        return False
    return True


def _batch(tokens: jax.Array, positions: jax.Array | None) -> Batch:
    return Batch(tokens=tokens, targets=tokens, weights=jnp.ones(tokens.shape, jnp.float32), positions=positions)


def _logits(forward: Forward, lm: LanguageModel, x: jax.Array) -> jax.Array:
    """fp32 `[rows, vocab]` of hidden states `[rows, 1, embed]`, each row whole on its device."""
    logits = lm.head(constrain(x, "batch seq_residual embed", name="last positions"))[:, 0].astype(jnp.float32)
    padding = jnp.arange(logits.shape[-1]) >= forward.model.config.vocab
    return constrain(jnp.where(padding, -jnp.inf, logits), "batch _", name="logits")
