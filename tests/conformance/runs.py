"""A few steps of a tiny model under any plan, with everything that must not depend on the plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.interfaces import Batch, PyTree
from meshpar.mesh.spec import MeshSpec
from meshpar.module import Model, abstract
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import Training, build
from meshpar.train.state import TrainState
from meshpar.train.step import Objective
from models.gemma import GemmaConfig
from models.gpt import GPTConfig
from models.llama import LlamaConfig

BATCH, SEQ = 8, 32
FP32 = Policy(compute="fp32")

# 90 of 96 rows of the tables are real, so the padding of the vocabulary takes part; kv heads are fewer than tensor=4.
LLAMA = LlamaConfig(
    vocab=90, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_seq=64, vocab_multiple=16, init_std=0.2
)
GPT = GPTConfig(vocab=90, layers=2, embed=32, heads=4, max_seq=64, vocab_multiple=16, init_std=0.2)
# Local and global layers, a window shorter than a row, and both softcaps.
GEMMA = GemmaConfig(
    vocab=90,
    layers=3,
    embed=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=64,
    max_seq=64,
    window=6,
    global_every=2,
    query_scalar=24.0,
    local_rope_theta=1000.0,
    qk_norm=True,
    attention_softcap=5.0,
    final_softcap=8.0,
    vocab_multiple=16,
    init_std=0.2,
)


@functools.cache
def model_of(config: Any) -> Model:
    """The model of a config, made once."""
    return abstract(config.build, config)


def recording_sgd(lr: float) -> optax.GradientTransformation:
    """SGD whose state is the gradient it was last given: raw gradients of a real step, without a second program."""

    def update(gradients: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda g: -lr * g, gradients), gradients

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def batch_of(number: int, *, packed: bool = False, batch: int = BATCH, seq: int = SEQ) -> Batch:
    """A random batch: a fifth of the targets are masked, and the last rows wholly; with `packed`, two documents and
    padding in each row.
    """
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 90, (batch, seq + 1), dtype=np.int32)
    weights = (rng.random((batch, seq)) < 0.8).astype(np.float32)
    weights[-2:] = 0.0
    segments = positions = None
    if packed:
        cuts = rng.integers(1, seq - 1, (batch, 2))
        cuts.sort(axis=1)
        places = np.arange(seq)[None]
        first, second = places < cuts[:, :1], (places >= cuts[:, :1]) & (places < cuts[:, 1:] + 1)
        segments = np.where(first, 1, np.where(second, 2, 0)).astype(np.int32)
        positions = np.where(first, places, np.where(second, places - cuts[:, :1], 0)).astype(np.int32)
        weights = weights * (segments > 0)
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights, segments=segments, positions=positions)


_initial: dict[Any, TrainState] = {}


def _initial_state(training: Training, plan: Plan) -> TrainState:
    """The state of seed 0, drawn once for each model and policy: that it does not depend on the mesh has its own
    test.
    """
    key = (training.model, plan.precision)
    if key not in _initial:
        _initial[key] = training.init(seed=0)
    fresh = jax.tree.map(
        jnp.copy, dataclasses.replace(_initial[key], key=jax.random.key_data(_initial[key].key))
    )  # steps donate theirs
    return jax.device_put(dataclasses.replace(fresh, key=jax.random.wrap_key_data(fresh.key)), training.shardings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What must not depend on the plan."""

    losses: list[float]
    norms: list[float]
    gradients: PyTree  # of the first step, raw, on the host
    params: PyTree  # after the last step, on the host
    training: Training
    state: TrainState


def train(
    mesh: str,
    *,
    config: Any = LLAMA,
    steps: int = 20,
    packed: bool = False,
    objective: Objective = Objective(clip_norm=None),
    lr: float = 0.3,
    batches: list[Batch] | None = None,
    **plan: Any,
) -> Run:
    """Trains `config` on the first devices that the mesh needs, with recording SGD. Runs on numbered batches are
    made once.
    """
    if batches is None:
        return _train_numbered(mesh, config, steps, packed, objective, lr, tuple(sorted(plan.items())))
    return _train(mesh, config, objective, lr, batches, plan)


@functools.cache
def _train_numbered(
    mesh: str, config: Any, steps: int, packed: bool, objective: Objective, lr: float, plan: tuple[tuple[str, Any], ...]
) -> Run:
    return _train(mesh, config, objective, lr, [batch_of(number, packed=packed) for number in range(steps)], dict(plan))


def _train(mesh: str, config: Any, objective: Objective, lr: float, batches: list[Batch], plan: dict[str, Any]) -> Run:
    made = Plan(**{"mesh": MeshSpec.parse(mesh), "precision": FP32, **plan})
    rows, seq = batches[0].tokens.shape
    training = build(
        model_of(config),
        recording_sgd(lr),
        made,
        batch=rows,
        seq=seq,
        objective=objective,
        devices=jax.devices()[: made.mesh.product],
    )
    state = _initial_state(training, made)
    losses, norms, gradients = [], [], None
    for batch in batches:
        state, metrics = training.step(state, training.place(batch))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        if gradients is None:
            gradients = jax.device_get(state.opt_state)
    return Run(
        losses=losses,
        norms=norms,
        gradients=gradients,
        params=jax.device_get(state.params),
        training=training,
        state=state,
    )
