"""The compiled step: traced once, its state donated, no vocabulary gathered; recipes for machines that are not here."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import experiments.recipes
from meshpar.interfaces import Batch, PyTree
from meshpar.mesh.build import abstract_mesh, build_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.module import abstract
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train import build as build_module
from meshpar.train.build import Training, build
from meshpar.train.describe import describe_state, persistent_bytes
from meshpar.train.state import init_state
from meshpar.train.step import Objective, make_step
from models.gpt import GPTConfig
from models.llama import LlamaConfig

VOCAB = 2992  # no other dim of these models is of this size, or of a quarter of it
LLAMA = LlamaConfig(vocab=VOCAB, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_seq=16, vocab_multiple=16)
TIED = dataclasses.replace(LLAMA, tied=True)
GPT = GPTConfig(vocab=VOCAB, layers=2, embed=32, heads=4, max_seq=16, vocab_multiple=16)
BATCH, SEQ = 4, 16


def training_of(
    mesh: str, config: Any = LLAMA, tx: optax.GradientTransformation | None = None, **plan: Any
) -> Training:
    made = Plan(mesh=MeshSpec.parse(mesh), **plan)
    devices = jax.devices()[: made.mesh.product]
    tx = optax.adamw(1e-3) if tx is None else tx
    return build(abstract(config.build, config), tx, made, batch=BATCH, seq=SEQ, devices=devices)


def batch_of(number: int) -> Batch:
    tokens = np.random.default_rng(number).integers(0, VOCAB, (BATCH, SEQ + 1), dtype=np.int32)
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=np.ones((BATCH, SEQ), np.float32))


def state_leaves(state: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]


def counting(tx: optax.GradientTransformation, counts: Counter[str]) -> optax.GradientTransformation:
    """`tx`, counting how often it is traced."""

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> Any:
        counts["step"] += 1
        return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("data=1", {}), ("data=2 fsdp=2 tensor=2", {"precision": Policy(storage="copy")})],
)
def test_neither_step_nor_evaluation_is_traced_twice(
    mesh: str, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    loss_sums = build_module.loss_sums

    def counted(*arguments: Any) -> Any:
        counts["evaluation"] += 1
        return loss_sums(*arguments)

    monkeypatch.setattr(build_module, "loss_sums", counted)
    training = training_of(mesh, tx=counting(optax.adamw(1e-3), counts), **plan)
    state = training.init()
    for number in range(3):
        old = state
        state, metrics = training.step(state, training.place(batch_of(number)))
        assert all(leaf.is_deleted() for leaf in state_leaves(old))  # donated: two states never lie side by side
        sums = training.evaluate(state.params, training.place(batch_of(9)))
    assert counts == {"step": 1, "evaluation": 1}
    assert int(state.step) == 3
    assert float(metrics["tokens"]) == float(sums["tokens"]) == BATCH * SEQ
    assert not any(leaf.is_deleted() for leaf in state_leaves(state))  # evaluation donates nothing


def test_the_compiled_step_takes_the_state_and_gives_its_memory_back() -> None:
    training = training_of("data=2 fsdp=2 tensor=2", precision=Policy(storage="copy"))
    memory = training.compile().memory_analysis()
    state = persistent_bytes(training.model, optax.adamw(1e-3), training.plan)
    batch = 3 * 4 * (BATCH // 4) * SEQ
    assert memory.argument_size_in_bytes == state + batch
    assert memory.alias_size_in_bytes == state
    assert memory.temp_size_in_bytes > 0


def test_the_compiled_step_may_take_packed_rows() -> None:
    training = training_of("data=1")
    given = [jax.tree.leaves(training.abstract_batch(packed=packed)) for packed in (False, True)]
    assert [len(leaves) for leaves in given] == [3, 5]
    assert {leaf.shape for leaves in given for leaf in leaves} == {(BATCH, SEQ)}


@pytest.mark.parametrize(
    ("field", "value", "weight", "sentence"),
    [
        ("tokens", VOCAB, 0.0, f"the batch holds the token {VOCAB} and the model's vocab={VOCAB} ends at {VOCAB - 1}"),
        ("tokens", -1, 1.0, "the batch holds the token -1 and"),
        ("targets", VOCAB + 3, 1.0, f"the batch holds the target {VOCAB + 3} and"),
        ("targets", -100, 0.0, None),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused_before_the_step(
    field: str, value: int, weight: float, sentence: str | None
) -> None:
    """In the last row and place; a target of weight 0 may be anything."""
    batch = jax.tree.map(np.array, batch_of(0))
    getattr(batch, field)[-1, -1] = value
    batch.weights[-1, -1] = weight
    training = training_of("data=2")
    if sentence is None:
        training.place(batch)
        return
    with pytest.raises(ValueError, match=re.escape(sentence)):
        training.place(batch)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"tokens": np.zeros((2 * BATCH, SEQ), np.int32)},
            "batch.tokens is (8, 16) and the step was built for (4, 16)",
        ),
        ({"weights": np.ones((BATCH, 2 * SEQ), np.float32)}, "batch.weights is (4, 32) and the step was built for"),
        (
            {"positions": np.full((BATCH, SEQ), SEQ)},
            "the batch holds the position 16 and the model's max_seq=16 ends at",
        ),
    ],
)
def test_rows_that_the_step_was_not_built_for_are_refused(changed: dict[str, np.ndarray], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        training_of("data=2").place(dataclasses.replace(batch_of(0), **changed))


def test_evaluation_takes_the_microbatches_of_training_and_gives_the_sums_of_the_whole() -> None:
    sums, temp = [], []
    for accumulate in (1, 4):
        training = training_of("data=1", accumulate=accumulate)
        state, batch = training.init(0), training.place(batch_of(0))
        sums.append(jax.device_get(training.evaluate(state.params, batch)))
        temp.append(training._evaluate.lower(state.params, batch).compile().memory_analysis().temp_size_in_bytes)
    for name, value in sums[0].items():
        assert sums[1][name] == pytest.approx(value, rel=1e-5), name
    assert temp[1] < 0.75 * temp[0]


# --- the vocabulary --------------------------------------------------------------------------------------------------


def collectives_over_whole_vocabulary(compiled: jax.stages.Compiled) -> list[str]:
    """Collectives of a compiled program whose result has a dim of the whole vocabulary, as lines of its text."""
    of_vocabulary = rf"= [^=]*\b{VOCAB}\b[^=]* (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    return [line.strip() for line in compiled.as_text().splitlines() if re.search(of_vocabulary, line)]


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (LLAMA, {}),
        (TIED, {}),
        (GPT, {"sequence_parallel": True}),
        (LLAMA, {"loss_chunk": 8, "sequence_parallel": True}),
    ],
    ids=["untied", "tied", "gpt", "in pieces"],
)
def test_neither_logits_nor_table_are_gathered_over_the_vocabulary(config: Any, plan: dict[str, Any]) -> None:
    compiled = training_of("data=2 tensor=4", config, **plan).compile()
    assert re.search(rf"\[(\d+,)*{VOCAB // 4}\b", compiled.as_text())  # a quarter of it is on each device
    assert collectives_over_whole_vocabulary(compiled) == []


@pytest.mark.parametrize("take", ["rows", "logits"])
def test_a_vocabulary_that_is_gathered_would_be_seen(take: str) -> None:
    """The naive forms of both look-ups, so that the test above can fail."""
    mesh = build_mesh(MeshSpec(data=2, tensor=4), jax.devices())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if take == "rows":
            return jax.lax.with_sharding_constraint(table, whole)[tokens]
        logits = jnp.ones((*tokens.shape, 32)) @ table.T
        return jax.lax.with_sharding_constraint(logits, rows).argmax(-1)

    table = jax.ShapeDtypeStruct((VOCAB, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("tensor")))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32, sharding=rows)
    assert collectives_over_whole_vocabulary(jax.jit(look_up).lower(table, tokens).compile())


# --- weights move, activations stay ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2 tensor=2", "data=2 fsdp=2 tensor=2"])
def test_fsdp_gathers_weights_and_never_moves_activations(mesh: str) -> None:
    kinds = set(re.findall(r" (all-to-all|collective-permute|all-gather)\(", training_of(mesh).compile().as_text()))
    assert kinds == {"all-gather"}


# --- machines that are not here --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices", "millions", "of_params", "of_optimizer"),
    [("llama_125m", 8, (100, 140), 4, 8 / 8), ("llama_1b", 64, (1200, 1400), 4 / 16, 8 / 16)],
)
def test_a_recipe_for_a_larger_machine_resolves_without_it(
    name: str, devices: int, millions: tuple[int, int], of_params: float, of_optimizer: float
) -> None:
    recipe = getattr(experiments.recipes, name)()
    model = abstract(recipe.model.build, recipe.model)
    assert millions[0] < model.size / 1e6 < millions[1]
    plan = recipe.plan.on(devices)
    plan.check(model, batch=recipe.train.batch, seq=recipe.data.seq)
    tx = recipe.optimizer.make(recipe.train.steps)
    parts = describe_state(model, tx, plan)
    assert [row.note for rows in parts.values() for row in rows if row.note] == []  # every leaf divides
    counters = 2 * 4 + 8 + 2 * 4  # the numbers of step and update, the key, the counts of Adam and of its schedule
    assert persistent_bytes(model, tx, plan) == model.size * (of_params + of_optimizer) + counters

    mesh = abstract_mesh(plan.mesh)
    state = jax.eval_shape(lambda: init_state(model, tx, plan, jax.random.key(0)))
    shape = (recipe.train.batch, recipe.data.seq)
    batch = Batch(
        tokens=jax.ShapeDtypeStruct(shape, jnp.int32),
        targets=jax.ShapeDtypeStruct(shape, jnp.int32),
        weights=jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    after, metrics = jax.eval_shape(make_step(model, tx, plan, mesh, Objective()), state, batch)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert metrics["loss"].shape == ()
