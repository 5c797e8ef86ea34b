"""The shape of a Gemma 2 or 3. Sources: Gemma 2, 2024, section 2; Gemma 3, 2025, section 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flax import nnx

from models.nn.rope import RopeScaling

if TYPE_CHECKING:
    from models.gemma.model import Gemma

_SIZES = ("vocab", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "max_seq", "window", "global_every")
_MOST = 2**31 - 1  # sizes and positions are int32 on devices


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """A Gemma 2 or 3; sizes in elements."""

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # inner size of the gated MLP
    max_seq: int
    window: int  # positions that a token sees in a local layer, itself included
    global_every: int  # layer i, from 0, is global where this divides i + 1; Gemma 2: 2, Gemma 3: 6
    query_scalar: float  # scores are divided by its root; head_dim, or embed / heads in Gemma 2 and 3 of 27B
    rope_theta: float = 10_000.0  # of global layers; Gemma 3: 1e6
    rope_scaling: RopeScaling = RopeScaling()  # of global layers; Gemma 3: linear, 8
    local_rope_theta: float | None = None  # of local layers, without scaling; none: as global layers. Gemma 3: 1e4
    qk_norm: bool = False  # Gemma 3
    attention_softcap: float | None = None  # Gemma 2: 50
    final_softcap: float | None = None  # Gemma 2: 30
    norm_eps: float = 1e-6
    tied: bool = True  # one table for embedding and head
    init_std: float = 0.02
    vocab_multiple: int = (
        128  # the tables are padded to this, whatever the mesh; the padding is masked out of softmax and sampling
    )

    def __post_init__(self) -> None:
        for name, fine, rule in (
            *(
                (size, 1 <= getattr(self, size) <= _MOST, f"at least 1 and at most {_MOST}")
                for size in (*_SIZES, "vocab_multiple")
            ),
            *(
                (cap, getattr(self, cap) is None or getattr(self, cap) > 0, "above 0, or none")
                for cap in ("attention_softcap", "final_softcap", "local_rope_theta")
            ),
            ("query_scalar", self.query_scalar > 0, "above 0; head_dim is usual"),
            ("rope_theta", self.rope_theta > 0, "above 0; 10000 is usual"),
            ("norm_eps", self.norm_eps > 0, "above 0; 1e-6 is usual"),
            ("init_std", self.init_std >= 0, "at least 0; 0.02 is usual"),
        ):
            if not fine:
                raise ValueError(f"model.{name}={getattr(self, name)} must be {rule}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                "each kv head serves the same number of heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE turns pairs, use an even one")

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Whether each layer is local."""
        return tuple((layer + 1) % self.global_every != 0 for layer in range(self.layers))

    @property
    def head_size(self) -> int:
        """The size of one head."""
        return self.head_dim

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def build(self, rngs: nnx.Rngs) -> Gemma:
        """The module, with parameters drawn from `rngs`."""
        from models.gemma.model import Gemma

        return Gemma(self, rngs=rngs)
