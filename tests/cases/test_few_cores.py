"""Collectives of many emulated devices on few cores: late participants must not end the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import meshpar as mp
mp.emulate(8)
import numpy as np, optax
from models.llama import LlamaConfig
config = LlamaConfig(vocab=90, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_seq=64, vocab_multiple=16)
model = mp.abstract(config.build, config)
training = mp.build(model, optax.sgd(0.1), mp.Plan(mesh="data=2 fsdp=2 tensor=2"), batch=8, seq=32)
def batches():
    rng = np.random.default_rng(0)
    while True:
        rows = rng.integers(0, 90, (8, 33), dtype=np.int32)
        yield mp.Batch(tokens=rows[:, :-1], targets=rows[:, 1:], weights=np.ones((8, 32), np.float32))
seen = []
hook = mp.Hook(on_metrics=lambda step, metrics, seconds: seen.append(step))
mp.fit(training, training.init(), batches(), start=0, steps=20, hooks=[hook])
print("finished", seen[-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("taskset"), reason="taskset (util-linux), which pins a process to one core, is not here"
)
def test_c42_eight_devices_train_on_one_core() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    core = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(
        ["taskset", "-c", core, sys.executable, "-c", RUN],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("finished 20")
