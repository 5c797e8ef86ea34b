"""The Gemma module: scaled embedding, blocks of attention and GeGLU with a norm before and after each, final norm and
head.

Local layers have a window, and in Gemma 3 a RoPE of their own; global ones have not. All blocks are alike, and which
kind a layer is comes with it as `layer_constants`, so that any number of layers can be stacked and scanned.
Decided so because five of six layers do not divide 26, 34 or 62 layers; instead of one block for each turn of the
pattern.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.interfaces import Batch
from meshpar.layout.constrain import constrain
from meshpar.module import stack
from meshpar.precision.remat import save_name
from models.gemma.config import GemmaConfig
from models.nn.attention import Attention
from models.nn.linear import Embedding, Linear
from models.nn.mlp import GatedMLP, gelu_tanh
from models.nn.norm import RMSNorm
from models.nn.rope import tables


class Block(nnx.Module):
    """One layer's parameters."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(config.embed, eps=config.norm_eps, offset=1.0)

        self.attention_norm, self.attention_out_norm = norm(), norm()
        self.attention = Attention(
            embed=config.embed,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            rngs=rngs,
            std=config.init_std,
            out_std=config.init_std,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            qk_norm_offset=1.0,
            window=config.window,
            scale=config.query_scalar**-0.5,
            softcap=config.attention_softcap,
        )
        self.mlp_norm, self.mlp_out_norm = norm(), norm()
        self.mlp = GatedMLP(
            config.embed, config.mlp, rngs=rngs, std=config.init_std, out_std=config.init_std, activation=gelu_tanh
        )


class Gemma(nnx.Module):
    """A decoder-only transformer; see `meshpar.interfaces.LanguageModel` for its parts."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.padded_vocab, config.embed, rngs=rngs, std=config.init_std)
        self.blocks = stack(lambda rngs: Block(config, rngs=rngs), config.layers, rngs)
        self.norm = RMSNorm(config.embed, eps=config.norm_eps, offset=1.0)
        self.unembed = (
            None
            if config.tied
            else Linear({"embed": config.embed}, {"vocab": config.padded_vocab}, rngs=rngs, std=config.init_std)
        )

    @property
    def layer_constants(self) -> dict[str, np.ndarray]:
        """Whether each layer is local, bool `[layers]`."""
        return {"local": np.array(self.config.local_layers)}

    def embed(self, batch: Batch, key: jax.Array | None) -> jax.Array:
        x = self.embedding(batch.tokens)
        # the factor is rounded to the compute dtype, as the reference does
        return constrain(
            x * jnp.asarray(math.sqrt(self.config.embed), x.dtype), "batch seq_residual embed", name="embeddings"
        )

    def block(
        self, block: Block, x: jax.Array, batch: Batch, key: jax.Array | None, constants: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        local = constants["local"]
        x = constrain(x, "batch seq_residual embed", name="block input")
        h = constrain(save_name(block.attention_norm(x), "norm"), "batch seq embed", name="attention input")
        h = block.attention(
            h, segments=batch.segments, rope=self._rope(batch, x.shape[1], local), key=None, windowed=local
        )
        x = save_name(x + block.attention_out_norm(h), "residual")
        h = constrain(save_name(block.mlp_norm(x), "norm"), "batch seq embed", name="mlp input")
        x = x + block.mlp_out_norm(block.mlp(h))
        return constrain(x, "batch seq_residual embed", name="block output"), {}

    def _rope(self, batch: Batch, seq: int, local: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The cos and sin tables of a layer."""
        config = self.config
        positions = jnp.arange(seq)[None] if batch.positions is None else batch.positions
        far = tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        if config.local_rope_theta is None:
            return far
        near = tables(positions, config.head_dim, config.local_rope_theta)
        cos, sin = (jnp.where(local, *pair) for pair in zip(near, far, strict=True))
        return cos, sin

    def head(self, x: jax.Array) -> jax.Array:
        h = constrain(self.norm(x), "batch seq embed", name="head input")
        logits = self.embedding.logits(h) if self.unembed is None else self.unembed(h)
        if self.config.final_softcap is not None:
            cap = self.config.final_softcap
            logits = (cap * jnp.tanh(logits.astype(jnp.float32) / cap)).astype(logits.dtype)
        return constrain(logits, "batch seq vocab", name="logits")
