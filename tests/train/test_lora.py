"""LoRA: which kernels, how they lie on devices, what a step holds and sends, and PEFT's files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from experiments.recipes import llama_micro
from meshpar.hf.folder import open_hf
from meshpar.mesh.spec import MeshSpec
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.precision.policy import Policy, Storage
from meshpar.train.build import build
from meshpar.train.describe import describe_state, persistent_bytes
from meshpar.train.lora import Lora, adapt, merge_adapters, with_fresh_adapters
from meshpar.train.metrics import flops_per_token
from meshpar.train.optimizer import Name, OptimizerConfig, matrices
from meshpar.train.peft import NoPeftForm, load_adapter, save_adapter
from tests.conformance.runs import GPT, LLAMA, batch_of, model_of
from tests.hf.fixtures import FOLDER

ADAM = optax.adam(1e-2)


def adapted_names(model: Model) -> set[str]:
    blocks = model.trained(model.shapes)["blocks"]
    return {f"{part}/{name}" for part, of in blocks.items() for name in of}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q", "v"), {"attention/q", "attention/v"}),
        (("attention",), {"attention/q", "attention/k", "attention/v", "attention/out"}),
        (("mlp/*", "attention/out"), {"mlp/gate", "mlp/up", "mlp/down", "attention/out"}),
        (("*/[qk]",), {"attention/q", "attention/k"}),
    ],
)
def test_targets_name_kernels(targets: tuple[str, ...], expected: set[str]) -> None:
    assert adapted_names(adapt(model_of(LLAMA), Lora(targets=targets))) == expected


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Lora(rank=0), "lora.rank=0 must be at least 1"),
        (lambda: Lora(alpha=-1.0), "lora.alpha=-1.0 must be above 0"),
        (lambda: Lora(targets=()), "lora.targets is empty"),
        (
            lambda: dataclasses.replace(llama_micro(), lora=Lora(rank=4)),
            "lora.rank=4 adapts weights, and weights is none",
        ),
        (lambda: adapt(model_of(LLAMA), Lora(targets=("q", "gat"))), "'gat', which is no kernel; did you mean 'gate'"),
        (lambda: adapt(model_of(GPT), Lora(targets=("gate",))), "the layers have attention/k"),
    ],
)
def test_wrong_values_are_one_sentence(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        make()  # type: ignore[operator]
    assert told in str(raised.value)


def test_adapters_are_split_as_their_kernel_is() -> None:
    model = adapt(model_of(LLAMA), Lora(rank=4))
    training = build(model, ADAM, Plan(mesh=MeshSpec(tensor=2)), batch=8, seq=32, devices=jax.devices()[:2])
    of = training.shardings.params["blocks"]
    for name, split in (("q", (None, None, "tensor")), ("k", (None, None, "tensor"))):
        assert of["attention"][name]["lora_b"].spec == jax.P(*split)
        assert of["attention"][name]["lora_a"].spec == jax.P()
    assert of["attention"]["out"]["lora_a"].spec == jax.P(None, "tensor")
    assert of["mlp"]["down"]["lora_a"].spec == jax.P(None, "tensor")
    assert of["mlp"]["down"]["lora_b"].spec == jax.P()


def test_the_base_has_neither_masters_nor_moments_and_is_stored_as_it_is_used() -> None:
    model, plan = model_of(LLAMA), Plan(precision=Policy(compute="bf16"))
    small = adapt(model, Lora(rank=2))
    trained = sum(leaf.size for leaf in jax.tree.leaves(small.trained(small.shapes)))
    norms = sum(leaf.size for path, leaf in jax.tree.leaves_with_path(model.shapes) if path[-1].key == "scale")
    rows = describe_state(small, ADAM, plan)
    params = sum(row.bytes_per_device for row in rows["params"])
    assert params == 4 * trained + 4 * norms + 2 * (model.size - norms)
    assert sum(row.bytes_per_device for row in rows["optimizer"]) == 8 * trained + 4  # and a count
    assert persistent_bytes(small, ADAM, plan) < persistent_bytes(model, ADAM, plan) / 3
    copy = Plan(mesh=MeshSpec(data=2), zero=1, precision=Policy(compute="bf16", storage="copy"))
    assert sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: state_of(small, copy)).master)) == trained


@pytest.mark.parametrize("name", get_args(Name))
def test_every_optimizer_updates_adapters_alone(name: Name) -> None:
    small = adapt(model_of(LLAMA), Lora(rank=2))
    tx = OptimizerConfig(name=name).make(10, small)
    trained = small.trained(small.init(jax.random.key(0)))
    with jax.numpy_dtype_promotion("standard"):  # as in the step
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, trained), tx.init(trained), trained)
    assert jax.tree.structure(updates) == jax.tree.structure(trained)
    rows = describe_state(small, tx, Plan(precision=Policy(compute="bf16")))
    assert not [row.path for row in rows["optimizer"] if row.path.endswith("kernel")]


def test_muon_orthogonalises_both_halves_of_an_adapter() -> None:
    dims = matrices(adapt(model_of(LLAMA), Lora(rank=2)))["blocks"]
    for kernel in ("q", "out"):
        for half in ("lora_a", "lora_b"):
            assert dims["attention"][kernel][half] is not None
    assert dims["attention"]["q"]["lora_b"].reduction_axis == (1,)  # layers, rank, heads, head_dim


@pytest.mark.parametrize("storage", ["cast", "copy", "pure"])
def test_a_state_of_given_weights_is_as_the_step_expects_it(storage: Storage) -> None:
    model, plan = model_of(LLAMA), Plan(precision=Policy(compute="bf16", storage=storage))
    training = build(model, ADAM, plan, batch=8, seq=32, devices=jax.devices()[:1])
    weights = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), training.abstract_weights())
    found, expected = training.start(weights), training.abstract_state()
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)


def test_frozen_kernels_have_no_product_for_their_gradient() -> None:
    model = model_of(LLAMA)
    full, small = flops_per_token(model, 32), flops_per_token(adapt(model, Lora(rank=1)), 32)
    assert full is not None and small is not None
    assert 2 / 3 < small / full < 0.8


def state_of(model: Model, plan: Plan) -> object:
    from meshpar.train.state import init_state

    return init_state(model, ADAM, plan, jax.random.key(0))


def test_no_gradient_of_the_base_is_sent() -> None:
    """Over data the gradients of adapters are summed, and nothing as large as those of the kernels."""
    model = adapt(model_of(LLAMA), Lora(rank=2))
    plan = Plan(mesh=MeshSpec(data=2), precision=Policy(compute="fp32"))
    training = build(model, ADAM, plan, batch=8, seq=32, devices=jax.devices()[:2])
    trained = sum(leaf.size for leaf in jax.tree.leaves(model.trained(model.shapes)))
    found = training.collectives()
    assert 4 * trained <= found.bytes <= 4 * trained + 1000  # all-reduce: 2 (n - 1) / n of the bytes; scalars besides


def test_masters_start_from_the_adapters_and_a_step_moves_them_alone() -> None:
    model = adapt(model_of(LLAMA), Lora(rank=2))
    precision = Policy(compute="bf16", storage="copy")
    plan = Plan(mesh=MeshSpec(data=2), zero=1, precision=precision)
    training = build(model, ADAM, plan, batch=8, seq=32, devices=jax.devices()[:2])
    base = jax.tree.map(
        lambda leaf: jax.device_put(jnp.full(leaf.shape, 0.01, leaf.dtype), leaf.sharding),
        model.untrained(training.abstract_weights()),
    )
    state = training.start(with_fresh_adapters(training, base, 0))
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), training.abstract_state())
    assert state.params["blocks"]["mlp"]["up"]["kernel"].dtype == jnp.bfloat16
    assert state.master["blocks"]["mlp"]["up"]["lora_a"].dtype == jnp.float32
    before = jax.device_get(state.params)
    state, _ = training.step(state, training.place(batch_of(0)))
    after = jax.device_get(state.params)
    jax.tree.map(np.testing.assert_array_equal, model.untrained(after), model.untrained(before))
    assert np.abs(after["blocks"]["mlp"]["up"]["lora_b"].astype(np.float32)).max() > 0


def test_the_file_has_the_names_and_the_orientation_of_peft(tmp_path: Path) -> None:
    """Merging by hand, on the tensors of theirs, gives what `merge_adapters` does on ours."""
    source, lora = open_hf(FOLDER / "llama"), Lora(rank=3, alpha=6.0)
    model = adapt(source.model, lora)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), model.trained(model.shapes)
    )
    save_adapter(tmp_path / "adapter", source.config, adapters, lora, base="somewhere")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6)
    attention, mlp = (
        (f"self_attn.{name}_proj" for name in "koqv"),
        (f"mlp.{name}_proj" for name in ("down", "gate", "up")),
    )
    assert config["target_modules"] == [*mlp, *attention]
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = load_file(FOLDER / "llama" / "model.safetensors")
    merged = merge_adapters(source.load(source.model.shapes), adapters, lora)
    kernels = {
        "self_attn.q_proj": merged["blocks"]["attention"]["q"]["kernel"][1].reshape(32, -1).T,
        "self_attn.o_proj": merged["blocks"]["attention"]["out"]["kernel"][1].reshape(-1, 32).T,
        "mlp.down_proj": merged["blocks"]["mlp"]["down"]["kernel"][1].T,
    }
    for name, ours in kernels.items():
        a, b = (file[f"base_model.model.model.layers.1.{name}.lora_{which}.weight"] for which in "AB")
        assert a.shape[0] == b.shape[1] == 3
        np.testing.assert_allclose(ours, theirs[f"model.layers.1.{name}.weight"] + 2.0 * b @ a, rtol=1e-5, atol=1e-5)
    again = load_adapter(tmp_path / "adapter", source.config, model.trained(model.shapes))
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    other = adapt(source.model, Lora(rank=4))
    with pytest.raises(ValueError, match=r"lora_A.weight is \(3, 32\)"):
        load_adapter(tmp_path / "adapter", source.config, other.trained(other.shapes))


def test_a_part_of_a_fused_tensor_has_no_peft_form(tmp_path: Path) -> None:
    source = open_hf(FOLDER / "gpt2")
    for targets, fine in ((("mlp",), True), (("attention",), False)):
        lora = Lora(targets=targets)
        model = adapt(source.model, lora)
        adapters = model.trained(model.init(jax.random.key(0)))
        if fine:
            save_adapter(tmp_path / "a", source.config, adapters, lora, base="gpt2")
            config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
            assert config["fan_in_fan_out"] is True
            assert config["target_modules"] == ["mlp.c_fc", "mlp.c_proj"]  # and not attn.c_proj
        else:
            with pytest.raises(NoPeftForm, match=r"blocks/attention/k is a part of transformer.h"):
                save_adapter(tmp_path / "b", source.config, adapters, lora, base="gpt2")
