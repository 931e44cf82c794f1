"""A rank that talks to nobody: tensors without data, and a note of every collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from autopar.ir.cuts import Piece, piece
from autopar.ir.mesh import Mesh
from autopar.runtime.certificate.calls import Call, Where
from autopar.runtime.comm import Axis, Communicator, names_of

NOWHERE = Where(line=0, function="", text="")


@dataclass
class Notes:
    """Calls so far, and the line that runs now.

    `own`: since it was last cleared, a length was asked for that isn't every rank's. `told`: a call came after that.
    """

    calls: list[Call] = field(default_factory=list)
    where: Where = NOWHERE
    branches: list[str] = field(default_factory=list)
    own: bool = False
    told: bool = False

    def add(self, kind: str, x: Tensor, axis: str = "", peer: int = -1) -> None:
        """Note one call with tensor `x`."""
        where = replace(self.where, branch=self.branches[-1]) if self.branches else self.where
        dtype = str(x.dtype).removeprefix("torch.")
        self.calls.append(Call(kind=kind, axis=axis, peer=peer, shape=tuple(x.shape), dtype=dtype, where=where))
        self.told |= self.own


class Recorder(Communicator):
    """`rt` of a rank while its program is read: the real one's steps down to what goes over the wire, on "meta".

    `send` and `receive` are the words for programs of pipeline stages: send(x, rank), receive(shape, dtype, rank).
    """

    def __init__(self, mesh: Mesh, rank: int, notes: Notes) -> None:
        super().__init__(mesh, rank, torch.device("meta"))
        self.notes = notes

    def piece(self, length: int, axis: Axis, unit: int = 1) -> Piece:
        """As the real one's; notes whether all ranks' pieces are as long. They are if the first and the last are."""
        sizes = [self.size(name) for name in names_of(axis)]
        first, last = (piece(length, [(n, at(n)) for n in sizes], unit) for at in (lambda n: 0, lambda n: n - 1))
        self.notes.own |= first.length != last.length
        return super().piece(length, axis, unit)

    def _reduce(self, x: Tensor, axis: str, largest: bool) -> Tensor:
        self.notes.add("all_reduce_max" if largest else "all_reduce", x, axis)
        return torch.empty_like(x)

    def _gather(self, x: Tensor, axis: str) -> Tensor:
        self.notes.add("all_gather", x, axis)
        return x.new_empty((self.size(axis), *x.shape))

    def _scatter(self, x: Tensor, axis: str, own: bool) -> Tensor:
        self.notes.add("reduce_scatter", x, axis)
        return x.new_empty(x.shape[1:])

    def _exchange(self, x: Tensor, axis: str) -> Tensor:
        self.notes.add("all_to_all", x, axis)
        return torch.empty_like(x)

    def _send_rows(self, x: Tensor, axis: str, give: list[int], take: list[int]) -> Tensor:
        self.notes.add("all_to_all_rows", x[:0], axis)  # how many is known in the step only
        return x.new_empty((sum(take), *x.shape[1:]))

    def pass_on(self, x: Tensor, axis: str) -> Callable[[], Tensor]:
        """All ranks of the axis pass on, and wait, in the same order: as a collective."""
        self.notes.add("pass_on", x, axis)
        return lambda: torch.empty_like(x)

    def send(self, x: Tensor, rank: int) -> None:
        """Hand x to another rank; waits until it has taken it."""
        self.notes.add("send", x, peer=rank)

    def receive(self, shape: list[int], dtype: torch.dtype, rank: int) -> Tensor:
        """A tensor from another rank."""
        x = torch.empty(shape, dtype=dtype, device=self.device)
        self.notes.add("receive", x, peer=rank)
        return x


@dataclass(frozen=True, slots=True)
class SilentRegion:
    """Stands for a region, which talks to nobody: the (dtype, shape)s that its forward and its backward give."""

    made: Sequence[tuple[str, Sequence[int]]]
    gradients: Sequence[tuple[str, Sequence[int]]]

    def forward(self, tensors: Sequence[Tensor], salt: str) -> list[Tensor]:
        """Outputs, new values of buffers, and a token."""
        return [*_empty(self.made), torch.empty((), dtype=torch.uint8, device="meta")]

    def backward(self, kept: object, tangents: Sequence[Tensor], again: bool) -> tuple[list[Tensor], frozenset[int]]:
        """Gradients."""
        return _empty(self.gradients), frozenset()


def _empty(metas: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
    return [torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta") for dtype, shape in metas]
