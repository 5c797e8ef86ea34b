"""Megatron's 1D tensor parallelism: column-split then row-split matrices, vocabulary-split embedding and head.

Each device of `tensor` has some heads, some of the MLP's inner units and some of the vocabulary; the residual stream is
whole. One all-reduce of the activations after attention and one after the MLP, in the forward and in the backward.
Source: Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

from meshpar.layout.rules import Rule
from meshpar.parallel.compose import Fragment


def megatron(axis: str = "tensor") -> Fragment:
    """Splits heads, mlp and vocab over `axis`. Fewer kv heads than the degree stay whole on each device (GQA)."""

    def rule(logical: str, replicate_if_fewer: bool = False) -> Rule:
        return Rule(
            logical=logical, mesh_axes=(axis,), source="tensor parallelism", replicate_if_fewer=replicate_if_fewer
        )

    return Fragment(weights=(rule("heads"), rule("kv_heads", replicate_if_fewer=True), rule("mlp"), rule("vocab")))
