"""Which blocks go to which pipeline stage, and how each is run there, as plain numbers.

A model is *runs* of equal instances in model order. Each instance takes one *column*: one way to run its block
(layouts, what is kept, recomputed or offloaded), priced. Stage s holds instances that follow one another, at least one;
with n[r, c] of them from run r in column c it is busy, per micro-batch,

    T_s = speed_s · Σ n·(forward + backward)

and holds `used_bytes` = fixed_s + Σ n·resident + in_flight_s · Σ n·saved + the largest transient among its columns.
With m micro-batches and p stages the step takes

    step = (m − ramp) · max_s (T_s + x_s)  +  ramp · Σ_s T_s  +  2·(p − 1)·boundary  +  max_s finish_s

- ramp = 1 is (m − 1)·T* + Σ T_s: the slowest stage sets the pace, and the first micro-batch passes all stages, forward
  and backward. It holds for GPipe and 1F1B. An interleaved schedule of v chunks fills and drains v times as fast:
  m·T* + (p − 1)·T*/v with equal stages (Narayanan et al., arXiv 2104.04473, section 2.2), which is ramp = 1/v. Where
  backwards are in halves the second half, a share w of T, fills waits: with equal stages zb-h1 takes m·T* +
  (p − 1)·(1 − 2·w)·T* (arXiv 2401.10241, table 1), which is ramp = 1 − 2·w.
- Filling and draining wait for each boundary once in each direction. If transfers can't hide behind computation
  (`boundary_hidden` false) a stage also pays for its own at the pace: x_s = boundary for each of its sides, else 0.
- finish_s = speed_s · Σ n·finish: what a stage does once a step after its last backward, with nothing to hide behind.
  The first stage ends its last backward when the pipeline has drained, others sooner, but the gradient's norm
  (clipping) and the loss scale are known only when all have, and the optimizer waits for them: so the longest one is
  added whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from autopar.ir.solution import Status

WHOLE_BYTE = 1 / 256
"""Saved bytes times a fractional `in_flight` are rounded up to whole bytes, after taking off this much: float noise."""


class StageObjective(Enum):
    """What to minimise. MEMORY: the largest used bytes of a stage, and among equals the step."""

    STEP = "step"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One way to run one instance of a block.

    Attributes:
        forward_us, backward_us: per micro-batch, recomputation and communication inside included.
        saved_bytes: kept from forward to backward, per micro-batch in flight.
        resident_bytes: weights, gradients and optimizer state.
        transient_bytes: held beside all the rest while it runs; of a stage's columns the largest counts.
        finish_us: once a step: gradient synchronisation and optimizer, as far as they can't hide.
    """

    name: str
    forward_us: float
    backward_us: float
    saved_bytes: int = 0
    resident_bytes: int = 0
    transient_bytes: int = 0
    finish_us: float = 0.0

    def __post_init__(self) -> None:
        for us in (self.forward_us, self.backward_us, self.finish_us):
            if not (us >= 0 and math.isfinite(us)):
                raise ValueError(f"column {self.name}: {us} µs: wanted a finite time, 0 or more")
        if min(self.saved_bytes, self.resident_bytes, self.transient_bytes) < 0:
            raise ValueError(f"column {self.name}: bytes must not be negative")

    @property
    def busy_us(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_us + self.backward_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` equal instances that follow one another in the model, and the columns each may take."""

    name: str
    count: int
    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if self.count < 1 or not self.columns:
            raise ValueError(f"run {self.name}: {self.count} instances, {len(self.columns)} columns: wanted 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A group of equal devices that holds one part of the model.

    Attributes:
        limit_bytes: of one device.
        fixed_bytes: held whatever is placed here.
        speed: multiplies the times of columns; 1.0 where the columns were priced, more on slower devices.
        in_flight: micro-batches whose saved bytes it holds at most (`in_flight`).
    """

    limit_bytes: int
    fixed_bytes: int = 0
    speed: float = 1.0
    in_flight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise ValueError(f"stage speed {self.speed}: wanted a finite factor above 0")
        if not (self.in_flight >= 0 and math.isfinite(self.in_flight)):
            raise ValueError(f"stage with {self.in_flight} micro-batches in flight: wanted a finite number, 0 or more")
        if min(self.limit_bytes, self.fixed_bytes) < 0:
            raise ValueError("stage: bytes must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """See the module's docstring.

    Attributes:
        boundary_us: one transfer of one micro-batch between two stages, in one direction.
        chunks: parts of the model on each stage. More than 1: the model is cut as `even_split` says, and a stage holds
            parts s, p + s, 2·p + s, …; columns are still free.
        cuts: [stage][run]: the instances that each stage holds, if that is decided; with one chunk only.
        ramp: see the module; 0 (no bubble) to 1. None: 1 / chunks.
        schedule: its name; "": 1F1B, or interleaved with several chunks.
    """

    name: str
    runs: tuple[Run, ...]
    stages: tuple[Stage, ...]
    micro_batches: int = 1
    boundary_us: float = 0.0
    boundary_hidden: bool = True
    chunks: int = 1
    cuts: tuple[tuple[int, ...], ...] | None = None
    ramp: float | None = None
    schedule: str = ""
    objective: StageObjective = StageObjective.STEP

    def __post_init__(self) -> None:
        if not self.runs or not self.stages:
            raise ValueError(f"{self.name}: {len(self.runs)} runs, {len(self.stages)} stages: wanted 1 or more of each")
        if min(self.micro_batches, self.chunks) < 1:
            raise ValueError(
                f"{self.name}: {self.micro_batches} micro-batches, {self.chunks} chunks: wanted 1 or more of each"
            )
        if self.cuts is not None and (self.chunks > 1 or len(self.cuts) != len(self.stages)):
            raise ValueError(
                f"{self.name}: cuts of {len(self.cuts)} stages, {self.chunks} chunks on {len(self.stages)}"
            )
        if not 0 <= self.filling <= 1:
            raise ValueError(f"{self.name}: ramp {self.ramp}: wanted 0 to 1")
        if not (self.boundary_us >= 0 and math.isfinite(self.boundary_us)):
            raise ValueError(f"{self.name}: {self.boundary_us} µs for a boundary: wanted a finite time, 0 or more")

    @property
    def instances(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def filling(self) -> float:
        """Weight of Σ T_s in the step: `ramp`."""
        return 1.0 / self.chunks if self.ramp is None else self.ramp

    @property
    def pace(self) -> float:
        """Weight of the slowest stage in the step."""
        return self.micro_batches - self.filling

    @property
    def crossings_us(self) -> float:
        """Boundary transfers while the pipeline fills and drains."""
        return 2 * (len(self.stages) - 1) * self.boundary_us

    def exposed_us(self, stage: int) -> float:
        """x_s: transfers that a stage waits for in each micro-batch."""
        if self.boundary_hidden or len(self.stages) == 1:
            return 0.0
        parts = len(self.stages) * self.chunks
        held = range(stage, parts, len(self.stages))
        return self.boundary_us * sum((part > 0) + (part < parts - 1) for part in held)

    def __str__(self) -> str:
        runs = ", ".join(f"{r.count} {r.name} ({len(r.columns)} columns)" for r in self.runs)
        chunks = f" × {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.name}: {runs} on {len(self.stages)} stages{chunks}, {self.micro_batches} micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """`counts[stage][run][column]`: instances of a run that a stage holds in a column."""

    counts: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """[stage][run]: instances of a run that a stage holds."""
        return tuple(tuple(sum(columns) for columns in runs) for runs in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEvaluation:
    """What an assignment costs, said by the referee. Tuples have one entry per stage.

    Attributes:
        busy_us: T_s. finish_us: finish_s.
        used_bytes: see the module.
        feasible: no stage uses more than its limit.
    """

    step_us: float
    busy_us: tuple[float, ...]
    finish_us: tuple[float, ...]
    used_bytes: tuple[int, ...]
    feasible: bool

    @property
    def peak_bytes(self) -> int:
        return max(self.used_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """A solver's answer, priced by the referee.

    Attributes:
        assignment, evaluation: None if infeasible.
        step_us: the referee's; inf if infeasible.
        bound_us: no assignment takes less (under the memory objective: none of those that need no more memory).
        needed_bytes: when infeasible, the smallest limit that would do if every stage had it; None if there are fewer
            instances than parts to place them on. Otherwise None.
    """

    status: Status
    assignment: Assignment | None
    evaluation: StageEvaluation | None
    step_us: float
    bound_us: float
    needed_bytes: int | None = None


def check_assignment(problem: StageProblem, assignment: Assignment) -> None:
    """Raise ValueError unless every instance is placed once, in order, and every stage holds one."""
    counts = assignment.counts
    if len(counts) != len(problem.stages):
        raise ValueError(f"{problem.name}: an assignment to {len(counts)} stages, wanted {len(problem.stages)}")
    for s, stage in enumerate(counts):
        if [len(columns) for columns in stage] != [len(run.columns) for run in problem.runs]:
            raise ValueError(f"{problem.name}: stage {s} has counts for other runs or columns")
        if min(n for columns in stage for n in columns) < 0:
            raise ValueError(f"{problem.name}: stage {s} has a negative count")
    cuts = assignment.cuts
    if problem.chunks > 1 or problem.cuts is not None:
        if cuts != fixed_cuts(problem):
            raise ValueError(f"{problem.name}: stages must hold {fixed_cuts(problem)}, found {cuts}")
        return
    ends = [0] * len(problem.runs)
    for s, held in enumerate(cuts):
        if not any(held):
            raise ValueError(f"{problem.name}: stage {s} holds no instance")
        first = next(r for r, n in enumerate(held) if n)
        if any(ends[r] != run.count for r, run in enumerate(problem.runs[:first])):
            raise ValueError(f"{problem.name}: stage {s} holds instances out of order")
        last = max(r for r, n in enumerate(held) if n)
        ends = [e + n for e, n in zip(ends, held, strict=True)]
        if any(ends[r] != problem.runs[r].count for r in range(last)):
            raise ValueError(f"{problem.name}: stage {s} leaves out instances")
    if ends != [run.count for run in problem.runs]:
        raise ValueError(f"{problem.name}: {ends} instances placed, wanted {[run.count for run in problem.runs]}")


def evaluate_stages(problem: StageProblem, assignment: Assignment) -> StageEvaluation:
    """The referee: price an assignment from the problem's numbers alone. Raises ValueError as `check_assignment`."""
    check_assignment(problem, assignment)
    busy, finish, used = [], [], []
    for stage, counts in zip(problem.stages, assignment.counts, strict=True):
        held = [
            (n, column)
            for run, columns in zip(problem.runs, counts, strict=True)
            for n, column in zip(columns, run.columns, strict=True)
            if n
        ]
        busy.append(stage.speed * sum(n * c.busy_us for n, c in held))
        finish.append(stage.speed * sum(n * c.finish_us for n, c in held))
        saved = stage.in_flight * sum(n * c.saved_bytes for n, c in held)
        resident = sum(n * c.resident_bytes for n, c in held)
        transient = max(c.transient_bytes for _, c in held)
        used.append(stage.fixed_bytes + resident + transient + math.ceil(saved - WHOLE_BYTE))
    slowest = max(t + problem.exposed_us(s) for s, t in enumerate(busy))
    return StageEvaluation(
        step_us=problem.pace * slowest + problem.filling * sum(busy) + problem.crossings_us + max(finish),
        busy_us=tuple(busy),
        finish_us=tuple(finish),
        used_bytes=tuple(used),
        feasible=all(u <= s.limit_bytes for u, s in zip(used, problem.stages, strict=True)),
    )


def even_split(problem: StageProblem) -> tuple[tuple[int, ...], ...] | None:
    """[part][run]: the instances of each of p·v parts, as even as can be; None if there are fewer instances than parts.

    A run of one instance at either end of the model (embedding, head) goes with the first or last part and doesn't
    count, if the others are enough for all parts. Instances that are left over by the division go to parts that follow
    one another, so that stages differ by one at most; stages in the middle come first.
    """
    return _even_split(tuple(run.count for run in problem.runs), len(problem.stages), problem.chunks)


@lru_cache(maxsize=256)
def _even_split(counts: tuple[int, ...], stages: int, chunks: int) -> tuple[tuple[int, ...], ...] | None:
    parts, instances = stages * chunks, sum(counts)
    lead = 1 if len(counts) > 1 and counts[0] == 1 else 0
    tail = 1 if len(counts) > 1 + lead and counts[-1] == 1 else 0
    if instances - lead - tail < parts:
        lead = tail = 0
    each, more = divmod(instances - lead - tail, parts)
    if not each:
        return None
    first = (stages - more % stages) // 2
    sizes = [each + (first <= part < first + more) for part in range(parts)]
    sizes[0] += lead
    sizes[-1] += tail
    return cut_in_order(counts, sizes)


def cut_in_order(counts: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """[part][run]: the instances of each run in stretches of these sizes, one after the other."""
    left, found = list(counts), []
    for size in sizes:
        held: list[int] = []
        for run, count in enumerate(left):
            held.append(min(count, size - sum(held)))
            left[run] -= held[-1]
        found.append(tuple(held))
    return tuple(found)


def device_cuts(problem: StageProblem) -> tuple[tuple[int, ...], ...] | None:
    """[stage][run]: what each stage holds under `even_split`, its parts together."""
    return _device_cuts(tuple(run.count for run in problem.runs), len(problem.stages), problem.chunks)


@lru_cache(maxsize=256)
def _device_cuts(counts: tuple[int, ...], stages: int, chunks: int) -> tuple[tuple[int, ...], ...] | None:
    split = _even_split(counts, stages, chunks)
    if split is None:
        return None
    return tuple(tuple(map(sum, zip(*split[s::stages], strict=True))) for s in range(stages))


def fixed_cuts(problem: StageProblem) -> tuple[tuple[int, ...], ...] | None:
    """[stage][run]: what each stage holds, where that is no choice; else None (and where there is no even split)."""
    return device_cuts(problem) if problem.chunks > 1 else problem.cuts


@dataclass(frozen=True, slots=True)
class Halves:
    """What the second halves of backwards are of the whole, as shares.

    Attributes:
        late: of a micro-batch's time.
        waiting: of what waits from the forward to the backward, what waits between the halves.
    """

    late: float
    waiting: float


def ramp_of(halves: Halves) -> float:
    """`StageProblem.ramp` of zb-h1."""
    return max(0.0, 1 - 2 * halves.late)


def in_flight(
    schedule: str, *, stages: int, micro_batches: int, chunks: int = 1, waiting: float = 1.0
) -> tuple[float, ...]:
    """Of each stage, the micro-batches whose saved tensors it holds at most under a schedule of `ir.schedules`.

    `waiting`: see `Halves`; stage s has s micro-batches (zb-h2: twice as many) between the halves.

    A chunk of an interleaved stage is 1/v of it: 2·(p − 1 − s) + (v − 1)·p + 1 chunks in flight on stage s are
    that many v-ths (arXiv 2104.04473; p·(1 + (p − 1)/(p·v)) on the first stage), as if a stage's chunks were equal.
    """
    p, m, v = stages, micro_batches, chunks
    match schedule:
        case "gpipe":
            held = [m * v] * p
        case "none" | "1f1b":
            held = [p - s for s in range(p)]
        case "interleaved":
            group = -(-m // max(1, m // p))  # the first group of micro-batches: p, or more where m is no multiple
            held = [2 * (p - 1 - s) + (v - 1) * group + 1 for s in range(p)]
        case "zb-h1":
            return tuple(_of_halves(m, p - s, s, waiting) for s in range(p))
        case "zb-h2":
            return tuple(_of_halves(m, 2 * (p - s) - 1, 2 * s, waiting) for s in range(p))
        case _:
            raise ValueError(f"schedule {schedule!r}: no count of micro-batches in flight")
    return tuple(min(n, m * v) / v for n in held)


def _of_halves(micro_batches: int, whole: int, half: int, waiting: float) -> float:
    """So many before the first half, and between the halves, as if all waited for the first."""
    whole = min(whole, micro_batches)
    return whole + min(half, micro_batches - whole) * waiting
