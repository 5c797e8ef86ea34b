"""`Policy`: the dtype of each role in a step.

Losses, softmax, norms, RoPE tables, gradient accumulators, moments and the master weights are fp32 whatever the policy
says; it chooses what the matrix products compute in and how the parameters are stored. Source of the second storage:
ZeRO (Rajbhandari et al. 2020), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp

from meshpar.precision.loss_scale import LossScaling

Dtype = Literal["fp32", "bf16", "fp16"]
Storage = Literal["cast", "copy", "pure"]
Reduce = Literal["compute", "fp32"]
_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Dtypes by role.

    Storage "cast" keeps fp32 parameters and casts them in the step, layer by layer. "copy" keeps a compute-dtype copy
    in the parameters' layout and fp32 master weights in the optimizer's layout, so that with ZeRO 1 and 2 only the copy
    is whole: 2 bytes + 12/N instead of 4 + 8/N (bf16, Adam, N devices). "pure" keeps compute-dtype parameters and no
    fp32 weights: updates below half a unit in the last place are lost, so it is there to be compared with.
    """

    compute: Dtype = "bf16"  # dtype of activations and of the weights in matrix products
    # cast: fp32 parameters; copy: fp32 masters beside parameters in the compute dtype; pure: no fp32, to compare with
    storage: Storage = "cast"
    # in which gradients are summed over devices; fp32 costs twice the bytes of half precision and loses none of it
    reduce: Reduce = "compute"
    loss_scale: LossScaling = LossScaling()

    def __post_init__(self) -> None:
        if self.compute not in get_args(Dtype):
            raise ValueError(
                f"precision.compute={self.compute!r} is not one of {', '.join(get_args(Dtype))}; choose one of them"
            )
        if self.storage not in get_args(Storage):
            raise ValueError(
                f"precision.storage={self.storage!r} is not one of {', '.join(get_args(Storage))}; choose one of them"
            )
        if self.reduce not in get_args(Reduce):
            raise ValueError(
                f"precision.reduce={self.reduce!r} is not one of {', '.join(get_args(Reduce))}; choose one of them"
            )

    @property
    def compute_dtype(self) -> jnp.dtype:
        """What activations and the weights of matrix products are in."""
        return jnp.dtype(_DTYPES[self.compute])

    @property
    def param_dtype(self) -> jnp.dtype:
        """What `state.params` is stored in: fp32 with storage "cast", else the compute dtype."""
        return jnp.dtype(jnp.float32) if self.storage == "cast" else self.compute_dtype

    @property
    def has_master(self) -> bool:
        """Whether the train state holds fp32 master weights apart from the parameters."""
        return self.storage == "copy" and self.compute != "fp32"

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled and a step whose gradients are not finite is skipped."""
        return self.loss_scale.kind in ("static", "dynamic") or self.scales_dynamically

    @property
    def scales_dynamically(self) -> bool:
        """Whether the scale changes."""
        kind = self.loss_scale.kind
        return kind == "dynamic" or (kind == "auto" and self.compute == "fp16")
