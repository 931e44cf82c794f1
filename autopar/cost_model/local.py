"""This machine as a cluster: measured in a few seconds, kept on disk.

Every rank has one thread. With several ranks, as many processes measure at the same time, so that cores and memory
bandwidth are shared in the figures as they will be in a run; then they time gloo all-reduces on the loopback. A rate is
the mean over an interval, not its best call, because a rank that waits for a core waits in a run too; and the best of a
few intervals, because what else the machine did for a moment is no part of it.

The link's figures invert the ring formula 2(n−1)α + 2(n−1)/n·V/β at a small and a large V.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist
from rich.console import Console

import autopar
from autopar.cost_model.catalogue import Preset, device_of, list_presets
from autopar.errors import ClusterError
from autopar.ir.cluster import ClusterSpec, Device, DeviceGroup, Host, LinkLevel
from autopar.ir.profile import Fingerprint

CACHE_FORMAT = 1
INTERVALS, INTERVAL_S = 3, 0.06
"""How often and how long each rate is measured."""
LIMIT_S = 90.0
"""Most time for the ranks together, start included."""
MOST_RANKS = 1024
MATMUL_SIZE = 256
COPY_BYTES = 16 * 2**20
SMALL_BYTES, LARGE_BYTES = 1024, 8 * 2**20
"""Sizes of the two timed all-reduces."""
SMALL_CALLS, LARGE_CALLS = 10, 1
BATCHES = 5
HELD_BACK = 0.2
"""Part of main memory kept from plans: the system, Python and torch themselves (estimate)."""
GUESSED_LATENCY_US, GUESSED_BYTES_PER_US = 100.0, 500.0
"""Stand in for a link that could not be measured; labelled."""
DTYPES = ("float64", "float32", "bfloat16")


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank achieved while all did the same. Link figures are 0 where there is one rank."""

    flops: dict[str, float]
    bytes_per_us: float
    floor_us: float
    latency_us: float = 0.0
    link_bytes_per_us: float = 0.0


class _Cached(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str
    cluster: ClusterSpec


def local_cluster(ranks: int, *, fresh: bool = False) -> ClusterSpec:
    """This machine with `ranks` ranks: its GPUs if it has enough of them, else its cores over gloo.

    Measured figures are kept under the user's cache directory by machine, cores, torch version and ranks;
    `fresh` measures again.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise ClusterError(f"local cluster of {ranks!r} ranks: wanted a whole number from 1 to {MOST_RANKS}")
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    key = _key(ranks, torch.cuda.get_device_name(0) if gpus else "cpu")
    kept = None if fresh else _read(key)
    if kept is not None:
        return kept
    with Console(stderr=True).status(f"measuring this machine with {ranks} rank{'s' * (ranks > 1)}"):
        cluster = _gpu_cluster(ranks) if gpus else _cpu_cluster(ranks)
    if not any(level.source.startswith("estimate") for level in cluster.levels):
        _write(key, cluster)
    return cluster


# ---- the cache


def _key(ranks: int, device: str) -> str:
    parts = (CACHE_FORMAT, platform.node(), _cpu(), _cores(), psutil.virtual_memory().total, torch.__version__)
    return "|".join(map(str, (*parts, device, ranks)))


def _path(key: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "autopar" / f"local-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(key: str) -> ClusterSpec | None:
    """The kept cluster, or None where there is none that can be read."""
    try:
        kept = msgspec.json.decode(_path(key).read_bytes(), type=_Cached)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return kept.cluster if kept.key == key else None


def _write(key: str, cluster: ClusterSpec) -> None:
    """Keep a cluster, whole or not at all; without a place to write, it is measured again next time."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.partial")
        scratch.write_bytes(msgspec.json.encode(_Cached(key=key, cluster=cluster)))
        scratch.replace(path)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fingerprint() -> Fingerprint:
    """The hardware that a profile measured here holds for."""
    memory = round(psutil.virtual_memory().total / 2**30)
    if torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
        return Fingerprint(kind="cuda", device=name, cores=_cores(), memory_gib=memory, gpus=count)
    return Fingerprint(kind="cpu", device=_cpu(), cores=_cores(), memory_gib=memory)


# ---- descriptions


def _cpu_cluster(ranks: int) -> ClusterSpec:
    tried = min(ranks, max(2, 2 * _cores()))
    rates, link = _measure(tried)
    share = ranks / tried
    scaled = "" if share == 1 else f", scaled from {tried} ranks that shared the cores alike"
    memory = psutil.virtual_memory().total
    device = Device(
        name=f"{_cpu()}, one thread",
        memory_bytes=int(memory * (1 - HELD_BACK)) // ranks,
        peak_flops={dtype: rate / share for dtype, rate in rates.flops.items()},
        memory_bytes_per_us=rates.bytes_per_us / share,
        kernel_floor_us=rates.floor_us * share,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        source=f"measured {_today()} with {tried} ranks on {_cores()} cores{scaled}; "
        f"rates are achieved ones; {HELD_BACK:.0%} of main memory held back",
    )
    level = LinkLevel(
        name="loopback",
        size=ranks,
        latency_us=rates.latency_us * share,
        bytes_per_us=rates.link_bytes_per_us / share,
        source=link + scaled,
    )
    return _cluster(ranks, device, level, "gloo")


def _cluster(ranks: int, device: Device, level: LinkLevel, backend: str) -> ClusterSpec:
    return ClusterSpec(
        name=f"local:{ranks}",
        groups=(DeviceGroup(count=ranks, device=device),),
        levels=(level,),
        host=Host(memory_bytes=int(psutil.virtual_memory().total * (1 - HELD_BACK)) if backend == "nccl" else 0),
        backend=backend,
        date=_today(),
    )


def _today() -> str:
    return datetime.date.today().isoformat()


def _gpu_cluster(ranks: int) -> ClusterSpec:
    """GPUs of this machine: figures of the preset that matches their name, else measured, the link estimated."""
    name, total = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    preset = find_preset(name)
    if preset is not None:
        held = preset.device.memory.held_back_bytes
        device = msgspec.structs.replace(device_of(preset), memory_bytes=total - held)
        link = preset.inside
        level = LinkLevel(
            name=link.name, size=ranks, latency_us=link.latency_us, bytes_per_us=link.bytes_per_us, source=link.source
        )
        return _cluster(ranks, device, level, "nccl")
    rates = measure_rates(torch.device("cuda"))
    device = Device(
        name=name,
        memory_bytes=total - 3 * 2**29,
        peak_flops=rates.flops,
        memory_bytes_per_us=rates.bytes_per_us,
        kernel_floor_us=rates.floor_us,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        source=f"measured {_today()}; rates are achieved ones; 1.5 GiB held back",
    )
    level = LinkLevel(
        name="pcie", size=ranks, latency_us=5.7, bytes_per_us=5000.0, source="estimate: PCIe4 cards without peer access"
    )
    return _cluster(ranks, device, level, "nccl")


def find_preset(device_name: str) -> Preset | None:
    """The preset of a device as CUDA names it: the name ends in one of the preset's `matches`, as whole words."""
    return next((p for p in list_presets() if any(f" {device_name}".endswith(f" {m}") for m in p.matches)), None)


# ---- measuring


def _measure(ranks: int) -> tuple[Rates, str]:
    """Rates of one of `ranks` ranks, and the source of the link's figures."""
    if ranks == 1:
        return _measure_here(1), "one rank: no link"
    try:
        return _measure_ranks(ranks), f"measured {_today()}: gloo all-reduce of {ranks} ranks on the loopback"
    except (OSError, RuntimeError) as error:
        rates = msgspec.structs.replace(
            _measure_here(ranks), latency_us=GUESSED_LATENCY_US, link_bytes_per_us=GUESSED_BYTES_PER_US
        )
        return rates, f"estimate: gloo did not run here ({error})"


def _measure_here(ranks: int) -> Rates:
    """Rates of this process alone, as if `ranks` shared the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = measure_rates(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    share = max(1.0, ranks / _cores())
    return Rates(
        flops={dtype: rate / share for dtype, rate in alone.flops.items()},
        bytes_per_us=alone.bytes_per_us / share,
        floor_us=alone.floor_us * share,
        latency_us=0.0,
        link_bytes_per_us=GUESSED_BYTES_PER_US,
    )


def measure_rates(device: torch.device, ready: Callable[[], object] = lambda: None) -> Rates:
    """Matmul, copy and floor on one device. `ready` is called before each, for ranks to start together."""
    flops = {}
    for dtype in DTYPES:
        a, b = (torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=getattr(torch, dtype), device=device) for _ in range(2))
        ready()
        flops[dtype] = 2 * MATMUL_SIZE**3 / _seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    ready()
    copy_s = _seconds(lambda: target.copy_(source), device)
    few = torch.ones(16, device=device)
    ready()
    floor_s = _seconds(lambda: few + few, device)
    return Rates(flops=flops, bytes_per_us=2 * COPY_BYTES / copy_s / 1e6, floor_us=floor_s * 1e6)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of a call: the best interval's mean, after one call to warm up."""
    work()
    _finish(device)
    return min(_mean_s(work, device) for _ in range(INTERVALS))


def _mean_s(work: Callable[[], object], device: torch.device) -> float:
    """Mean time of a call over INTERVAL_S. Calls are doubled at first, so that reading the clock does not count."""
    count, step = 0, 1
    start = now = time.perf_counter()
    while now - start < INTERVAL_S:
        for _ in range(step):
            work()
        _finish(device)
        count += step
        now = time.perf_counter()
        if now - start < INTERVAL_S / 8:
            step *= 2
    return (now - start) / count


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure_ranks(ranks: int) -> Rates:
    """Start `ranks` processes and take the slowest one's figures. RuntimeError if they don't end well."""
    with tempfile.TemporaryDirectory(prefix="autopar-local-") as folder:
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                workers.append(_start(folder, rank, ranks))
            _await(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
        found = [msgspec.json.decode((Path(folder) / f"{r}.json").read_bytes(), type=Rates) for r in range(ranks)]
    return _slowest(found)


def _start(folder: str, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    here = str(Path(autopar.__file__).parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, env.get("PYTHONPATH", "")]))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    call = f"from autopar.cost_model.local import rank_main; rank_main({folder!r}, {rank}, {ranks})"
    return subprocess.Popen(
        [sys.executable, "-c", call],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )


def _await(workers: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all end. RuntimeError when one fails or time is up."""
    limit = time.monotonic() + LIMIT_S
    while any(worker.poll() is None for worker in workers):
        failed = next((w for w in workers if w.poll() not in (None, 0)), None)
        if failed is not None:
            break
        if time.monotonic() > limit:
            raise RuntimeError(f"no answer within {LIMIT_S:.0f} s")
        time.sleep(0.02)
    for rank, worker in enumerate(workers):
        if worker.poll() not in (None, 0):
            said = worker.communicate()[1].decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"rank {rank} ended with {worker.returncode}: {said[-1] if said else ''}")


def _slowest(found: list[Rates]) -> Rates:
    return Rates(
        flops={dtype: min(r.flops[dtype] for r in found) for dtype in found[0].flops},
        bytes_per_us=min(r.bytes_per_us for r in found),
        floor_us=max(r.floor_us for r in found),
        latency_us=max(r.latency_us for r in found),
        link_bytes_per_us=min(r.link_bytes_per_us for r in found),
    )


def rank_main(folder: str, rank: int, ranks: int) -> None:
    """What one measuring process does: rates beside the others, then all-reduces with them; leaves `RANK.json`."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=LIMIT_S)
    meeting = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timeout)
    rates = measure_rates(torch.device("cpu"), dist.barrier)
    small, large = (
        statistics.median(_all_reduce_us(nbytes, calls))
        for nbytes, calls in ((SMALL_BYTES, SMALL_CALLS), (LARGE_BYTES, LARGE_CALLS))
    )
    latency, bandwidth = link_figures(ranks, small, large)
    full = msgspec.structs.replace(rates, latency_us=latency, link_bytes_per_us=bandwidth)
    (Path(folder) / f"{rank}.json").write_bytes(msgspec.json.encode(full))
    dist.barrier()
    dist.destroy_process_group()


def _all_reduce_us(nbytes: int, calls: int) -> Iterator[float]:
    """µs of an all-reduce of `nbytes`, one mean for each of BATCHES batches, after one to warm up."""
    data = torch.zeros(nbytes // 4)
    dist.all_reduce(data)
    for _ in range(BATCHES):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(data)
        yield (time.perf_counter() - start) / calls * 1e6


def link_figures(ranks: int, small_us: float, large_us: float) -> tuple[float, float]:
    """(α, β) of the ring formula from the times of all-reduces of SMALL_BYTES and LARGE_BYTES.

    β = 2(n−1)/n·(V₂−V₁)/(t₂−t₁); α = (t₁ − 2(n−1)/n·V₁/β)/(2(n−1)).
    """
    factor = 2 * (ranks - 1)
    bandwidth = factor / ranks * (LARGE_BYTES - SMALL_BYTES) / max(large_us - small_us, 1.0)
    latency = small_us / factor - SMALL_BYTES / ranks / bandwidth
    return (max(latency, 0.0) if math.isfinite(latency) else 0.0), bandwidth
