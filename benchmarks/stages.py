"""How long does the assignment of blocks to stages take?

    PYTHONPATH=. .venv/bin/python benchmarks/stages.py [--repeat 5]

Prints a line for each problem: median milliseconds, step, bound. Columns are those of a transformer block with more and
more recomputed, with whole and with sharded states; limits lie between what all-kept and all-recomputed need.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from autopar.ir.stages import Column, Run, Stage, StageProblem, in_flight
from autopar.solver import solve_stages, stages_bound_us

MIB = 1 << 20


def block_columns(count: int, *, size: float = 1.0) -> tuple[Column, ...]:
    """Every second column has sharded states: less resident, more time, less to finish. Later ones recompute more."""
    steps = max(1, (count + 1) // 2 - 1)
    found = []
    for i in range(count):
        level, sharded = (i // 2) / steps, i % 2
        found.append(
            Column(
                name=f"level {i // 2}, {'sharded' if sharded else 'whole'}",
                forward_us=size * (1000.0 + 37.0 * sharded),
                backward_us=size * (2000.0 + 41.0 * sharded + 900.0 * level**1.7 + 13.0 * (level > 0)),
                saved_bytes=int(size * 311 * MIB * (1.03 - level)),
                resident_bytes=int(size * (1500 - 1300 * sharded) * MIB),
                transient_bytes=int(size * (180 + 220 * (level > 0) + 90 * sharded) * MIB),
                finish_us=size * (5200.0 - 3100.0 * sharded),
            )
        )
    return tuple(found)


def edge_columns(size: float) -> tuple[Column, ...]:
    """Embedding or head: kept or recomputed."""
    kept = block_columns(3, size=size)
    return (kept[0], kept[2])


def problem(
    name: str, runs: Sequence[Run], stages: int, micro_batches: int, *, tightness: float = 0.5, uneven: bool = False
) -> StageProblem:
    """1F1B. `tightness` 0: everything fits; 1: barely the smallest columns on the first stage."""
    flights = in_flight("1f1b", stages=stages, micro_batches=micro_batches)
    layers = sum(r.count for r in runs) / stages
    most = layers * (1500 + 320 * flights[0]) * MIB
    least = (layers + 2) * (250 + 20 * flights[0]) * MIB
    limit = most - tightness * (most - least)
    return StageProblem(
        name=name,
        runs=tuple(runs),
        stages=tuple(
            Stage(
                limit_bytes=int(limit * (0.8 if uneven and s % 4 == 3 else 1.0)),
                fixed_bytes=700 * MIB,
                speed=1.4 if uneven and s >= stages // 2 else 1.0,
                in_flight=flights[s],
            )
            for s in range(stages)
        ),
        micro_batches=micro_batches,
        boundary_us=120.0,
    )


def problems() -> list[StageProblem]:
    """Sizes of published models and pipelines."""
    head = Run(name="head", count=1, columns=edge_columns(0.8))
    embedding = Run(name="embedding", count=1, columns=edge_columns(0.2))

    def layers(count: int, columns: int = 8, size: float = 1.0) -> Run:
        return Run(name="layer", count=count, columns=block_columns(columns, size=size))

    plain = (embedding, layers(96), head)
    large = (embedding, layers(126), head)
    mixed = (embedding, layers(3, size=0.7), layers(58), head)
    found = [problem(f"96 layers, tightness {t}", plain, 16, 64, tightness=t) for t in (0.0, 0.5, 0.8, 0.95)]
    found += [problem(f"126 layers, tightness {t}", large, 64, 128, tightness=t) for t in (0.0, 0.5, 0.8, 0.95)]
    found += [
        problem("126 layers, p = m", large, 64, 64, tightness=0.7),
        problem("126 layers, uneven", large, 64, 128, tightness=0.7, uneven=True),
        problem("96 layers, uneven", plain, 16, 64, tightness=0.7, uneven=True),
        problem("96 layers", plain, 1, 16, tightness=0.7),
        problem("96 layers", plain, 2, 16, tightness=0.7),
        problem("96 layers", plain, 4, 16, tightness=0.7),
        problem("96 layers", plain, 8, 32, tightness=0.7),
        problem("96 layers, m = p", plain, 8, 8, tightness=0.7),
        problem("3 + 58 layers", mixed, 16, 64, tightness=0.7),
        problem("24 + 24 layers", (layers(24, 4), layers(24, 8, 1.3)), 8, 32, tightness=0.7),
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    print(f"{'problem':40} {'p':>3} {'m':>4} {'ms':>8} {'bound µs':>9} {'step, ms':>10}  status")
    for case in problems():
        times, quick = [], []
        for _ in range(repeat):
            start = time.perf_counter()
            solution = solve_stages(case)
            middle = time.perf_counter()
            stages_bound_us(case)
            times.append(middle - start)
            quick.append(time.perf_counter() - middle)
        assert solution is not None
        print(
            f"{case.name:40} {len(case.stages):3} {case.micro_batches:4} {1e3 * statistics.median(times):8.1f} "
            f"{1e6 * statistics.median(quick):9.0f} {solution.step_us / 1e3:10.2f}  {solution.status.name.lower()}"
        )


if __name__ == "__main__":
    main()
