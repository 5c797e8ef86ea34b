"""The GPT-2 module: token and position tables, blocks of pre-norm attention and GELU MLP, final norm and head."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.interfaces import Batch
from meshpar.layout.constrain import constrain
from meshpar.layout.dropout import dropout
from meshpar.matmul.lookup import lookup
from meshpar.module import stack
from meshpar.precision.remat import save_name
from models.gpt.config import GPTConfig
from models.nn.attention import Attention
from models.nn.linear import Embedding, Linear
from models.nn.mlp import MLP
from models.nn.norm import LayerNorm


class Block(nnx.Module):
    """One layer's parameters."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        out_std = config.init_std / math.sqrt(2 * config.layers)
        self.attention_norm = LayerNorm(config.embed, eps=config.norm_eps)
        self.attention = Attention(
            embed=config.embed,
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=config.head_size,
            rngs=rngs,
            std=config.init_std,
            out_std=out_std,
            bias=True,
            out_bias=True,
            dropout=config.dropout,
        )
        self.mlp_norm = LayerNorm(config.embed, eps=config.norm_eps)
        self.mlp = MLP(config.embed, config.mlp_size, rngs=rngs, std=config.init_std, out_std=out_std)


class GPT(nnx.Module):
    """A decoder-only transformer; see `meshpar.interfaces.LanguageModel` for its parts."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.padded_vocab, config.embed, rngs=rngs, std=config.init_std)
        self.positions = nnx.Param(
            config.init_std / 2 * jax.random.normal(rngs.params(), (config.max_seq, config.embed), jnp.float32),
            axes=(None, "embed"),
        )
        self.blocks = stack(lambda rngs: Block(config, rngs=rngs), config.layers, rngs)
        self.norm = LayerNorm(config.embed, eps=config.norm_eps)
        self.unembed = (
            None
            if config.tied
            else Linear({"embed": config.embed}, {"vocab": config.padded_vocab}, rngs=rngs, std=config.init_std)
        )

    def embed(self, batch: Batch, key: jax.Array | None) -> jax.Array:
        table = self.positions[...]
        seq = batch.tokens.shape[1]
        placed = table[None, :seq] if batch.positions is None else lookup(table, batch.positions)
        embedded = self.embedding(batch.tokens)
        # in fp32, because the gradient of a position is a sum over all rows
        x = (embedded.astype(jnp.float32) + placed.astype(jnp.float32)).astype(embedded.dtype)
        x = constrain(x, "batch seq_residual embed", name="embeddings")
        return dropout(x, self.config.dropout, key)

    def block(
        self, block: Block, x: jax.Array, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        keys = (None, None, None) if key is None else tuple(jax.random.split(key, 3))
        x = constrain(x, "batch seq_residual embed", name="block input")
        h = constrain(save_name(block.attention_norm(x), "norm"), "batch seq embed", name="attention input")
        h = block.attention(h, segments=batch.segments, rope=None, key=keys[0])
        x = save_name(x + dropout(h, self.config.dropout, keys[1]), "residual")
        h = constrain(save_name(block.mlp_norm(x), "norm"), "batch seq embed", name="mlp input")
        x = x + dropout(block.mlp(h), self.config.dropout, keys[2])
        return constrain(x, "batch seq_residual embed", name="block output"), {}

    def head(self, x: jax.Array) -> jax.Array:
        h = constrain(self.norm(x), "batch seq embed", name="head input")
        logits = self.embedding.logits(h) if self.unembed is None else self.unembed(h)
        return constrain(logits, "batch seq vocab", name="logits")
