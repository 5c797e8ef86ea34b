"""Bytes of a training state: the formulas of both storages, and the shards of a real state."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import optax
import pytest

from meshpar.layout.describe import totals
from meshpar.mesh.build import build_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.module import Model, abstract
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.describe import describe_state, persistent_bytes
from meshpar.train.state import init_state, state_shardings
from models.llama import LlamaConfig

CONFIG = LlamaConfig(vocab=90, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_seq=64, vocab_multiple=16)
MODEL = abstract(CONFIG.build, CONFIG)
ADAM = optax.adamw(1e-3)
COUNTERS = 2 * 4 + 8 + 4  # the numbers of step and update, the key, Adam's count

# storage -> bytes a parameter: what ZeRO 3 spreads (the parameters), what ZeRO 1 spreads (master and moments)
BYTES = {"cast": (4, 8), "copy": (2, 12)}


def size_on_device(model: Model, tensor: int, spread: int, whole: dict[str, int] | None = None) -> int:
    """Parameters of one device: Ψ, split over tensor where a rule says so, then over ZeRO's axes.

    `whole` gives for leaves that do not divide by `spread` what they divide by.
    """
    sizes = jax.tree.leaves_with_path(jax.tree.map(lambda leaf: leaf.size, model.shapes))
    axes = jax.tree.leaves(model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    total = 0
    for (path, size), names in zip(sizes, axes, strict=True):
        split = tensor if {"heads", "kv_heads", "mlp", "vocab"} & set(names) else 1
        by = next((n for name, n in (whole or {}).items() if name in jax.tree_util.keystr(path)), spread)
        assert size % (split * by) == 0
        total += size // (split * by)
    return total


@pytest.mark.parametrize("storage", ["cast", "copy"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["data=2 fsdp=4", "fsdp=8", "data=8", "data=2 fsdp=2 tensor=2"])
def test_persistent_bytes_are_the_formula_of_the_storage(mesh: str, zero: int, storage: Any) -> None:
    spec = MeshSpec.parse(mesh)
    plan = Plan(mesh=spec, zero=zero, precision=Policy(storage=storage))
    n = math.prod(spec.sizes[axis] for axis in plan.zero_over)
    of_params, of_optimizer = BYTES[storage]
    whole, spread = size_on_device(MODEL, spec.tensor, 1), size_on_device(MODEL, spec.tensor, n)
    expected = of_params * (spread if zero == 3 else whole) + of_optimizer * (spread if zero >= 1 else whole)
    assert persistent_bytes(MODEL, ADAM, plan) == expected + COUNTERS
    if spec.tensor == 1:  # the table of the design, in Ψ and N
        psi = MODEL.size
        table = [
            of_params * psi + of_optimizer * psi,
            of_params * psi + of_optimizer * psi // n,
            of_params * psi + of_optimizer * psi // n,
            (of_params * psi + of_optimizer * psi) // n,
        ]
        assert expected == table[zero]


@pytest.mark.parametrize(
    ("mesh", "zero", "divides_by"), [("fsdp=8", 3, 1), ("fsdp=4", 1, 1), ("data=2 fsdp=4", 1, 2), ("fsdp=3", 3, 3)]
)
def test_leaves_that_do_not_divide_are_listed_and_counted_as_such(mesh: str, zero: int, divides_by: int) -> None:
    """Norms of heads of 6 divide by 2 and 3; everything else by 24."""
    config = LlamaConfig(
        vocab=90,
        layers=2,
        embed=48,
        heads=8,
        kv_heads=8,
        mlp=96,
        max_seq=64,
        head_dim=6,
        vocab_multiple=48,
        qk_norm=True,
    )
    model, plan = abstract(config.build, config), Plan(mesh=MeshSpec.parse(mesh), zero=zero)
    n = plan.mesh.product
    parts = describe_state(model, ADAM, plan)
    small = {f"blocks/attention/{which}_norm/scale" for which in "qk"}
    assert {row.path.removeprefix("0/mu/").removeprefix("0/nu/") for row in parts["optimizer"] if row.note} == (
        small if divides_by != n else set()
    )
    assert all(f"divides by {n // divides_by}" in row.note for row in parts["optimizer"] if row.note)
    spread = size_on_device(model, 1, n, {"'q_norm'": divides_by, "'k_norm'": divides_by})
    assert persistent_bytes(model, ADAM, plan) == 4 * (spread if zero == 3 else model.size) + 8 * spread + COUNTERS


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ("data=2 fsdp=2 tensor=2", {"zero": 3}),
        ("data=2 tensor=4", {"zero": 1, "precision": Policy(storage="copy")}),  # kv heads are fewer than tensor
    ],
)
def test_a_real_state_has_these_rows_and_these_bytes_on_each_device(mesh: str, plan: dict[str, Any]) -> None:
    made = Plan(mesh=MeshSpec.parse(mesh), **plan)
    shardings = state_shardings(MODEL, ADAM, made, build_mesh(made.mesh, jax.devices()))
    # XLA spends most of its time on making random numbers fast; here they are drawn once.
    init = jax.jit(
        lambda key: init_state(MODEL, ADAM, made, key),
        out_shardings=shardings,
        compiler_options={"xla_backend_optimization_level": "0"},
    )
    state = init(jax.random.key(0))
    held: Counter[int] = Counter()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert set(held.values()) == {persistent_bytes(MODEL, ADAM, made)}
    assert len(held) == 8
    parts = describe_state(MODEL, ADAM, made)
    for name, tree in (("params", state.params), ("master", state.master), ("optimizer", state.opt_state)):
        for row, leaf in zip(parts[name], jax.tree.leaves(tree), strict=True):
            assert (row.shape, row.dtype) == (leaf.shape, str(leaf.dtype))
            assert leaf.sharding.shard_shape(leaf.shape) == tuple(
                size // math.prod(made.mesh.sizes[axis] for axis in split)
                for size, split in zip(row.shape, row.split, strict=True)
            )


def test_moments_carry_the_axes_of_their_parameters() -> None:
    parts = describe_state(MODEL, ADAM, Plan(mesh=MeshSpec(fsdp=4, tensor=2)))
    assert list(parts) == ["params", "master", "optimizer", "counters"]
    by_path = {row.path: row for row in parts["optimizer"]}
    for row in parts["params"]:
        for moment in ("mu", "nu"):
            inherited = by_path.pop(f"0/{moment}/{row.path}")
            assert (inherited.axes, inherited.spec, inherited.shape) == (row.axes, row.spec, row.shape)
    assert {path: row.axes for path, row in by_path.items()} == {"0/count": ()}
    assert parts["master"] == []
    assert [row.path for row in parts["counters"]] == ["key", "step", "updates"]


def test_state_of_another_shape_than_its_parameter_is_whole_and_listed() -> None:
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    rows = describe_state(MODEL, tx, Plan(mesh=MeshSpec(fsdp=8), zero=1))["optimizer"]
    factored = [row for row in rows if row.path.startswith("v_row/") and row.path.endswith("table")]
    assert [(row.is_whole, row.note) for row in factored] == [(True, "whole: not of the shape of a parameter")]
    assert totals(rows).noted >= 1


def test_sgd_without_momentum_adds_no_state() -> None:
    plan = Plan(mesh=MeshSpec(fsdp=8), zero=0)
    parts = describe_state(MODEL, optax.sgd(0.1), plan)
    assert sum(row.bytes for row in parts["optimizer"]) <= 4
    assert sum(row.bytes for row in parts["params"]) == 4 * MODEL.size


def test_a_free_mesh_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh fsdp=-1 has no shape"):
        describe_state(MODEL, ADAM, Plan(mesh=MeshSpec(fsdp=-1)))
