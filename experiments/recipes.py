"""Recipes: functions that return everything a run is. Override single values with `--set`, or copy one and change it.

The comments say why, and what is normal; see the configs of model, data, optimizer and plan for the meaning of each
field.
"""

from __future__ import annotations

from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.data import DataConfig
from meshpar.train.optimizer import OptimizerConfig
from meshpar.train.run import Recipe, RunConfig
from models.gpt import GPTConfig
from models.llama import LlamaConfig


def llama_tiny_stdlib() -> Recipe:
    """1M-parameter Llama on the Python standard library's own source: beats a bigram model in minutes on a laptop."""
    return Recipe(
        model=LlamaConfig(vocab=1024, layers=4, embed=128, heads=4, kv_heads=2, mlp=384, max_seq=256),
        # One device by default; emulate more and say how to use them with --set mesh="data=2 fsdp=2 tensor=2".
        plan=Plan(mesh=MeshSpec(data=1), precision=Policy(compute="bf16"), unroll=4),
        # A small BPE: long enough tokens for structure, few enough that a tiny model sees each often.
        data=DataConfig(source="stdlib", tokenizer="bpe:1024", seq=128),
        # Tiny models take large steps; beyond 5e-3 this one becomes unstable.
        optimizer=OptimizerConfig(lr=3e-3, warmup=40, weight_decay=0.1),
        train=RunConfig(steps=400, batch=16, eval_every=100, eval_batches=8),
    )


def llama_tiny_botocore() -> Recipe:
    """The same model on English prose about web services (pip install botocore, Apache-2.0)."""
    base = llama_tiny_stdlib()
    return Recipe(
        model=base.model,
        plan=base.plan,
        data=DataConfig(source="botocore", tokenizer="bpe:1024", seq=128),
        optimizer=base.optimizer,
        train=base.train,
    )


def llama_6m_stdlib() -> Recipe:
    """6M-parameter Llama with a 4k vocabulary: the model of the speed benchmark."""
    return Recipe(
        model=LlamaConfig(vocab=4096, layers=4, embed=256, heads=8, kv_heads=4, mlp=1024, max_seq=256),
        plan=Plan(mesh=MeshSpec(data=1), precision=Policy(compute="bf16"), unroll=4),
        data=DataConfig(source="stdlib", tokenizer="bpe:4096", seq=256),
        optimizer=OptimizerConfig(lr=1e-3, warmup=100),
        train=RunConfig(steps=1000, batch=8),
    )


def gpt_tiny_stdlib() -> Recipe:
    """A tiny GPT-2 with dropout, on bytes: no tokenizer to train."""
    return Recipe(
        model=GPTConfig(vocab=257, layers=4, embed=128, heads=4, max_seq=256, dropout=0.1),
        plan=Plan(mesh=MeshSpec(data=1), precision=Policy(compute="bf16"), unroll=4),
        data=DataConfig(source="stdlib", tokenizer="bytes", seq=256),
        optimizer=OptimizerConfig(lr=2e-3, warmup=40),
        train=RunConfig(steps=400, batch=16, eval_every=100, eval_batches=8),
    )


def llama_micro() -> Recipe:
    """A Llama of 25 thousand parameters, for checks of many meshes: `python -m meshpar check llama_micro --fuzz 20`."""
    return Recipe(
        model=LlamaConfig(vocab=257, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_seq=64, init_std=0.1),
        plan=Plan(mesh=MeshSpec(data=1), precision=Policy(compute="fp32")),
        data=DataConfig(source="stdlib", tokenizer="bytes", seq=16),
        optimizer=OptimizerConfig(lr=3e-3, warmup=2),
        train=RunConfig(steps=20, batch=16),
    )


def llama_125m() -> Recipe:
    """Llama with 125M parameters on one node of 8 GPUs: the weights fit everywhere, so only the batch is split."""
    return Recipe(
        model=LlamaConfig(vocab=50_257, layers=12, embed=768, heads=12, kv_heads=12, mlp=2048, max_seq=2048, tied=True),
        # ZeRO 1: parameters whole on each GPU (0.5 GB), moments spread; no gathers in the step but one of the new
        # parameters.
        plan=Plan(mesh=MeshSpec(data=8), zero=1, precision=Policy(compute="bf16"), remat="none"),
        data=DataConfig(source="stdlib", tokenizer="bpe:50257", seq=2048),
        optimizer=OptimizerConfig(lr=6e-4, warmup=700, weight_decay=0.1),
        # 256 x 2048 = 0.5M tokens an update, as GPT-3's 125M (Brown et al. 2020, table 2.1).
        train=RunConfig(steps=19_000, batch=256, eval_every=1000, checkpoint_every=1000),
    )


def llama_1b() -> Recipe:
    """Llama with 1.3B parameters on a TPU v5e-64: FSDP over 16, with 4 replicas of that."""
    return Recipe(
        model=LlamaConfig(
            vocab=32_000, layers=24, embed=2048, heads=16, kv_heads=8, mlp=5632, max_seq=4096, rope_theta=500_000.0
        ),
        # 12 bytes a parameter / 16 = 1 GB a chip of 16 GB; the gathers stay inside a row of 16 chips and only gradients
        # cross rows (HSDP).
        plan=Plan(
            mesh=MeshSpec(data=4, fsdp=16), zero=3, precision=Policy(compute="bf16"), remat="selective", loss_chunk=1024
        ),
        data=DataConfig(source="stdlib", tokenizer="bpe:32000", seq=4096),
        optimizer=OptimizerConfig(lr=2e-4, warmup=2000, weight_decay=0.1),
        # 256 x 4096 = 1M tokens an update, as GPT-3's 1.3B.
        train=RunConfig(steps=25_000, batch=256, eval_every=1000, checkpoint_every=1000),
    )
