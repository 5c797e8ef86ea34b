"""precision.reduce: sums over devices in fp32 keep what a bf16 sum rounds away, and ZeRO 3 still gathers in bf16."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from tests.conformance.runs import LLAMA, model_of, train


def rounded(mesh: str, **plan: Any) -> float:
    """The share of a kernel's gradients that bf16 can hold."""
    leaf = train(mesh, steps=1, **plan).gradients["blocks"]["mlp"]["up"]["kernel"]
    return float(np.mean(leaf == np.asarray(jnp.asarray(leaf).astype(jnp.bfloat16).astype(jnp.float32))))


@pytest.mark.parametrize(
    ("mesh", "plan"), [("data=4", {}), ("fsdp=4", {"zero": 2}), ("fsdp=4", {"zero": 3}), ("data=2 fsdp=2 tensor=2", {})]
)
def test_a_sum_in_fp32_is_not_rounded(mesh: str, plan: dict[str, Any]) -> None:
    assert rounded(mesh, precision=Policy(reduce="compute"), **plan) == 1.0
    assert rounded(mesh, precision=Policy(reduce="fp32"), **plan) < 0.5


def test_zero_3_gathers_in_bf16_and_scatters_in_fp32() -> None:
    text = train("fsdp=4", steps=1, precision=Policy(reduce="fp32")).training.trace().lower().as_text()
    gathered = re.findall(r"stablehlo\.all_gather.*?-> tensor<[\dx]*x(\w+)>", text)
    scattered = re.findall(r"stablehlo\.reduce_scatter.*?-> tensor<[\dx]*x(\w+)>", text, re.DOTALL)
    assert gathered.count("bf16") >= 9  # q, k, v, out, gate, up, down, table, head; norms are gathered as they are
    assert len(scattered) >= 9
    assert set(scattered) == {"f32"}


def test_what_cannot_be_reduced_apart_is_one_sentence() -> None:
    plan = Plan(mesh=MeshSpec(data=2, fsdp=2), zero=0, rules={"own": ("fsdp",)}, precision=Policy(reduce="fp32"))
    with pytest.raises(ValueError, match=r"precision\.reduce=fp32 cannot reduce over fsdp, since a rule splits"):
        plan.check(model_of(LLAMA))
    with pytest.raises(ValueError, match=r"precision\.reduce='bf16' is not one of compute, fp32"):
        Policy(reduce="bf16")  # type: ignore[arg-type]
