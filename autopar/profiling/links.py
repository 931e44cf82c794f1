"""What is timed between ranks: collectives of a link level, the optimizer on spread parameters, host, disk, overlap.

Collectives are timed as emitted code calls them, through the rank's communicator, in all groups at once.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.ir.layout import replicated
from autopar.ir.mesh import Axis, Mesh
from autopar.profiling.clock import Crew
from autopar.runtime.comm import Communicator
from autopar.runtime.groups import communicator
from autopar.runtime.parameters import wrap

Prepared = tuple[Callable[[int], Any], int]

LINK_BYTES = {"cpu": (2**10, 2**13, 2**16, 2**19, 2**22, 2**24), "cuda": tuple(4**n for n in range(5, 15))}
"""Bytes of a collective on its larger side: 1 KiB to 16 MiB on CPUs."""
MOST_GROUPS = 3
"""Most group sizes of a level that are measured: the smallest, the largest, and one between."""
COPY_BYTES = (2**16, 2**20, 2**24)
DISK_BYTES = (2**20, 2**22, 2**24)
"""Bytes of a copy between main memory and the device, and of a file: 16 MiB at most, for each rank."""
COPIED_BYTES = 2**25
"""Buffers of one size that copies go round, together."""
SPARE = 16
"""A disk is timed if it has so many times a file's bytes free."""
HOST_TO_DEVICE, DEVICE_TO_HOST, NVME_WRITE, NVME_READ = "host_to_device", "device_to_host", "nvme_write", "nvme_read"
PARAMETERS = 6
"""Parameters that one timed optimizer step updates."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One collective in groups of `members` inside a level. `mesh` holds the groups along axis "group"."""

    collective: str
    level: str
    members: int
    mesh: Mesh

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells curves apart."""
        return self.collective, self.level, str(self.members)


@dataclass(frozen=True, slots=True)
class Level:
    """One link level of the ranks: `size` units of `inside` ranks each."""

    name: str
    size: int
    inside: int


def link_specs(levels: tuple[Level, ...], ranks: int) -> list[LinkSpec]:
    """Every collective in some group sizes of every level; the send once for each."""
    found = []
    for level in levels:
        sizes = _group_sizes(level.size)
        for members in sizes:
            mesh = _mesh(level, members, ranks)
            for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                found.append(LinkSpec(collective, level.name, members, mesh))
        if sizes:
            found.append(LinkSpec("send", level.name, 2, _mesh(level, sizes[0], ranks)))
    return found


def _group_sizes(size: int) -> list[int]:
    every = [n for n in range(2, size + 1) if size % n == 0]
    return every if len(every) <= MOST_GROUPS else [every[0], every[len(every) // 2], every[-1]]


def _mesh(level: Level, members: int, ranks: int) -> Mesh:
    """Groups of `members` units of a level, as the axis "group"; the ranks inside a unit lie beside it."""
    others = ranks // (members * level.inside)
    sizes = (("others", others), ("group", members), ("inside", level.inside))
    return Mesh(axes=tuple(Axis(name=name, size=n, level=0) for name, n in sizes if n > 1))


_COMMUNICATORS: dict[tuple[tuple[str, int], ...], Communicator] = {}


def _communicator(mesh: Mesh) -> Communicator:
    key = tuple((a.name, a.size) for a in mesh.axes)
    if key not in _COMMUNICATORS:
        _COMMUNICATORS[key] = communicator(mesh)
    return _COMMUNICATORS[key]


def prepare_link(spec: LinkSpec, nbytes: int) -> Prepared:
    """A collective whose larger side has `nbytes`, float32."""
    rt = _communicator(spec.mesh)
    whole = torch.ones(max(spec.members, nbytes // 4 // spec.members * spec.members), device=rt.device)
    piece = whole[: whole.numel() // spec.members].clone()
    if spec.collective == "send":
        return _send(rt, whole), nbytes
    calls: dict[str, Callable[[int], Tensor]] = {
        "all_reduce": lambda i: rt.all_reduce(whole, "group"),
        "all_gather": lambda i: rt.all_gather(piece, "group", 0),
        "reduce_scatter": lambda i: rt.reduce_scatter(whole, "group", 0),
        "all_to_all": lambda i: rt.all_to_all(whole.view(spec.members, -1), "group", 1, 0),
    }
    return calls[spec.collective], nbytes


def _send(rt: Communicator, data: Tensor) -> Callable[[int], None]:
    """Every rank sends to the next of its group while it receives from the one before."""
    axis = next(a for a in rt.mesh.axes if a.name == "group")
    stride = rt.mesh.stride("group")
    at = rt.index("group")
    there = rt.rank + ((at + 1) % axis.size - at) * stride
    back = rt.rank + ((at - 1) % axis.size - at) * stride
    got = torch.empty_like(data)

    def call(i: int) -> None:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, data, there), dist.P2POp(dist.irecv, got, back)])
        for work in works:
            work.wait()

    return call


def prepare_optimizer(crew: Crew, numel: int) -> Prepared:
    """One AdamW step over PARAMETERS parameters of `numel` elements, stored as a compiled module stores them.

    Giving the parameters their gradients is part of it: the module does that once a step too.
    """
    mesh = Mesh(axes=(Axis(name="group", size=crew.size, level=0),) if crew.size > 1 else ())
    rt = _communicator(mesh) if crew.size > 1 else None
    local = [torch.randn(numel, device=crew.device) for _ in range(PARAMETERS)]
    layout = replicated(mesh)

    def spread(x: Tensor) -> Tensor:
        return x if rt is None else wrap(x, (numel,), layout, rt)

    parameters = [nn.Parameter(spread(x)) for x in local]
    gradients = [torch.randn_like(x) for x in local]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def call(i: int) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = spread(gradient)
        optimizer.step()

    return call, 0


def prepare_copy(kind: str, nbytes: int, device: torch.device) -> Prepared:
    """A copy from main memory to the device's ("host_to_device") or back; on a CPU from one buffer to another.

    Buffers take turns, so that caches hold no more of them than of what a step brings in from elsewhere.
    """
    cuda = device.type == "cuda"
    count = max(1, COPIED_BYTES // nbytes)
    here = [torch.ones(nbytes // 4, pin_memory=cuda) for _ in range(count)]
    there = [torch.ones(nbytes // 4, device=device) for _ in range(count)]
    to, of = (there, here) if kind == HOST_TO_DEVICE else (here, there)
    return (lambda i: to[i % count].copy_(of[i % count], non_blocking=cuda)), 0


def disk_folder(wanted: Path) -> Path:
    """Where files to time the disk go: `wanted`, or the system's folder for such where that can't be written."""
    return wanted if os.access(wanted, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def takes_direct(folder: Path) -> bool:
    """Whether files there can be read and written past the page cache."""
    try:
        with _scratch(folder, direct=True) as file, mmap.mmap(-1, mmap.PAGESIZE) as page:
            return hasattr(os, "O_DIRECT") and file.write(page) == len(page)
    except OSError:
        return False


def _scratch(folder: Path, *, direct: bool) -> FileIO:
    """A new file without a name: gone with whoever holds it, however that ends."""
    handle, name = tempfile.mkstemp(prefix=".autopar-disk-", dir=folder)
    try:
        if direct:
            os.close(handle)
            handle = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    finally:
        os.unlink(name)
    return FileIO(handle, "r+")


def prepare_disk(kind: str, nbytes: int, folder: Path, *, direct: bool) -> Prepared:
    """One file written through to the disk ("nvme_write"), or read; not `direct`: the page cache is told to forget it.

    Raises:
        OSError: the disk would get full, or takes or gives fewer bytes than asked for.
    """
    free = shutil.disk_usage(folder).free
    if free < SPARE * nbytes:
        raise OSError(f"{free >> 20} MiB of disk are free, wanted {SPARE * nbytes >> 20}")
    data = mmap.mmap(-1, nbytes)  # begins with a page, as direct transfers need
    data.write(os.urandom(nbytes))
    file = _scratch(folder, direct=direct)

    def write(i: int) -> None:
        file.seek(0)
        _whole(file.write(data))
        os.fsync(file.fileno())

    def read(i: int) -> None:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, nbytes, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        _whole(file.readinto(data))

    def _whole(moved: int | None) -> None:
        if moved != nbytes:
            raise OSError(f"{moved} of {nbytes} bytes went through")

    write(0)
    return (write if kind == NVME_WRITE else read), 0


def overlap_factors(crew: Crew, rounds: int) -> dict[str, float]:
    """How many times slower computation and communication are while both run; 1 or more, the median of `rounds`."""
    a = torch.randn(192, 192, device=crew.device)
    data = torch.ones(2**18, device=crew.device)

    def compute(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            a @ a
        crew.finish()
        return (time.perf_counter() - start) / n

    def communicate(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            dist.all_reduce(data)
        crew.finish()
        return (time.perf_counter() - start) / n

    compute(3), communicate(3)
    slower: dict[str, list[float]] = {"compute": [], "communication": []}
    for _ in range(rounds):
        crew.worst(0.0)
        alone_compute = compute(10)
        crew.worst(0.0)
        alone_communicate = communicate(10)
        (busy,) = crew.worst(max(alone_compute, 1e-6))
        (wire,) = crew.worst(max(alone_communicate, 1e-6))
        span = 10 * max(busy, wire)
        beside = _Beside(communicate, int(span / wire) + 1)
        beside.start()
        both = compute(int(span / busy) + 1)
        beside.join()
        slower["compute"].append(both / alone_compute)
        slower["communication"].append(beside.seconds / alone_communicate)
    names = tuple(slower)
    medians = crew.worst(*(min(100.0, max(1.0, statistics.median(slower[n]))) for n in names))
    return {name: round(value, 3) for name, value in zip(names, medians, strict=True)}


class _Beside(threading.Thread):
    """Communication while this rank computes; `seconds` of a call."""

    def __init__(self, communicate: Callable[[int], float], count: int) -> None:
        super().__init__(daemon=True)
        self.seconds, self._communicate, self._count = 0.0, communicate, count

    def run(self) -> None:
        """In the thread."""
        self.seconds = self._communicate(self._count)
