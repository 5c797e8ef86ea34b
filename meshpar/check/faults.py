"""Faults of parallel training, planted on purpose: what the checker must catch.

Each is a fault that some framework had or that a layout invites, made by replacing a function that ships while a
context is open. `mesh` and `changes` are a case in which it does harm; on one device, or without the feature it belongs
to, the replaced function does what the real one does. What replaces them is in `faulty.py`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from meshpar.check import faulty


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: what is replaced, by what, and a case that suffers from it."""

    what: str  # one line
    target: str  # "module:attribute" that is replaced; the attribute may have dots
    make: Callable[[Any], Any]  # the real thing -> the faulty one
    mesh: str
    changes: Mapping[str, str] = field(default_factory=dict)
    recipe: str = "llama"  # or "gpt": which family the case is of


@contextlib.contextmanager
def plant(fault: Fault) -> Iterator[None]:
    """Replaces the function while the context is open. What was compiled before keeps the real one."""
    module, _, attribute = fault.target.partition(":")
    owner = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    with mock.patch.object(owner, name, fault.make(getattr(owner, name))):
        yield


_SCALED: Final = {"precision.loss_scale.kind": "static"}
_STEP: Final = "meshpar.train.build:make_step"
_LOSS: Final = "meshpar.losses.cross_entropy:_cross_entropy"
_SCATTER: Final = "meshpar.collectives.gather_weight:jax.lax.psum_scatter"

FAULTS: Final[Mapping[str, Fault]] = {
    "psum dropped": Fault(
        what="a gradient that is reduced by an explicit reduce-scatter keeps this device's part only",
        target=_SCATTER,
        make=faulty.local_slice,
        mesh="fsdp=4",
        changes={"precision.reduce": "fp32"},
    ),
    "psum doubled": Fault(
        what="the same gradient is summed over the devices twice",
        target=_SCATTER,
        make=faulty.summed_twice,
        mesh="fsdp=4",
        changes={"precision.reduce": "fp32"},
    ),
    "all-reduce dropped": Fault(
        what="the row-split product of attention is not summed over tensor",
        target="models.nn.linear:linear",
        make=faulty.one_part_of_the_heads,
        mesh="data=2 tensor=2",
    ),
    "local softmax": Fault(
        what="the softmax of a split vocabulary sums over one part of it",
        target=_LOSS,
        make=faulty.loss_with(faulty.lse_of_one_part, lambda vocab, n: vocab),
        mesh="data=2 tensor=2",
    ),
    "gathered logits": Fault(
        what="a loss for split logits is given whole ones, so each device adds the whole sum",
        target=_LOSS,
        make=faulty.loss_with(faulty.lse_of_gathered, lambda vocab, n: vocab),
        mesh="tensor=4",
    ),
    "local vocabulary": Fault(
        what="label smoothing divides by the vocabulary of one device",
        target=_LOSS,
        make=faulty.loss_with(faulty.lse, lambda vocab, n: vocab // n),
        mesh="data=2 tensor=2",
        changes={"objective.label_smoothing": "0.1"},
    ),
    "mean of means": Fault(
        what="each microbatch is divided by its own tokens",
        target="meshpar.train.step:_of_rows",
        make=faulty.mean_of_means,
        mesh="data=2",
        changes={"accumulate": "4"},
    ),
    "clip before unscale": Fault(
        what="gradients are clipped while they carry the loss scale",
        target=_STEP,
        make=faulty.norm_times(faulty.scale_of),
        mesh="data=2",
        changes={**_SCALED, "objective.clip_norm": "1"},
    ),
    "loss scale kept": Fault(
        what="gradients are not divided by the loss scale",
        target="meshpar.train.step:gradients",
        make=faulty.scaled_again,
        mesh="data=2",
        changes=_SCALED,
    ),
    "norm per rank": Fault(
        what="the gradient norm counts each copy of a parameter",
        target=_STEP,
        make=faulty.norm_times(lambda state, plan, mesh: mesh.size**0.5),
        mesh="data=4",
    ),
    "stale weights": Fault(
        what="ZeRO 1 updates its part and does not gather the new parameters",
        target=_STEP,
        make=faulty.around_step(faulty.stale),
        mesh="data=4",
        changes={"zero": "1"},
    ),
    "moments forgotten": Fault(
        what="ZeRO 1 does not write the new first moments back",
        target=_STEP,
        make=faulty.around_step(faulty.forgetful),
        mesh="data=2",
        changes={"zero": "1"},
    ),
    "tokens of all ranks": Fault(
        what="the tokens of a batch that is counted whole are summed over the data ranks again",
        target=_STEP,
        make=faulty.around_step(faulty.tokens_of_all_ranks),
        mesh="data=2",
    ),
    "drawn per device": Fault(
        what="the first parameters depend on how many devices draw them",
        target="meshpar.train.build:init_state",
        make=faulty.drawn_per_device,
        mesh="data=2",
    ),
    "mean of evaluations": Fault(
        what="the evaluation divides its sums by the number of microbatches",
        target="meshpar.train.build:loss_sums",
        make=faulty.mean_of_pieces,
        mesh="data=2",
        changes={"accumulate": "2"},
    ),
    "shards out of order": Fault(
        what="the shards of a norm's scale are gathered in another order",
        target="meshpar.forward:weights_in_use",
        make=faulty.shards_out_of_order,
        mesh="fsdp=2",
    ),
    "copies drift": Fault(
        what="the copies of a norm's scale differ between data ranks",
        target=_STEP,
        make=faulty.around_step(faulty.drifting_copies),
        mesh="data=2",
    ),
    "shift after the split": Fault(
        what="targets are shifted in each half of a row, so that the first half loses its last target",
        target="meshpar.train.rows:_batch",
        make=faulty.shifted_in_halves,
        mesh="data=2",
    ),
    "dropout reused": Fault(
        what="each data rank draws the masks of the first",
        target="meshpar.layout.dropout:_first_row",
        make=lambda original: lambda rows: 0,
        mesh="data=2",
        changes={"accumulate": "2", "model.dropout": "0.2"},
    ),
    "one mask for all rows": Fault(
        what="all rows of a batch have the same dropout mask",
        target="models.llama.model:dropout",
        make=faulty.one_mask,
        mesh="data=2",
        changes={"model.dropout": "0.2"},
    ),
    "microbatches drop alike": Fault(
        what="each microbatch draws the masks of the first",
        target="meshpar.train.step:accumulate",
        make=faulty.one_key_for_all_microbatches,
        mesh="data=2",
        changes={"accumulate": "2", "model.dropout": "0.2"},
        recipe="gpt",
    ),
    "layers drop alike": Fault(
        what="each layer draws the masks of the first",
        target="meshpar.forward:loop",
        make=faulty.one_key_for_all_layers,
        mesh="data=2",
        changes={"model.dropout": "0.2"},
        recipe="gpt",
    ),
    "sequence-parallel norm": Fault(
        what="the gradient of a norm's scale is not summed over the parts of a sequence that tensor splits",
        target="models.nn.norm:RMSNorm.__call__",
        make=faulty.scale_of_one_part,
        mesh="data=2 tensor=2",
        changes={"sequence_parallel": "true"},
    ),
    "bias on each rank": Fault(
        what="the bias of a row-split product is added before the sum over tensor, once by each device",
        target="models.nn.linear:Linear.add_bias",
        make=faulty.bias_on_each,
        mesh="data=2 tensor=2",
        recipe="gpt",
    ),
}
