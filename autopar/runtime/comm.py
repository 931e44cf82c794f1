"""What emitted code asks of its rank: neighbours along mesh axes, its own place, its device.

Every collective takes a contiguous or strided tensor and returns a new contiguous one, or its input where nothing is to
do. An axis is a name, or a tuple of names, slowest first, where a dim is cut by several.

Where a dim doesn't divide, pieces are padded to the largest for the journey and trimmed after it (`autopar.ir.cuts`
says who has which rows). A gather is then told the `length` of the joined dim; `unit` is what a cut keeps together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir.cuts import Piece, chunk, piece
from autopar.ir.layout import Kind, Layout, unit_of
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Collective, plan_reshard
from autopar.runtime.torch_private import keeps_graph

Axis = str | tuple[str, ...]


def _unwatched(line: int, instance: int, values: Mapping[str, object], before: bool) -> None:
    """Nobody wants to know."""


def _untimed(line: int) -> None:
    """Nobody wants to know."""


class Communicator(ABC):
    """`rt` in emitted code: one rank's place in the mesh and its way to the others.

    Attributes:
        mesh, rank, device.
        seed, step: what random ops draw from, together with their key and global positions. The module sets `step` to
            the number of the call before its forward, and again before its backward.
        instance: module path of the block instance that runs now, "" outside blocks.
        watch: told of every value by a program that `runtime.watch` made talk.
        tick: told of the end of every line by a program that `runtime.timing` made tick.
        regions: what runs the regions of the program that runs now, by key.
        ungiven: (key, position) of the gradients that a region's backward gave as zeros since there were none.
        device_mesh: the same mesh as torch knows it, for DTensors; None where ranks are no processes.
    """

    device_mesh: Any = None

    def __init__(self, mesh: Mesh, rank: int, device: torch.device) -> None:
        self.mesh = mesh
        self.rank = rank
        self.device = device
        self.seed = 0
        self.step = 0
        self.instance = ""
        self.watch: Callable[[int, int, Mapping[str, object], bool], None] = _unwatched
        self.tick: Callable[[int], None] = _untimed
        self.regions: Mapping[str, Any] = {}
        self.ungiven: set[tuple[str, int]] = set()

    @abstractmethod
    def _reduce(self, x: Tensor, axis: str, largest: bool) -> Tensor:
        """Elementwise sum (or maximum) over the axis, in a new tensor. The axis has 2 or more."""

    @abstractmethod
    def _gather(self, x: Tensor, axis: str) -> Tensor:
        """[n, *x.shape] of the n ranks' contiguous x."""

    @abstractmethod
    def _scatter(self, x: Tensor, axis: str, own: bool) -> Tensor:
        """x: [n, *shape], contiguous -> the sum over the axis of each rank's x[own index]; `own`: to be written to."""

    @abstractmethod
    def _exchange(self, x: Tensor, axis: str) -> Tensor:
        """x: [n, *shape], contiguous -> [n, *shape] in which row j is x[own index] of rank j."""

    def send_to(self, x: Tensor, to: int, tag: int) -> None:
        """Give a tensor to another rank, which asks for it by the same tag; goes on at once."""
        raise AssertionError(f"{type(self).__name__} has nobody to send to")

    def receive_from(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> Tensor:
        """What another rank sends by this tag; waits for it."""
        raise AssertionError(f"{type(self).__name__} has nobody to receive from")

    def sent(self) -> None:  # noqa: B027  (nothing to wait for where sending is done at once)
        """Wait until all that was sent has arrived."""

    def _send_rows(self, x: Tensor, axis: str, give: list[int], take: list[int]) -> Tensor:
        """x: contiguous, give[j] of its rows for rank j of the axis, in order -> the take[j] rows of each."""
        raise AssertionError(f"{type(self).__name__} has nobody to send rows to")

    def pass_on(self, x: Tensor, axis: str) -> Callable[[], Tensor]:
        """Begin to send x to the next rank along the axis, the last one's next being the first.

        Gives what waits for the tensor, of the same shape, that the rank before sends. x mustn't change until then.
        """
        raise AssertionError(f"{type(self).__name__} has nobody to pass on to")

    def size(self, axis: Axis) -> int:
        """Number of ranks along an axis."""
        n = 1
        for name in names_of(axis):
            n *= self.mesh.axis(name).size
        return n

    def index(self, axis: Axis) -> int:
        """This rank's position along an axis."""
        at = 0
        for name in names_of(axis):
            at = at * self.mesh.axis(name).size + self.mesh.index(self.rank, name)
        return at

    def beside(self, axis: str) -> tuple[int, int]:
        """The ranks before and after this one along an axis, which is a ring."""
        at, size, stride = self.index(axis), self.size(axis), self.mesh.stride(axis)
        first = self.rank - at * stride
        return first + (at - 1) % size * stride, first + (at + 1) % size * stride

    def piece(self, length: int, axis: Axis, unit: int = 1) -> Piece:
        """This rank's rows of a dim of `length` rows cut over an axis."""
        return piece(length, ((self.size(name), self.index(name)) for name in names_of(axis)), unit)

    def all_reduce(self, x: Tensor, axis: Axis) -> Tensor:
        """Sum over the axis."""
        return self._reduced(x, axis, largest=False)

    def all_reduce_max(self, x: Tensor, axis: Axis) -> Tensor:
        """Maximum over the axis."""
        return self._reduced(x, axis, largest=True)

    def _reduced(self, x: Tensor, axis: Axis, largest: bool) -> Tensor:
        x = x.contiguous()
        for name in reversed(names_of(axis)):
            if self.size(name) > 1 and x.numel():
                x = self._reduce(x, name, largest)
        return x

    def all_gather(self, x: Tensor, axis: Axis, dim: int, length: int | None = None, unit: int = 1) -> Tensor:
        """The pieces along the axis joined in dim `dim`, to `length` rows; None: the pieces are equal."""
        names = names_of(axis)
        x = x.contiguous()
        for i in reversed(range(len(names))):
            n = self.size(names[i])
            if n == 1:
                continue
            whole = x.shape[dim] * n if length is None else self.piece(length, names[:i], unit).length
            x = _padded(x, dim, chunk(whole, n, unit))
            x = _trimmed(_join(self._gather(x, names[i]) if x.numel() else x.expand(n, *x.shape), dim), dim, whole)
        return x

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int, unit: int = 1) -> Tensor:
        """This rank's piece in dim `dim` of the sum over the axis."""
        given = x
        for name in names_of(axis):
            n, whole = self.size(name), x.shape[dim]
            if n > 1:
                parts = _split(x, dim, n, chunk(whole, n, unit))
                own = parts.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
                x = self._scatter(parts, name, own) if parts.numel() else parts[0]
                x = _trimmed(x, dim, self.piece(whole, name, unit).length)
        return x.contiguous()

    def all_to_all(
        self, x: Tensor, axis: Axis, dim_whole_after: int, dim_cut_after: int, length: int | None = None, unit: int = 1,
        cut_unit: int = 1,
    ) -> Tensor:  # fmt: skip
        """From a piece cut in `dim_whole_after` to a piece cut in `dim_cut_after`.

        `length` and `unit` are of the dim whole afterwards (None: its pieces are equal), `cut_unit` is of the other.
        """
        names = names_of(axis)
        if len(names) > 1:
            return self.slice(self.all_gather(x, names, dim_whole_after, length, unit), names, dim_cut_after, cut_unit)
        n, cut = self.size(axis), x.shape[dim_cut_after]
        if n == 1:
            return x.contiguous()
        whole = x.shape[dim_whole_after] * n if length is None else length
        x = _padded(x, dim_whole_after, chunk(whole, n, unit))
        parts = _split(x, dim_cut_after, n, chunk(cut, n, cut_unit))
        joined = _join(self._exchange(parts, names[0]) if parts.numel() else parts, dim_whole_after)
        mine = self.piece(cut, axis, cut_unit).length
        return _trimmed(_trimmed(joined, dim_whole_after, whole), dim_cut_after, mine).contiguous()

    def exchange_counts(self, counts: Tensor, axis: str) -> Tensor:
        """counts: [ranks, *shape]: row j is told to rank j -> what each rank told this one."""
        return self._exchange(counts.contiguous(), axis) if self.size(axis) > 1 else counts

    def exchange_rows(self, x: Tensor, axis: str, give: list[int], take: list[int]) -> Tensor:
        """All-to-all with unequal counts: give[j] of the rows of x go to rank j, in order; take[j] come from it."""
        return self._send_rows(x.contiguous(), axis, give, take) if self.size(axis) > 1 else x

    def slice(self, x: Tensor, axis: Axis, dim: int, unit: int = 1) -> Tensor:
        """This rank's piece in dim `dim`, without communication; its own memory, so that the whole can go."""
        if self.size(axis) == 1:
            return x.contiguous()
        mine = self.piece(x.shape[dim], axis, unit)
        return x.narrow(dim, mine.start, mine.length).clone(memory_format=torch.contiguous_format)

    def narrow(self, x: Tensor, axis: Axis, dim: int, unit: int = 1) -> Tensor:
        """As `slice`, but a view: of what is there as long as the piece is."""
        mine = self.piece(x.shape[dim], axis, unit)
        return x.narrow(dim, mine.start, mine.length)

    def cut(self, whole: Tensor, layout: Layout, *, own: bool = True) -> Tensor:
        """This rank's piece of a tensor that all ranks have. Not `own`: a view where that is contiguous."""
        for axis in layout.axes:
            at = layout.on(axis)
            if at.kind is Kind.SHARD:
                whole = (self.slice if own else self.narrow)(whole, axis, at.dim)
        return whole.contiguous()

    def convert(
        self, x: Tensor, before: Layout, after: Layout, shape: tuple[int, ...], units: tuple[int, ...] = ()
    ) -> Tensor:
        """A tensor of global `shape` from one layout to another, by the same steps that emitted code takes.

        ValueError if there are none.
        """
        steps = plan_reshard(before, after)
        if steps is None:
            raise ValueError(f"nothing turns {before} into {after}")
        for step in steps:
            unit = unit_of(units, step.dim) if step.dim >= 0 else 1
            if step.collective in (Collective.ALL_GATHER, Collective.ALL_TO_ALL):
                around = [a for a in step.before.axes_of(step.dim) if a != step.axis]
                length = self.piece(shape[step.dim], tuple(around), unit).length
            match step.collective:
                case Collective.ALL_REDUCE:
                    x = self.all_reduce(x, step.axis)
                case Collective.ALL_TO_ALL:
                    x = self.all_to_all(x, step.axis, step.dim, step.to_dim, length, unit, unit_of(units, step.to_dim))
                case Collective.ALL_GATHER:
                    x = self.all_gather(x, step.axis, step.dim, length, unit)
                case Collective.REDUCE_SCATTER:
                    x = self.reduce_scatter(x, step.axis, step.dim, unit)
                case Collective.SLICE:
                    x = self.slice(x, step.axis, step.dim, unit)
        return x

    def region(self, key: str, *tensors: Tensor) -> list[Any]:
        """Run a submodule as the user wrote it, on whole tensors: outputs, new values of buffers, what is kept.

        All ranks draw the same random numbers in it: their seed is that of (seed, step, key).
        """
        found: list[Any] = self.regions[key].forward(tensors, f"{self.seed}|{self.step}|{key}")
        return found

    def region_backward(self, key: str, kept: Any, *tangents: Tensor) -> list[Tensor]:
        """Gradients of its arguments that need one; equal on all ranks, so that nothing is to be summed."""
        found, ungiven = self.regions[key].backward(kept, tangents, keeps_graph())
        self.ungiven |= {(key, position) for position in ungiven}
        gradients: list[Tensor] = found
        return gradients

    def barrier(self) -> None:
        """Wait until all ranks of the mesh are here."""
        token = torch.zeros(1, device=self.device)
        for axis in self.mesh.axes:
            token = self.all_reduce(token, axis.name)


class Alone(Communicator):
    """A mesh of one device: nobody to talk to, no process group."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        if mesh.size != 1:
            raise ValueError(f"mesh {mesh} has {mesh.size} devices; wanted 1")
        super().__init__(mesh, 0, device)

    def _reduce(self, x: Tensor, axis: str, largest: bool) -> Tensor:
        raise AssertionError("one device reduces nothing")

    def _gather(self, x: Tensor, axis: str) -> Tensor:
        raise AssertionError("one device gathers nothing")

    def _scatter(self, x: Tensor, axis: str, own: bool) -> Tensor:
        raise AssertionError("one device scatters nothing")

    def _exchange(self, x: Tensor, axis: str) -> Tensor:
        raise AssertionError("one device exchanges nothing")


class View(Communicator):
    """A rank in a part of its mesh, or with more axes that are no ranks: collectives are those of `base`.

    `at`: the position on each axis of `mesh` that `base` lacks.
    """

    def __init__(self, base: Communicator, mesh: Mesh, at: Mapping[str, int] | None = None) -> None:
        super().__init__(mesh, 0, base.device)
        self.base = base
        self.place(at or {})

    def place(self, at: Mapping[str, int]) -> None:
        """Be at these positions on the axes that are no ranks."""
        rank = 0
        for axis in self.mesh.axes:
            mine = at[axis.name] if axis.name in at else self.base.index(axis.name)
            rank = rank * axis.size + mine
        self.rank = rank

    def _reduce(self, x: Tensor, axis: str, largest: bool) -> Tensor:
        return self.base._reduce(x, axis, largest)

    def _gather(self, x: Tensor, axis: str) -> Tensor:
        return self.base._gather(x, axis)

    def _scatter(self, x: Tensor, axis: str, own: bool) -> Tensor:
        return self.base._scatter(x, axis, own)

    def _exchange(self, x: Tensor, axis: str) -> Tensor:
        return self.base._exchange(x, axis)

    def _send_rows(self, x: Tensor, axis: str, give: list[int], take: list[int]) -> Tensor:
        return self.base._send_rows(x, axis, give, take)

    def pass_on(self, x: Tensor, axis: str) -> Callable[[], Tensor]:
        """As `base` does."""
        return self.base.pass_on(x, axis)


def names_of(axis: Axis) -> tuple[str, ...]:
    """The names of one or several axes, slowest first."""
    return (axis,) if isinstance(axis, str) else axis


def _join(parts: Tensor, dim: int) -> Tensor:
    """[n, ...] -> the n rows joined in dim `dim`, contiguous. `dim` may be negative."""
    dim %= parts.ndim - 1
    if dim == 0:
        return parts.flatten(0, 1)
    return torch.cat(parts.unbind(0), dim)


def _split(x: Tensor, dim: int, n: int, size: int) -> Tensor:
    """x -> [n, ...]: n pieces of `size` in dim `dim`, zeros where x ends, contiguous."""
    x = _padded(x, dim, n * size)
    dim %= x.ndim
    if dim == 0:
        return x.contiguous().view(n, size, *x.shape[1:])
    return torch.stack([x.narrow(dim, i * size, size) for i in range(n)])


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros at the end of dim `dim`, `size` long; x itself where it is."""
    if x.shape[dim] == size:
        return x
    dim %= x.ndim
    found = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    found.narrow(dim, 0, x.shape[dim]).copy_(x)
    return found


def _trimmed(x: Tensor, dim: int, size: int) -> Tensor:
    """The first `size` rows of dim `dim`, contiguous."""
    return x if x.shape[dim] == size else x.narrow(dim, 0, size).contiguous()
