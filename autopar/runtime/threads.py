"""Ranks as threads of one process: the same emitted code without process groups, for tests and `autopar verify`.

Sums are made in rank order, so a run repeats exactly. A rank that fails breaks the others' waits, so all end.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from autopar.errors import RankError
from autopar.ir.mesh import Axis, Mesh
from autopar.runtime.comm import Communicator

T = TypeVar("T")
Key = tuple[int, int, int | tuple[str, int]]
"""(from, to, tag) of a tensor on its way; what is passed on along an axis: the axis, and how many were before."""

GRACE_S = 1.0
"""After the time limit: how long ranks that only wait for others may take to end, to find who is waited for."""


class _Meeting:
    """Where the ranks of one group hand each other tensors."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.barrier = threading.Barrier(size)
        self._slots: list[Tensor | None] = [None] * size

    def swap(self, at: int, x: Tensor, take: Callable[[list[Tensor]], Tensor], *, rows: bool = False) -> Tensor:
        """Put x in; when all have, take what is wanted; go on when all have taken. `rows`: each has its own number."""
        self._slots[at] = x
        self.barrier.wait(self._timeout_s)
        all_ = [s for s in self._slots if s is not None]
        self._check([t[:0] for t in all_] if rows else all_)
        result = take(all_)
        self.barrier.wait(self._timeout_s)
        return result

    def _check(self, all_: list[Tensor]) -> None:
        seen = {(tuple(t.shape), t.dtype) for t in all_}
        if len(seen) > 1:
            raise ValueError(f"ranks meet in one collective with different tensors: {sorted(map(str, seen))}")


class _Mail:
    """Tensors on their way from rank to rank."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._arrived = threading.Condition()
        self._waiting: dict[Key, Tensor] = {}
        self._broken = False

    def put(self, key: Key, x: Tensor) -> None:
        """Give."""
        with self._arrived:
            if key in self._waiting:
                raise ValueError(f"rank {key[0]} sends to {key[1]} by tag {key[2]} before the last such was received")
            self._waiting[key] = x
            self._arrived.notify_all()

    def take(self, key: Key) -> Tensor:
        """Wait for it."""
        with self._arrived:
            there = self._arrived.wait_for(lambda: self._broken or key in self._waiting, self._timeout_s)
            if self._broken or not there:
                raise threading.BrokenBarrierError
            return self._waiting.pop(key)

    def abort(self) -> None:
        """Break every wait, now and later."""
        with self._arrived:
            self._broken = True
            self._arrived.notify_all()


class ThreadWorld:
    """A mesh of threads. `communicator(rank)` is the `rt` of one of them."""

    def __init__(self, mesh: Mesh, timeout_s: float = 60.0) -> None:
        self.mesh = mesh
        self._meetings = {
            (axis.name, group): _Meeting(len(group), timeout_s)
            for axis in mesh.axes
            for group in mesh.groups(axis.name)
        }
        self._mail = _Mail(timeout_s)

    def communicator(self, rank: int) -> ThreadCommunicator:
        """`rt` of one rank."""
        mine = {axis: meeting for (axis, group), meeting in self._meetings.items() if rank in group}
        return ThreadCommunicator(self.mesh, rank, mine, self._mail)

    def abort(self) -> None:
        """Break every wait, now and later."""
        for meeting in self._meetings.values():
            meeting.barrier.abort()
        self._mail.abort()


class ThreadCommunicator(Communicator):
    """`rt` of one thread."""

    def __init__(self, mesh: Mesh, rank: int, meetings: dict[str, _Meeting], mail: _Mail) -> None:
        super().__init__(mesh, rank, torch.device("cpu"))
        self._meetings = meetings
        self._mail = mail
        self._passed: Counter[str] = Counter()

    def send_to(self, x: Tensor, to: int, tag: int) -> None:
        """Give a tensor to another rank, which asks for it by the same tag."""
        self._mail.put((self.rank, to, tag), x.contiguous().clone())

    def receive_from(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> Tensor:
        """What another rank sends by this tag; waits for it."""
        return _expected(self._mail.take((source, self.rank, tag)), shape, dtype, source)

    def pass_on(self, x: Tensor, axis: str) -> Callable[[], Tensor]:
        """Begin to send x to the next rank along the axis; what waits for the one that the rank before sends."""
        before, after = self.beside(axis)
        tag = axis, self._passed[axis]
        self._passed[axis] += 1
        self._mail.put((self.rank, after, tag), x.contiguous().clone())
        shape, dtype = tuple(x.shape), x.dtype
        return lambda: _expected(self._mail.take((before, self.rank, tag)), shape, dtype, before)

    def _swap(self, x: Tensor, axis: str, take: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return self._meetings[axis].swap(self.index(axis), x, take)

    def _reduce(self, x: Tensor, axis: str, largest: bool) -> Tensor:
        return self._swap(x, axis, _largest if largest else _sum)

    def _gather(self, x: Tensor, axis: str) -> Tensor:
        return self._swap(x, axis, torch.stack)

    def _scatter(self, x: Tensor, axis: str, own: bool) -> Tensor:
        at = self.index(axis)
        return self._swap(x, axis, lambda all_: _sum([t[at] for t in all_]))

    def _exchange(self, x: Tensor, axis: str) -> Tensor:
        at = self.index(axis)
        return self._swap(x, axis, lambda all_: torch.stack([t[at] for t in all_]))

    def _send_rows(self, x: Tensor, axis: str, give: list[int], take: list[int]) -> Tensor:
        meeting, at = self._meetings[axis], self.index(axis)
        starts = torch.tensor([0, *give]).cumsum(0)
        firsts = meeting.swap(at, starts, torch.stack)  # [from, to]

        def mine(all_: list[Tensor]) -> Tensor:
            return torch.cat([t[firsts[j, at] : firsts[j, at + 1]] for j, t in enumerate(all_)])

        found = meeting.swap(at, x, mine, rows=True)
        if found.shape[0] != sum(take):
            raise ValueError(f"{found.shape[0]} rows came where {sum(take)} were told")
        return found


def _expected(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
    if (tuple(x.shape), x.dtype) != (tuple(shape), dtype):
        raise ValueError(f"rank {source} sent {x.dtype}{list(x.shape)}, expected {dtype}{list(shape)}")
    return x


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _largest(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).amax(0)


def run_threads(mesh: Mesh | int, fn: Callable[[ThreadCommunicator], T], *, timeout_s: float = 120.0) -> list[T]:
    """`fn(rt)` on each rank of a mesh of threads (an int: one axis "dp"); their results in rank order.

    Raises:
        RankError: a rank raised (named, with its message; `__cause__` is its exception) or did not end in `timeout_s`.
    """
    world = ThreadWorld(mesh if isinstance(mesh, Mesh) else _line(mesh), timeout_s)
    n = world.mesh.size
    results: list[list[T]] = [[] for _ in range(n)]
    failures: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank].append(fn(world.communicator(rank)))
        except BaseException as error:
            failures.append((rank, error))
            world.abort()

    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in range(n)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = [r for r, t in enumerate(threads) if t.is_alive()]
    if late:
        _tell_late(world, threads, failures, late, timeout_s)
    _raise_first(failures, n, timeout_s)
    return [r[0] for r in results]


def _tell_late(
    world: ThreadWorld, threads: list[threading.Thread], failures: list[tuple[int, BaseException]], late: list[int],
    timeout_s: float,
) -> None:  # fmt: skip
    """RankError for the ranks that are busy with something else, if there are any; who only waits for them ends now."""
    world.abort()
    for rank in late:
        threads[rank].join(GRACE_S / len(late))
    busy = [r for r in late if threads[r].is_alive()]
    if busy and all(_is_broken(error) for _, error in failures):
        raise RankError(f"ranks {busy} of {len(threads)} did not end in {timeout_s:g} s; the others waited for them")


def _line(n: int) -> Mesh:
    return Mesh(axes=(Axis(name="dp", size=n),))


def _raise_first(failures: list[tuple[int, BaseException]], n: int, timeout_s: float) -> None:
    """The failure that came first; broken waits follow from it."""
    own = [f for f in failures if not _is_broken(f[1])]
    if own:
        rank, error = own[0]
        message = str(error) or type(error).__name__
        raise RankError(f"rank {rank} of {n} failed: {type(error).__name__}: {message}") from error
    if failures:
        rank, error = failures[0]
        raise RankError(f"rank {rank} of {n} waited {timeout_s:g} s for the others in a collective") from error


def _is_broken(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, threading.BrokenBarrierError):
            return True
        error = error.__cause__
    return False
