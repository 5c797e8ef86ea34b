"""`Policy`: the dtype of each role in a step.

Losses, softmax, norms, RoPE tables, gradient accumulators, moments and the master weights are fp32 whatever the policy
says; it chooses what the matrix products compute in and how the parameters are stored. Source of the second storage:
ZeRO (Rajbhandari et al. 2020), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp

Dtype = Literal["fp32", "bf16"]
Storage = Literal["cast", "copy"]
_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Dtypes by role.

    Storage "cast" keeps fp32 parameters and casts them in the step, layer by layer. "copy" keeps a compute-dtype copy
    in the parameters' layout and fp32 master weights in the optimizer's layout, so that with ZeRO 1 and 2 only the copy
    is whole: 2 bytes + 12/N instead of 4 + 8/N (bf16, Adam, N devices).
    """

    compute: Dtype = "bf16"
    storage: Storage = "cast"

    def __post_init__(self) -> None:
        if self.compute not in get_args(Dtype):
            raise ValueError(
                f"precision.compute={self.compute!r} is not one of {', '.join(get_args(Dtype))}; choose one of them"
            )
        if self.storage not in get_args(Storage):
            raise ValueError(
                f"precision.storage={self.storage!r} is not one of {', '.join(get_args(Storage))}; choose one of them"
            )

    @property
    def compute_dtype(self) -> jnp.dtype:
        """What activations and the weights of matrix products are in."""
        return jnp.dtype(_DTYPES[self.compute])

    @property
    def param_dtype(self) -> jnp.dtype:
        """What `state.params` is stored in: fp32, or the compute dtype where fp32 master weights stand beside it."""
        return self.compute_dtype if self.has_master else jnp.dtype(jnp.float32)

    @property
    def has_master(self) -> bool:
        """Whether the train state holds fp32 master weights apart from the parameters."""
        return self.storage == "copy" and self.compute != "fp32"
