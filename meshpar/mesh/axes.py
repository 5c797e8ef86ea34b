"""The axes of the device mesh, their order and what each one is for.

The order is a promise about links: the outermost axis lies on the slowest link (between slices or nodes), the
innermost on the fastest (between neighbours), so an axis stands further in the more it communicates.
"""

from __future__ import annotations

from typing import Final

AXES: Final = ("stage", "data", "fsdp", "expert", "sequence", "tensor")

MEANING: Final[dict[str, str]] = {
    "stage": "pipeline stages, each a run of layers; activations pass between neighbours once a microbatch",
    "data": "replicas of the parameters on different rows of the batch; gradients are summed once a step",
    "fsdp": "different rows of the batch, the training state sharded; weights are gathered layer by layer",
    "expert": "different experts of a mixture-of-experts layer; tokens are exchanged twice a layer",
    "sequence": "different positions of one sequence: ring, Ulysses or all-gather attention",
    "tensor": "parts of one weight matrix, by columns and rows; activations are reduced several times a layer",
}

BATCH_AXES: Final = ("data", "fsdp")  # the axes that the rows of a batch are split over

# What other frameworks call the same axes; only errors read this, to answer "did you mean".
OTHER_NAMES: Final[dict[str, str]] = {
    "pp": "stage",
    "pipe": "stage",
    "pipeline": "stage",
    "dp": "data",
    "replica": "data",
    "zero": "fsdp",
    "ep": "expert",
    "cp": "sequence",
    "sp": "sequence",
    "context": "sequence",
    "tp": "tensor",
    "model": "tensor",
    "mp": "tensor",
}
