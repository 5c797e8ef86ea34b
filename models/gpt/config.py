"""The shape of a GPT-2-like model. Source: Radford et al. 2019."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flax import nnx

if TYPE_CHECKING:
    from models.gpt.model import GPT

_SIZES = ("vocab", "layers", "embed", "heads", "max_seq", "vocab_multiple")
_MOST = 2**31 - 1  # sizes and positions are int32 on devices


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A GPT-2-like model; sizes in elements."""

    vocab: int
    layers: int
    embed: int
    heads: int
    max_seq: int  # rows of the position table
    mlp: int = 0  # 0: 4 embed
    norm_eps: float = 1e-5
    tied: bool = True
    dropout: float = 0.0  # on embeddings, attention weights and residual branches; GPT-2 was trained with 0.1
    init_std: float = 0.02  # outputs into the residual stream get init_std / sqrt(2 layers)
    vocab_multiple: int = (
        128  # the tables are padded to this, whatever the mesh; the padding is masked out of softmax and sampling
    )

    def __post_init__(self) -> None:
        for name, fine, rule in (
            *((size, 1 <= getattr(self, size) <= _MOST, f"at least 1 and at most {_MOST}") for size in _SIZES),
            ("mlp", 0 <= self.mlp <= _MOST, f"at least 0 and at most {_MOST}; 0 is 4 embed"),
            ("norm_eps", self.norm_eps > 0, "above 0; 1e-5 is usual"),
            ("init_std", self.init_std >= 0, "at least 0; 0.02 is usual"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1; 0 drops nothing"),
        ):
            if not fine:
                raise ValueError(f"model.{name}={getattr(self, name)} must be {rule}")
        if self.embed % self.heads:
            raise ValueError(f"embed={self.embed} is not divisible by heads={self.heads}; choose heads that divide it")

    @property
    def mlp_size(self) -> int:
        """The inner size of the MLP in force."""
        return self.mlp or 4 * self.embed

    @property
    def kv_heads(self) -> int:
        """As many as query heads."""
        return self.heads

    @property
    def head_size(self) -> int:
        """The size of one head."""
        return self.embed // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def build(self, rngs: nnx.Rngs) -> GPT:
        """The module, with parameters drawn from `rngs`."""
        from models.gpt.model import GPT

        return GPT(self, rngs=rngs)
