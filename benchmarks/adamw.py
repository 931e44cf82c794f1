"""AdamW beside torch's fused AdamW on a CPU, and beside what the memory allows.

    python benchmarks/adamw.py [--rounds 15] [--threads 1 2] [--million 64]

A turn is one optimizer step over tensors that no cache holds. All sides take turns; a figure is the median of its
turns. The bound is the bytes that a step has to read and write over the best that this run reached in place (x *= c and
x += y, median of their turns among the others').
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar import native
from autopar.optim import AdamW

TENSORS = 8


def parameters(numel: int, dtype: torch.dtype) -> list[nn.Parameter]:
    held = [nn.Parameter(torch.randn(numel // TENSORS).to(dtype)) for _ in range(TENSORS)]
    for p in held:
        p.grad = torch.randn_like(p)
    return held


def sides(numel: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (one turn, bytes that it reads and writes)."""
    fp32, bf16 = torch.float32, torch.bfloat16
    x, y = torch.randn(numel), torch.randn(numel)

    def ours(dtype: torch.dtype, state: torch.dtype, **extras: Any) -> tuple[Callable[[], Any], int]:
        held = parameters(numel, dtype)
        if extras.pop("copy", False):
            extras["copies"] = {p: torch.empty_like(p, dtype=bf16) for p in held}
        step = AdamW(held, state_dtype=state, **extras).step
        traffic = 3 * dtype.itemsize + 4 * state.itemsize + (2 if "copies" in extras else 0)
        return step, traffic * numel

    return {
        "x *= c": (lambda: x.mul_(1.0), 8 * numel),
        "x += y": (lambda: x.add_(y), 12 * numel),
        "torch, fp32": (torch.optim.AdamW(parameters(numel, fp32), fused=True).step, 28 * numel),
        "torch, bf16": (torch.optim.AdamW(parameters(numel, bf16), fused=True).step, 14 * numel),
        "fp32": ours(fp32, fp32),
        "fp32, bf16 copy": ours(fp32, fp32, copy=True),
        "fp32, bf16 moments": ours(fp32, bf16),
        "fp32, bf16 moments at random": ours(fp32, bf16, stochastic_rounding=True),
        "bf16, fp32 moments at random": ours(bf16, fp32, stochastic_rounding=True),
        "bf16": ours(bf16, bf16),
    }


def medians(turns: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each, their turns interleaved."""
    taken: list[list[float]] = [[] for _ in turns]
    for turn in range(rounds + 2):
        for mine, run in zip(taken, turns, strict=True):
            start = time.perf_counter()
            run()
            if turn >= 2:
                mine.append(time.perf_counter() - start)
    return [statistics.median(t) for t in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--million", type=int, default=64, help="elements, in millions")
    asked = parser.parse_args()
    numel = asked.million * 10**6
    print(f"kernels: {native.found().kernels.target if native.kernels() else native.found().reason}")
    for threads in asked.threads:
        torch.set_num_threads(threads)
        todo = sides(numel)
        seconds = dict(zip(todo, medians([run for run, _ in todo.values()], asked.rounds), strict=True))
        best = max(todo[name][1] / seconds[name] for name in ("x *= c", "x += y"))
        print(f"{threads} threads, memory at {best / 1e9:.1f} GB/s")
        print(
            f"  {'':30} {'M elements/s':>12} {'GB/s':>6} {'of the bound':>12} {'× torch fp32':>12} {'× ours fp32':>11}"
        )
        for name, (_, traffic) in todo.items():
            took = seconds[name]
            print(
                f"  {name:30} {numel / took / 1e6:12.0f} {traffic / took / 1e9:6.1f} {traffic / took / best:12.2f} "
                f"{seconds['torch, fp32'] / took:12.2f} {seconds['fp32'] / took:11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
