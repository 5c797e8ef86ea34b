"""config.json of either style is read to the same config, written so that both read it, and refused where the model
would compute something else.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from meshpar.hf.families import FAMILIES, family_of, family_of_config
from meshpar.hf.values import Values
from models.gemma import GemmaConfig
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.nn.rope import RopeScaling

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = RopeScaling(kind="linear", factor=4.0)


def read(kind: str, **values: Any) -> Any:
    found = Values(values={"model_type": kind, **SIZES, **values}, file="config.json")
    return family_of(found).read_config(found)


def again(config: Any) -> Any:
    """The config after it was written and read."""
    written = json.loads(json.dumps(family_of_config(config).write_config(config)))
    values = Values(values=written, file="config.json")
    return family_of(values).read_config(values)


# c12: one meaning of theta and scaling in both styles
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    ("old", "new", "theta", "scaling"),
    [
        ({}, {}, 10_000.0, RopeScaling()),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}, 5e5, RopeScaling()),
        (
            {"rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3},
            5e5,
            RopeScaling(kind="llama3", factor=8.0, original_seq=8192),
        ),
        (
            {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 2e4, "rope_type": "linear", "factor": 4.0},
            2e4,
            LINEAR,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            10_000.0,
            RopeScaling(kind="yarn", factor=4.0, original_seq=32),
        ),
    ],
)
def test_both_styles_of_rope_are_one(kind: str, old: Any, new: Any, theta: float, scaling: RopeScaling) -> None:
    for config in (read(kind, **old), read(kind, rope_parameters=new), read(kind, **old, rope_parameters=new)):
        assert (config.rope_theta, config.rope_scaling) == (theta, scaling)
    written = family_of_config(config).write_config(config)
    new_only = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    old_only = {key: value for key, value in written.items() if key != "rope_parameters"}
    for part in (written, new_only, old_only):
        values = Values(values=part, file="config.json")
        found = family_of(values).read_config(values)
        assert (found.rope_theta, found.rope_scaling) == (theta, scaling)


def test_styles_that_disagree_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rope_parameters says theta 10000, .*'default'.* says theta 500000, .*delete"
    ):
        read("llama", rope_theta=5e5, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    with pytest.raises(ValueError, match=r"rope_parameters says .*'linear'.* says .*'yarn'"):
        read(
            "llama",
            rope_scaling={"type": "yarn", "factor": 4.0},
            rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
        )
    new = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match=r"rope_parameters says .* and rope_theta, rope_scaling and .*; delete"):
        read("gemma3_text", rope_theta=5e5, rope_parameters=new)


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "ntk", "mrope", 7])
def test_an_unknown_rope_type_is_an_error_and_never_the_default(style: str, kind: Any) -> None:
    sentence = f"config.json: {style}: the rope type {kind!r} is not computed, only default, linear, llama3, yarn; use"
    with pytest.raises(ValueError, match=sentence):
        read("llama", **{style: {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling has no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has no low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, 'factor="4" should be a number'),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "config.json: rope scaling factor=0.5 is below 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "truncate=false is not computed"),
        ({"rope_scaling": "linear"}, 'rope_scaling="linear" should be an object'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary_factor=0.5"),
        ({"hidden_act": "relu"}, 'hidden_act="relu" is not computed by this model, only "silu", "swish"; use'),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers; take"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 should be a whole number"),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings="yes" should be true or false'),
        ({"num_key_value_heads": 3}, "config.json: heads=4 is not a multiple of kv_heads=3"),
    ],
)
def test_what_is_missing_wrong_or_not_computed_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    from meshpar.hf.folder import read_config

    with pytest.raises(ValueError, match=sentence) as error:
        read_config(Values(values={"model_type": "llama", **SIZES, **values}, file="config.json"))
    assert str(error.value).startswith("config.json")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("lama", "model_type='lama' is not known; did you mean 'llama'\\? known are gpt2, llama,"),
        ("gemma3", "did you mean 'gemma3_text'"),
        ("t5", "model_type='t5' is not known; known are "),
        (None, "model_type=None is not known; known are "),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_list(kind: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        family_of(Values(values={"model_type": kind}, file="config.json"))


@pytest.mark.parametrize(
    ("kind", "values", "window"),
    [
        ("llama", {"sliding_window": 16}, None),  # transformers does not look at it
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 16}, 16),
        ("qwen2", {"sliding_window": 16}, None),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}, None),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        ("qwen3", {"sliding_window": 16, "layer_types": ["sliding_attention"] * 4}, 16),
        ("qwen3", {"sliding_window": 16, "layer_types": ["full_attention"] * 4}, None),
    ],
)
def test_the_window_is_that_of_the_architecture(kind: str, values: dict[str, Any], window: int | None) -> None:
    assert read(kind, **values).window == window


def test_a_window_in_some_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="3 of 4 layers have a sliding window, and this model computes all with one"):
        read("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("gpt2", True), ("llama", False), ("mistral", False), ("qwen2", False), ("qwen3", False), ("gemma2", True)],
)
def test_a_missing_tie_word_embeddings_is_the_architectures_default(kind: str, tied: bool) -> None:
    assert read(kind).tied is tied
    assert read(kind, tie_word_embeddings=not tied).tied is not tied


def test_gpt2_is_read() -> None:
    config = read("gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=64, n_inner=48, attn_pdrop=0.1)
    assert config == GPTConfig(vocab=90, layers=2, embed=32, heads=4, max_seq=64, mlp=48, dropout=0.1)
    with pytest.raises(ValueError, match=r"resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0 differ, and .*; set them"):
        read("gpt2", attn_pdrop=0.0)
    for values in ({"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}):
        with pytest.raises(ValueError, match="is not computed by this model"):
            read("gpt2", **values)


def test_gemma_3_has_two_ropes_in_both_styles() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = read("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=linear)
    nested = {
        "full_attention": {"rope_theta": 1e6, **linear},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    assert old == read("gemma3_text", rope_parameters=nested) == read("gemma3_text", rope_scaling=linear)
    assert (old.rope_theta, old.local_rope_theta, old.rope_scaling.factor) == (1e6, 1e4, 8.0)
    nested["sliding_attention"] |= linear
    with pytest.raises(ValueError, match="scales sliding_attention by"):
        read("gemma3_text", rope_parameters=nested)


def test_gemmas_layers_come_in_turn() -> None:
    assert read("gemma2").local_layers == (True, False, True, False)
    assert read("gemma3_text", num_hidden_layers=7).local_layers == (True,) * 5 + (False, True)
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert read("gemma3_text", layer_types=types).global_every == 3
    with pytest.raises(ValueError, match="do not come every 1"):
        read("gemma3_text", layer_types=["full_attention", *types[:3]])
    with pytest.raises(ValueError, match=r"layer_types=.* should be a list of 4 kinds"):
        read("gemma3_text", layer_types=types[:3])


SMALL = LlamaConfig(vocab=90, layers=2, embed=32, heads=4, kv_heads=2, mlp=40, max_seq=64)
GEMMA = GemmaConfig(
    vocab=90,
    layers=7,
    embed=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=40,
    max_seq=64,
    window=16,
    global_every=2,
    query_scalar=24.0,
)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (SMALL, "llama"),
        (dataclasses.replace(SMALL, attention_bias=True, attention_out_bias=True, mlp_bias=True), "llama"),
        (dataclasses.replace(SMALL, head_dim=16, tied=True, rope_scaling=LINEAR, norm_eps=1e-6), "llama"),
        (dataclasses.replace(SMALL, window=16), "mistral"),
        (dataclasses.replace(SMALL, attention_bias=True), "qwen2"),
        (dataclasses.replace(SMALL, attention_bias=True, window=16), "qwen2"),
        (dataclasses.replace(SMALL, qk_norm=True, head_dim=16), "qwen3"),
        (dataclasses.replace(SMALL, qk_norm=True, window=16, head_dim=16), "qwen3"),
        (GPTConfig(vocab=90, layers=2, embed=32, heads=4, max_seq=64, dropout=0.25), "gpt2"),
        (GPTConfig(vocab=90, layers=2, embed=32, heads=4, max_seq=64, mlp=40, tied=False), "gpt2"),
        (dataclasses.replace(GEMMA, attention_softcap=50.0, final_softcap=30.0), "gemma2"),
        (
            dataclasses.replace(GEMMA, qk_norm=True, local_rope_theta=1e4, rope_theta=1e6, rope_scaling=LINEAR),
            "gemma3_text",
        ),
        (dataclasses.replace(GEMMA, qk_norm=True, local_rope_theta=1e4, global_every=6), "gemma3_text"),
    ],
)
def test_a_config_is_the_same_after_it_was_written_and_read(config: Any, kind: str) -> None:
    assert family_of_config(config).write_config(config)["model_type"] == kind
    assert again(config) == config


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (dataclasses.replace(SMALL, mlp_bias=True, window=16), "mlp_bias=True, qk_norm=False, window=16 together"),
        (dataclasses.replace(SMALL, mlp_bias=True, qk_norm=True), "no architecture of transformers computes"),
        (dataclasses.replace(GEMMA, qk_norm=True), "qk_norm=True, local_rope_theta=None"),
        (3, "a int has no Hugging Face form"),
    ],
)
def test_a_config_that_no_architecture_computes_is_refused(config: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        family_of_config(config).write_config(config)


def test_every_family_is_there() -> None:
    for kind in FAMILIES:
        assert read(kind).vocab == 90
