"""A data-parallel step of a model of 100 million parameters beside DistributedDataParallel.

    python benchmarks/data_parallel.py [--ranks 2] [--layers 24] [--rows 64] [--rounds 7]

Both train the same layers on the same ranks, in turns: forward, backward with the gradients joined, and the update by
AdamW (torch's fused one for DDP, autopar.optim's for the compiled module). A figure is the median of the slowest rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.optim import AdamW

WIDTH = 2048
Step = Callable[[], tuple[float, float]]


class Layers(nn.Module):
    """Linear layers in a row."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the result."""
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return (x**2).mean()


def stepping(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    """One step: seconds until the gradients are there, and of the update."""

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        start = time.perf_counter()
        module(x).backward()
        there = time.perf_counter()
        optimizer.step()
        return there - start, time.perf_counter() - there

    return step


def measure(layers: int, rows: int, rounds: int) -> list[list[float]]:
    """On every rank: per side (DDP, ours) median seconds until the gradients are there, and of the update."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model, x = Layers(layers), torch.randn(rows, WIDTH)
    options = autopar.Options(pins={"dp": ranks, "zero": 0})
    ours = autopar.compile(model, autopar.ClusterSpec.local(ranks), example_inputs={"x": x}, options=options)
    peer = DistributedDataParallel(model, gradient_as_bucket_view=True)
    mine = x.chunk(ranks)[dist.get_rank()]
    steps = [
        stepping(peer, torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True), mine),
        stepping(ours, AdamW(ours.parameters(), lr=1e-4), x),
    ]
    taken = torch.zeros(rounds, len(steps), 2, dtype=torch.float64)
    for turn in range(-2, rounds):
        for i, step in enumerate(steps):
            dist.barrier()
            seconds = torch.tensor(step(), dtype=torch.float64)
            if turn >= 0:
                taken[turn, i] = seconds
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    medians: list[list[float]] = taken.median(0).values.tolist()
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=64, help="of the whole batch")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    arguments = (asked.layers, asked.rows, asked.rounds)
    (ddp, ddp_update), (ours, update) = autopar.launch(measure, asked.ranks, arguments, timeout_s=900)
    print(f"{asked.ranks} ranks, {asked.layers * WIDTH * (WIDTH + 1) / 1e6:.0f} million parameters, {asked.rows} rows")
    print(f"{'':22} {'DDP ms':>8} {'ours ms':>8} {'ours/DDP':>8}")
    rows = (("gradients", ddp, ours), ("update", ddp_update, update), ("step", ddp + ddp_update, ours + update))
    for name, theirs, mine in rows:
        print(f"{name:22} {theirs * 1e3:8.0f} {mine * 1e3:8.0f} {mine / theirs:8.2f}")


if __name__ == "__main__":
    main()
