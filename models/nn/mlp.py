"""The two MLPs of the model families: gated (SwiGLU and GeGLU, Shazeer 2020) and plain with GELU."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from meshpar.layout.constrain import constrain
from meshpar.precision.remat import save_name
from models.nn.linear import Linear


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU in its tanh form, as in GPT-2 and Gemma."""
    return jax.nn.gelu(x, approximate=True)


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`; column-split gate and up, row-split down."""

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        rngs: nnx.Rngs,
        std: float,
        out_std: float,
        bias: bool = False,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ):
        self.gate = Linear({"embed": embed}, {"mlp": mlp}, rngs=rngs, bias=bias, std=std)
        self.up = Linear({"embed": embed}, {"mlp": mlp}, rngs=rngs, bias=bias, std=std)
        self.down = Linear({"mlp": mlp}, {"embed": embed}, rngs=rngs, bias=bias, std=out_std)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, seq, embed]`, whole along seq, to `[batch, seq_residual, embed]`."""
        gate = save_name(constrain(self.gate.add_bias(self.gate(x)), "batch seq mlp", name="mlp gate"), "mlp_gate")
        up = save_name(constrain(self.up.add_bias(self.up(x)), "batch seq mlp", name="mlp up"), "mlp_gate")
        hidden = save_name(self.activation(gate) * up, "mlp_hidden")
        return self.down.add_bias(constrain(self.down(hidden), "batch seq_residual embed", name="mlp output"))


class MLP(nnx.Module):
    """`down(gelu(up(x)))` with biases, GPT-2's tanh form of GELU."""

    def __init__(self, embed: int, mlp: int, *, rngs: nnx.Rngs, std: float, out_std: float):
        self.up = Linear({"embed": embed}, {"mlp": mlp}, rngs=rngs, bias=True, std=std)
        self.down = Linear({"mlp": mlp}, {"embed": embed}, rngs=rngs, bias=True, std=out_std)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, seq, embed]`, whole along seq, to `[batch, seq_residual, embed]`."""
        up = save_name(constrain(self.up.add_bias(self.up(x)), "batch seq mlp", name="mlp up"), "mlp_gate")
        hidden = save_name(gelu_tanh(up), "mlp_hidden")
        return self.down.add_bias(constrain(self.down(hidden), "batch seq_residual embed", name="mlp output"))
