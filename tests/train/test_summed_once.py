"""Accumulation under ZeRO 0 and 1 reduces gradients once a step; under ZeRO 2 and 3 with each microbatch."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
import pytest

from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.testing.compare import assert_trees_close
from tests.conformance.runs import GPT, train


def reduced(compiled: jax.stages.Compiled) -> tuple[int, int]:
    """Elements that all-reduces give a device, outside of loops and in one pass of each loop."""
    once = in_loops = 0
    entry = False
    for line in compiled.as_text().splitlines():
        if line and not line[0].isspace():
            entry = line.startswith("ENTRY")
        if found := re.search(r"= (.+?) all-reduce(?:-start)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", found[1])
            elements = sum(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes)
            once, in_loops = (once + elements, in_loops) if entry else (once, in_loops + elements)
    return once, in_loops


@pytest.mark.parametrize(
    ("mesh", "plan", "share"),
    [("data=4", {}, 1), ("data=4", {"zero": 1}, 1), ("data=2 fsdp=2", {"zero": 1}, 1), ("data=2 fsdp=2", {}, 2)],
)
def test_what_zero_leaves_whole_is_reduced_once(mesh: str, plan: dict[str, Any], share: int) -> None:
    """`share`: data reduces the part of the gradients that fsdp has left on a device."""
    run = train(mesh, accumulate=2, steps=1, **plan)
    once, in_loops = reduced(run.training.compile())
    size = run.training.model.size
    assert size / share <= once <= size / share + 2000  # beside it sums of losses, the norm and small whole leaves
    if "fsdp" not in mesh or plan:
        assert in_loops < 100


def test_gradients_that_are_spread_are_reduced_with_each_microbatch() -> None:
    """So that the test above can fail."""
    run = train("data=4", accumulate=2, steps=1, zero=2)
    assert reduced(run.training.compile())[1] > run.training.model.size / 2


def test_zero_2_holds_a_part_of_the_gradients_and_zero_1_all() -> None:
    temp = {}
    for stage in (1, 2):
        training = train("data=4", accumulate=2, steps=1, zero=stage).training
        temp[stage] = training.compile().memory_analysis().temp_size_in_bytes
    assert temp[1] - temp[2] >= 4 * training.model.size * (1 - 1 / 4)


def test_accumulating_spread_gradients_gathers_only_weights() -> None:
    """A sum that is kept whole would be gathered with each microbatch."""
    plain, accumulated = (
        len(re.findall(r" all-gather\(", train("fsdp=4", accumulate=n, steps=1).training.compile().as_text()))
        for n in (1, 2)
    )
    assert accumulated == plain


@pytest.mark.parametrize(
    ("mesh", "plan", "axes"),
    [
        ("data=2 fsdp=2", {"zero": 0}, ("data", "fsdp")),
        ("data=2 fsdp=2", {"zero": 1}, ("data", "fsdp")),
        ("data=2 fsdp=2", {"zero": 2}, ()),
        ("data=2 fsdp=2", {}, ("data",)),
        ("data=4", {"zero": 3}, ()),
        ("data=2 fsdp=2", {"zero": 2, "zero_axes": ("data",)}, ()),
        ("data=2 fsdp=2", {"zero": 0, "rules": {"batch": ("data",), "mlp": ("fsdp",)}}, ("data",)),
        ("data=2 fsdp=2", {"zero": 0, "rules": {"mlp": ("data",)}}, ()),
        ("data=2 fsdp=2", {"zero": 0, "rules": {"batch": ()}}, ()),
    ],
)
def test_the_axes_are_those_that_split_neither_weights_nor_gradients(
    mesh: str, plan: dict[str, Any], axes: tuple[str, ...]
) -> None:
    made = Plan(mesh=MeshSpec.parse(mesh), accumulate=2, **plan)
    assert made.reduced_apart == axes
    assert dataclasses.replace(made, accumulate=1).reduced_apart == ()


@pytest.mark.slow
def test_dropout_is_that_of_one_device() -> None:
    config = dataclasses.replace(GPT, dropout=0.2)
    one = train("data=1", config=config, steps=2, accumulate=2)
    many = train("data=2 fsdp=2 tensor=2", config=config, steps=2, accumulate=2, zero=1)
    np.testing.assert_allclose(many.losses, one.losses, rtol=0, atol=1e-5)
    assert_trees_close(many.gradients, one.gradients)
