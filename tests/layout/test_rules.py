"""Rules and layouts: known names, collisions, overrides."""

from __future__ import annotations

import re

import pytest

from meshpar.layout.rules import LOGICAL_AXES, Layout, Rule, did_you_mean, merge_rules


def rule(logical: str, *mesh_axes: str, source: str = "a test") -> Rule:
    return Rule(logical=logical, mesh_axes=mesh_axes, source=source)


def test_a_layout_answers_its_rule_and_none_for_known_axes_without_one() -> None:
    layout = Layout(rules=(rule("mlp", "tensor"),))
    assert layout.rule("mlp") == rule("mlp", "tensor")
    assert all(layout.rule(logical) is None for logical in LOGICAL_AXES if logical != "mlp")
    assert list(layout) == [rule("mlp", "tensor")]


def test_an_unknown_axis_is_refused_with_the_name_that_was_meant_and_the_way_to_declare_it() -> None:
    with pytest.raises(ValueError, match=re.escape("unknown logical axis 'embd'; did you mean 'embed'?")) as caught:
        Layout().rule("embd")
    assert 'rules={"embd": ()}' in str(caught.value)


def test_a_rule_declares_its_axis() -> None:
    assert Layout(rules=(rule("state"),)).rule("state") == rule("state")
    with pytest.raises(ValueError, match="did you mean 'state'"):
        Layout(rules=(rule("state"),)).rule("stat")


def test_two_rules_for_one_axis_are_refused_naming_both_sources() -> None:
    rules = (rule("mlp", "tensor", source="Megatron"), rule("mlp", "fsdp", source="mine"))
    sentence = "two rules for 'mlp': mlp -> tensor (from Megatron) and mlp -> fsdp (from mine)"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        merge_rules(rules)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Layout(rules=rules)


def test_order_of_mesh_axes_is_part_of_a_rule() -> None:
    with pytest.raises(ValueError, match="two rules for 'batch'"):
        merge_rules([rule("batch", "data", "fsdp"), rule("batch", "fsdp", "data")])


def test_equal_rules_of_two_sources_merge_into_the_first() -> None:
    first, second = rule("mlp", "tensor", source="first"), rule("mlp", "tensor", source="second")
    assert merge_rules([first, rule("vocab", "tensor"), second]) == (first, rule("vocab", "tensor"))


def test_override_replaces_rules_of_the_same_axes_only_and_keeps_the_spread() -> None:
    layout = Layout(rules=(rule("mlp", "tensor"), rule("vocab", "tensor")), spread=("fsdp",))
    changed = layout.override([rule("vocab"), rule("embed", "data")])
    assert {r.logical: r.mesh_axes for r in changed} == {"mlp": ("tensor",), "vocab": (), "embed": ("data",)}
    assert changed.spread == ("fsdp",)


@pytest.mark.parametrize(
    "make", [lambda: rule("mlp", "tensor", "data", "tensor"), lambda: Layout(spread=("tensor", "tensor"))]
)
def test_a_mesh_axis_that_is_named_twice_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match="mesh axis 'tensor' is named twice"):
        make()  # type: ignore[operator]


def test_did_you_mean_is_silent_when_nothing_is_close() -> None:
    assert did_you_mean("embd", ["embed", "mlp"]) == "; did you mean 'embed'?"
    assert did_you_mean("qqqq", ["embed", "mlp"]) == ""
