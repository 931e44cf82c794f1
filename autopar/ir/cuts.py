"""How a dim that doesn't divide is cut: the first pieces have ceil(units / parts) units each, the last are smaller or
empty (torch's chunk, and so DTensor's Shard).

A *unit* is what isn't cut apart: the rows of one sample in a dim that holds batch · sequence rows. Of a dim with fewer
units than parts, single rows are cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's rows of a dim: `length` of them from `start` on."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Own:
    """A number that depends on the rank: of a dim of `whole` rows cut over `axes` (slowest first), keeping `unit` rows
    together, the `part` of its piece: "length" or "start"."""

    whole: int
    axes: tuple[str, ...]
    unit: int = 1
    part: str = "length"


@dataclass(frozen=True, slots=True)
class LengthOf:
    """A number that only the step knows: the length of dim `dim` of the tensor of this name."""

    name: str
    dim: int


def chunk(length: int, parts: int, unit: int = 1) -> int:
    """Rows of the largest piece, the first."""
    if unit > 1 and length % unit == 0 and length // unit >= parts:
        return -(-(length // unit) // parts) * unit
    return -(-length // parts)


def is_even(length: int, parts: int, unit: int = 1) -> bool:
    """True if all pieces are as large as the first."""
    return chunk(length, parts, unit) * parts == length


def piece(length: int, cuts: Iterable[tuple[int, int]], unit: int = 1) -> Piece:
    """The rows of a dim that is cut by each (parts, index) in turn."""
    start = 0
    for parts, index in cuts:
        size = chunk(length, parts, unit)
        first = min(index * size, length)
        start, length = start + first, min(size, length - first)
    return Piece(start, length)
