"""`autopar profile`: the points of a machine measured on all its ranks at once, kept as they come, made into a cluster.

Without torchrun the ranks are started here; under torchrun each rank calls this, and rank 0 writes.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import msgspec
import psutil
import torch

from autopar.cost_model.clusters import dump_cluster
from autopar.cost_model.local import GUESSED_BYTES_PER_US, GUESSED_LATENCY_US, HELD_BACK, fingerprint
from autopar.errors import UserError
from autopar.ir import profile as kinds
from autopar.ir.cluster import ClusterSpec, Device, DeviceGroup, Host, LinkLevel
from autopar.ir.profile import Curve, LinkCurve, Profile, interpolate
from autopar.profiling.clock import Crew, MeasureError, Timed, time_calls
from autopar.profiling.links import (
    COPY_BYTES,
    DEVICE_TO_HOST,
    DISK_BYTES,
    HOST_TO_DEVICE,
    LINK_BYTES,
    NVME_READ,
    NVME_WRITE,
    PARAMETERS,
    Level,
    disk_folder,
    link_specs,
    overlap_factors,
    prepare_copy,
    prepare_disk,
    prepare_link,
    prepare_optimizer,
    takes_direct,
)
from autopar.profiling.partial import Partial, Point, curves_of, path_of, read_partial, write_partial
from autopar.profiling.works import ELEMENTS, Sized, work_specs
from autopar.runtime.groups import init_ranks, ranks_started
from autopar.runtime.launch import launch

SECONDS = 80.0
"""What a profile takes, ranks' start not counted."""
SAVED_EVERY_S, TOLD_EVERY_S = 2.0, 10.0
OPTIMIZER_BYTES = 28
"""Bytes that an update of one float32 parameter with AdamW moves (`cost_model.op_cost.optimizer_us`)."""
GUESSED_FLOPS, GUESSED_STREAM = 1e10, 5000.0


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank is told. `folder`: where a file may be written to time the disk."""

    seconds: float
    partial: Partial
    path: str
    folder: str


@dataclass(frozen=True, slots=True)
class _Job:
    """One point to come. `prepare` gives the call, the bytes that it makes, and the point's size once prepared."""

    kind: Literal["work", "link"]
    key: tuple[str, str, str]
    scale: int
    prepare: Callable[[], tuple[Callable[[int], Any], int, float]]
    each: float = 1.0

    @property
    def name(self) -> tuple[str, tuple[str, str, str], int]:
        return self.kind, self.key, self.scale


def profile_here(ranks: int | None, output: Path, seconds: float = SECONDS) -> ClusterSpec | None:
    """Measure, and write `output`. None on ranks other than 0 under torchrun.

    Raises:
        ClusterError: the points kept beside `output` are another machine's.
        UserError: `ranks` is not what torchrun started.
    """
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if under_torchrun and ranks is not None and ranks != ranks_started():
        raise UserError(f"--ranks {ranks}: torchrun started {ranks_started()}; leave --ranks out")
    ranks = ranks_started() if under_torchrun else ranks or 2
    path = path_of(output)
    first = os.environ.get("RANK", "0") == "0" or not under_torchrun
    kept = Partial(hardware=fingerprint(), torch=str(torch.__version__), ranks=ranks, threads=1)
    word = ""
    if first or not under_torchrun:
        kept, word = read_partial(path, kept)
    if word:
        print(word, file=sys.stderr)
    asked = Asked(seconds=seconds, partial=kept, path=str(path), folder=str(output.absolute().parent))
    if under_torchrun or ranks == 1:
        spec = measure(asked)
    else:
        spec = launch(measure, ranks, (asked,), timeout_s=seconds * 3 + 120)
    if not first:
        return None
    assert spec is not None
    scratch = output.with_name(f"{output.name}.{os.getpid()}")
    scratch.write_text(dump_cluster(spec))
    scratch.replace(output)
    path.unlink(missing_ok=True)
    return spec


def measure(asked: Asked) -> ClusterSpec:
    """What one rank does."""
    size = ranks_started()
    threads = torch.get_num_threads()
    torch.set_num_threads(asked.partial.threads)
    try:
        if size > 1:
            init_ranks()
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= min(size, _local_size(size))
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        return _Run(asked, Crew(int(os.environ.get("RANK", "0")) if size > 1 else 0, size, device)).all()
    finally:
        torch.set_num_threads(threads)


def _local_size(size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


@final
class _Run:
    """The points of one rank."""

    def __init__(self, asked: Asked, crew: Crew) -> None:
        self.asked, self.crew = asked, crew
        self.levels = _levels(crew.size)
        self.points = {p.name: p for p in asked.partial.points}
        self.notes = list(asked.partial.notes)
        self.start = self.saved = self.told = time.monotonic()

    def all(self) -> ClusterSpec:
        """Every point that time allows, then the cluster that they describe."""
        every = list(self._jobs())
        jobs = [job for job in every if not self._have(job)]
        seconds = self.asked.seconds * len(jobs) / len(every)  # what is there already took its part
        for at, job in enumerate(jobs):
            left = seconds - (time.monotonic() - self.start)
            (left,) = self.crew.worst(-left)
            if -left <= 0:
                self._note(f"time was up: {len(jobs) - at} of {len(jobs)} points are not measured")
                break
            self._tell(job, at / len(jobs))
            self._point(job, -left / (len(jobs) - at))
        self._save(always=True)
        overlap = {}
        if self.crew.size > 1:
            overlap = overlap_factors(self.crew, 5 if self.asked.seconds >= 30 else 1)
        return self._cluster(overlap)

    def _have(self, job: _Job) -> bool:
        """The same answer on every rank: what rank 0 has kept."""
        return self.crew.worst(float(self.crew.rank == 0 and job.name in self.points))[0] > 0

    def _point(self, job: _Job, seconds: float) -> None:
        found: list[float] = []

        def prepare() -> tuple[Callable[[int], Any], int]:
            call, made, size = job.prepare()
            found.append(size)
            return call, made

        try:
            timed = time_calls(self.crew, prepare, seconds)
        except MeasureError as error:
            self._note(f"{_words(job)}: not measured ({error})")
            return
        if job.each != 1:
            timed = Timed(timed.p10 / job.each, timed.p50 / job.each, timed.p90 / job.each, timed.stable)
        self.points[job.name] = Point.of(job.kind, job.key, job.scale, found[0], timed)
        self._save()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _tell(self, job: _Job, part: float) -> None:
        now = time.monotonic()
        if self.crew.rank == 0 and now - self.told >= (2.0 if sys.stderr.isatty() else TOLD_EVERY_S):
            self.told = now
            print(f"profile: {part:.0%}, {now - self.start:.0f} s: {_words(job)}", file=sys.stderr, flush=True)

    def _save(self, always: bool = False) -> None:
        now = time.monotonic()
        if self.crew.rank == 0 and (always or now - self.saved >= SAVED_EVERY_S):
            self.saved = now
            kept = msgspec.structs.replace(
                self.asked.partial, points=tuple(self.points.values()), notes=tuple(self.notes)
            )
            write_partial(Path(self.asked.path), kept)

    def _jobs(self) -> list[_Job]:
        """All points: of each curve ends and middle first, so that little time covers much."""
        jobs = [(order, job) for curve in self._curves() for order, job in zip(_order(len(curve)), curve, strict=True)]
        return [job for _, job in sorted(jobs, key=lambda pair: pair[0])]

    def _curves(self) -> Iterator[list[_Job]]:
        crew, kind = self.crew, self.crew.device.type
        for spec in work_specs(kind):
            dtype = getattr(torch, spec.dtype or "float32")

            def sized(
                scale: int, spec: Any = spec, dtype: torch.dtype = dtype
            ) -> tuple[Callable[[int], Any], int, float]:
                made: Sized = spec.make(scale, dtype, crew.device)
                return made.call, made.out_bytes, made.size

            yield [_Job("work", spec.key, scale, lambda scale=scale, f=sized: f(scale)) for scale in spec.scales]  # type: ignore[misc]
        numels = ELEMENTS[kind][1:-1]
        yield [
            _Job(
                "work", (kinds.OPTIMIZER, "", "float32"), n,
                lambda n=n: (*prepare_optimizer(crew, n), float(n * OPTIMIZER_BYTES)), PARAMETERS,  # type: ignore[misc]
            )
            for n in numels
        ]  # fmt: skip
        for link in link_specs(self.levels, crew.size):
            yield [
                _Job("link", link.key, n, lambda link=link, n=n: (*prepare_link(link, n), float(n)))  # type: ignore[misc]
                for n in LINK_BYTES[kind]
            ]
        for copy in (HOST_TO_DEVICE, DEVICE_TO_HOST):
            yield [
                _Job(
                    "work", (copy, "", ""), n,
                    lambda copy=copy, n=n: (*prepare_copy(copy, n, crew.device), float(n)),  # type: ignore[misc]
                )
                for n in COPY_BYTES
            ]  # fmt: skip
        folder = disk_folder(Path(self.asked.folder))
        direct = takes_direct(folder)
        if not direct:
            self._note("disk: files go through the page cache there, which is flushed and told to forget them")
        for disk in (NVME_WRITE, NVME_READ):
            yield [
                _Job(
                    "work", (disk, "", ""), n,
                    lambda disk=disk, n=n: (*prepare_disk(disk, n, folder, direct=direct), float(n)),  # type: ignore[misc]
                )
                for n in DISK_BYTES
            ]  # fmt: skip

    def _cluster(self, overlap: dict[str, float]) -> ClusterSpec:
        curves, links = curves_of(self.points.values())
        shaky = sum(len(c.unstable) for c in curves) + sum(len(c.unstable) for c in links)
        if shaky:
            self._note(
                f"{shaky} of {len(self.points)} points did not settle (`unstable`): something else ran meanwhile"
            )
        today = datetime.date.today().isoformat()
        profile = Profile(
            date=today, torch=str(torch.__version__), ranks=self.crew.size, threads=self.asked.partial.threads,
            hardware=self.asked.partial.hardware, overlap=overlap, notes=tuple(self.notes), curves=curves, links=links,
        )  # fmt: skip
        return describe(profile, self.levels, _local_size(self.crew.size))


def _words(job: _Job) -> str:
    return " ".join([*filter(None, job.key), f"at {job.scale}"])


def _order(count: int) -> list[int]:
    """Of each position the round in which it is measured: ends and middle first."""
    rounds = [2] * count
    for at in range(0, count, 2):
        rounds[at] = 1
    for at in (0, count - 1, count // 2):
        rounds[at] = 0
    return rounds


def _levels(size: int) -> tuple[Level, ...]:
    """The link levels of the ranks: inside a machine, and between machines where there are several."""
    local = _local_size(size)
    inner = Level("nvlink" if torch.cuda.is_available() else "loopback", local, 1)
    if local >= size or size % local:
        return (Level(inner.name, size, 1),)
    return inner, Level("network", size // local, local)


def describe(profile: Profile, levels: tuple[Level, ...], local: int) -> ClusterSpec:
    """A cluster of equal ranks from what was measured. Figures without a point are labelled estimates."""
    cuda = profile.hardware.kind == "cuda"
    by_key = {c.key: c for c in profile.curves}
    estimated: list[str] = []
    products = {key[2]: curve for key, curve in by_key.items() if key[:2] == (kinds.MATMUL, "square")}
    flops = {dtype: _rate(curve) * 1e6 for dtype, curve in products.items()}
    if not flops:
        estimated.append("peak_flops")
    stream = by_key.get((kinds.POINTWISE, "", "float32"))
    if stream is None:
        estimated.append("memory_bytes_per_us")
    total = psutil.virtual_memory().total
    memory = int(total * (1 - HELD_BACK)) // local
    if cuda:
        memory = torch.cuda.get_device_properties(0).total_memory - 3 * 2**29
    said = f"; estimates: {', '.join(estimated)}" if estimated else ""
    device = Device(
        name=profile.hardware.device if cuda else f"{profile.hardware.device}, one thread",
        memory_bytes=memory,
        peak_flops=flops or {"float32": GUESSED_FLOPS},
        memory_bytes_per_us=_rate(stream) if stream is not None else GUESSED_STREAM,
        kernel_floor_us=stream.p50[0] if stream is not None else 5.0,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        source=f"measured {profile.date} with {profile.ranks} ranks on {profile.hardware.cores} cores; "
        f"rates are achieved ones{said}",
    )
    return ClusterSpec(
        name=f"profiled:{profile.ranks}",
        groups=(DeviceGroup(count=profile.ranks, device=device),),
        levels=tuple(_link_level(level, profile) for level in levels),
        host=_host(by_key, int(total * (1 - HELD_BACK)) if cuda else 0),
        backend="nccl" if cuda else "gloo",
        date=profile.date,
        profile=profile,
    )


def _rate(curve: Curve) -> float:
    """Size per µs where it is largest."""
    return max(size / time for size, time in zip(curve.sizes, curve.p50, strict=True))


def _link_level(level: Level, profile: Profile) -> LinkLevel:
    """α and β of the ring formula through the ends of the all-reduce in the whole level."""
    found = next((c for c in profile.links if c.key == ("all_reduce", level.name, str(level.size))), None)
    latency, bandwidth = GUESSED_LATENCY_US, GUESSED_BYTES_PER_US
    source = "one rank: no link" if level.size == 1 else "estimate: no all-reduce was measured"
    if found is not None and len(found.sizes) > 1:
        latency, bandwidth = ring_figures(found)
        source = f"measured {profile.date}: all-reduce of {level.size}"
    return LinkLevel(name=level.name, size=level.size, latency_us=latency, bytes_per_us=bandwidth, source=source)


def ring_figures(curve: LinkCurve) -> tuple[float, float]:
    """(α, β) of 2(n−1)α + 2(n−1)/n·V/β through the first and the last point of an all-reduce."""
    n, steps = curve.members, 2 * (curve.members - 1)
    (small, large), (first, last) = (curve.sizes[0], curve.sizes[-1]), (curve.p50[0], curve.p50[-1])
    bandwidth = steps / n * (large - small) / max(last - first, 1e-3)
    return max(0.0, first / steps - small / n / bandwidth), bandwidth


def _host(curves: dict[tuple[str, str, str], Curve], memory: int) -> Host:
    """The slower way of each link, at its largest size. `memory`: 0 on CPUs, where the device's is main memory."""

    def rate(*names: str) -> float:
        found = [c for name in names if (c := curves.get((name, "", ""))) is not None]
        return min((c.sizes[-1] / interpolate(c.sizes, c.p50, c.sizes[-1]) for c in found), default=0.0)

    return Host(
        memory_bytes=memory, link_bytes_per_us=rate(HOST_TO_DEVICE, DEVICE_TO_HOST),
        nvme_bytes_per_us=rate(NVME_WRITE, NVME_READ),
    )  # fmt: skip
