"""GPT-2 at Hugging Face. Its linear layers are `Conv1D`, kernels of `[inputs, outputs]` as ours; q, k and v are one."""

from __future__ import annotations

from typing import Any

from meshpar.hf.mapping import Entry, Weights
from meshpar.hf.values import Values
from models.gpt.config import GPTConfig
from models.nn.entries_hf import with_head

_DEFAULTS = {
    "vocab_size": 50_257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "tie_word_embeddings": True,
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def read_config(values: Values) -> GPTConfig:
    """Our config of a config.json. Raises ValueError for what the model does not compute."""
    values = values.with_defaults(_DEFAULTS)
    values.must_be("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    values.must_be("scale_attn_weights", (True,), True)
    values.must_be("scale_attn_by_inverse_layer_idx", (False,), False)
    values.must_be("add_cross_attention", (False,), False)
    rates = {key: values.number(key) for key in _DROPOUTS}
    if len(set(rates.values())) > 1:
        told = ", ".join(f"{key}={rate:g}" for key, rate in rates.items())
        raise ValueError(f"{values.file}: {told} differ, and this model has one rate of dropout; set them alike")
    return GPTConfig(
        vocab=values.integer("vocab_size"),
        layers=values.integer("n_layer"),
        embed=values.integer("n_embd"),
        heads=values.integer("n_head"),
        max_seq=values.integer("n_positions"),
        mlp=0 if values.get("n_inner") is None else values.integer("n_inner"),
        norm_eps=values.number("layer_norm_epsilon"),
        tied=values.flag("tie_word_embeddings"),
        dropout=rates["resid_pdrop"],
        init_std=values.number("initializer_range"),
    )


def write_config(config: GPTConfig) -> dict[str, Any]:
    """The config.json of a GPT-2."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_positions": config.max_seq,
        "n_ctx": config.max_seq,  # the name of earlier versions
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp or None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(_DROPOUTS, config.dropout),
    }


def weights(config: GPTConfig) -> Weights:
    """Where each parameter is."""
    layer = "transformer.h.{layer}."
    entries = [
        Entry("embedding/table", "transformer.wte.weight", "vocab embed -> vocab embed"),
        Entry("positions", "transformer.wpe.weight", "positions embed -> positions embed"),
        Entry(
            "blocks/attention/out/kernel",
            layer + "attn.c_proj.weight",
            "(heads head_dim) embed -> heads head_dim embed",
        ),
        Entry("blocks/attention/out/bias", layer + "attn.c_proj.bias", "embed -> embed"),
        Entry("blocks/mlp/up/kernel", layer + "mlp.c_fc.weight", "embed mlp -> embed mlp"),
        Entry("blocks/mlp/up/bias", layer + "mlp.c_fc.bias", "mlp -> mlp"),
        Entry("blocks/mlp/down/kernel", layer + "mlp.c_proj.weight", "mlp embed -> mlp embed"),
        Entry("blocks/mlp/down/bias", layer + "mlp.c_proj.bias", "embed -> embed"),
    ]
    for third, (name, heads) in enumerate((("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))):
        fused = f"({third}/3 {heads} head_dim)"
        entries += [
            Entry(
                f"blocks/attention/{name}/kernel",
                layer + "attn.c_attn.weight",
                f"embed {fused} -> embed {heads} head_dim",
            ),
            Entry(f"blocks/attention/{name}/bias", layer + "attn.c_attn.bias", f"{fused} -> {heads} head_dim"),
        ]
    norms = {"norm": "transformer.ln_f", "blocks/attention_norm": layer + "ln_1", "blocks/mlp_norm": layer + "ln_2"}
    for ours, theirs in norms.items():
        entries += [
            Entry(f"{ours}/scale", f"{theirs}.weight", "embed -> embed"),
            Entry(f"{ours}/bias", f"{theirs}.bias", "embed -> embed"),
        ]
    return with_head(
        entries,
        vocab=config.vocab,
        tied=config.tied,
        table="transformer.wte.weight",
        prefix="transformer.",
        ignored=(r"h\.\d+\.attn\.(bias|masked_bias)$",),  # causal masks
    )
