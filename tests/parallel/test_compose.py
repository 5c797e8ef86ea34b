"""Fragments merge into four layouts: weights everywhere, activations in compute alone, spreads where ZeRO asks."""

from __future__ import annotations

import re

import pytest

from meshpar.layout.rules import Layout, Rule
from meshpar.parallel.compose import Fragment, Layouts, compose
from meshpar.parallel.data import data_parallel
from meshpar.parallel.sequence import megatron_sp
from meshpar.parallel.tensor import megatron
from meshpar.parallel.zero import zero


def rules_of(layout: Layout) -> dict[str, tuple[str, ...]]:
    return {rule.logical: rule.mesh_axes for rule in layout}


def all_of(layouts: Layouts) -> list[Layout]:
    return [layouts.params, layouts.compute, layouts.grads, layouts.optimizer]


WEIGHTS = {"heads": ("tensor",), "kv_heads": ("tensor",), "mlp": ("tensor",), "vocab": ("tensor",)}


def test_weight_rules_are_in_all_layouts_and_activation_rules_in_compute_alone() -> None:
    layouts = compose([data_parallel(("data", "fsdp")), megatron(), megatron_sp()])
    for layout in (layouts.params, layouts.grads, layouts.optimizer):
        assert rules_of(layout) == WEIGHTS
    assert rules_of(layouts.compute) == WEIGHTS | {"batch": ("data", "fsdp"), "seq_residual": ("tensor",)}
    assert not any(layout.spread for layout in all_of(layouts))


def test_compute_is_never_spread_so_that_weights_are_gathered_for_use() -> None:
    layouts = compose([zero(3, ("fsdp",))])
    assert [layout.spread for layout in all_of(layouts)] == [("fsdp",), (), ("fsdp",), ("fsdp",)]


def test_two_fragments_that_disagree_are_refused_naming_both() -> None:
    mine = Fragment(activations=(Rule(logical="mlp", mesh_axes=("fsdp",), source="my strategy"),))
    sentence = "two rules for 'mlp': mlp -> tensor (from tensor parallelism) and mlp -> fsdp (from my strategy)"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        compose([megatron(), mine])


def test_an_override_replaces_the_rule_of_a_fragment_in_every_layout() -> None:
    own = [
        Rule(logical="vocab", mesh_axes=(), source="the user"),
        Rule(logical="embed", mesh_axes=("data",), source="me"),
    ]
    for layout in all_of(compose([megatron()], own)):
        assert rules_of(layout) == WEIGHTS | {"vocab": (), "embed": ("data",)}


def test_an_override_may_stand_where_a_fragment_has_no_rule_of_its_own_but_not_twice() -> None:
    own = [Rule(logical="embed", mesh_axes=(axis,), source=f"entry {axis}") for axis in ("data", "fsdp")]
    with pytest.raises(ValueError, match="two rules for 'embed'"):
        compose([], own)


def test_spreads_of_two_fragments_join_without_repeats() -> None:
    layouts = compose([zero(1, ("data", "fsdp")), zero(1, ("fsdp", "expert"))])
    assert layouts.optimizer.spread == ("data", "fsdp", "expert")


def test_nothing_composes_to_whole_arrays() -> None:
    assert compose([]) == Layouts(params=Layout(), compute=Layout(), grads=Layout(), optimizer=Layout())
