"""`Plan`: JSON both ways, defaults of ZeRO, and a sentence for each plan that cannot be."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.layout.describe import describe
from meshpar.layout.rules import LOGICAL_AXES
from meshpar.mesh.axes import AXES
from meshpar.mesh.build import abstract_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.module import Model, abstract
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.precision.remat import SAVE_NAMES
from models.llama import LlamaConfig


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that can be built."""
    tensor = draw(st.integers(1, 8))
    mesh_axes = st.lists(st.sampled_from(AXES), unique=True, max_size=3).map(tuple)
    stage = draw(st.sampled_from([None, 0, 1, 2, 3]))
    fsdp = draw(st.sampled_from([-1, 1, 2, 64]))
    spread = stage or (stage is None and fsdp != 1)
    return Plan(
        mesh=MeshSpec(data=draw(st.integers(1, 16)), fsdp=fsdp, tensor=tensor),
        zero=stage,
        zero_axes=draw(st.none() | mesh_axes) if spread else None,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        rules=draw(st.dictionaries(st.sampled_from([*LOGICAL_AXES, "own"]), mesh_axes, max_size=3)),
        accumulate=draw(st.integers(1, 64)),
        precision=Policy(
            compute=draw(st.sampled_from(["fp32", "bf16"])), storage=draw(st.sampled_from(["cast", "copy"]))
        ),
        remat=draw(st.sampled_from(["none", "full", "selective"])),
        remat_save=tuple(draw(st.lists(st.sampled_from(list(SAVE_NAMES)), unique=True))),
        unroll=draw(st.integers(0, 4)),
        loss_chunk=draw(st.none() | st.integers(1, 4096)),
        attention=draw(st.sampled_from(["auto", "reference", "xla"])),
    )


@given(plans())
def test_json_gives_an_equal_plan_back(plan: Plan) -> None:
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.layouts() == plan.layouts()


def test_json_is_what_a_person_would_write() -> None:
    values = Plan(mesh=MeshSpec(data=2, tensor=4), rules={"embed": ("data",)}).to_json()
    assert values["mesh"] == "data=2 tensor=4"
    assert values["rules"] == {"embed": ["data"]}
    assert values["precision"]["compute"] == "bf16"
    assert Plan.from_json({"mesh": "fsdp=-1", "zero": 2}) == Plan(mesh=MeshSpec(fsdp=-1), zero=2)


def test_an_unknown_key_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ValueError, match="unknown plan key 'zerro'; did you mean 'zero'"):
        Plan.from_json({"zerro": 1})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"zero": 4}, "zero=4 is not a ZeRO stage; choose 0 (replicate), 1 (optimizer), 2 (gradients too) or 3"),
        ({"accumulate": 0}, "accumulate=0 is below 1; use 1"),
        ({"unroll": -1}, "unroll=-1 is negative; use 1 for a loop"),
        ({"loss_chunk": 0}, "loss_chunk=0 is below 1; give a number of positions or none"),
        ({"remat": "ful"}, "remat='ful' is not one of none, full, selective; did you mean 'full'?"),
        ({"remat_save": ("qvk",)}, "remat_save='qvk' is no name that models tag; did you mean 'qkv'?"),
        ({"zero_axes": ("fdsp",)}, "unknown mesh axis 'fdsp'; did you mean 'fsdp'?"),
        ({"rules": {"mlp": ("tensr",)}}, "unknown mesh axis 'tensr'; did you mean 'tensor'?"),
        (
            {"sequence_parallel": True},
            "sequence_parallel=True needs a tensor axis to split the sequence over; add tensor=2",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        Plan(**values)
    assert "\n" not in str(caught.value)


def test_a_mesh_axis_that_is_named_twice_in_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh axis 'data' is named twice"):
        Plan(rules={"mlp": ("data", "data")}).layouts()


@pytest.mark.parametrize(
    ("mesh", "zero", "stage", "over"),
    [
        ("data=8", None, 0, ("data", "fsdp")),
        ("fsdp=8", None, 3, ("fsdp",)),
        ("data=2 fsdp=4", None, 3, ("fsdp",)),  # HSDP: data replicates
        ("fsdp=-1", None, 3, ("fsdp",)),
        ("data=8", 3, 3, ("data",)),
        ("data=2 fsdp=4", 3, 3, ("fsdp",)),
        ("data=2 fsdp=4", 1, 1, ("data", "fsdp")),
        ("data=2 fsdp=4", 2, 2, ("data", "fsdp")),
        ("data=2 fsdp=4", 0, 0, ("data", "fsdp")),
    ],
)
def test_defaults_of_zero(mesh: str, zero: int | None, stage: int, over: tuple[str, ...]) -> None:
    plan = Plan(mesh=MeshSpec.parse(mesh), zero=zero)
    assert (plan.zero_stage, plan.zero_over) == (stage, over)
    assert plan.layouts().optimizer.spread == (over if stage else ())


def test_named_zero_axes_win_over_the_defaults() -> None:
    plan = Plan(mesh=MeshSpec(data=2, fsdp=4), zero=3, zero_axes=("data", "fsdp"))
    assert plan.zero_over == ("data", "fsdp") == plan.layouts().params.spread


def test_layouts_follow_the_fields() -> None:
    mesh = MeshSpec(data=2, fsdp=2, tensor=2)
    plain, sequence = Plan(mesh=mesh).layouts(), Plan(mesh=mesh, sequence_parallel=True).layouts()
    assert plain.compute.rule("batch").mesh_axes == ("data", "fsdp")  # type: ignore[union-attr]
    assert plain.compute.rule("seq_residual") is None
    assert sequence.compute.rule("seq_residual").mesh_axes == ("tensor",)  # type: ignore[union-attr]
    own = Plan(mesh=mesh, rules={"vocab": [], "embed": ["data"]}).layouts()  # type: ignore[dict-item]
    assert own.params.rule("vocab").mesh_axes == ()  # type: ignore[union-attr]
    assert own.grads.rule("embed").mesh_axes == ("data",)  # type: ignore[union-attr]


def llama(**values: int) -> Model:
    sizes = {
        "vocab": 90,
        "layers": 2,
        "embed": 32,
        "heads": 4,
        "kv_heads": 2,
        "mlp": 64,
        "max_seq": 64,
        "vocab_multiple": 16,
    }
    config = LlamaConfig(**(sizes | values))  # type: ignore[arg-type]
    return abstract(config.build, config)


MODEL = llama()


@pytest.mark.parametrize(
    "mesh", ["data=1", "data=8", "fsdp=8", "data=2 fsdp=2 tensor=2", "tensor=4", "fsdp=5", "fsdp=3"]
)
def test_a_plan_that_fits_passes(mesh: str) -> None:
    plan = Plan(mesh=MeshSpec.parse(mesh))
    plan.check(MODEL, batch=8 * 15, seq=64)


@pytest.mark.parametrize(
    ("mesh", "values", "batch", "seq", "sentence"),
    [
        ("fsdp=-1", {}, 8, 64, "mesh fsdp=-1 has a free axis; resolve it first"),
        # the batch names every factor and the next size that fits
        (
            "data=2 fsdp=4",
            {},
            1,
            64,
            "batch=1 is not divisible by data=2 x fsdp=4 x accumulate=1 = 8; use a multiple of 8, such as 8",
        ),
        ("data=2 fsdp=4", {}, 12, 64, "use a multiple of 8, such as 16"),
        ("data=2", {"accumulate": 3}, 8, 64, "batch=8 is not divisible by data=2 x fsdp=1 x accumulate=3 = 6"),
        ("data=2", {}, 0, 64, "batch=0 is not divisible by"),
        ("data=2", {}, 8, 65, "seq=65 is longer than the model's max_seq=64"),
        (
            "tensor=2",
            {"sequence_parallel": True},
            8,
            33,
            "seq=33 is not divisible by tensor=2, which sequence_parallel splits",
        ),
        ("tensor=8", {}, 8, 64, "heads=4 is not divisible by tensor=8 (blocks/attention/"),
        (
            "data=3",
            {"rules": {"embed": ("data",)}},
            3,
            64,
            "embed=32 is not divisible by data=3 (blocks/attention/k/kernel, dim 1)",
        ),
        ("data=2", {"rules": {"embed": ("data",), "mlp": ("data",)}}, 8, 64, "mesh axis 'data' would split two dims"),
    ],
)
def test_a_plan_that_does_not_fit_is_one_sentence(
    mesh: str, values: dict[str, Any], batch: int, seq: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        Plan(mesh=MeshSpec.parse(mesh), **values).check(MODEL, batch=batch, seq=seq)
    assert "\n" not in str(caught.value)


def notes(model: Model, plan: Plan) -> dict[str, str]:
    """For each parameter why it is not split as asked."""
    rows = describe(plan.layouts().params, model.axes, model.shapes, abstract_mesh(plan.mesh))
    return {row.path: row.note for row in rows}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "sentence"),
    [
        (8, 2, 4, None),  # kv heads are kept whole
        (6, 2, 4, "heads=6 is not divisible by tensor=4"),
        (6, 3, 2, "kv_heads=3 is not divisible by tensor=2"),
    ],
)
def test_heads_and_kv_heads_fit_tensor_or_are_refused_by_name(
    heads: int, kv_heads: int, tensor: int, sentence: str | None
) -> None:
    model = llama(heads=heads, kv_heads=kv_heads, head_dim=8)
    plan = Plan(mesh=MeshSpec(tensor=tensor))
    if sentence is None:
        plan.check(model)
        assert notes(model, plan)["blocks/attention/k/kernel"] == "kv_heads=2 is fewer than tensor=4: whole on each"
    else:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            plan.check(model)


def test_a_vocabulary_is_padded_or_refused_by_name() -> None:
    Plan(mesh=MeshSpec(tensor=4)).check(llama(vocab=50257, vocab_multiple=128))
    with pytest.raises(
        ValueError, match=re.escape("vocab=50257 is not divisible by tensor=4 (embedding/table, dim 0)")
    ):
        Plan(mesh=MeshSpec(tensor=4)).check(llama(vocab=50257, vocab_multiple=1))


def test_zero_falls_back_to_another_dim_or_to_whole_leaves_with_a_note() -> None:
    found = notes(llama(embed=64, mlp=100), Plan(mesh=MeshSpec(fsdp=5)))
    assert found["blocks/mlp/up/kernel"] == ""  # 64 does not divide by 5, 100 does
    assert found["norm/scale"] == "whole over fsdp: no dim of embed=64 divides by 5"


def test_a_free_axis_is_filled_for_the_devices_there_are() -> None:
    assert Plan(mesh=MeshSpec(fsdp=-1, tensor=2), zero=2).on(8) == Plan(mesh=MeshSpec(fsdp=4, tensor=2), zero=2)
    with pytest.raises(ValueError, match="does not divide 9"):
        Plan(mesh=MeshSpec(fsdp=-1, tensor=2)).on(9)


def test_a_placement_carries_what_models_may_know(mesh_of: Any) -> None:
    mesh = mesh_of("data=2 tensor=4")
    plan = Plan(mesh=MeshSpec(data=2, tensor=4), attention="reference")
    placement = plan.placement(mesh)
    assert (placement.mesh, placement.layout, placement.attention) == (mesh, plan.layouts().compute, "reference")
    assert placement.manual_axes == frozenset()
