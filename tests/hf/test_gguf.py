"""A GGUF file gives the parameters that it was made of, up to its quantisation, and says what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from meshpar.hf.folder import open_hf
from meshpar.hf.gguf import _NAMES, GgufTensor, read_tokenizer
from tests.hf.fixtures import FOLDER, load, loaded

Kind = gguf.GGMLQuantizationType


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows: its halves interleaved."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write(path: Path, name: str, *, kind: Kind = Kind.F32, change: dict[str, Any] | None = None) -> Path:
    """A fixture as a GGUF file, as llama.cpp's conversion would make it; matrices that can are quantised."""
    config = json.loads((FOLDER / name / "config.json").read_text())
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim", 8),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        **(change or {}),
    }
    writer = gguf.GGUFWriter(path, values.pop("architecture", config["model_type"]))
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key if key.startswith("tokenizer") else f"{writer.arch}.{key}", value)
    short = {theirs: ours for ours, theirs in _NAMES.items()}
    for full, array in load_file(FOLDER / name / "model.safetensors").items():
        parts = full.split(".")
        layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        body = ".".join(parts[3:-1] if layer else parts[:-1])
        if config["model_type"] == "llama" and parts[-2] in ("q_proj", "k_proj"):
            key = "num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"
            array = permuted(array, config[key])
        data, stored = array, Kind.F32
        if array.ndim == 2 and array.shape[1] % 32 == 0 and kind != Kind.F32:
            data, stored = gguf.quantize(array, kind), kind
        writer.add_tensor(f"{layer}{short[body]}.{parts[-1]}", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def leaves(params: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(params)}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_plain_files_are_the_model_bit_for_bit(name: str, tmp_path: Path) -> None:
    ours, expected = load(write(tmp_path / "x.gguf", name)), loaded(name)
    assert ours.config == expected.config
    for path, leaf in leaves(expected.params).items():
        np.testing.assert_array_equal(leaves(ours.params)[path], leaf, err_msg=path)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_quantised_files_are_what_the_package_makes_of_each_row(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "llama", kind=Kind[kind])
    tensors = open_hf(path).tensors
    changed = 0
    for name, array in load_file(FOLDER / "llama" / "model.safetensors").items():
        expected = array
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            expected = gguf.dequantize(gguf.quantize(array, Kind[kind]), Kind[kind])
        np.testing.assert_array_equal(tensors[name].read().astype(np.float32), expected, err_msg=name)
        changed += (expected != array).any()
    assert changed > 5
    ours, spread = leaves(load(path).params), leaves(load(path, "fsdp=2 tensor=2").params)
    assert {name: leaf.tobytes() for name, leaf in spread.items()} == {n: leaf.tobytes() for n, leaf in ours.items()}


def test_rows_that_begin_within_a_head_are_read(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensor = open_hf(write(tmp_path / "x.gguf", "llama")).tensors[name]
    assert isinstance(tensor, GgufTensor)
    assert tensor.interleaved == 8
    whole = load_file(FOLDER / "llama" / "model.safetensors")[name]
    for start, end in ((0, 32), (3, 5), (7, 17), (30, 32), (4, 4)):
        np.testing.assert_array_equal(tensor.read((slice(start, end), slice(1, 9))), whole[start:end, 1:9])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": Kind.Q5_0}, r"x.gguf: \S+ \(\d+, 32\) is quantised as Q5_0, which is not read; use a file of F32,"),
        ({"change": {"architecture": "mamba"}}, "x.gguf: the architecture 'mamba' is not read from GGUF, only llama,"),
        ({"change": {"rope.scaling.type": "longrope"}}, r"the rope type 'longrope' is not computed"),
        ({"change": {"block_count": 3}}, r"x.gguf lacks model.layers.2.input_layernorm.weight \(32,\) and 8 more"),
        (
            {"change": {"feed_forward_length": 41}},
            r"gate_proj.weight is \(40, 32\) in .*x.gguf and \(41, 32\) by config",
        ),
    ],
)
def test_a_file_that_is_not_read_is_one_sentence(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        open_hf(write(tmp_path / "x.gguf", "llama", **options))


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "llama")
    whole = path.read_bytes()
    for content in (whole[:-100], whole[:1000], whole[:10], b"", b"GGUX" + whole[4:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x.gguf is cut off.*fetch the file again"):
            open_hf(path)
    with pytest.raises(ValueError, match=r"y.gguf cannot be read \(No such file or directory\)"):
        open_hf(tmp_path / "y.gguf")


def test_the_tokenizer_of_a_file_is_the_one_that_it_was_made_of(tmp_path: Path) -> None:
    texts = ["The year 2024, isn't it?  Two  spaces.\n\nNew\tline", "x = f(1)  # naïve café"]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(texts * 20, trainer)
    model = json.loads(trained.to_str())["model"]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = read_tokenizer(tmp_path / "x.gguf")
    for text in (*texts, "<|endoftext|>unseen"):
        assert read.encode(text).ids == trained.encode(text).ids
        assert read.decode(read.encode(text).ids) == text.replace("<|endoftext|>", "")
    write(tmp_path / "y.gguf", "llama", change={"tokenizer.ggml.model": "llama"})
    with pytest.raises(ValueError, match="its tokenizer is 'llama' with 'default', and only 'gpt2' with"):
        read_tokenizer(tmp_path / "y.gguf")


def test_without_the_package_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ValueError, match=r'pip install "meshpar\[gguf\]"'):
        open_hf(tmp_path / "x.gguf")
