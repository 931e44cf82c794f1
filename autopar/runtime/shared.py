"""Ranks of one host that exchange tensors through memory which they share (native/shared), through ctypes.

Faster than gloo (benchmarks/collectives.py), so it carries a group wherever it can: the ranks are on one
host, under one user, with our kernels. Sums are made in the order of ranks, in float32 for bfloat16 and float16.

A rank that has ended, or has been stopped by a signal for 2 s, is named by an error on those that wait for it. The
memory has no name in any file system, so that no crash leaves anything behind. AUTOPAR_SHARED_MEMORY=off leaves it out.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar import native
from autopar.errors import LostRankError, RankError
from autopar.runtime.draw import DTYPES as FLOATS

_POINTER, _I32, _I64, _F64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "create": (_I32, (_I32, _I64)),
    "join": (_POINTER, (ctypes.c_char_p, _I32, _F64, _POINTER, _POINTER)),
    "leave": (None, (_POINTER,)),
    "run": (_I32, (_POINTER, _POINTER)),
    "begin": (_I64, (_POINTER, _POINTER)),
    "wait": (_I32, (_POINTER, _I64)),
    "ended": (_I32, (_POINTER, _I64)),
    "send": (_I32, (_POINTER, _POINTER, _I64, _I32, _I64)),
    "receive": (_I32, (_POINTER, _POINTER, _I64, _I32, _I64)),
    "sent": (_I32, (_POINTER,)),
    "culprit": (_I32, (_POINTER,)),
}
_BARRIER, _ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _BROADCAST = range(6)
_DEAD, _STOPPED, _LATE, _SYSTEM, _MISMATCH = 10, 11, 12, 13, 14

DTYPES = {
    **FLOATS, torch.float16: 4, torch.int64: 5, torch.int32: 6, torch.int16: 7, torch.int8: 8, torch.uint8: 9,
    torch.bool: 10,
}  # fmt: skip
"""What can be summed, as native/kernel.h numbers it. Anything can be moved."""
CHUNK_BYTES = 2**20
"""What a rank puts into shared memory at a time; it has room for two. More costs cache, less costs waits."""


class _Call(ctypes.Structure):
    """One collective: `Call` of native/shared/api.cpp."""

    _fields_ = (
        ("kind", _I32), ("argument", _I32), ("largest", _I32), ("given", _POINTER), ("out", _POINTER), ("count", _I64),
        ("give", _POINTER), ("take", _POINTER),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Library:
    functions: dict[str, Any]
    combine: int
    """Address of the sums of the target in use."""


@cache
def _library() -> _Library | None:
    found = native.kernels()
    if found is None or sys.platform != "linux":
        return None
    opened, functions = ctypes.CDLL(str(found.path)), {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(opened, f"autopar_shared_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    combine = ctypes.cast(found.functions["combine"], _POINTER).value
    assert combine is not None
    return _Library(functions, combine)


class Handle:
    """A collective under way. Its tensors stay as they are until `wait` returns."""

    def __init__(self, group: SharedGroup, ticket: int, kept: tuple[object, ...]) -> None:
        self._group, self._ticket, self._kept = group, ticket, kept

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._group._ended(self._ticket)

    def wait(self) -> None:
        """LostRankError where a rank failed. Waiting again returns at once."""
        self._group._finish(self._ticket)
        self._kept = ()


class SharedGroup:
    """One rank's place among `members`, ranks of the whole run, in their order.

    Tensors are contiguous, on the CPU. A method with `later` goes on at once and gives a Handle; what was begun is done
    in that order, and before what is called afterwards. Every rank makes the same calls in the same order.

    Raises (every method):
        LostRankError: naming the rank that has ended, been stopped, or not come within `limit_s`; from then on every
            call.
    """

    def __init__(self, library: _Library, place: int, members: Sequence[int], rank: int, limit_s: float) -> None:
        self.members, self.rank, self.limit_s = tuple(members), rank, limit_s
        self._call = library.functions
        self._place = place
        self._leave = weakref.finalize(self, library.functions["leave"], place)
        self._leave.atexit = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def leave(self) -> None:
        """Give the memory back. Others may go on with what this rank has done its part of."""
        self._leave()

    def barrier(self) -> None:
        """Wait until all are here."""
        self._run(_Call(kind=_BARRIER), (), later=False)

    def all_reduce(self, x: Tensor, out: Tensor, *, largest: bool = False, later: bool = False) -> Handle | None:
        """out: sum or maximum over the ranks of x; may be x."""
        call = _Call(_ALL_REDUCE, DTYPES[x.dtype], largest, x.data_ptr(), out.data_ptr(), x.numel())
        return self._run(call, (x, out), later)

    def all_gather(self, x: Tensor, out: Tensor, *, later: bool = False) -> Handle | None:
        """out: [ranks, *x.shape]."""
        call = _Call(_ALL_GATHER, 0, 0, x.data_ptr(), out.data_ptr(), x.nbytes)
        return self._run(call, (x, out), later)

    def reduce_scatter(self, x: Tensor, out: Tensor, *, largest: bool = False, later: bool = False) -> Handle | None:
        """x: [ranks, *out.shape]; out: sum or maximum over the ranks of x[own place]."""
        call = _Call(_REDUCE_SCATTER, DTYPES[x.dtype], largest, x.data_ptr(), out.data_ptr(), out.numel())
        return self._run(call, (x, out), later)

    def all_to_all(
        self, x: Tensor, out: Tensor, give: Sequence[int] | None = None, take: Sequence[int] | None = None,
        *, later: bool = False,
    ) -> Handle | None:  # fmt: skip
        """give[j] rows of x go to rank j, in order; take[j] rows of out come from it. None: equal numbers."""
        alike = give is None or take is None
        sizes = [self._bytes(t, rows) for t, rows in ((x, give), (out, take))]
        call = _Call(_ALL_TO_ALL, alike, 0, x.data_ptr(), out.data_ptr(), 0, *map(ctypes.addressof, sizes))
        return self._run(call, (x, out, *sizes), later)

    def _bytes(self, x: Tensor, rows: Sequence[int] | None) -> Any:
        """Bytes for each rank, of so many rows each."""
        if rows is None:
            return (_I64 * self.size)(*[x.nbytes // self.size] * self.size)
        each = x.nbytes // max(1, x.shape[0])
        return (_I64 * self.size)(*(n * each for n in rows))

    def broadcast(self, x: Tensor, root: int, *, later: bool = False) -> Handle | None:
        """x: that of the member at place `root`."""
        return self._run(_Call(_BROADCAST, root, 0, None, x.data_ptr(), x.nbytes), (x,), later)

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """To the member at place `to`, which receives by the same tag, at any time. x may change afterwards."""
        self._check(self._call["send"](self._place, x.data_ptr(), x.nbytes, to, tag), self.members[to])

    def receive(self, x: Tensor, source: int, tag: int) -> None:
        """What the member at place `source` sent first of what it sent by this tag."""
        outcome = self._call["receive"](self._place, x.data_ptr(), x.nbytes, source, tag)
        self._check(outcome, self.members[source])

    def sent(self) -> None:
        """Wait until all that was sent has been received."""
        self._check(self._call["sent"](self._place), None)

    def _run(self, call: _Call, kept: tuple[object, ...], later: bool) -> Handle | None:
        if later and (ticket := self._call["begin"](self._place, ctypes.addressof(call))):
            return Handle(self, ticket, kept)
        self._check(self._call["run"](self._place, ctypes.addressof(call)), None)
        return Handle(self, 0, ()) if later else None

    def _finish(self, ticket: int) -> None:
        self._check(self._call["wait"](self._place, ticket), None)

    def _ended(self, ticket: int) -> bool:
        return bool(self._call["ended"](self._place, ticket))

    def _check(self, outcome: int, other: int | None) -> None:
        if not outcome:
            return
        if outcome == _MISMATCH:
            raise RankError(f"rank {other} sent another number of bytes than this rank, {self._own}, receives")
        if outcome == _SYSTEM:
            raise RankError(f"rank {self._own}: the system gave no memory to share for a message")
        if outcome not in _FAILED:
            raise AssertionError(f"status {outcome}")
        culprit = self.members[self._call["culprit"](self._place)]
        words = _FAILED[outcome].format(limit=self.limit_s)
        where = f"rank {self._own} waited for it in a group of {self.size} ranks"
        raise LostRankError(f"rank {culprit} {words}; {where}")

    @property
    def _own(self) -> int:
        return self.members[self.rank]


_FAILED = {
    _DEAD: "has ended", _STOPPED: "was stopped by a signal", _LATE: "did not come within {limit:g} s",
}  # fmt: skip

_made: Counter[tuple[int, ...]] = Counter()
"""How many groups these members have made."""


def shared_group(store: Any, members: Sequence[int], own: int, limit_s: float) -> tuple[SharedGroup | None, str]:
    """(The group of `members`, or None; why, for people). Collective over them; all come to the same.

    Args:
        store: through which ranks tell each other text, torch's.
        own: this rank.
    """
    key = f"autopar/shared/{','.join(map(str, members))}/{_made[tuple(members)]}"
    _made[tuple(members)] += 1
    store.set(f"{key}/host/{own}", _host())
    hosts = {h.decode() for h in store.multi_get([f"{key}/host/{m}" for m in members])}
    for without in sorted(h for h in hosts if not h.startswith("host ")):
        return None, without
    if len(hosts) > 1:
        return None, "ranks are on several hosts"
    library = _library()
    assert library is not None
    file = -1
    if own == members[0]:
        file = library.functions["create"](len(members), CHUNK_BYTES)
        store.set(f"{key}/file", f"/proc/{os.getpid()}/fd/{file}" if file >= 0 else os.strerror(-file))
    path: str = store.get(f"{key}/file").decode()
    rank, why = list(members).index(own), _I32(0)
    place = None
    if path.startswith("/proc"):
        place = library.functions["join"](path.encode(), rank, limit_s, library.combine, ctypes.addressof(why))
    store.set(f"{key}/joined/{own}", "yes" if place else os.strerror(why.value) if path.startswith("/") else path)
    joined = [j.decode() for j in store.multi_get([f"{key}/joined/{m}" for m in members])]
    if file >= 0:
        os.close(file)
    group = SharedGroup(library, place, members, rank, limit_s) if place else None
    if all(j == "yes" for j in joined):
        return group, "shared memory"
    if group is not None:
        group.leave()
    return None, f"no memory can be shared: {next(j for j in joined if j != 'yes')}"


def _host() -> str:
    """ "host ..." where two processes that say the same can share memory; else why this one shares none."""
    if os.environ.get("AUTOPAR_SHARED_MEMORY", "").lower() in ("off", "0", "no"):
        return "left out by AUTOPAR_SHARED_MEMORY"
    if _library() is None:
        return f"there are no kernels: {native.found().reason}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"host {boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()} {native.source_digest()}"
