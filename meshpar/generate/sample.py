"""Sampling under a training plan's own layout, so that a model can be looked at while it trains.

Every new token runs the whole row again: one program, no cache, right for any layout. The cost grows with the square of
the length, so rows are kept short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.forward import Forward
from meshpar.interfaces import Batch, PyTree
from meshpar.layout.constrain import constrain
from meshpar.layout.context import placed
from meshpar.module import Model
from meshpar.plan import Plan


def sample(
    model: Model,
    plan: Plan,
    mesh: Mesh,
    params: PyTree,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[list[int]]:
    """Continues prompts.

    Args:
      params: in the plan's params layout.
      prompts: token ids, at least one each; they may differ in length.
      new_tokens: how many to add to each prompt.
      temperature: 0 takes the most likely token.

    Returns:
      Prompt and continuation of each.

    Raises:
      ValueError: an empty prompt, or prompt and continuation longer than the model allows.
    """
    if not prompts or min(len(prompt) for prompt in prompts) < 1:
        raise ValueError("a prompt is empty; start it with at least one token, such as the end-of-document token")
    length = max(len(prompt) for prompt in prompts) + new_tokens
    longest = getattr(model.config, "max_seq", length)
    if length > longest:
        raise ValueError(
            f"prompt and continuation are {length} tokens and the model's max_seq is {longest}; "
            f"ask for at most {longest - length + new_tokens} new ones"
        )
    rows = _up(len(prompts), _degree(plan, mesh, "batch"))
    width = _up(length, _piece(plan, mesh))
    tokens = np.zeros((rows, width), np.int32)
    ends = np.ones(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        ends[row] = len(prompt)
    whole = NamedSharding(mesh, PartitionSpec())  # so that each process can read all rows
    run = jax.jit(_runner(model, plan, mesh, new_tokens), out_shardings=whole)
    filled = run(params, tokens, ends, jax.random.key(seed), jnp.float32(temperature))
    host = np.asarray(jax.device_get(filled))
    return [host[row, : len(prompt) + new_tokens].tolist() for row, prompt in enumerate(prompts)]


def _degree(plan: Plan, mesh: Mesh, logical: str) -> int:
    rule = plan.layouts().compute.rule(logical)
    return math.prod(mesh.shape[axis] for axis in rule.mesh_axes) if rule else 1


def _piece(plan: Plan, mesh: Mesh) -> int:
    """A sequence that is a multiple of this can be split as the plan splits sequences."""
    return math.lcm(_degree(plan, mesh, "seq"), _degree(plan, mesh, "seq_residual"))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _runner(model: Model, plan: Plan, mesh: Mesh, new_tokens: int) -> Callable[..., jax.Array]:
    forward = Forward(model, plan, mesh)

    def run(params: PyTree, tokens: jax.Array, ends: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
        rows = jnp.arange(tokens.shape[0])

        def add_one(step: jax.Array, tokens: jax.Array) -> jax.Array:
            with placed(plan.placement(mesh)):
                tokens = constrain(tokens, "batch seq", name="tokens")
                batch = Batch(tokens=tokens, targets=tokens, weights=jnp.ones(tokens.shape, jnp.float32))
                lm, x, _ = forward(params, batch, None)
                last = jnp.take_along_axis(x, (ends + step - 1)[:, None, None], axis=1)
                last = jnp.broadcast_to(last, (x.shape[0], _piece(plan, mesh), x.shape[2]))
                logits = lm.head(last)[:, 0]
            logits = jnp.where(jnp.arange(logits.shape[-1]) < model.config.vocab, logits.astype(jnp.float32), -jnp.inf)
            drawn = jax.random.categorical(jax.random.fold_in(key, step), logits / jnp.maximum(temperature, 1e-6))
            new = jnp.where(temperature == 0, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
            return tokens.at[rows, ends + step].set(new)

        return jax.lax.fori_loop(0, new_tokens, add_one, tokens)

    return run
