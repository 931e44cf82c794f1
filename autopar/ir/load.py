"""How a step runs on the devices of one mesh: as one, in micro-batches, or in pipeline stages as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`stages` of the model one after another, each on a mesh of its own; the batch in `micro_batches`."""

    stages: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if min(self.stages, self.micro_batches) < 1:
            raise ValueError(f"{self}: wanted 1 or more of each")

    def __str__(self) -> str:
        parts = [f"pp={self.stages}"] if self.stages > 1 else []
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return ", ".join(parts) or "whole batch"
