"""ZeRO: state that data-parallel ranks would hold in copies is spread over them.

    stage  spread                                 communication a step, beside the gradients' reduction
    0      nothing
    1      optimizer state (and master weights)   all-gather of the new parameters
    2      and gradients                          the reduction becomes a reduce-scatter where the compiler can (else an
                                                  all-reduce and a slice: always on CPU, for some sizes on TPU)
    3      and parameters (FSDP)                  all-gather of each layer's weights, forward and backward

HSDP is stage 3 over `fsdp` alone while `data` replicates. Sources: Rajbhandari et al. 2020; FSDP: Zhao et al. 2023.
"""

from __future__ import annotations

from meshpar.parallel.compose import Fragment


def zero(stage: int, axes: tuple[str, ...]) -> Fragment:
    """ZeRO `stage` 0-3 over the mesh `axes`."""
    return Fragment(
        spread_optimizer=axes if stage >= 1 else (),
        spread_grads=axes if stage >= 2 else (),
        spread_params=axes if stage >= 3 else (),
    )
