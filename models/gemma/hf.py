"""Gemma 2 and 3 (text) at Hugging Face. Their norms multiply by 1 + weight, as ours do."""

from __future__ import annotations

from typing import Any

from meshpar.hf.mapping import Entry, Weights
from meshpar.hf.values import Values
from models.gemma.config import GemmaConfig
from models.nn.entries_hf import attention_entries, mlp_entries, qk_norm_entries, with_head
from models.nn.rope import RopeScaling
from models.nn.rope_hf import Rope, read_part, read_rope, scaling_values, write_rope

_COMMON = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window_pattern": 6},
}
_CLASSES = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_THETAS = (10_000.0, 1_000_000.0)  # of Gemma 3's local and global layers, where a file has none


def read_config(values: Values) -> GemmaConfig:
    """Our config of a config.json. Raises ValueError for what the model does not compute."""
    kind = str(values.model_type)
    third = kind == "gemma3_text"
    values = values.with_defaults({**_COMMON, **_DEFAULTS[kind]})
    values.must_be("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    values.must_be("attention_bias", (False,), False)
    values.must_be("use_bidirectional_attention", (False,), False)
    caps = {
        key: None if values.get(key) is None else values.number(key)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    if third:
        values.must_be("attn_logit_softcapping", (None,), None)  # transformers has the key and does not compute it
    layers = values.integer("num_hidden_layers")
    (theta, scaling), local = _ropes(values) if third else (read_rope(values), None)
    return GemmaConfig(
        vocab=values.integer("vocab_size"),
        layers=layers,
        embed=values.integer("hidden_size"),
        heads=values.integer("num_attention_heads"),
        kv_heads=values.integer("num_key_value_heads"),
        head_dim=values.integer("head_dim"),
        mlp=values.integer("intermediate_size"),
        max_seq=values.integer("max_position_embeddings"),
        window=values.integer("sliding_window"),
        global_every=_global_every(values, layers, values.integer("sliding_window_pattern") if third else 2),
        query_scalar=values.number("query_pre_attn_scalar"),
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local,
        qk_norm=third,
        attention_softcap=caps["attn_logit_softcapping"],
        final_softcap=caps["final_logit_softcapping"],
        norm_eps=values.number("rms_norm_eps"),
        tied=values.flag("tie_word_embeddings"),
        init_std=values.number("initializer_range"),
    )


def _global_every(values: Values, layers: int, usual: int) -> int:
    """After how many layers a global one comes. Raises ValueError when they do not come regularly."""
    types = values.get("layer_types")
    if types is None:
        return usual
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_LOCAL, _GLOBAL}:
        raise values.wrong("layer_types", types, f"a list of {layers} kinds, each {_LOCAL} or {_GLOBAL}")
    every = types.index(_GLOBAL) + 1 if _GLOBAL in types else max(usual, layers + 1)
    if types != _types(layers, every):
        raise ValueError(
            f"{values.file}: layer_types has global layers that do not come every {every}, and this model computes a "
            "regular pattern only; use such a checkpoint"
        )
    return every


def _types(layers: int, every: int) -> list[str]:
    return [_GLOBAL if (layer + 1) % every == 0 else _LOCAL for layer in range(layers)]


def _ropes(values: Values) -> tuple[Rope, float]:
    """Theta and scaling of Gemma 3's global layers, and theta of its local ones, in either style."""
    thetas = [
        values.number(key) if values.get(key) is not None else usual
        for key, usual in zip(("rope_local_base_freq", "rope_theta"), _THETAS, strict=True)
    ]
    old, new = values.part("rope_scaling"), values.part("rope_parameters")
    flat = ((thetas[1], RopeScaling()) if old is None else read_part(old, values, theta=thetas[1])), thetas[0]
    if new is None:
        return flat
    parts = [new.part(_LOCAL), new.part(_GLOBAL)]
    near, far = (
        (theta, RopeScaling()) if part is None else read_part(part, values, theta=theta)
        for part, theta in zip(parts, thetas, strict=True)
    )
    if near[1] != RopeScaling():
        raise ValueError(
            f"{values.file}: rope_parameters scales {_LOCAL} by {scaling_values(near[1])}, and this model scales "
            "global layers only; use such a checkpoint"
        )
    stated = any(values.get(key) is not None for key in ("rope_scaling", "rope_theta", "rope_local_base_freq"))
    if stated and flat != (far, near[0]):
        raise ValueError(
            f"{values.file}: rope_parameters says {(far, near[0])} and rope_theta, rope_scaling and "
            f"rope_local_base_freq say {flat}; delete the one that is wrong"
        )
    return far, near[0]


def write_config(config: GemmaConfig) -> dict[str, Any]:
    """The config.json of a Gemma 2, or of a Gemma 3 where there is qk-norm. Raises ValueError for a mixture."""
    third = config.qk_norm
    if third != (config.local_rope_theta is not None) or (third and config.attention_softcap is not None):
        raise ValueError(
            f"no architecture of transformers computes qk_norm={config.qk_norm}, "
            f"local_rope_theta={config.local_rope_theta} and attention_softcap={config.attention_softcap} together; "
            "Gemma 2 has the softcap alone, Gemma 3 the other two"
        )
    kind = "gemma3_text" if third else "gemma2"
    values: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "query_pre_attn_scalar": _whole(config.query_scalar),
        "sliding_window": config.window,
        "layer_types": _types(config.layers, config.global_every),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        **write_rope(config.rope_theta, config.rope_scaling),
    }
    if third:
        values |= {
            "sliding_window_pattern": config.global_every,
            "rope_local_base_freq": config.local_rope_theta,
            "rope_parameters": {
                _LOCAL: {"rope_type": "default", "rope_theta": config.local_rope_theta},
                _GLOBAL: values["rope_parameters"],
            },
        }
    return values


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value  # transformers wants a whole number


def weights(config: GemmaConfig) -> Weights:
    """Where each parameter is."""
    layer, attention = "model.layers.{layer}.", "model.layers.{layer}.self_attn."
    norms = {
        "norm": "model.norm",
        "blocks/attention_norm": layer + "input_layernorm",
        "blocks/attention_out_norm": layer + "post_attention_layernorm",
        "blocks/mlp_norm": layer + "pre_feedforward_layernorm",
        "blocks/mlp_out_norm": layer + "post_feedforward_layernorm",
    }
    entries = [
        Entry("embedding/table", "model.embed_tokens.weight", "vocab embed -> vocab embed"),
        *(Entry(f"{ours}/scale", f"{theirs}.weight", "embed -> embed") for ours, theirs in norms.items()),
        *attention_entries(attention),
        *mlp_entries(layer + "mlp."),
        *(qk_norm_entries(attention) if config.qk_norm else []),
    ]
    return with_head(entries, vocab=config.vocab, tied=config.tied, table="model.embed_tokens.weight", prefix="model.")
