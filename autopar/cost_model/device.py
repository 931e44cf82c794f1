"""What a device achieves: rates from `ir.cluster.Device`, peaks times the achieved part.

A dtype that the description does not list gets a labelled estimate: its nearest relative's peak, never zero or free.
"""

from __future__ import annotations

from autopar.ir.cluster import Device

MICROSECONDS = 1e6
FP64_PART = 1 / 32
"""fp64 over fp32 peak where fp64 is not listed: 1/32 to 1/64 on NVIDIA's consumer cards (GA102 and Ada whitepapers)."""


def flops_per_us(device: Device, dtype: str) -> tuple[float, bool]:
    """Achieved floating point operations per µs on large matrices of `dtype`, and whether the description lists it."""
    peak = device.peak_flops.get(dtype)
    rate = _estimated_peak(device, dtype) if peak is None else peak
    return rate * device.matmul_efficiency / MICROSECONDS, peak is not None


def _estimated_peak(device: Device, dtype: str) -> float:
    slowest = min(device.peak_flops.values())
    single = device.peak_flops.get("float32", slowest)
    return single * FP64_PART if dtype in ("float64", "complex128") else single


def memory_bytes_per_us(device: Device) -> float:
    """Achieved bytes per µs of device memory, reads and writes together."""
    return device.memory_bytes_per_us * device.memory_efficiency
