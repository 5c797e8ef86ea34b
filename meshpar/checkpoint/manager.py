"""Save and restore a train state with Orbax: each host writes its own shards, and a restore reads straight into the
target's shards.

Restores always go through an abstract target that carries shardings, so a checkpoint written on one mesh can be read on
another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

State = TypeVar("State")


class Checkpoints:
    """The checkpoints of one run, by step. The folder is made by the first save."""

    def __init__(self, folder: Path, *, keep: int = 2):
        """`keep` is how many of the newest stay."""
        self.folder = folder.absolute()
        self._keep = keep
        self._opened: Any = None

    def latest(self) -> int | None:
        """The newest complete step, None when there is none."""
        return self._manager().latest_step() if self.folder.exists() else None

    def save(self, step: int, state: Any) -> None:
        """Writes a state in the background; arrays are copied off the devices before this returns, so they may be
        donated.
        """
        import orbax.checkpoint as ocp

        self._manager().save(step, args=ocp.args.StandardSave(_without_keys(state)))

    def restore(self, target: State, step: int | None = None) -> State:
        """Reads a step (None: the newest) into the shapes, dtypes and shardings of `target`.

        Raises:
          ValueError: there is no checkpoint.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise ValueError(f"{self.folder} holds no checkpoint; train without resuming, or give another run folder")
        import orbax.checkpoint as ocp

        plain = jax.tree.map(_key_shape, target)
        restored = self._manager().restore(step, args=ocp.args.StandardRestore(plain))
        return jax.tree.map(lambda leaf, like: _with_key(leaf, like), restored, target)

    def close(self) -> None:
        """Waits for the last save and ends."""
        if self._opened is not None:
            self._opened.wait_until_finished()
            self._opened.close()

    def _manager(self) -> Any:
        if self._opened is None:
            import orbax.checkpoint as ocp  # costs over a second

            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, create=True, enable_async_checkpointing=True)
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _without_keys(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def _key_shape(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _with_key(leaf: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(leaf) if _is_key(like) else leaf
