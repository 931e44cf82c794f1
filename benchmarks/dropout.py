"""What plan-independent dropout costs beside torch's own, forward and backward, by dtype, size and threads.

    python benchmarks/dropout.py [--rounds 40] [--threads 1 2]

A turn is one call of the op and one of its backward. All sides take turns on the same tensors; a figure is the median
of its turns. torch's sides are `native_dropout` with its backward, as a captured graph calls them, and `F.dropout` with
autograd.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from autopar import native
from autopar.runtime import draw
from autopar.runtime.philox import Stream, space

SHAPES = ((64, 256), (512, 1024), (2048, 1024), (4096, 4096))
P = 0.1


def ours(x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    shape = tuple(x.shape)
    piece, scale = space(shape, (0, 0), shape), draw.scale_of(P)

    def once() -> None:
        _, mask = draw.dropout(Stream(1, 2), piece, x, P)
        draw.dropout_backward(gradient, mask, scale)

    return once


def op(x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    def once() -> None:
        _, mask = torch.native_dropout(x, P, True)
        torch.ops.aten.native_dropout_backward(gradient, mask, 1 / (1 - P))

    return once


def eager(x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    leaf = x.clone().requires_grad_()

    def once() -> None:
        torch.autograd.grad(F.dropout(leaf, P), leaf, gradient)

    return once


def medians(sides: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each, their turns interleaved."""
    taken: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 3):
        for mine, side in zip(taken, sides, strict=True):
            start = time.perf_counter()
            side()
            if turn >= 3:
                mine.append(time.perf_counter() - start)
    return [statistics.median(t) for t in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    print(f"kernels: {native.found().kernels.target if native.kernels() else native.found().reason}")
    heads = f"{'ours µs':>10} {'op µs':>10} {'eager µs':>10} {'ours/op':>8} {'ours/eager':>10}"
    print(f"{'dtype':9} {'shape':>12} {'threads':>7} {heads}")
    for threads in asked.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                x, gradient = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
                rounds = asked.rounds if x.numel() < 2**22 else max(asked.rounds // 4, 5)
                mine, native_op, plain = medians([ours(x, gradient), op(x, gradient), eager(x, gradient)], rounds)
                name = f"{str(dtype).removeprefix('torch.'):9} {'x'.join(map(str, shape)):>12} {threads:7}"
                times = " ".join(f"{t * 1e6:10.1f}" for t in (mine, native_op, plain))
                print(f"{name} {times} {mine / native_op:8.2f} {mine / plain:10.2f}", flush=True)


if __name__ == "__main__":
    main()
