"""What families of transformers have in common: their names of attention, gated MLP and head, as entries of a map."""

from __future__ import annotations

from meshpar.hf.mapping import Entry, Weights


def attention_entries(theirs: str) -> list[Entry]:
    """The four kernels of attention."""
    q, kv = "(heads head_dim) embed -> embed heads head_dim", "(kv_heads head_dim) embed -> embed kv_heads head_dim"
    return [
        Entry("blocks/attention/q/kernel", theirs + "q_proj.weight", q),
        Entry("blocks/attention/k/kernel", theirs + "k_proj.weight", kv),
        Entry("blocks/attention/v/kernel", theirs + "v_proj.weight", kv),
        Entry(
            "blocks/attention/out/kernel", theirs + "o_proj.weight", "embed (heads head_dim) -> heads head_dim embed"
        ),
    ]


def qk_norm_entries(theirs: str) -> list[Entry]:
    """The norms of queries and keys."""
    return [
        Entry("blocks/attention/q_norm/scale", theirs + "q_norm.weight", "head_dim -> head_dim"),
        Entry("blocks/attention/k_norm/scale", theirs + "k_norm.weight", "head_dim -> head_dim"),
    ]


def mlp_entries(theirs: str) -> list[Entry]:
    """The three kernels of a gated MLP."""
    return [
        Entry("blocks/mlp/gate/kernel", theirs + "gate_proj.weight", "mlp embed -> embed mlp"),
        Entry("blocks/mlp/up/kernel", theirs + "up_proj.weight", "mlp embed -> embed mlp"),
        Entry("blocks/mlp/down/kernel", theirs + "down_proj.weight", "embed mlp -> mlp embed"),
    ]


def with_head(
    entries: list[Entry], *, vocab: int, tied: bool, table: str, prefix: str, ignored: tuple[str, ...] = ()
) -> Weights:
    """The map of a model with these entries and a head: its own, or the table, which may lie there twice."""
    head = "lm_head.weight"
    if tied:
        hint = (
            "tie_word_embeddings is true, by config.json or by default, and makes them one; set it to false for a "
            "model with a head of its own"
        )
    else:
        entries = [*entries, Entry("unembed/kernel", head, "vocab embed -> embed vocab")]
        hint = (
            "tie_word_embeddings is false, by config.json or by default, so the head must be there; set it to true "
            "for a model whose head is the table"
        )
    return Weights(
        entries=tuple(entries),
        sizes={"vocab": vocab},
        ignored=(r"rotary_emb\.inv_freq$", *ignored),
        copies={head: table} if tied else {},
        prefix=prefix,
        hints={head: hint},
    )
