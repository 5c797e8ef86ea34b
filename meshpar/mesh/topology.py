"""What hardware can do: the peak of its matrix units, for MFU. Sources: the vendors' data sheets, dense bf16, per
device that jax shows.
"""

from __future__ import annotations

# jax's device_kind -> FLOP/s in bf16
PEAK_BF16: dict[str, float] = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,  # jax shows each of a chip's two dies
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_bf16(device_kind: str) -> float | None:
    """FLOP/s of one device in bf16, None for hardware that is not in the table. GPU names come with their form
    factor behind.
    """
    if device_kind in PEAK_BF16:
        return PEAK_BF16[device_kind]
    return next(
        (peak for kind, peak in PEAK_BF16.items() if kind.startswith("NVIDIA") and device_kind.startswith(kind)), None
    )
