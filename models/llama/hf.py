"""Llama's relatives at Hugging Face: Llama 2 and 3, Mistral, Qwen 2 and 3; SmolLM2 is a Llama.

Their RoPE turns the same pairs as ours (i, i + head_dim/2), so q and k need no permutation. The defaults are those of
transformers' configuration classes.
"""

from __future__ import annotations

from typing import Any

from meshpar.hf.mapping import Entry, Weights
from meshpar.hf.values import Values
from models.llama.config import LlamaConfig
from models.nn.entries_hf import attention_entries, mlp_entries, qk_norm_entries, with_head
from models.nn.rope_hf import read_rope, write_rope

_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    "mistral": {
        "vocab_size": 32_000,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read_config(values: Values) -> LlamaConfig:
    """Our config of a config.json. Raises ValueError for what the model does not compute."""
    kind = str(values.model_type)
    values = values.with_defaults({**_COMMON, **_DEFAULTS[kind]})
    values.must_be("hidden_act", ("silu", "swish"), "silu")
    values.must_be("use_mrope", (False,), False)
    embed, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    theta, scaling = read_rope(values)
    bias = values.flag("attention_bias") if kind in ("llama", "qwen3") else False
    head_dim = 0 if values.get("head_dim") is None else values.integer("head_dim")
    return LlamaConfig(
        vocab=values.integer("vocab_size"),
        layers=values.integer("num_hidden_layers"),
        embed=embed,
        heads=heads,
        kv_heads=heads if values.get("num_key_value_heads") is None else values.integer("num_key_value_heads"),
        mlp=values.integer("intermediate_size"),
        max_seq=values.integer("max_position_embeddings"),
        head_dim=0 if head_dim * heads == embed else head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=values.number("rms_norm_eps"),
        tied=values.flag("tie_word_embeddings"),
        attention_bias=bias or kind == "qwen2",
        attention_out_bias=bias,
        mlp_bias=values.flag("mlp_bias") if kind == "llama" else False,
        qk_norm=kind == "qwen3",
        window=_window(values, kind),
        init_std=values.number("initializer_range"),
    )


def _window(values: Values, kind: str) -> int | None:
    """The window of all layers. Raises ValueError when only some have one."""
    if kind == "llama" or values.get("sliding_window") is None:
        return None
    window, layers = values.integer("sliding_window"), values.integer("num_hidden_layers")
    types = values.get("layer_types")
    if types is None and kind == "mistral":
        return window
    if types is None:
        first = values.integer("max_window_layers") if values.flag("use_sliding_window") else layers
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise values.wrong("layer_types", types, f"a list of {layers} kinds, one for each layer")
    if set(types) == {"sliding_attention"}:
        return window
    if set(types) == {"full_attention"}:
        return None
    raise ValueError(
        f"{values.file}: {types.count('sliding_attention')} of {layers} layers have a sliding window, and this model "
        "computes all with one or none (max_window_layers=0, or use_sliding_window=false); use such a checkpoint"
    )


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """The config.json of the architecture that computes this. Raises ValueError when there is none."""
    kind = _architecture(config)
    values: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        **write_rope(config.rope_theta, config.rope_scaling),
    }
    if kind in ("llama", "qwen3"):
        values["attention_bias"] = config.attention_bias
    if kind == "llama":
        values["mlp_bias"] = config.mlp_bias
    if kind == "mistral":
        values["sliding_window"] = config.window
    if kind in ("qwen2", "qwen3"):
        windowed = config.window is not None
        values |= {
            "use_sliding_window": windowed,
            "sliding_window": config.window,
            "max_window_layers": 0 if windowed else config.layers,
            "layer_types": ["sliding_attention" if windowed else "full_attention"] * config.layers,
        }
    return values


def _architecture(config: LlamaConfig) -> str:
    """The `model_type` that has what this config asks for: the biases of q, k, v and of out, qk-norm, window, MLP."""
    both = config.attention_bias == config.attention_out_bias
    if config.qk_norm and both and not config.mlp_bias:
        return "qwen3"
    if config.attention_bias and not (config.qk_norm or config.attention_out_bias or config.mlp_bias):
        return "qwen2"
    if both and not config.qk_norm and config.window is None:
        return "llama"
    if not (config.attention_bias or config.attention_out_bias or config.mlp_bias or config.qk_norm):
        return "mistral"
    names = ("attention_bias", "attention_out_bias", "mlp_bias", "qk_norm", "window")
    asked = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise ValueError(
        f"no architecture of transformers computes {asked} together; "
        "llama has biases and no window, mistral a window, qwen2 biases of q, k, v, qwen3 qk-norm"
    )


def weights(config: LlamaConfig) -> Weights:
    """Where each parameter is."""
    layer, attention = "model.layers.{layer}.", "model.layers.{layer}.self_attn."
    entries = [
        Entry("embedding/table", "model.embed_tokens.weight", "vocab embed -> vocab embed"),
        Entry("norm/scale", "model.norm.weight", "embed -> embed"),
        Entry("blocks/attention_norm/scale", layer + "input_layernorm.weight", "embed -> embed"),
        Entry("blocks/mlp_norm/scale", layer + "post_attention_layernorm.weight", "embed -> embed"),
        *attention_entries(attention),
        *mlp_entries(layer + "mlp."),
    ]
    if config.attention_bias:
        entries += [
            Entry("blocks/attention/q/bias", attention + "q_proj.bias", "(heads head_dim) -> heads head_dim"),
            Entry("blocks/attention/k/bias", attention + "k_proj.bias", "(kv_heads head_dim) -> kv_heads head_dim"),
            Entry("blocks/attention/v/bias", attention + "v_proj.bias", "(kv_heads head_dim) -> kv_heads head_dim"),
        ]
    if config.attention_out_bias:
        entries.append(Entry("blocks/attention/out/bias", attention + "o_proj.bias", "embed -> embed"))
    if config.mlp_bias:
        entries += [
            Entry("blocks/mlp/gate/bias", layer + "mlp.gate_proj.bias", "mlp -> mlp"),
            Entry("blocks/mlp/up/bias", layer + "mlp.up_proj.bias", "mlp -> mlp"),
            Entry("blocks/mlp/down/bias", layer + "mlp.down_proj.bias", "embed -> embed"),
        ]
    if config.qk_norm:
        entries += qk_norm_entries(attention)
    return with_head(entries, vocab=config.vocab, tied=config.tied, table="model.embed_tokens.weight", prefix="model.")
