"""The seams of meshpar: what a batch is and what a model must offer, and nothing else.

A model is any `flax.nnx.Module` with the four members of `LanguageModel`; the plain step, the pipeline executor and
generation all drive a model through these parts, so a model never learns how it is spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax

# A nested dict of arrays (parameters, gradients, moments). Leaf names are joined by "/" in reports and errors.
PyTree: TypeAlias = Any
Axes: TypeAlias = tuple[str | None, ...]  # the logical axes of one array, outermost first


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one step reads: `[batch, seq]` arrays, in a microbatch, a global batch, on the host or on devices.

    Targets are shifted by the data pipeline, before any split of the sequence, so no shard loses its last target.
    Packed rows say with `segments` which document a token belongs to (attention stays inside a document) and with
    `positions` where it stands in it.
    """

    tokens: jax.Array  # int32 [batch, seq]
    targets: jax.Array  # int32 [batch, seq]: the token that follows
    weights: jax.Array  # float32 [batch, seq]: weight of each target in the loss, 0 for padding
    segments: jax.Array | None = None  # int32 [batch, seq], 0 for padding; None: one document a row
    positions: jax.Array | None = None  # int32 [batch, seq]; None: 0 .. seq-1 in every row


@runtime_checkable
class LanguageModel(Protocol):
    """The parts of a language model. `blocks` is made by `meshpar.module.stack`; the rest are methods.

    `key` is a typed PRNG key when the step trains with dropout and None otherwise.

    A model whose layers differ in a value that is not trained, such as a window, also has `layer_constants`: arrays
    `[layers, ...]` by name, made from its config. Its `block` takes those of its layer as a fifth
    argument.
    """

    blocks: Any  # stacked blocks: every parameter carries the logical axis "layers" in front

    def embed(self, batch: Batch, key: jax.Array | None) -> jax.Array:
        """Tokens to the first hidden states, `[batch, seq_residual, embed]`."""
        ...

    def block(
        self, block: Any, x: jax.Array, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """One layer of `blocks`. Returns the next hidden states and the layer's auxiliary losses (sums over tokens),
        by name.
        """
        ...

    def head(self, x: jax.Array) -> jax.Array:
        """Hidden states of any `[batch, seq]` to logits `[batch, seq, vocab]`; padding of the vocabulary included."""
        ...
