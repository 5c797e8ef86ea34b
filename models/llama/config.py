"""The shape of a Llama-like model. Sources: Touvron et al. 2023; Jiang et al. 2023 (window); Qwen 2 and 3 (biases,
qk-norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flax import nnx

from models.nn.rope import RopeScaling

if TYPE_CHECKING:
    from models.llama.model import Llama

_SIZES = ("vocab", "layers", "embed", "heads", "kv_heads", "mlp", "max_seq", "vocab_multiple")
_MOST = 2**31 - 1  # sizes and positions are int32 on devices


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A Llama-like model; sizes in elements."""

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int  # inner size of SwiGLU; 8/3 embed, rounded up, is usual
    max_seq: int
    head_dim: int = 0  # 0: embed / heads
    rope_theta: float = 10_000.0  # 500000 for contexts of 8k and more
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: float = 1e-5
    tied: bool = False  # one table for embedding and head; usual below 1B
    attention_bias: bool = False  # Qwen 2: q, k, v
    attention_out_bias: bool = False  # Llama's and Qwen 3's attention_bias is this one too; none of theirs has it
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen 3
    window: int | None = None  # Mistral: positions that a token sees, itself included
    dropout: float = 0.0  # on the residual branches; pretraining uses 0
    init_std: float = 0.02  # outputs into the residual stream get init_std / sqrt(2 layers)
    vocab_multiple: int = (
        128  # the tables are padded to this, whatever the mesh; the padding is masked out of softmax and sampling
    )

    def __post_init__(self) -> None:
        for name, fine, rule in (
            *((size, 1 <= getattr(self, size) <= _MOST, f"at least 1 and at most {_MOST}") for size in _SIZES),
            ("head_dim", 0 <= self.head_dim <= _MOST, f"at least 0 and at most {_MOST}; 0 is embed / heads"),
            (
                "window",
                self.window is None or 1 <= self.window <= _MOST,
                f"at least 1 and at most {_MOST}, or none",
            ),
            ("rope_theta", self.rope_theta > 0, "above 0; 10000 is usual"),
            ("norm_eps", self.norm_eps > 0, "above 0; 1e-5 is usual"),
            ("init_std", self.init_std >= 0, "at least 0; 0.02 is usual"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1; 0 drops nothing"),
        ):
            if not fine:
                raise ValueError(f"model.{name}={getattr(self, name)} must be {rule}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                "each kv head serves the same number of heads"
            )
        if not self.head_dim and self.embed % self.heads:
            raise ValueError(
                f"embed={self.embed} is not divisible by heads={self.heads}; "
                "choose heads that divide it or give head_dim"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim={self.head_size} is odd; RoPE turns pairs, use an even one")

    @property
    def head_size(self) -> int:
        """The size of one head in force."""
        return self.head_dim or self.embed // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def build(self, rngs: nnx.Rngs) -> Llama:
        """The module, with parameters drawn from `rngs`."""
        from models.llama.model import Llama

        return Llama(self, rngs=rngs)
