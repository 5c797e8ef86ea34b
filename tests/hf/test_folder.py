"""A folder is opened, checked and loaded: any dtype, any number of files, onto any mesh; and what is wrong with it is
one sentence before anything is loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshpar.hf import mapping
from meshpar.hf.folder import open_hf, save_hf
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from tests.hf.fixtures import FOLDER, load, loaded

Tensors = dict[str, np.ndarray]


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def changed(
    folder: Path,
    name: str = "llama",
    *,
    config: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], Any] | None = None,
) -> Path:
    """A copy of a fixture with other values in its config.json, and other tensors."""
    shutil.copytree(FOLDER / name, folder)
    values = json.loads((folder / "config.json").read_text())
    values = {key: value for key, value in {**values, **(config or {})}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    if tensors is not None:
        found = load_file(folder / "model.safetensors")
        tensors(found)
        save_file(found, folder / "model.safetensors")
    return folder


def recast(dtype: Any) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: array.astype(dtype) for name, array in tensors.items()})


# --- what loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_read_and_cast_on_the_way(tmp_path: Path, dtype: Any) -> None:
    path = changed(tmp_path / "half", "qwen2", tensors=recast(dtype))
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), loaded("qwen2").params)
    wide = load(path, "data=2 tensor=2").params
    assert bits(wide) == bits(jax.tree.map(lambda leaf: leaf.astype(np.float32), expected))
    narrow = open_hf(path)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), narrow.model.shapes)
    assert bits(narrow.load(target)) == bits(expected)


def test_the_dtype_is_what_the_plan_stores() -> None:
    stored = load(FOLDER / "llama", precision=Policy(storage="copy")).params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stored)} == {"bfloat16"}


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=2 tensor=2", "data=2 tensor=4"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_every_shard_is_right_on_any_mesh_and_from_several_files(tmp_path: Path, name: str, mesh: str) -> None:
    whole = loaded(name)
    save_hf(tmp_path / "out", whole.config, whole.params, shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    spread = load(tmp_path / "out", mesh)
    assert bits(spread.params) == bits(whole.params)
    split = [leaf.sharding.spec for leaf in jax.tree.leaves(spread.params)]
    assert any(any(spec) for spec in split)


def test_files_of_the_base_model_have_no_prefix(tmp_path: Path) -> None:
    def without_prefix(tensors: Tensors) -> None:
        for name in [*tensors]:
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.uint8))

    path = changed(tmp_path / "base", "gpt2", tensors=without_prefix)
    assert bits(load(path).params) == bits(loaded("gpt2").params)


def test_harmless_extras_are_passed_over(tmp_path: Path) -> None:
    def extras(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    path = changed(tmp_path / "extras", "llama_tied", tensors=extras)
    assert bits(load(path).params) == bits(loaded("llama_tied").params)


def test_padding_of_the_vocabulary_is_zero_and_does_not_go_out(tmp_path: Path) -> None:
    ours = loaded("llama")
    assert not np.asarray(ours.params["embedding"]["table"])[90:].any()
    assert not np.asarray(ours.params["unembed"]["kernel"])[:, 90:].any()
    save_hf(tmp_path / "out", ours.config, jax.tree.map(lambda leaf: leaf + 1, ours.params))
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape == (90, 32)


def test_a_host_holds_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a stacked parameter is put in its place before the next one is read, and each place once."""
    order: list[tuple[str, int]] = []
    read = mapping.read_block

    def noted(weights: Any, entry: Any, tensor: Any, *rest: Any) -> np.ndarray:
        found = read(weights, entry, tensor, *rest)
        order.append((tensor.name, found.nbytes))
        return found

    monkeypatch.setattr(mapping, "read_block", noted)
    params = load(FOLDER / "llama", "fsdp=8").params
    runs = [name for name, _ in order]
    assert len(set(runs)) == sum(1 for before, now in zip(["", *runs], runs, strict=False) if before != now)
    assert sum(size for _, size in order) <= sum(
        shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
    )
    assert max(size for _, size in order) <= 128 * 32 * 4 // 8  # an eighth of the table


def test_what_is_loaded_can_be_donated() -> None:
    params = load(FOLDER / "llama", "fsdp=8").params
    kept = jax.tree.map(lambda leaf: leaf.sharding, params)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0, out_shardings=kept)
    before = places(params)
    after = places(jax.block_until_ready(step(params)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert set(before) == set(after)  # what lies in numpy's memory would be copied instead


def places(tree: Any) -> list[int]:
    """Where each shard lies in memory."""
    return [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


# --- what does not ---------------------------------------------------------------------------------------------------


def pop(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def put(name: str, array: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: array})


Q = "model.layers.1.self_attn.q_proj.weight"
HEAD = np.ones((90, 32), np.float32)
BAD: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], None] | None, str]] = {
    "missing": (
        "llama",
        {},
        pop(Q, "model.norm.weight"),
        r"/bad lacks model.norm.weight \(32,\) and 1 more, which norm/scale is read from; config.json and the weights",
    ),
    "misspelled": (
        "llama",
        {},
        lambda t: t.update({Q.replace("q_proj", "q_prj"): t.pop(Q)}),
        r"lacks model.layers.1.self_attn.q_proj.weight \(32, 32\), which blocks/attention/q/kernel is read from; did "
        r"you mean 'model.layers.1.self_attn.q_prj.weight'",
    ),
    "left over": (
        "llama",
        {},
        put("model.layers.0.self_attn.q_proj.bias", HEAD[0]),
        r"bad/model.safetensors holds model.layers.0.self_attn.q_proj.bias \(32,\), which no parameter of this model",
    ),
    "layer left over": (
        "llama",
        {"num_hidden_layers": 1},
        None,
        r"holds model.layers.1.* and 8 more, which no",
    ),
    "shape": (
        "llama",
        {},
        put(Q, np.ones((32, 16), np.float32)),
        r"q_proj.weight is \(32, 16\) in .*/bad/model.safetensors and \(32, 32\) by config.json, for "
        r"blocks/attention/q/kernel \(2, 32, 4, 8\)",
    ),
    "vocabulary": (
        "llama",
        {"vocab_size": 91},
        None,
        r"embed_tokens.weight is \(90, 32\) in .* and \(91, 32\) by config",
    ),
    "dtype": ("llama", {}, put(Q, np.ones((32, 32), np.int8)), r"q_proj.weight \(32, 32\) in .* is int8; weights are"),
    "tied with a head of its own": (
        "llama_tied",
        {},
        put("lm_head.weight", HEAD),
        r"lm_head.weight \(90, 32\) in .* differs from model.embed_tokens.weight \(90, 32\); tie_word_embeddings is",
    ),
    "untied without a head": (
        "llama",
        {},
        pop("lm_head.weight"),
        r"lacks lm_head.weight \(90, 32\), which unembed/kernel is read from; tie_word_embeddings is false",
    ),
    "no flag, no head": (
        "llama",
        {"tie_word_embeddings": "absent"},
        pop("lm_head.weight"),
        "tie_word_embeddings is false, by config.json or by default",
    ),
    "no flag, and a head": (
        "gpt2",
        {"tie_word_embeddings": "absent"},
        put("lm_head.weight", HEAD),
        r"differs from transformer.wte.weight \(90, 32\); tie_word_embeddings is true, by config.json or by default",
    ),
    "architecture": ("llama", {"model_type": "t5"}, None, r"bad/config.json: model_type='t5' is not known"),
    "activation": ("llama", {"hidden_act": "gelu"}, None, r'bad/config.json: hidden_act="gelu" is not computed'),
    "rope": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2}},
        None,
        "the rope type 'dynamic' is not computed",
    ),
    "quantised": (
        "llama",
        {"quantization_config": {"quant_method": "awq"}},
        None,
        r"weights are quantised \(awq\); use",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_sentence_before_anything_is_loaded(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, config, tensors, sentence = BAD[case]
    path = changed(tmp_path / "bad", name, config=config, tensors=tensors)
    monkeypatch.setattr(mapping, "_load", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(ValueError, match=sentence) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert "bad" in str(error.value)


def test_a_file_that_is_cut_off_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = changed(tmp_path / "bad") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    monkeypatch.setattr(mapping, "_load", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(ValueError, match=r"model.safetensors is cut off: \S+ \(.*\) ends at byte \d+ and the file at"):
        load(path.parent)


def test_a_folder_without_config_or_with_a_broken_one_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*nothing/config.json; name a folder"):
        open_hf(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON \("):
        open_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json is not a JSON object"):
        open_hf(tmp_path)


def test_a_target_of_another_model_is_refused() -> None:
    source = open_hf(FOLDER / "llama")
    with pytest.raises(
        ValueError, match=r"blocks/attention/k/bias is not there in the model of .*llama and \(2, 2, 8\)"
    ):
        source.load(open_hf(FOLDER / "qwen2").model.shapes)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="heads=4 is not divisible by tensor=8"):
        load(FOLDER / "llama", "tensor=8")
    with pytest.raises(ValueError, match="16 devices"):
        load(FOLDER / "llama", "data=16")


def test_an_export_over_something_is_refused_and_one_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = loaded("llama")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ValueError, match="there is there already and not empty; name a new folder"):
        save_hf(tmp_path / "there", ours.config, ours.params)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        save_hf(tmp_path / "new", ours.config, ours.params)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    ours, source = loaded("llama"), tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "merges.txt", "notes.txt"):
        (source / name).write_text(f'{{"file": "{name}"}}')
    save_hf(tmp_path / "out", ours.config, ours.params, tokenizer=source, token_ids={"eos_token_id": 3})
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "merges.txt", "tokenizer_config.json"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"file": "tokenizer.json"}'
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 3
    assert open_hf(tmp_path / "out").token_ids == {"eos_token_id": 3}


def test_plans_are_as_everywhere() -> None:
    ours = loaded("llama", "data=2 tensor=2")
    assert ours.plan == Plan(mesh="data=2 tensor=2", precision=Policy(compute="fp32"))
    assert ours.mesh.size == 4
