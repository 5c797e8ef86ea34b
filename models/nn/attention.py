"""Multi-head attention with grouped kv heads (Ainslie et al. 2023): projections here, the product itself in
`meshpar.attention`.
"""

from __future__ import annotations

import jax
from flax import nnx

from meshpar.attention.attend import attend
from meshpar.layout.constrain import constrain
from meshpar.precision.remat import save_name
from models.nn.linear import Linear
from models.nn.norm import RMSNorm
from models.nn.rope import rotate


class Attention(nnx.Module):
    """Causal self-attention. Column-split q, k, v, row-split output: one reduction over tensor."""

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
        std: float,
        out_std: float,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        qk_norm_offset: float = 0.0,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ):
        """`qk_norm_eps` turns on a norm of queries and keys per head; `window` limits attention to that many
        positions, the token itself included; `scale` and `softcap` are those of `attend`.
        """
        self.q = Linear({"embed": embed}, {"heads": heads, "head_dim": head_dim}, rngs=rngs, bias=bias, std=std)
        self.k = Linear({"embed": embed}, {"kv_heads": kv_heads, "head_dim": head_dim}, rngs=rngs, bias=bias, std=std)
        self.v = Linear({"embed": embed}, {"kv_heads": kv_heads, "head_dim": head_dim}, rngs=rngs, bias=bias, std=std)
        self.out = Linear(
            {"heads": heads, "head_dim": head_dim}, {"embed": embed}, rngs=rngs, bias=out_bias, std=out_std
        )
        self.q_norm, self.k_norm = (
            None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, axis="head_dim", offset=qk_norm_offset)
            for _ in "qk"
        )
        self.window = window
        self.scale = scale
        self.softcap = softcap
        self.dropout = dropout

    def __call__(
        self,
        x: jax.Array,
        *,
        segments: jax.Array | None,
        rope: tuple[jax.Array, jax.Array] | None,
        key: jax.Array | None,
        windowed: jax.Array | None = None,
    ) -> jax.Array:
        """`[batch, seq, embed]`, whole along seq, to `[batch, seq_residual, embed]`; `rope` are the cos and sin
        tables, None for no rotation; `windowed`, a bool scalar, is whether this layer has the window.
        """
        q = self.q.add_bias(self.q(x))
        k = self.k.add_bias(self.k(x))
        v = self.v.add_bias(self.v(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q = save_name(constrain(q, "batch seq heads head_dim", name="queries"), "qkv")
        k = save_name(constrain(k, "batch seq kv_heads head_dim", name="keys"), "qkv")
        v = save_name(constrain(v, "batch seq kv_heads head_dim", name="values"), "qkv")
        y = attend(
            q,
            k,
            v,
            segments=segments,
            window=self.window,
            windowed=windowed,
            scale=self.scale,
            softcap=self.softcap,
            dropout=self.dropout if key is not None else 0.0,
            key=key,
        )
        y = constrain(y, "batch seq heads head_dim", name="attention")  # attend has tagged it for rematerialisation
        return self.out.add_bias(constrain(self.out(y), "batch seq_residual embed", name="attention output"))
