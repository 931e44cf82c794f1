"""Where a tensor's pieces are: one placement per mesh axis."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from autopar.ir.cuts import chunk, is_even, piece
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

    def __hash__(self) -> int:
        """By its letter: an Enum's own hash is a Python call, and a search asks for millions."""
        return hash((self.kind._value_, self.dim))

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind is Kind.SHARD else self.kind.value


R = Placement(Kind.REPLICATE)
P = Placement(Kind.PARTIAL)
_CODES = {"R": 1, "P": 2, "S": 3}
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
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Of numbers alone, so that it holds in another process too.
        code = tuple(_CODES[p.kind._value_] + p.dim for p in self.placements)
        object.__setattr__(self, "_hash", hash(code))

    def __hash__(self) -> int:
        """Worked out once: layouts are keys of most tables of a search."""
        return self._hash

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


def fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    """True if every sharded dim exists and isn't empty. Pieces need not be equal: see `autopar.ir.cuts`."""
    return all(p.kind is not Kind.SHARD or (p.dim < len(shape) and shape[p.dim] > 0) for p in layout.placements)


def divides(layout: Layout, shape: tuple[int, ...], mesh: Mesh, units: tuple[int, ...] = ()) -> bool:
    """True if the layout fits and the pieces of every device are equal."""
    left = list(shape)
    for axis, placement in zip(mesh.axes, layout.placements, strict=True):
        if placement.kind is Kind.SHARD:
            if placement.dim >= len(shape) or shape[placement.dim] <= 0:
                return False
            n, unit = left[placement.dim], unit_of(units, placement.dim)
            if not is_even(n, axis.size, unit):
                return False
            left[placement.dim] = n // axis.size
    return True


def unit_of(units: tuple[int, ...], dim: int) -> int:
    """Rows of dim `dim` that stay together; () means 1 throughout."""
    return units[dim] if units else 1


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh, units: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Shape of the largest piece, the first device's."""
    local = list(shape)
    for axis, placement in zip(mesh.axes, layout.placements, strict=True):
        if placement.kind is Kind.SHARD:
            local[placement.dim] = chunk(local[placement.dim], axis.size, unit_of(units, placement.dim))
    return tuple(local)


def local_piece(
    shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int, units: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(index of the first element, shape) of `rank`'s piece."""
    parts: dict[int, list[tuple[int, int]]] = {}
    for axis, at, placement in zip(mesh.axes, mesh.coordinate(rank), layout.placements, strict=True):
        if placement.kind is Kind.SHARD:
            parts.setdefault(placement.dim, []).append((axis.size, at))
    found = [piece(n, parts.get(d, ()), unit_of(units, d)) for d, n in enumerate(shape)]
    return tuple(p.start for p in found), tuple(p.length for p in found)


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
