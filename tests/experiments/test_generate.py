"""The command line `python -m experiments.generate`, on a run folder as train_lm leaves it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.generate import main, write_as_it_comes
from meshpar.checkpoint.weights import save_weights
from meshpar.plan import Plan
from meshpar.train.data import DataConfig
from meshpar.train.optimizer import OptimizerConfig
from meshpar.train.run import Recipe, RunConfig
from meshpar.train.tokenizer import ByteTokenizer, load_tokenizer
from meshpar.train.values import to_json
from tests.conformance.runs import FP32, LLAMA
from tests.experiments.pretrained import make_folder
from tests.generate.runs import likeliest, params_of
from tests.hf.fixtures import load, logits

CONFIG = dataclasses.replace(LLAMA, vocab=257)
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ZeRO 3 on 8 devices, with weights that nobody trained."""
    folder = tmp_path_factory.mktemp("run")
    recipe = Recipe(
        model=CONFIG,
        plan=Plan(mesh="fsdp=4 tensor=2", sequence_parallel=True, precision=FP32),  # type: ignore[arg-type]
        data=DataConfig(tokenizer="bytes"),
        optimizer=OptimizerConfig(),
        train=RunConfig(steps=1, batch=8),
    )
    (folder / "config.json").write_text(json.dumps({"name": "tiny", "recipe": to_json(recipe)}))
    save_weights(folder / "weights.safetensors", params_of(CONFIG))
    ByteTokenizer().save(folder)
    return folder


def expected(text: str, new: int) -> list[int]:
    return likeliest(CONFIG, ByteTokenizer().encode(text).tolist(), new)


def test_prompts_of_flags_and_a_file_are_continued_by_the_weights_of_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("import\n\nx\n")
    arguments = ["--run", str(folder), "--prompt", "def", "--prompts", str(tmp_path / "prompts.txt")]
    greedy = [
        "--new-tokens",
        "4",
        "--temperature",
        "0",
        "--go-on",
        "--batch",
        "3",
        "--out",
        str(tmp_path / "out.jsonl"),
    ]
    assert main([*arguments, *greedy, "--set", "mesh=data=2 tensor=2"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["def", "import", "", "x"]
    assert [lines[at]["tokens"] for at in (0, 1, 3)] == [expected(text, 4) for text in ("def", "import", "x")]
    assert lines[2]["tokens"] == likeliest(CONFIG, [ByteTokenizer().eod], 4)
    printed = capsys.readouterr()
    assert printed.out.count("----") == 3
    assert "decode: 12 tokens" in printed.err  # after the 4 that came with the prompts


def test_one_text_comes_as_it_is_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run", str(folder), "--prompt", "def", "--new-tokens", "4", "--temperature", "0", "--go-on"]) == 0
    assert capsys.readouterr().out == ByteTokenizer().decode(expected("def", 4)) + "\n"


def test_half_a_character_waits_for_its_other_half(capsys: pytest.CaptureFixture[str]) -> None:
    tokens: list[list[int | None]] = [[token] for token in "é!".encode()]
    seen = []
    for _ in write_as_it_comes(ByteTokenizer(), [65], iter(tokens)):
        seen.append(capsys.readouterr().out)
    assert seen == ["A", "é", "!"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--new-tokens", "62"], "--new-tokens 62 does not fit; the longest prompt leaves 61"),
        (["--top-p", "0"], "top_p=0.0 must be above 0"),
        (["--temperature", "-1"], "temperature=-1.0 must be finite and at least 0"),
        (["--set", "mesh=dat=2"], "did you mean 'data'"),
        (["--batch", "0"], "--batch 0"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt cannot be read"),
        (["--run", "nowhere"], "there is no nowhere/config.json; name the folder of a run"),
        (["--chat"], "--chat takes the chat template of --weights"),
    ],
)
def test_a_bad_value_is_one_sentence(
    folder: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run", str(folder), "--prompt", "def", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_weights_of_others_are_continued_and_a_chat_template_asks_for_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2", reason='pip install -e ".[chat]"')
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    weights = make_folder(tmp_path / "model", extra=("<|user|>", "<|answer|>"))
    words = ["--weights", str(weights), "--prompt", "a b", "--new-tokens", "5", "--temperature", "0", "--go-on"]
    words += ["--set", "precision.compute=fp32", "--out", str(tmp_path / "out.jsonl")]
    loaded, tokenizer = load(weights), load_tokenizer(weights)

    def expected(tokens: list[int]) -> list[int]:
        for _ in range(5):
            tokens = [*tokens, int(logits(loaded, np.array([tokens]))[0, -1].argmax())]
        return tokens

    def written() -> Any:
        return json.loads((tmp_path / "out.jsonl").read_text())

    assert main(words) == 0
    assert written()["tokens"] == expected(tokenizer.encode("a b").tolist())
    assert main([*words, "--chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    (weights / "chat_template.jinja").write_text(
        "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|answer|>{% endif %}"
    )
    assert main([*words, "--chat"]) == 0
    row = expected([1, *tokenizer.encode("a b").tolist(), 2])  # <|user|> and <|answer|> as the tokens that they are
    assert written()["tokens"] == row
    assert written()["text"] == tokenizer.decode(row[5:])
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": [row[6], 0]}))
    words.remove("--go-on")
    assert main([*words, "--chat"]) == 0
    assert written()["tokens"] == row[: row.index(row[6], 5) + 1]


@pytest.mark.slow
def test_the_benchmark_of_tokens_runs() -> None:
    tiny = ("model.layers=1", "model.embed=32", "model.heads=2", "model.kv_heads=1", "model.mlp=32", "model.vocab=256")
    sets = [word for value in tiny for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench_decode", "--lengths", "64", "96", "--rows", "2", *sets],
        cwd=REPOSITORY,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| 64", "| 96"))]
    assert len(rows) == 2
    assert all(row.endswith("| 1 + 1 |") for row in rows)
