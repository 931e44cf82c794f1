"""Named axes over the devices of one pipeline stage."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis. `level` is the index of the cluster's link level that its traffic crosses (0 is the innermost)."""

    name: str
    size: int
    level: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"axis {self.name} has size {self.size}; wanted 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axes from the slowest to the fastest: neighbours along the last axis have consecutive ranks."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.axes):
            raise ValueError(f"mesh axes repeat: {self.names}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def axis(self, name: str) -> Axis:
        """The axis called `name`; KeyError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)

    def stride(self, name: str) -> int:
        """Distance in ranks between neighbours along an axis."""
        i = self.names.index(name)
        return math.prod(self.shape[i + 1 :])

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` on each axis."""
        return tuple(rank // self.stride(a.name) % a.size for a in self.axes)

    def index(self, rank: int, name: str) -> int:
        """Position of `rank` on one axis."""
        return rank // self.stride(name) % self.axis(name).size

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ on this axis only, in order along the axis."""
        step, size = self.stride(name), self.axis(name).size
        firsts = [r for r in range(self.size) if self.index(r, name) == 0]
        return tuple(tuple(first + step * i for i in range(size)) for first in firsts)

    def __str__(self) -> str:
        return " × ".join(f"{a.name}={a.size}" for a in self.axes) or "one device"
