"""`python -m meshpar convert`: both ways, bit for bit, and one sentence for what is wrong."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from meshpar.checkpoint.weights import load_weights, save_weights
from meshpar.cli import main
from meshpar.hf.folder import open_hf
from meshpar.module import abstract
from meshpar.train.run import Recipe
from meshpar.train.tokenizer import ByteTokenizer
from meshpar.train.values import from_json
from tests.hf.fixtures import FOLDER, loaded


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def bits(params: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_from_and_to_hugging_face_is_the_same_model(name: str, tmp_path: Path) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    assert convert("--from-hf", FOLDER / name, "--to", run) == 0
    recipe = from_json(Recipe, json.loads((run / "config.json").read_text())["recipe"])
    assert recipe.model == loaded(name).config
    params = load_weights(run / "weights.safetensors", loaded(name).params)
    assert bits(params) == bits(loaded(name).params)
    assert convert("--to-hf", back, "--run", run) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (FOLDER / name, back))
    assert {key: array.tobytes() for key, array in before.items()} == {k: array.tobytes() for k, array in after.items()}
    assert open_hf(back).config == loaded(name).config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "run"]


def test_a_run_folder_of_training_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    """The padding of its vocabulary stays behind; ids of special tokens are the tokenizer's."""
    from tokenizers import Tokenizer, models

    run, config = tmp_path / "run", loaded("llama").config
    assert convert("--from-hf", FOLDER / "llama", "--to", run) == 0
    about = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({"name": "mine", "recipe": about["recipe"]}))  # as train_lm does
    drawn = jax.jit(abstract(config.build, config).init)(jax.random.key(0))
    save_weights(run / "weights.safetensors", drawn)
    Tokenizer(models.BPE(vocab={"a": 0, "<|endoftext|>": 1}, merges=[])).save(str(run / "tokenizer.json"))
    assert convert("--to-hf", tmp_path / "out", "--run", run, "--dtype", "bf16") == 0
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"], values["dtype"]) == (None, 1, "bfloat16")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    source = open_hf(tmp_path / "out")
    read = source.load(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "bfloat16"), source.model.shapes))
    expected = jax.tree.map(lambda leaf: np.array(leaf.astype("bfloat16")), drawn)
    expected["embedding"]["table"][90:] = 0
    expected["unembed"]["kernel"][:, 90:] = 0
    assert bits(read) == bits(expected)
    ByteTokenizer().save(run)  # has no form there
    assert convert("--to-hf", tmp_path / "bytes", "--run", run) == 0
    assert not (tmp_path / "bytes" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "bytes" / "config.json").read_text())["eos_token_id"] == 256


def test_the_weights_alone_in_another_dtype(tmp_path: Path) -> None:
    assert convert("--from-hf", FOLDER / "llama", "--to", tmp_path / "w.safetensors", "--dtype", "fp16") == 0
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float16", sharding=leaf.sharding), loaded("llama").params
    )
    params = load_weights(tmp_path / "w.safetensors", target)
    assert bits(params) == bits(jax.tree.map(lambda leaf: leaf.astype("float16"), loaded("llama").params))
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--from-hf", "{fixture}"), "--from-hf goes with --to; name a new run folder, or a file"),
        (("--from-hf", "{fixture}", "--to", "{tmp}/x", "--run", "y"), "--from-hf goes with --to"),
        (("--to-hf", "{tmp}/x"), "--to-hf goes with --run; name the run folder"),
        (("--from-hf", "{tmp}/none", "--to", "{tmp}/x"), "there is no {tmp}/none/config.json; name a folder"),
        (("--from-hf", "{fixture}", "--to", "{tmp}/full"), "{tmp}/full is there already and not empty; name a new"),
        (("--from-hf", "{fixture}", "--to", "{tmp}/full/a.safetensors"), "a.safetensors is there already; name a new"),
        (("--to-hf", "{tmp}/x", "--run", "{tmp}/none"), "{tmp}/none/config.json does not tell the recipe of a run"),
        (("--to-hf", "{tmp}/x", "--run", "{tmp}/full"), "{tmp}/full/config.json does not tell the recipe of a run"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.safetensors").touch()
    names = {"fixture": str(FOLDER / "llama"), "tmp": str(tmp_path)}
    assert convert(*(word.format(**names) for word in words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert sentence.format(**names) in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_weights_of_another_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert convert("--from-hf", FOLDER / "llama", "--to", run) == 0
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"mlp": 40', '"mlp": 48'))
    assert convert("--to-hf", tmp_path / "out", "--run", run) == 2
    assert "blocks/mlp/down/kernel is (2, 40, 32) in" in capsys.readouterr().err
    (run / "config.json").write_text(text.replace("LlamaConfig", "LamaConfig"))
    assert convert("--to-hf", tmp_path / "out", "--run", run) == 2
    assert "models.llama.config has no 'LamaConfig'; did you mean 'LlamaConfig'" in capsys.readouterr().err


def test_outside_of_a_clone_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.import_module

    def outside(name: str) -> Any:
        if name.startswith("models."):
            raise ModuleNotFoundError(f"No module named {name!r}", name="models")
        return found(name)

    monkeypatch.setattr(importlib, "import_module", outside)
    assert convert("--from-hf", FOLDER / "llama", "--to", tmp_path / "x") == 2
    assert "there is no models.llama.hf here; run from the root of a clone" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert("--help")
    out = capsys.readouterr().out
    assert out.count("python -m meshpar convert --from-hf") == 3
    assert "--to-hf exported --run runs/mine" in out
