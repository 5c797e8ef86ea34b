"""Loading a checkpoint takes little more memory than its parameters."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_loading_500_mb_holds_less_than_two_tensors_beyond_the_shards() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench_load"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (megabytes,) = re.findall(r"final shards +([\d.]+) MB", done.stdout)
    assert float(megabytes) > 450
    assert re.search(r"beyond the shards +[\d.]+ MB, [\d.]+ of the largest tensor", done.stdout)
