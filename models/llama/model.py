"""The Llama module: embedding, blocks of pre-norm attention and SwiGLU, final norm and head."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.interfaces import Batch
from meshpar.layout.constrain import constrain
from meshpar.layout.dropout import dropout
from meshpar.module import stack
from meshpar.precision.remat import save_name
from models.llama.config import LlamaConfig
from models.nn.attention import Attention
from models.nn.linear import Embedding, Linear
from models.nn.mlp import GatedMLP
from models.nn.norm import RMSNorm
from models.nn.rope import tables


class Block(nnx.Module):
    """One layer's parameters."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        out_std = config.init_std / math.sqrt(2 * config.layers)
        self.attention_norm = RMSNorm(config.embed, eps=config.norm_eps)
        self.attention = Attention(
            embed=config.embed,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_size,
            rngs=rngs,
            std=config.init_std,
            out_std=out_std,
            bias=config.attention_bias,
            out_bias=config.attention_out_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            window=config.window,
        )
        self.mlp_norm = RMSNorm(config.embed, eps=config.norm_eps)
        self.mlp = GatedMLP(
            config.embed, config.mlp, rngs=rngs, std=config.init_std, out_std=out_std, bias=config.mlp_bias
        )


class Llama(nnx.Module):
    """A decoder-only transformer; see `meshpar.interfaces.LanguageModel` for its parts."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.padded_vocab, config.embed, rngs=rngs, std=config.init_std)
        self.blocks = stack(lambda rngs: Block(config, rngs=rngs), config.layers, rngs)
        self.norm = RMSNorm(config.embed, eps=config.norm_eps)
        self.unembed = (
            None
            if config.tied
            else Linear({"embed": config.embed}, {"vocab": config.padded_vocab}, rngs=rngs, std=config.init_std)
        )

    def embed(self, batch: Batch, key: jax.Array | None) -> jax.Array:
        return constrain(self.embedding(batch.tokens), "batch seq_residual embed", name="embeddings")

    def block(
        self, block: Block, x: jax.Array, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        attention_key, mlp_key = (None, None) if key is None else tuple(jax.random.split(key))
        positions = jnp.arange(x.shape[1])[None] if batch.positions is None else batch.positions
        rope = tables(positions, self.config.head_size, self.config.rope_theta, self.config.rope_scaling)
        x = constrain(x, "batch seq_residual embed", name="block input")
        h = constrain(save_name(block.attention_norm(x), "norm"), "batch seq embed", name="attention input")
        h = block.attention(h, segments=batch.segments, rope=rope, key=None)
        x = save_name(x + dropout(h, self.config.dropout, attention_key), "residual")
        h = constrain(save_name(block.mlp_norm(x), "norm"), "batch seq embed", name="mlp input")
        x = x + dropout(block.mlp(h), self.config.dropout, mlp_key)
        return constrain(x, "batch seq_residual embed", name="block output"), {}

    def head(self, x: jax.Array) -> jax.Array:
        h = constrain(self.norm(x), "batch seq embed", name="head input")
        logits = self.embedding.logits(h) if self.unembed is None else self.unembed(h)
        return constrain(logits, "batch seq vocab", name="logits")
