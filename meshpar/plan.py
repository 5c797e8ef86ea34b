"""`Plan`: everything about how one step is spread, in one frozen value.

Recipes and planners produce plans, only the step builder consumes them. A plan is checked at the door (`Plan.check`),
before anything compiles, against the model, the batch and the mesh; it goes to JSON and back unchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import jax
from jax.sharding import AbstractMesh, Mesh

from meshpar.attention.attend import BACKENDS
from meshpar.layout.context import Placement
from meshpar.layout.resolve import place, shardings
from meshpar.layout.rules import LOGICAL_AXES, Rule, did_you_mean
from meshpar.mesh.axes import AXES, BATCH_AXES
from meshpar.mesh.build import abstract_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.module import Model
from meshpar.parallel.compose import Layouts, compose
from meshpar.parallel.data import data_parallel
from meshpar.parallel.sequence import megatron_sp
from meshpar.parallel.tensor import megatron
from meshpar.parallel.zero import zero
from meshpar.precision.policy import Policy
from meshpar.precision.remat import SAVE_NAMES, Remat

# What every decoder constrains; rules that split two dims of one of these by one mesh axis are refused at the door.
ACTIVATIONS = (
    "batch seq_residual embed",
    "batch seq heads head_dim",
    "batch seq kv_heads head_dim",
    "batch seq mlp",
    "batch seq vocab",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one training step is spread over a mesh. `Plan()` is one device, bf16 compute, no rematerialisation."""

    # Degrees of the mesh axes, such as "data=2 fsdp=-1 tensor=2"; one -1 takes the devices that are left.
    mesh: MeshSpec = MeshSpec()
    # ZeRO stage 0-3. None: 3 (FSDP) when the mesh has an fsdp axis, else 0.
    zero: int | None = None
    # What ZeRO spreads over. None: data and fsdp for stages 1 and 2; for stage 3 fsdp (data then replicates: HSDP), or
    # data when there is no fsdp.
    zero_axes: tuple[str, ...] | None = None
    # Megatron's sequence parallelism: norms, dropout and residuals split along the sequence over tensor. Saves
    # activation memory at equal bytes.
    sequence_parallel: bool = False
    # Your own rules, logical axis -> mesh axes (() keeps it whole); they replace the built-in rule of the same logical
    # axis.
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Microbatches per optimizer step, run one after another; activation memory falls by this factor.
    accumulate: int = 1
    precision: Policy = Policy()
    # What the forward keeps for the backward: "none" rematerialises nothing, "full" every block, "selective" keeps
    # `remat_save`.
    remat: Remat = "none"
    # Names of `precision.remat.SAVE_NAMES`.
    remat_save: tuple[str, ...] = ("qkv", "attention", "mlp_gate")
    # Layers per iteration of the layer loop; 0 writes all layers out. More run faster (fewer copies into stacked
    # buffers) and compile longer. With rematerialisation or ZeRO 3 it is always 1.
    unroll: int = 1
    # Positions per piece of the loss; None computes all logits at once. Pieces bound the memory of logits at the cost
    # of a second head product.
    loss_chunk: int | None = None
    # Which attention: auto, reference, xla, cudnn (GPU) or splash (TPU).
    attention: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.mesh, str):
            object.__setattr__(self, "mesh", MeshSpec.parse(self.mesh))
        rules = {name: (axes,) if isinstance(axes, str) else tuple(axes) for name, axes in dict(self.rules).items()}
        object.__setattr__(self, "rules", rules)
        if self.zero not in (None, 0, 1, 2, 3):
            raise ValueError(
                f"zero={self.zero} is not a ZeRO stage; choose 0 (replicate), 1 (optimizer), 2 (gradients too) or 3 "
                "(parameters too)"
            )
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate} is below 1; use 1 for a single microbatch")
        if self.unroll < 0:
            raise ValueError(
                f"unroll={self.unroll} is negative; use 1 for a loop, n for n layers an iteration, 0 for all layers"
            )
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"loss_chunk={self.loss_chunk} is below 1; give a number of positions or none")
        if self.remat not in get_args(Remat):
            raise ValueError(
                f"remat={self.remat!r} is not one of "
                f"{', '.join(get_args(Remat))}{did_you_mean(str(self.remat), get_args(Remat))}"
            )
        if self.attention not in BACKENDS:
            raise ValueError(
                f"attention={self.attention!r} is not one of {', '.join(BACKENDS)}"
                f"{did_you_mean(self.attention, BACKENDS)}"
            )
        for name in self.remat_save:
            if name not in SAVE_NAMES:
                raise ValueError(
                    f"remat_save={name!r} is no name that models tag{did_you_mean(name, SAVE_NAMES)}; "
                    f"known are {', '.join(SAVE_NAMES)}"
                )
        for axis in (*(self.zero_axes or ()), *(axis for axes in self.rules.values() for axis in axes)):
            if axis not in AXES:
                raise ValueError(
                    f"unknown mesh axis {axis!r}{did_you_mean(axis, AXES)}; mesh axes are {', '.join(AXES)}"
                )
        for axis in ("stage", "expert", "sequence"):
            if self.mesh.sizes[axis] != 1:
                raise ValueError(
                    f"mesh {axis}={self.mesh.sizes[axis]}: no {axis} parallelism in this version; "
                    f"leave {axis} out and use data, fsdp and tensor"
                )
        if self.zero_axes and self.zero_stage == 0:
            raise ValueError(
                f"zero_axes={' '.join(self.zero_axes)} spreads nothing with zero=0; "
                "add zero=1, 2 or 3, or drop zero_axes"
            )
        if self.sequence_parallel and self.mesh.tensor == 1:
            raise ValueError(
                "sequence_parallel=True needs a tensor axis to split the sequence over; "
                "add tensor=2 or more to the mesh, or drop it"
            )

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in force."""
        return self.zero if self.zero is not None else (3 if self.mesh.fsdp != 1 else 0)

    @property
    def zero_over(self) -> tuple[str, ...]:
        """The mesh axes that ZeRO spreads over."""
        if self.zero_axes is not None:
            return self.zero_axes
        if self.zero_stage == 3:
            return ("fsdp",) if self.mesh.fsdp != 1 else ("data",)
        return BATCH_AXES

    @property
    def reduced_apart(self) -> tuple[str, ...]:
        """The batch axes over which each device first computes the gradients of its own rows, which are then summed
        apart from the backward.

        With precision.reduce=fp32 all of them, so that the sum has a dtype of its own. Else, under accumulation, those
        that split neither parameters nor gradients: summing once a step sends the bytes once. ZeRO 2 and 3 spread the
        gradients, so they reduce each microbatch's and hold a part: less memory, more bytes.
        """
        layouts = self.layouts()
        in_use = {axis for rule in layouts.compute for axis in rule.mesh_axes if rule.logical != "batch"}
        if self.precision.reduce != "fp32":
            if self.accumulate == 1:
                return ()
            in_use.update(layouts.params.spread, layouts.grads.spread)
        # Outer axes only: an axis inside one that GSPMD keeps would hold rows from all over the batch.
        return tuple(itertools.takewhile(lambda axis: axis not in in_use, self._batch_axes()))

    def layouts(self) -> Layouts:
        """The four layouts: parameters, compute, gradients, optimizer."""
        fragments = [data_parallel(BATCH_AXES), megatron(), zero(self.zero_stage, self.zero_over)]
        if self.sequence_parallel:
            fragments.append(megatron_sp())
        return compose(
            fragments,
            [Rule(logical=name, mesh_axes=axes, source="the plan's rules") for name, axes in self.rules.items()],
        )

    def placement(self, mesh: Mesh | AbstractMesh) -> Placement:
        """What model code sees while a step is traced for `mesh`."""
        return Placement(mesh=mesh, layout=self.layouts().compute, attention=self.attention)

    def check(self, model: Model, *, batch: int | None = None, seq: int | None = None) -> None:
        """Raises ValueError, one sentence, when this plan cannot spread this model and batch.

        Args:
          batch: rows of the global batch; seq: positions of a row.
        """
        if self.mesh.has_free_axis:
            raise ValueError(f"mesh {self.mesh} has a free axis; resolve it first: plan.on(number of devices)")
        mesh = abstract_mesh(self.mesh)
        layouts = self.layouts()
        for layout in (layouts.params, layouts.compute, layouts.grads, layouts.optimizer):
            shardings(layout, model.axes, model.shapes, mesh)
        known = {*LOGICAL_AXES, *jax.tree.leaves(model.axes)}
        for name in self.rules:
            if name not in known and (hint := did_you_mean(name, known)):
                raise ValueError(f"rules name {name!r}, an axis of no parameter{hint}")
        whole = math.prod(self.mesh.sizes.values())
        for activation in ACTIVATIONS:
            axes = tuple(activation.split())
            place(layouts.compute, axes, (whole,) * len(axes), mesh, path=f"activations of {activation}")
        apart = self.reduced_apart
        if self.precision.reduce == "fp32":
            for axis in self._batch_axes():
                if self.mesh.sizes[axis] > 1 and axis not in apart:
                    raise ValueError(
                        f"precision.reduce=fp32 cannot reduce over {axis}, since a rule splits weights or activations "
                        "over it too; drop that rule, or use precision.reduce=compute"
                    )
        if batch is not None:
            self._check_batch(batch)
        if seq is not None:
            longest = getattr(model.config, "max_seq", None)
            if longest is not None and seq > longest:
                raise ValueError(
                    f"seq={seq} is longer than the model's max_seq={longest}; "
                    f"shorten the rows or build the model with max_seq={seq}"
                )
            if self.sequence_parallel and seq % self.mesh.tensor:
                raise ValueError(
                    f"seq={seq} is not divisible by tensor={self.mesh.tensor}, which sequence_parallel splits it "
                    "over; use a multiple"
                )
            for name in ("seq", "seq_residual"):
                place(layouts.compute, (name,), (seq,), mesh, path="a row")

    def on(self, devices: int) -> Plan:
        """This plan with the mesh's free axis filled for a number of devices."""
        return dataclasses.replace(self, mesh=self.mesh.resolve(devices))

    def _batch_axes(self) -> tuple[str, ...]:
        rule = self.layouts().compute.rule("batch")
        return rule.mesh_axes if rule else ()

    def _check_batch(self, batch: int) -> None:
        axes = self._batch_axes()
        degree = math.prod(self.mesh.sizes[axis] for axis in axes)
        if batch < 1 or batch % (degree * self.accumulate):
            product = " x ".join(f"{axis}={self.mesh.sizes[axis]}" for axis in axes)
            unit = degree * self.accumulate
            near = max(1, -(-batch // unit)) * unit
            raise ValueError(
                f"batch={batch} is not divisible by {product} x accumulate={self.accumulate} = {unit}; "
                f"use a multiple of {unit}, such as {near}"
            )

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `from_json` gives an equal plan."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values |= {
            "mesh": str(self.mesh),
            "precision": dataclasses.asdict(self.precision),
            "rules": {k: list(v) for k, v in self.rules.items()},
        }
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """A plan from `to_json`'s values. Raises ValueError for a key that plans do not have."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"unknown plan key {key!r}{did_you_mean(key, known)}; plans have {', '.join(known)}")
        parsed: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        if "mesh" in parsed:
            parsed["mesh"] = MeshSpec.parse(parsed["mesh"])
        if "precision" in parsed:
            parsed["precision"] = _part(Policy, "precision", parsed["precision"])
        return cls(**parsed)


def _part(cls: type[Any], key: str, values: Mapping[str, Any]) -> Any:
    """A dataclass inside a plan from its JSON values."""
    known = {f.name: f.default for f in dataclasses.fields(cls)}
    for name in values:
        if name not in known:
            raise ValueError(f"unknown key {key}.{name}{did_you_mean(name, known)}; {key} has {', '.join(known)}")
    inner = {
        name: _part(type(known[name]), f"{key}.{name}", value)
        for name, value in values.items()
        if isinstance(value, dict)
    }
    return cls(**{**values, **inner})
