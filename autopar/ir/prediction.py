"""What a configuration is expected to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.configuration import Configuration
from autopar.ir.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a configuration is expected to do.

    Attributes:
        step_time_us: of one global batch. `tokens_per_s`: of all devices together.
        flops_per_s: of one device: model flops, causal attention halved, nothing recomputed. `mfu`: that over the dense
            peak of the precision. `mfu_full`: with all scores counted, as "6N + 12Lhs" does.
        peak_memory_bytes: of the fullest device, as its monitor shows it; `memory_bytes`: what it holds then.
        fits: within `limit_bytes`, the whole memory of the device.
        notes: estimates and assumptions.
    """

    model: str
    cluster: str
    configuration: Configuration
    step_time_us: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float
    mfu_full: float
    peak_memory_bytes: int
    memory_bytes: Mapping[str, int]
    limit_bytes: int
    fits: bool
    breakdown_us: Mapping[str, float]
    cost_source: str
    notes: tuple[str, ...]
    timeline: Timeline
