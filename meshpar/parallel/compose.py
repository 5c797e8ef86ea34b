"""Fragments of rules, and their merger into the four layouts of a step.

The layouts, in the order in which a step meets them:
    params     how parameters are stored between steps
    compute    how weights and activations are split while they are used
    grads      how gradients are split once they are reduced
    optimizer  how moments and master weights are stored
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshpar.layout.rules import Layout, Rule, merge_rules


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """What one strategy asks for: rules on weights (all layouts), on activations (compute only), spreads for ZeRO."""

    weights: tuple[Rule, ...] = ()
    activations: tuple[Rule, ...] = ()
    spread_params: tuple[str, ...] = ()
    spread_grads: tuple[str, ...] = ()
    spread_optimizer: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The four layouts of one step."""

    params: Layout
    compute: Layout
    grads: Layout
    optimizer: Layout


def compose(fragments: Iterable[Fragment], overrides: Iterable[Rule] = ()) -> Layouts:
    """Merges fragments; `overrides` (the user's own rules) replace those of the fragments, in all four layouts.

    Raises:
      ValueError: two fragments give one logical axis different mesh axes; the sentence names both.
    """
    fragments, overrides = tuple(fragments), tuple(overrides)
    weights = merge_rules(rule for fragment in fragments for rule in fragment.weights)
    compute = merge_rules(rule for fragment in fragments for rule in (*fragment.weights, *fragment.activations))

    def layout(rules: tuple[Rule, ...], spread: Iterable[str] = ()) -> Layout:
        return Layout(rules=rules, spread=tuple(dict.fromkeys(spread))).override(overrides)

    return Layouts(
        params=layout(weights, (axis for fragment in fragments for axis in fragment.spread_params)),
        compute=layout(compute),
        grads=layout(weights, (axis for fragment in fragments for axis in fragment.spread_grads)),
        optimizer=layout(weights, (axis for fragment in fragments for axis in fragment.spread_optimizer)),
    )
