"""What no assignment to stages takes less than, whatever the choices in its columns: from bounds at prices of memory.

A bound at prices (`solver.parts.PriceBound`) holds for every choice of one instance of a part. On a stage of in_flight
k and room B that holds n instances of each part, with μ = max(saved_price / k, resident_price, remade_price · Σ n),

    busy + once_weight · finish  >=  speed · (Σ n · least − μ · B)  =: w

since k·saved + resident and the mean of what instances make again may not exceed B there. With p stages and
once_weight <= 1 / (pace + ramp · p) the step

    pace · max_s (T_s + x_s) + ramp · Σ_s T_s + max_s finish_s + crossings

is at least pace · max_s (w_s + x_s) + ramp · Σ_s w_s + crossings: what finishing adds to the w's is not more than the
longest finish. The best cuts into stages are found for the maximum and for the sum (`cut_line`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.ir.parts import Frame, PartedProblem
from autopar.ir.stages import StageProblem, fixed_cuts
from autopar.solver.cut_line import Cuts, cuts_of
from autopar.solver.even_cut import unchosen
from autopar.solver.linear import Floats
from autopar.solver.parts import PriceBound


def least_of(
    parted: PartedProblem, frame: Frame, chunks: int, bounds: Sequence[PriceBound], passed_bytes: float,
    transient: Sequence[float] = (),
) -> float:  # fmt: skip
    """No plan with so many chunks takes less, by these bounds."""
    problem = frame.problem(parted, unchosen(parted), chunks, passed_bytes)
    return least_step_us(problem, [p for p, _ in parted.runs], bounds, transient)


def least_step_us(
    problem: StageProblem, run_parts: Sequence[int], bounds: Sequence[PriceBound], transient: Sequence[float] = ()
) -> float:
    """No assignment takes less. Columns of `problem` are not looked at; `boundary_us` must be a least one.

    `run_parts`: the part of each run. `transient`: least bytes beside all others, by part. inf where nothing can fit.
    """
    stages = len(problem.stages)
    if problem.instances < stages * problem.chunks or any(math.inf in b.least for b in bounds):
        return math.inf
    longest = problem.instances - stages + 1
    fixed = fixed_cuts(problem) is not None
    tried = longest if fixed else min(longest, 2 * -(-problem.instances // stages) + 4)
    while True:
        value, next_up = _of_cuts(problem, cuts_of(problem, tried), run_parts, bounds, transient, tried)
        if fixed or tried == longest or value <= next_up:
            return value
        tried = min(longest, 2 * tried)


def _of_cuts(
    problem: StageProblem, cuts: Cuts, run_parts: Sequence[int], bounds: Sequence[PriceBound],
    transient: Sequence[float], longest: int,
) -> tuple[float, float]:  # fmt: skip
    """The bound over these cuts, and what a stage of `longest` or more instances makes of a step at the least."""
    work = _work(problem, cuts.contents.astype(np.float64), run_parts, bounds, transient)
    exposed = np.array([[problem.exposed_us(s)] for s in range(len(problem.stages))])
    slowest, total = cuts.best(work + exposed, np.maximum), cuts.best(work, np.add)
    if slowest is None or total is None:
        return math.inf, 0.0
    rest = problem.filling * total[0] + problem.crossings_us
    longer = (work + exposed)[:, cuts.contents.sum(axis=1) >= longest]
    return problem.pace * slowest[0] + rest, problem.pace * float(longer.min(initial=math.inf)) + problem.crossings_us


def _work(
    problem: StageProblem, held: Floats, run_parts: Sequence[int], bounds: Sequence[PriceBound],
    transient: Sequence[float],
) -> Floats:  # fmt: skip
    """[stage, content]: w of the module's docstring, the largest of all bounds; inf where nothing fits."""
    speed = np.array([[s.speed] for s in problem.stages])
    once = once_weight(len(problem.stages), problem.micro_batches, problem.chunks) * (1 + 1e-9)
    room = _room(problem, held, run_parts, transient)
    flying = np.array([[max(s.in_flight, 1e-9)] for s in problem.stages])
    work = np.zeros((len(problem.stages), len(held)))
    fits = np.ones_like(work, dtype=bool)
    for bound in bounds:
        if bound.once_weight <= once:
            price = np.maximum(bound.saved_price / flying, bound.resident_price)
            price = np.maximum(price, bound.remade_price * held.sum(axis=1))
            least = held @ np.array([bound.least[p] for p in run_parts])
            if bound.busy_weight:
                work = np.maximum(work, speed * (least - price * room))
            else:
                fits &= least - price * room <= 1e-6 * np.abs(least)
    work[~fits] = math.inf
    return work


def stage_work_us(
    problem: StageProblem, held: Sequence[Sequence[int]], run_parts: Sequence[int], bounds: Sequence[PriceBound],
    transient: Sequence[float],
) -> list[float]:  # fmt: skip
    """Of each stage the least µs that these bounds know of what it holds: `held[stage][run]` instances."""
    work = _work(problem, np.array(held, dtype=np.float64), run_parts, bounds, transient)
    return [float(us) for us in np.diagonal(work)]


def once_weight(stages: int, micro_batches: int, chunks: int) -> float:
    """What finishing weighs beside a micro-batch in a bound: 1 / (pace + ramp · p), with ramp 1 / chunks."""
    return 1 / (micro_batches + (stages - 1) / chunks)


def _room(problem: StageProblem, held: Floats, run_parts: Sequence[int], transient: Sequence[float]) -> Floats:
    """[stage, content]: bytes for what is saved and resident."""
    own = np.array([[float(s.limit_bytes - s.fixed_bytes)] for s in problem.stages])
    if not transient:
        return np.broadcast_to(own, (len(own), len(held)))
    each = np.array([transient[p] for p in run_parts])
    room: Floats = own - np.where(held > 0, each, 0.0).max(axis=1)
    return room
