"""The report of a restore: what stays, moves, is cast, comes from elsewhere, is missing or left over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.checkpoint.manifest import Manifest
from meshpar.checkpoint.reshard import axes_by_path, compare, describe_leaf, mesh_of, named_leaves

MeshOf = Callable[[str], Mesh]


def state(mesh: Mesh, *specs: str | None, param: Any = jnp.float32, master: bool = False, scale: bool = False) -> Any:
    """An abstract state with a matrix, split as `specs` say, its moment, and scalars."""

    def leaf(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    tree = {
        "step": leaf((), jnp.int32),
        "params": {"mlp": {"kernel": leaf((8, 8), param, *specs)}},
        "opt_state": ({"mu": {"mlp": {"kernel": leaf((8, 8), jnp.float32, *specs)}}},),
        "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=NamedSharding(mesh, PartitionSpec())),
    }
    if master:
        tree["master"] = {"mlp": {"kernel": leaf((8, 8), jnp.float32, *specs)}}
    if scale:
        tree["scale"] = {"value": leaf((), jnp.float32), "good": leaf((), jnp.int32)}
    return tree


def manifest(tree: Any, step: int = 300) -> Manifest:
    leaves = named_leaves(tree)
    return Manifest(
        step=step, mesh=mesh_of(leaves), leaves={path: describe_leaf(leaf) for path, leaf in leaves.items()}
    )


def lines(stored: Any, target: Any) -> list[str]:
    return compare(manifest(stored), named_leaves(target)).lines()


def test_the_same_state_on_the_same_mesh_stays(mesh_of: MeshOf) -> None:
    mesh = mesh_of("fsdp=4 tensor=2")
    assert lines(state(mesh, "fsdp"), state(mesh, "fsdp")) == [
        "restoring step 300, written on fsdp=4 tensor=2: 4 leaves as they were"
    ]


def test_another_mesh_or_another_split_is_resharded(mesh_of: MeshOf) -> None:
    mesh = mesh_of("fsdp=4 tensor=2")
    expected = "restoring step 300, written on fsdp=4 tensor=2{}: 2 leaves as they were, 2 resharded"
    assert lines(state(mesh, "fsdp"), state(mesh_of("fsdp=2"), "fsdp")) == [expected.format(", onto fsdp=2")]
    assert lines(state(mesh, "fsdp"), state(mesh_of("data=1"), "fsdp")) == [expected.format(", onto one device")]
    assert lines(state(mesh, "fsdp"), state(mesh, None, "fsdp")) == [expected.format("")]


def test_whole_arrays_stay_whole_on_another_number_of_devices(mesh_of: MeshOf) -> None:
    assert lines(state(mesh_of("data=8")), state(mesh_of("data=2"))) == [
        "restoring step 300, written on data=8, onto data=2: 4 leaves as they were"
    ]


def test_from_fp32_parameters_to_copies_with_masters(mesh_of: MeshOf) -> None:
    mesh = mesh_of("data=2")
    report = compare(manifest(state(mesh)), named_leaves(state(mesh, param=jnp.bfloat16, master=True)))
    assert {match.path: match.source for match in report.matches if match.path != match.source} == {
        "master/mlp/kernel": "params/mlp/kernel"
    }
    assert report.lines() == [
        "restoring step 300, written on data=2: 4 leaves as they were, 1 cast float32 -> bfloat16",
        "  1 leaves of master are read from params",
    ]


def test_fp32_parameters_come_from_masters_never_from_their_bf16_copies(mesh_of: MeshOf) -> None:
    mesh = mesh_of("data=2")
    report = compare(manifest(state(mesh, param=jnp.bfloat16, master=True)), named_leaves(state(mesh)))
    assert [match.source for match in report.matches if match.path == "params/mlp/kernel"] == ["master/mlp/kernel"]
    assert report.left_over == ("params/mlp/kernel",)
    assert not any(match.cast for match in report.matches)


def test_bf16_parameters_come_from_their_own_copies(mesh_of: MeshOf) -> None:
    stored = state(mesh_of("data=2"), param=jnp.bfloat16, master=True)
    report = compare(manifest(stored), named_leaves(stored))
    assert all(match.path == match.source for match in report.matches)


def test_a_missing_scale_starts_fresh_and_one_too_many_is_left(mesh_of: MeshOf) -> None:
    mesh = mesh_of("data=2")
    report = compare(manifest(state(mesh)), named_leaves(state(mesh, scale=True)))
    assert report.fresh == ("scale/good", "scale/value")
    assert report.lines()[1:] == ["  missing, starts fresh: scale/good, scale/value"]
    assert lines(state(mesh, scale=True), state(mesh))[1:] == [
        "  only in the checkpoint, not read: scale/good, scale/value"
    ]


def test_another_shape_is_a_sentence_with_path_and_both(mesh_of: MeshOf) -> None:
    target = state(mesh_of("data=2"))
    target["params"]["mlp"]["kernel"] = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    sentence = r"params/mlp/kernel is \(8, 8\) in the checkpoint of step 300 and \(8, 16\) here; give the model"
    with pytest.raises(ValueError, match=sentence):
        lines(state(mesh_of("data=2")), target)


def test_an_integer_does_not_become_a_float_nor_a_key_of_another_kind(mesh_of: MeshOf) -> None:
    rbg = jax.random.key(0, impl="rbg").dtype
    for path, dtype, stored in (("step", jnp.dtype("float32"), "int32"), ("key", rbg, "key<fry>")):
        target = state(mesh_of("data=2"))
        target[path] = jax.ShapeDtypeStruct((), dtype)
        with pytest.raises(ValueError, match=f"{path} is {stored} in the checkpoint of step 300 and {dtype} here"):
            lines(state(mesh_of("data=2")), target)


def test_a_renamed_parameter_is_named_with_the_close_one(mesh_of: MeshOf) -> None:
    target = state(mesh_of("data=2"))
    target["params"] = {"mlp": {"kernels": target["params"]["mlp"]["kernel"]}}
    sentence = "step 300 has no params/mlp/kernels; did you mean 'params/mlp/kernel'; give the model"
    with pytest.raises(ValueError, match=sentence):
        lines(state(mesh_of("data=2")), target)


def test_missing_moments_are_counted_and_parameters_alone_are_offered(mesh_of: MeshOf) -> None:
    mesh = mesh_of("data=2")
    target = state(mesh)
    target["opt_state"] = {f"nu{i}": target["params"]["mlp"]["kernel"] for i in range(5)}
    sentence = r"has no opt_state/nu0, opt_state/nu1, opt_state/nu2 and 2 more.*or restore parameters only"
    with pytest.raises(ValueError, match=sentence):
        lines(state(mesh), target)


def test_logical_axes_reach_moments_and_masters(mesh_of: MeshOf) -> None:
    leaves = named_leaves(state(mesh_of("data=2"), master=True))
    found = axes_by_path(leaves, {"mlp": {"kernel": ("embed", "mlp")}})
    assert found == {
        path: ("embed", "mlp") for path in ("params/mlp/kernel", "opt_state/0/mu/mlp/kernel", "master/mlp/kernel")
    }
    assert axes_by_path(leaves, None) == {}
