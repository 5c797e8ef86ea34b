"""Megatron's sequence parallelism: what tensor parallelism leaves whole is split along the sequence over the same axis.

Norms, dropout and the residual stream then hold 1/tensor of the positions; the all-reduce after each row-split matrix
becomes a reduce-scatter, with an all-gather before the next column-split one: the same bytes. Source: Korthikanti et
al. 2022, section 4.2.2.
"""

from __future__ import annotations

from meshpar.layout.rules import Rule
from meshpar.parallel.compose import Fragment


def megatron_sp(axis: str = "tensor") -> Fragment:
    """Splits `seq_residual` over `axis`; `seq`, the positions inside attention, MLP and loss, stays whole."""
    return Fragment(
        activations=(Rule(logical="seq_residual", mesh_axes=(axis,), source="Megatron sequence parallelism"),)
    )
