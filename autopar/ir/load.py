"""How a step runs on the devices of one mesh: as one, in micro-batches, or in pipeline stages as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`stages` of the model one after another, each on a mesh of its own; the batch in `micro_batches`.

    A stage of 1F1B is busy with m micro-batches and waits for p - 1 others. With W the whole model's work on one
    micro-batch the step takes (m + p - 1)·W/p at the least, however it is cut: the slowest stage has W/p or more.
    With up to `chunks` parts of the model on each stage (an interleaved schedule) the waiting is as many times shorter.
    """

    stages: int = 1
    micro_batches: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.stages, self.micro_batches, self.chunks) < 1:
            raise ValueError(f"{self}: wanted 1 or more of each")

    @property
    def runs(self) -> float:
        """What a step pays of the work of one micro-batch through the whole model."""
        return (self.micro_batches + (self.stages - 1) / self.chunks) / self.stages

    @property
    def once(self) -> float:
        """What a step pays of what is done once: gradients joined over ranks, the optimizer."""
        return 1 / self.stages

    def __str__(self) -> str:
        parts = [f"pp={self.stages}"] if self.stages > 1 else []
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return ", ".join(parts) or "whole batch"


WHOLE = Load()
