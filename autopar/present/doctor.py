"""What is installed here, and whether ranks reach each other."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from autopar.errors import RankError
from autopar.present.words import bytes_words, time_words

Fact = tuple[str, bool | None, str]
"""(what, True fine, False missing and needed, None neither; detail)."""

NEEDED = ("torch", "numpy", "networkx", "highspy", "pulp", "msgspec", "rich", "cyclopts", "psutil", "safetensors")
OPTIONAL = {
    "transformers": "catalogue and Hugging Face models: pip install 'autopar[hf]'",
    "gguf": "GGUF weights: pip install 'autopar[hf]'",
}
TORCH = "2.13"
RANKS_LIMIT_S = 60.0


def facts(
    launch: Callable[..., Any], ranks: int, kernels: tuple[bool, str], carrier: Callable[[], str]
) -> Iterator[Fact]:
    """Everything, quickest first.

    Args:
        launch: `launch(function, ranks, arguments, timeout_s=...)` starts ranks on this machine.
        kernels: whether our C++ kernels are loaded; which, or why not.
        carrier: on every rank, what tensors between them go through.
    """
    yield "python", True, f"{platform.python_version()} on {platform.platform(terse=True)}"
    yield from _packages()
    yield from _machine()
    yield from _torch()
    loaded, detail = kernels
    yield "own kernels", True if loaded else None, detail if loaded else f"PyTorch's are used: {detail}"
    yield _ranks(launch, ranks, carrier)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Fact]:
    yield "autopar", True, _version("autopar") or "run from a source tree"
    for package in NEEDED:
        found = _version(package)
        fine = found is not None and (package != "torch" or found.startswith(TORCH + "."))
        wanted = f" (supported: {TORCH})" if package == "torch" and not fine else ""
        yield package, fine, (found or "not installed") + wanted
    for package, use in OPTIONAL.items():
        found = _version(package)
        yield package, True if found else None, found or f"not installed; needed for {use}"


def _machine() -> Iterator[Fact]:
    import psutil

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", True, f"{cores}"
    yield "memory", True, f"{bytes_words(memory.available)} free of {bytes_words(memory.total)}"


def _torch() -> Iterator[Fact]:
    import torch

    backends = [b for b in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{b}_available")()]
    yield "torch.distributed", "gloo" in backends, ", ".join(backends) or "not available in this build"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            yield f"GPU {i}", True, f"{p.name}, {bytes_words(p.total_memory)}"
    else:
        driver = "driver found, but not usable by this build of torch" if shutil.which("nvidia-smi") else "no driver"
        yield "GPU", None, f"{driver}; ranks run on the CPU"


def _ranks(launch: Callable[..., Any], ranks: int, carrier: Callable[[], str]) -> Fact:
    """Start ranks and let each greet the others; under torchrun, this run's own ranks."""
    if "WORLD_SIZE" in os.environ:
        ranks, seen, us, carried = greet(carrier)
    else:
        try:
            ranks, seen, us, carried = launch(greet, ranks, (carrier,), timeout_s=RANKS_LIMIT_S)
        except RankError as error:
            return "ranks", False, " ".join(str(error).split())[:300]
    return (
        "ranks",
        len(seen) == ranks,
        f"{len(seen)} of {ranks} see each other ({', '.join(seen)}); {time_words(us)} a greeting; "
        f"tensors on CPUs go through {carried}",
    )


def greet(carrier: Callable[[], str]) -> tuple[int, list[str], float, str]:
    """On every rank: (how many there should be, `rank@host` of those that answered, µs of an all-gather of names, what
    tensors go through)."""
    import torch.distributed as dist

    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, "")
    start = time.perf_counter()
    dist.all_gather_object(names, f"{dist.get_rank()}@{socket.gethostname()}")
    us = (time.perf_counter() - start) * 1e6
    result = dist.get_world_size(), [n for n in names if n], us, carrier()
    if mine:
        dist.destroy_process_group()
    return result
