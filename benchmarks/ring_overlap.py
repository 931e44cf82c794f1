"""Does a ring's transfer run beside its computation? Attention on 2 gloo processes, causal: the second rank works on a
block in each of two rounds, and gets the second block while it works on the first.

    python benchmarks/ring_overlap.py [--keys 2048] [--heads 8] [--size 64]

Prints the least ms of some calls, on the second rank: of the two blocks alone, of the transfer alone, and of the ring.
Beside each other the ring takes about max(blocks, transfer) where a core is free for each rank and for gloo.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from autopar.ir.mesh import Axis, Mesh
from autopar.runtime.groups import communicator
from autopar.runtime.launch import launch
from autopar.runtime.local_ops import ring_attention

CALLS = 40


def measure(keys: int, heads: int, size: int) -> dict[str, float]:
    """ms on the last rank."""
    torch.set_num_threads(1)
    rt = communicator(Mesh(axes=(Axis(name="cp", size=2),)))
    q, k, v = (torch.randn(1, heads, keys // 2, size) for _ in range(3))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def blocks() -> None:
        if rt.rank:
            attend(q, k, v, 0.0, True)
            attend(q, k, v, 0.0, False)

    works: dict[str, Callable[[], object]] = {
        "blocks": blocks,
        "transfer": lambda: rt.pass_on(torch.stack([k, v]), "cp")(),
        "ring": lambda: ring_attention(rt, "cp", keys, 1, q, k, v, 0.0, True),
    }
    found = dict.fromkeys(works, float("inf"))
    for _ in range(CALLS):
        for name, work in works.items():
            rt.barrier()
            start = time.perf_counter()
            work()
            found[name] = min(found[name], 1e3 * (time.perf_counter() - start))
    return {name: float(rt.all_reduce(torch.tensor(ms if rt.rank else 0.0), "cp")) for name, ms in found.items()}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    given = parser.parse_args()
    found = launch(measure, 2, (given.keys, given.heads, given.size), timeout_s=300)
    print(", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()))


if __name__ == "__main__":
    main()
