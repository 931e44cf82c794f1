"""Collectives through shared memory beside gloo's and beside a plain copy of the same traffic.

    python benchmarks/collectives.py [--ranks 2 4] [--kib 4 64 1024 16384 262144] [--rounds 9]

Bytes are of the larger side of a collective on one rank, float32. A turn is one call after a barrier, its time the
slowest rank's; the three sides take turns; a figure is the median. The copy is a plain one of as many bytes, by every
rank at once. Outputs are there. On a busy machine ranks wait for each other's turns on the cores: --cpu counts the
processor time of all threads of a rank instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.runtime.launch import launch
from autopar.runtime.shared import SharedGroup, shared_group
from autopar.runtime.torch_private import default_store

Side = Callable[[], object]
LIMIT_S = 60.0


def sides(group: SharedGroup, nbytes: int) -> dict[str, tuple[Side, Side, Side]]:
    """Collective -> (ours, gloo's, the copy)."""
    n = group.size
    whole = torch.ones(n, max(1, nbytes // 4 // n))
    piece, out, part = whole[0].clone(), torch.empty_like(whole), torch.empty_like(whole[0])

    def copy() -> None:
        out.copy_(whole)

    def gloo_scatter() -> None:
        dist.reduce_scatter_single(part, whole.view(-1))

    return {
        "all-reduce": (lambda: group.all_reduce(whole, out), lambda: dist.all_reduce(out), copy),
        "all-gather": (
            lambda: group.all_gather(piece, out), lambda: dist.all_gather_single(out.view(-1), piece), copy,
        ),
        "reduce-scatter": (lambda: group.reduce_scatter(whole, part), gloo_scatter, copy),
        "all-to-all": (
            lambda: group.all_to_all(whole, out), lambda: dist.all_to_all_single(out.view(-1), whole.view(-1)), copy,
        ),
    }  # fmt: skip


def medians(group: SharedGroup, turns: tuple[Side, ...], rounds: int, clock: Callable[[], float]) -> list[float]:
    """Median seconds of each side, of the slowest rank in each turn."""
    mine = torch.empty(rounds, len(turns), dtype=torch.float64)
    for turn in range(rounds + 2):
        for i, side in enumerate(turns):
            group.barrier()
            start = clock()
            side()
            if turn >= 2:
                mine[turn - 2, i] = clock() - start
    group.all_reduce(mine, mine, largest=True)
    return [statistics.median(column.tolist()) for column in mine.unbind(1)]


def measure(kib: list[int], rounds: int, cpu: bool) -> list[tuple[str, int, list[float]]]:
    """On every rank: (collective, bytes, seconds of ours, gloo's, the copy)."""
    ranks = list(range(dist.get_world_size()))
    group, why = shared_group(default_store(), ranks, dist.get_rank(), LIMIT_S)
    if group is None:
        raise RuntimeError(why)
    found = []
    for size in kib:
        nbytes = size * 1024
        few = max(3, min(rounds * 8, rounds * (1 << 20) // nbytes)) if nbytes < 1 << 22 else rounds
        for name, turns in sides(group, nbytes).items():
            found.append((name, nbytes, medians(group, turns, few, time.process_time if cpu else time.perf_counter)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 64, 1024, 16384, 262144])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    given = (asked.kib, asked.rounds, asked.cpu)
    heads = f"{'ours µs':>10} {'gloo µs':>10} {'ours GB/s':>10} {'× gloo':>7} {'of a copy':>9}"
    for ranks in asked.ranks:
        print(f"{ranks} ranks\n  {'':15} {'KiB':>8} {heads}")
        for name, nbytes, (ours, gloo, copied) in launch(measure, ranks, given, timeout_s=600):
            print(
                f"  {name:15} {nbytes // 1024:8} {ours * 1e6:10.0f} {gloo * 1e6:10.0f} {nbytes / ours / 1e9:10.2f} "
                f"{gloo / ours:7.1f} {copied / ours:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
