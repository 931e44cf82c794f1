"""Small random stage problems, and their optimum by trying everything."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from autopar.ir.stages import (
    Assignment,
    Column,
    Run,
    Stage,
    StageProblem,
    device_cuts,
)


def random_column(rng: random.Random, name: str, coarse: bool) -> Column:
    """`coarse`: numbers from few values, so that ties and columns on one line are common."""
    most = 4 if coarse else 1000
    return Column(
        name=name,
        forward_us=rng.randint(1, most),
        backward_us=rng.randint(1, 2 * most),
        saved_bytes=rng.randint(0, most),
        resident_bytes=rng.choice([0, rng.randint(0, most)]),
        transient_bytes=rng.choice([0, 0, rng.randint(0, most)]),
        finish_us=rng.choice([0, rng.randint(0, most), rng.randint(0, 4 * most)]),
    )


def random_stage_problem(seed: int, *, chunks: int = 1) -> StageProblem:
    """Up to 4 stages, 7 instances, 3 columns. Limits lie around what the instances need, so that many bind."""
    rng = random.Random(seed)
    coarse = rng.random() < 0.5
    stages = rng.randint(1, 4 if chunks == 1 else 2)
    instances = rng.randint(max(1, stages * chunks - (rng.random() < 0.1)), 7)
    counts: list[int] = []
    while sum(counts) < instances:
        counts.append(rng.randint(1, instances - sum(counts)))
    runs = tuple(
        Run(
            name=f"r{r}",
            count=n,
            columns=tuple(random_column(rng, f"c{c}", coarse) for c in range(rng.randint(1, 3))),
        )
        for r, n in enumerate(counts)
    )
    micro_batches = rng.randint(1, 6)
    alike = rng.random() < 0.3
    speeds = [rng.choice([1.0, 0.5, 0.75, 2.25]) for _ in range(stages)]
    scale = 3 if coarse else 750
    need = scale * instances / stages * rng.choice([0.3, 0.6, 1.0, 1.5, 4.0]) * (1 if alike else rng.uniform(0.8, 1.6))
    return StageProblem(
        name=f"random {seed}",
        runs=runs,
        stages=tuple(
            Stage(
                limit_bytes=int(need * (1 if alike else rng.uniform(0.6, 1.5))),
                fixed_bytes=rng.choice([0, int(need / 10)]),
                speed=1.0 if alike else speeds[s],
                in_flight=min(micro_batches, stages - s) if rng.random() < 0.7 else rng.randint(1, 7) / 3,
            )
            for s in range(stages)
        ),
        micro_batches=micro_batches,
        boundary_us=rng.choice([0, 1, 20]),
        boundary_hidden=rng.random() < 0.5,
        chunks=chunks,
        ramp=rng.choice([None, None, 0.0, 1.0, 0.4]),
    )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` numbers, 0 or more."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def line_cuts(problem: StageProblem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """[stage][run] of every cut into stages of at least one instance."""
    run_of = [r for r, run in enumerate(problem.runs) for _ in range(run.count)]
    runs = range(len(problem.runs))
    for places in itertools.combinations(range(1, len(run_of)), len(problem.stages) - 1):
        ends = (0, *places, len(run_of))
        yield tuple(
            tuple(run_of[a:b].count(r) for r in runs) for a, b in itertools.pairwise(ends)
        )  # fmt: skip


def all_assignments(problem: StageProblem) -> Iterator[Assignment]:
    """Every assignment, a stage at a time."""
    if problem.chunks > 1:
        fixed = device_cuts(problem)
        cuts = [fixed] if fixed else []
    elif problem.cuts is not None:
        cuts = [problem.cuts]
    else:
        cuts = list(line_cuts(problem))
    for cut in cuts:
        ways = [
            [
                tuple(mix)
                for mix in itertools.product(
                    *(compositions(n, len(run.columns)) for n, run in zip(held, problem.runs, strict=True))
                )
            ]
            for held in cut
        ]
        for counts in itertools.product(*ways):
            yield Assignment(counts=counts)


class BruteForce:
    """The least step and the least peak under the limits, and the least peak without; inf where there is none.

    Priced here, independently of the referee, from sums per stage; `best` is what the referee is asked about.
    """

    def __init__(self, problem: StageProblem) -> None:
        self.step_us = math.inf
        self.peak_bytes: float = math.inf
        self.needed_bytes: float = math.inf
        self.step_at_peak_us = math.inf
        self.best: Assignment | None = None
        seen: dict[tuple[int, tuple[tuple[int, ...], ...]], tuple[float, float, float]] = {}
        for assignment in all_assignments(problem):
            rows = []
            for s, counts in enumerate(assignment.counts):
                if (s, counts) not in seen:
                    seen[s, counts] = stage_numbers(problem, s, counts)
                rows.append(seen[s, counts])
            self._take(problem, assignment, rows)

    def _take(self, problem: StageProblem, assignment: Assignment, rows: list[tuple[float, float, float]]) -> None:
        peak = max(used for _, _, used in rows)
        self.needed_bytes = min(self.needed_bytes, peak)
        if any(used > stage.limit_bytes for (_, _, used), stage in zip(rows, problem.stages, strict=True)):
            return
        step = step_of(problem, rows)
        if step < self.step_us:
            self.step_us, self.best = step, assignment
        if (peak, step) < (self.peak_bytes, self.step_at_peak_us):
            self.peak_bytes, self.step_at_peak_us = peak, step


def stage_numbers(problem: StageProblem, s: int, counts: tuple[tuple[int, ...], ...]) -> tuple[float, float, float]:
    """(time, finish, bytes) of a stage."""
    stage = problem.stages[s]
    busy = finish = saved = 0.0
    resident = transient = 0
    for run, row in zip(problem.runs, counts, strict=True):
        for column, n in zip(run.columns, row, strict=True):
            if n:
                busy += n * (column.forward_us + column.backward_us) * stage.speed
                finish += n * column.finish_us * stage.speed
                saved += n * column.saved_bytes
                resident += n * column.resident_bytes
                transient = max(transient, column.transient_bytes)
    used = stage.fixed_bytes + resident + transient + math.ceil(round(saved * stage.in_flight, 6))
    return busy, finish, used


def step_of(problem: StageProblem, rows: list[tuple[float, float, float]]) -> float:
    """The step by its definition, boundaries counted one by one."""
    p, v, m = len(rows), problem.chunks, problem.micro_batches
    ramp = problem.ramp if problem.ramp is not None else 1 / v
    exposed = [0.0] * p
    if not problem.boundary_hidden and p > 1:
        for part in range(p * v - 1):  # between part and part + 1: one sends forward, the other back
            exposed[part % p] += problem.boundary_us
            exposed[(part + 1) % p] += problem.boundary_us
    slowest = max(t + x for (t, _, _), x in zip(rows, exposed, strict=True))
    total = sum(t for t, _, _ in rows)
    return (m - ramp) * slowest + ramp * total + 2 * (p - 1) * problem.boundary_us + max(f for _, f, _ in rows)
