"""Rematerialisation: which values of a block the forward keeps for the backward, by name.

Models tag values with `save_name(x, "mlp_hidden")`; the plan says "none" (keep all that autodiff wants), "full" (keep
only each block's input) or "selective" (keep the listed names). A layer's cast and gathered weights are never kept:
they would undo ZeRO 3 (one whole copy of every layer) and cost one more pass over memory than casting again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

Remat = Literal["none", "full", "selective"]
SAVE_NAMES: dict[str, str] = {
    "qkv": "queries, keys and values after RoPE",
    "attention": "the output of attention, before its projection",
    "mlp_hidden": "the inner activations of the MLP, after the nonlinearity",
    "mlp_gate": "the gate and up projections of the MLP, before the nonlinearity",
    "norm": "the outputs of norms",
    "residual": "the residual stream inside a block",
}

_seen: ContextVar[tuple[Any, list[tuple[str, jax.Array]]] | None] = ContextVar("meshpar_seen_names", default=None)


def save_name(x: jax.Array, name: str) -> jax.Array:
    """Tags `x` for selective rematerialisation. Raises ValueError for a name that is not in `SAVE_NAMES`."""
    if name not in SAVE_NAMES:
        raise ValueError(f"save_name={name!r} is not one of {', '.join(SAVE_NAMES)}; choose one of them")
    seen = _seen.get()
    if seen is not None and seen[0] == get_opaque_trace_state(convention="meshpar"):
        seen[1].append((name, x))
    return checkpoint_name(x, name)


@contextmanager
def seen_names() -> Iterator[list[tuple[str, jax.Array]]]:
    """Collects the tagged values of the code in the `with` block, in order; not those of inner traces, which cannot
    leave them.
    """
    seen: list[tuple[str, jax.Array]] = []
    token = _seen.set((get_opaque_trace_state(convention="meshpar"), seen))
    try:
        yield seen
    finally:
        _seen.reset(token)


def remat(
    function: Callable[..., Any],
    mode: Remat,
    save: tuple[str, ...] = (),
    *,
    weights: Collection[tuple[int, ...]] = (),
) -> Callable[..., Any]:
    """`function`, the body of a loop over layers, under the mode.

    In a loop XLA cannot merge the forward with its second run, so `prevent_cse` and its barriers are off.

    Args:
      save: the names that "selective" keeps.
      weights: the shapes of the layer's parameters. A value of such a shape that was only cast or moved to another
        layout is a weight in use, and is made again.
    """
    if mode == "full":
        policy = jax.checkpoint_policies.nothing_saveable
    elif mode == "selective":
        policy = jax.checkpoint_policies.save_only_these_names(*save)
    else:
        # jax has a policy to keep all but some names, and it keeps everything (0.10 and 0.12); it would also keep the
        # unnamed value before the name.
        def policy(primitive: Any, *inputs: Any, **_: Any) -> bool:
            return not (
                primitive.name in ("convert_element_type", "sharding_constraint") and inputs[0].shape in weights
            )

    return jax.checkpoint(function, policy=policy, prevent_cse=False)
