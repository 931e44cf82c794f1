"""Where a tensor's pieces are: one placement per mesh axis."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from autopar.ir.mesh import Mesh


class Kind(Enum):
    """R: every device of the axis holds the whole. S: cut along a dim. P: each holds a summand."""

    REPLICATE = "R"
    SHARD = "S"
    PARTIAL = "P"


@dataclass(frozen=True, slots=True)
class Placement:
    """What one mesh axis does to a tensor. `dim` counts from 0 and is -1 unless `kind` is SHARD."""

    kind: Kind
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind is Kind.SHARD else self.kind.value


R = Placement(Kind.REPLICATE)
P = Placement(Kind.PARTIAL)
_SHARDS = tuple(Placement(Kind.SHARD, dim) for dim in range(16))


def S(dim: int) -> Placement:  # noqa: N802  (the field's notation)
    """Sharded along tensor dim `dim` (not negative)."""
    return _SHARDS[dim]


@dataclass(frozen=True, slots=True)
class Layout:
    """Placements in the order of the mesh's axes. Prints as `dp:S(0) tp:R` and parses back.

    A dim sharded over several axes is cut by the first axis first (the first axis is the slowest, as in DTensor).
    """

    axes: tuple[str, ...]
    placements: tuple[Placement, ...]

    def __str__(self) -> str:
        return " ".join(f"{a}:{p}" for a, p in zip(self.axes, self.placements, strict=True)) or "whole"

    def on(self, axis: str) -> Placement:
        """The placement on a named axis."""
        return self.placements[self.axes.index(axis)]

    def replace(self, axis: str, placement: Placement) -> Layout:
        """The same layout with one axis changed."""
        i = self.axes.index(axis)
        return Layout(self.axes, (*self.placements[:i], placement, *self.placements[i + 1 :]))

    @property
    def replicated(self) -> bool:
        """True if every device holds the whole tensor."""
        return all(p is R or p == R for p in self.placements)

    @property
    def partial(self) -> bool:
        """True if some axis holds summands."""
        return any(p.kind is Kind.PARTIAL for p in self.placements)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Axes that cut tensor dim `dim`, slowest first."""
        return tuple(
            a for a, p in zip(self.axes, self.placements, strict=True) if p.kind is Kind.SHARD and p.dim == dim
        )


def replicated(mesh: Mesh) -> Layout:
    """The layout with the whole tensor on every device of `mesh`."""
    return Layout(mesh.names, (R,) * len(mesh.axes))


def divides(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """True if every sharded dim exists and its size is a multiple of the product of the axes that cut it, and not 0."""
    parts: dict[int, int] = {}
    for axis, placement in zip(mesh.axes, layout.placements, strict=True):
        if placement.kind is Kind.SHARD:
            if placement.dim >= len(shape):
                return False
            parts[placement.dim] = parts.get(placement.dim, 1) * axis.size
    return all(shape[dim] > 0 and shape[dim] % n == 0 for dim, n in parts.items())


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one device's piece; the layout must divide the shape."""
    local = list(shape)
    for axis, placement in zip(mesh.axes, layout.placements, strict=True):
        if placement.kind is Kind.SHARD:
            local[placement.dim] //= axis.size
    return tuple(local)


def local_offset(shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Index of the first element of `rank`'s piece in each dim."""
    coordinate = mesh.coordinate(rank)
    start, size = [0] * len(shape), list(shape)
    for axis, at, placement in zip(mesh.axes, coordinate, layout.placements, strict=True):
        if placement.kind is Kind.SHARD:
            size[placement.dim] //= axis.size
            start[placement.dim] += at * size[placement.dim]
    return tuple(start)


_TERM = re.compile(r"^(\w+):(R|P|S\((\d+)\))$")


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """Inverse of `str(layout)`. Axes left out are R. Raises ValueError naming the term that is wrong."""
    found: dict[str, Placement] = {}
    for term in text.split() if text != "whole" else ():
        match = _TERM.match(term)
        if match is None:
            raise ValueError(f"layout term {term!r}: wanted AXIS:R, AXIS:P or AXIS:S(DIM)")
        axis, kind, dim = match.groups()
        if axis not in mesh.names:
            raise ValueError(f"layout term {term!r}: the mesh has axes {', '.join(mesh.names)}")
        found[axis] = S(int(dim)) if dim is not None else (R if kind == "R" else P)
    return Layout(mesh.names, tuple(found.get(name, R) for name in mesh.names))
