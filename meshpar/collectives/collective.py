"""`Collective`: one buffer that devices exchange in a step, and how many bytes that sends."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One buffer that devices exchange. Bytes are of one device."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # the mesh axes that it crosses, outermost first
    degree: int  # devices in a group
    times: int  # in one step, all passes of the loops around it
    dtype: str
    shape: tuple[int, ...]  # of the buffer: gathered for all-gather and reduce-scatter, else the local one
    buffer_bytes: int
    sent_bytes: int  # by one device, each time
    phase: str  # "forward", "again" (recomputed for the backward), "backward", or "step" outside of gradients, or empty
    scopes: tuple[str, ...]  # name scopes, such as "blocks/attention/out"; several where XLA joined buffers
    parameters: tuple[str, ...]  # paths of the parameters that the scopes name
    source: str  # "meshpar/forward.py:118", or empty where the text does not tell
    op: str  # the instruction; buffers of one operation share it
    between_slices: bool = False  # over the data-centre network

    @property
    def bytes(self) -> int:
        """What a device sends for it in one step."""
        return self.times * self.sent_bytes

    @property
    def axis(self) -> str:
        """The axes in one word, as `data*fsdp`; `data (slices)` between slices."""
        return "*".join(self.axes) + (" (slices)" if self.between_slices else "")

    @property
    def of(self) -> str:
        """The parameter or the place it belongs to; empty where the text does not tell."""
        names = self.parameters or self.scopes
        return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""


def sent(kind: str, buffer: int, degree: int) -> int:
    """Bytes that one device sends: of the gathered n·b, all-gather and reduce-scatter (n-1)·b, all-reduce 2(n-1)·b; of
    a local buffer, all-to-all (n-1)/n and a permute or broadcast all.
    """
    if kind in ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return buffer * (degree - 1) // degree
    return 2 * buffer * (degree - 1) // degree if kind == "all-reduce" else buffer
