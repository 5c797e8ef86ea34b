"""Compiled steps of small models on emulated devices and their reports, each made once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax

from meshpar.collectives.report import Report
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.train.build import Training, build
from models.llama import LlamaConfig
from tests.conformance.runs import FP32, model_of

BATCH, SEQ = 8, 32
# every dim divides by 8, so ZeRO splits each array; heads and kv heads alike, so tensor=2 repeats none
CONFIG = LlamaConfig(vocab=96, layers=2, embed=32, heads=4, kv_heads=4, mlp=64, max_seq=64, vocab_multiple=32)


def training(mesh: str, *, config: Any = CONFIG, **plan: Any) -> Training:
    """The step of a plan on the first devices that the mesh needs; fp32 where the plan does not say."""
    made = Plan(**{"mesh": MeshSpec.parse(mesh), "precision": FP32, **plan})
    devices = jax.devices()[: made.mesh.product]
    return build(model_of(config), optax.sgd(0.1), made, batch=BATCH, seq=SEQ, devices=devices)


@functools.cache
def _report(mesh: str, config: Any, plan: tuple[tuple[str, Any], ...]) -> Report:
    return training(mesh, config=config, **dict(plan)).collectives()


def report_of(mesh: str, *, config: Any = CONFIG, **plan: Any) -> Report:
    """What that step communicates."""
    return _report(mesh, config, tuple(sorted(plan.items())))
