"""Blocks to pipeline stages, with the column of each: exact, by dynamic programming. The mathematics is in `ir.stages`.

With w[s, e] the least time of stage s for content e (instances by run; `mixes`), the step is

    pace · max_s (w + x_s)  +  ramp · Σ_s w  +  max_s finish_s  +  a constant.

1. Prices of contents start as lower bounds: the relaxation of the knapsack for all stages and contents at once
   (`_relaxed_us`), exact where the fastest columns fit. A bound is replaced by the exact mix when a best cut uses it,
   until the best cut uses no bound (`_Search._settle`). So few knapsacks are solved.
2. For a cap t on the slowest stage and f on the finish, the least Σ w is a shortest path over stages × positions
   (`cut_line`). It grows as the caps fall; a region of caps costs at least pace · its lowest t + its lowest f + ramp ·
   that sum. `_Search.run` keeps a heap of regions: it solves the upper corner of the one with the lowest bound, which
   gives an assignment with slowest stage t' and finish f', and goes on with t < t', and with t >= t', f < f'.
3. Tables hold only what is no slower than a guess of the slowest stage; a better guess, or proof that none is needed,
   comes from the best assignment (`_solve_step`).

Seen on a busy machine (`benchmarks/stages.py`): 96 layers with 8 columns on 16 stages 20 to 30 ms, 126 on 64 stages
25 to 45 ms, half of it spent in some twenty shortest paths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.solution import Status
from autopar.ir.stages import (
    WHOLE_BYTE,
    Assignment,
    StageObjective,
    StageProblem,
    StageSolution,
    evaluate_stages,
    fixed_cuts,
)
from autopar.solver.cut_line import Cuts, cuts_of
from autopar.solver.linear import Bools, Floats, Ints
from autopar.solver.mixes import NODES, SAME, AllMixes, Mixer, all_mixes, count_mixes, useful_columns

FIRST_GUESS = 1.5
"""First cap on the slowest stage, in its lower bound."""

MOST_PRICES = 64
"""Memory prices at which the relaxation of all contents is tried."""

MOST_NODES = 50_000
"""Mixes that the knapsacks of one problem look at before each is given less (`mixes.NODES`)."""

MOST_MIXES = 150_000
"""Mixes of a content times kinds of stage up to which all are looked at at once."""

NEVER = 1e30
"""Stands for inf where 0 · inf would be asked for."""

Counts = tuple[tuple[int, ...], ...]
"""Of one stage: instances by run and column."""


def solve_stages(problem: StageProblem, *, cutoff_us: float = math.inf) -> StageSolution | None:
    """The best assignment; None as soon as it is certain that none takes less than `cutoff_us`.

    The status is OPTIMAL with bound = step, unless a knapsack was given up (`mixes.NODES`): then FEASIBLE with a bound.
    Infeasible answers carry the smallest limit that would do on every stage.
    """
    if problem.instances < len(problem.stages) * problem.chunks:
        return _infeasible(None)
    if stages_bound_us(problem) >= cutoff_us:
        return None
    if problem.objective is StageObjective.MEMORY:
        least = least_peak_bytes(problem)
        if least is None:
            return _infeasible(_needed_bytes(problem))
        stages = tuple(replace(s, limit_bytes=min(s.limit_bytes, least)) for s in problem.stages)
        problem = replace(problem, stages=stages)
    return _solve_step(problem, cutoff_us)


def stages_bound_us(problem: StageProblem) -> float:
    """No assignment takes less: best columns, no memory limit, work divided evenly. Takes microseconds."""
    slowest, total, finish = _least(problem)
    return problem.pace * slowest + problem.filling * total + finish + problem.crossings_us


def _least(problem: StageProblem) -> tuple[float, float, float]:
    """Lower bounds on the slowest stage, on the sum of all, and on the longest finish."""
    speeds = [s.speed for s in problem.stages]
    stages, best = len(speeds), min(speeds)
    busy = [min(c.busy_us for c in run.columns) for run in problem.runs]
    finish = [min(c.finish_us for c in run.columns) for run in problem.runs]
    counts = [run.count for run in problem.runs]
    even = sum(1 / v for v in speeds)
    found = []
    for each in (busy, finish):
        total = sum(n * us for n, us in zip(counts, each, strict=True))
        crowded = max(-(-n // stages) * us for n, us in zip(counts, each, strict=True))
        found.append((max(total / even, best * crowded), best * total))
    (slowest, total), (longest, _) = found
    exposed = min(problem.exposed_us(s) for s in range(stages))
    return (slowest + exposed) * (1 - SAME), total * (1 - SAME), longest * (1 - SAME)


def least_peak_bytes(problem: StageProblem) -> int | None:
    """The least that the fullest stage can use; None if the limits can't be kept."""
    limits = np.array([[s.limit_bytes] for s in problem.stages]) + WHOLE_BYTE
    return _peak_bytes(problem, limits)


def _needed_bytes(problem: StageProblem) -> int:
    needed = _peak_bytes(problem, np.full((len(problem.stages), 1), np.inf))
    assert needed is not None
    return needed


def _peak_bytes(problem: StageProblem, limits: Floats) -> int | None:
    kinds = _Kinds(problem)
    cuts = cuts_of(problem, problem.instances - len(problem.stages) + 1)
    fixed = np.array([[s.fixed_bytes] for s in problem.stages])
    used = kinds.smallest(cuts.contents)[kinds.of_stage] + fixed
    used[used > limits] = np.inf
    found = cuts.best(used, np.maximum)
    return None if found is None else math.ceil(found[0] - WHOLE_BYTE)


def _infeasible(needed_bytes: int | None) -> StageSolution:
    return StageSolution(
        status=Status.INFEASIBLE,
        assignment=None,
        evaluation=None,
        step_us=math.inf,
        bound_us=math.inf,
        needed_bytes=needed_bytes,
    )


def _solve_step(problem: StageProblem, cutoff_us: float) -> StageSolution | None:
    """Least step under the limits: searches up to a cap on the slowest stage, until no higher cap is of use."""
    kinds = _Kinds(problem)
    search = _Search(problem, kinds, cutoff_us)
    slowest, total, finish = _least(problem)
    free = fixed_cuts(problem) is not None or problem.pace == 0 or slowest <= 0
    cap = math.inf if free else FIRST_GUESS * slowest
    known_feasible = False
    relaxed = math.inf
    while True:
        if cap >= kinds.longest_us(problem):
            cap = math.inf
        relaxed = min(relaxed, search.run(cap))
        if cap == math.inf:
            break
        beyond = problem.pace * cap + problem.filling * total + finish
        if beyond >= search.limit_us * (1 - SAME):
            break
        if search.limit_us < math.inf:
            cap = (search.limit_us - problem.filling * total - finish) / problem.pace
        else:
            if not known_feasible and least_peak_bytes(problem) is None:
                break
            known_feasible = True
            cap *= 1.5
    if search.found is None:
        if known_feasible or (cutoff_us < math.inf and least_peak_bytes(problem) is not None):
            return None
        return _infeasible(_needed_bytes(problem))
    assignment = Assignment(counts=search.found)
    evaluation = evaluate_stages(problem, assignment)
    assert evaluation.feasible
    step = evaluation.step_us
    bound = step
    if search.missed_us or search.dropped_us < math.inf:
        bound = step - (problem.pace + problem.filling * len(problem.stages)) * search.missed_us
        # What has a dropped content has a stage that takes as long; and nothing is below the relaxation.
        dropped = problem.pace * search.dropped_us + problem.filling * total + finish
        bound = min(bound, max(dropped, relaxed) + problem.crossings_us)
        bound = min(step, max(bound, stages_bound_us(problem)))
    return StageSolution(
        status=Status.OPTIMAL if bound == step else Status.FEASIBLE,
        assignment=assignment,
        evaluation=evaluation,
        step_us=step,
        bound_us=bound,
    )


class _Kinds:
    """The kinds of stage that differ, and the numbers of all useful columns on each: [kind, column]."""

    def __init__(self, problem: StageProblem) -> None:
        keys = [(s.in_flight, s.limit_bytes - s.fixed_bytes, s.speed) for s in problem.stages]
        kinds = {key: k for k, key in enumerate(dict.fromkeys(keys))}
        self.of_stage: Ints = np.array([kinds[key] for key in keys], dtype=np.int64)
        self.runs = problem.runs
        self.stages = [problem.stages[keys.index(key)] for key in kinds]
        self.use = [useful_columns(run) for run in problem.runs]
        self.mixers: dict[int, Mixer] = {}
        self.columns = [run.columns[i] for run, use in zip(problem.runs, self.use, strict=True) for i in use]
        columns = self.columns
        self.starts = np.cumsum([0, *(len(use) for use in self.use)])
        in_flight, room, speed = (np.array(c, dtype=np.float64)[:, None] for c in zip(*kinds, strict=True))
        self.room: Floats = room[:, 0] + WHOLE_BYTE
        self.in_flight, self.speed = in_flight, speed
        self.us: Floats = speed * np.array([c.busy_us for c in columns])
        self.finish: Floats = speed * np.array([c.finish_us for c in columns])
        saved = np.array([c.saved_bytes for c in columns], dtype=np.float64)
        self.size: Floats = np.array([c.resident_bytes for c in columns], dtype=np.float64) + in_flight * saved
        self.transient: Floats = np.array([c.transient_bytes for c in columns], dtype=np.float64)
        # Those that fit by themselves can be of use.
        self.fits: Bools = self.size + self.transient <= self.room[:, None]
        self.fastest = _fastest_columns(self)

    def mixer(self, kind: int) -> Mixer:
        if kind not in self.mixers:
            self.mixers[kind] = Mixer(self.runs, self.use, self.stages[kind])
        return self.mixers[kind]

    def longest_us(self, problem: StageProblem) -> float:
        """More than any stage can take."""
        most = [run.count * max(c.busy_us for c in run.columns) for run in problem.runs]
        exposed = max(problem.exposed_us(s) for s in range(len(problem.stages)))
        return 1.01 * (sum(most) * max(s.speed for s in problem.stages) + exposed)

    def per_run(self, values: Floats) -> Floats:
        """[..., column] to the least of each run: [..., run]."""
        least: Floats = np.minimum.reduceat(values, self.starts[:-1], axis=-1)
        return least

    def smallest(self, contents: Ints) -> Floats:
        """[kind, content]: bytes beside the fixed ones of the smallest mix, the largest transient included."""
        best = np.full((len(self.room), len(contents)), np.inf)
        held = contents.astype(np.float64)
        for cap in np.unique(self.transient):
            least = self.per_run(np.where(self.transient <= cap, self.size, NEVER))
            best = np.minimum(best, least @ held.T + cap)
        best[best >= NEVER / 2] = np.inf
        return best


@dataclass(slots=True)
class _Prices:
    """[kind, content]: time or a bound on it, which of the two, and of what is exact the finish.

    `mixes`: what is exact and not all in its fastest columns: instances by run and column, or all mixes and which one.
    """

    us: Floats
    exact: Bools
    finish: Floats
    mixes: dict[tuple[int, int], Counts | tuple[AllMixes, int]]


@dataclass(frozen=True, slots=True, order=True)
class _Region:
    """Caps to search: slowest stage from `low_us` to `cap_us`, finish likewise. Nothing in it is below `bound_us`."""

    bound_us: float
    order: int
    low_us: float
    cap_us: float
    low_finish_us: float
    cap_finish_us: float


@dataclass(frozen=True, slots=True)
class _Cut:
    """The least sum under two caps, and the slowest stage and longest finish of the assignment that has it."""

    sum_us: float
    slowest_us: float
    finish_us: float


class _Search:
    """One problem's best so far; tables for one cap at a time. Times are without the constant of `crossings_us`."""

    def __init__(self, problem: StageProblem, kinds: _Kinds, cutoff_us: float) -> None:
        self.problem, self.kinds = problem, kinds
        self.pace, self.filling = problem.pace, problem.filling
        self.exposed = np.array([[problem.exposed_us(s)] for s in range(len(problem.stages))])
        self.limit_us = cutoff_us - problem.crossings_us
        self.found: tuple[Counts, ...] | None = None
        # Of knapsacks given up: how much too high a price may be, and the least of those that have none.
        self.missed_us, self.dropped_us = 0.0, math.inf
        self.nodes = 0
        self.cuts: Cuts
        self.prices: dict[float, _Prices] = {}
        self.every: dict[int, AllMixes | None] = {}
        self.least_finish: Floats
        self.cap_us = math.inf

    @property
    def enough_us(self) -> float:
        """A bound that reaches this leaves nothing to find."""
        return self.limit_us * (1 - SAME)

    def run(self, cap_us: float) -> float:
        """Find the best assignment whose slowest stage takes at most `cap_us`. Returns a bound on all these."""
        if not self._tables(cap_us):
            return math.inf
        sums = self.cuts.best(self._table(self.prices[math.inf], cap_us), np.add)
        finishes = self.cuts.best(self.least_finish[self.kinds.of_stage], np.maximum)
        if sums is None or finishes is None:
            return math.inf
        low_finish = finishes[0]
        rest = self.filling * sums[0] + low_finish
        start = self._slowest()
        if start is None:
            return math.inf
        relaxed_us, low = start
        root = _Region(self.pace * low + rest, 0, low, cap_us, low_finish, math.inf)
        self._solve_region(replace(root, cap_us=low))
        heap, order = [root], 0
        while heap:
            region = heapq.heappop(heap)
            if region.bound_us >= self.enough_us:
                break
            cut = self._solve_region(region)
            if cut is None:
                continue
            for low_us, high_us, low_f, cap_f in _rest(region, cut):
                least = self.pace * low_us + self.filling * cut.sum_us + low_f
                if least < self.enough_us:
                    order += 1
                    heapq.heappush(heap, _Region(least, order, low_us, high_us, low_f, cap_f))
        return self.pace * relaxed_us + rest

    def _solve_region(self, region: _Region) -> _Cut | None:
        cap = region.cap_us
        if self.pace:
            # Whatever is slower costs more than the best, with the least that the rest of the region can take.
            floor = region.bound_us - self.pace * region.low_us
            cap = min(cap, (self.limit_us - floor) / self.pace)
        return self._solve(cap, region.cap_finish_us, self.pace * region.low_us + region.low_finish_us)

    def _tables(self, cap_us: float) -> bool:
        """Contents that can matter and the first prices; False if too few for all stages."""
        problem, kinds = self.problem, self.kinds
        longest = self._longest(cap_us)
        if longest * len(problem.stages) < problem.instances:
            return False
        self.cap_us = cap_us
        self.cuts = cuts_of(problem, longest)
        contents = self.cuts.contents
        held = contents.astype(np.float64)
        us = _relaxed_us(kinds, held)
        fast_us, fast_finish, fits = _fastest(kinds, held)
        us = np.where(fits, fast_us, us)
        us[kinds.smallest(contents) > kinds.room[:, None]] = np.inf
        exact = fits | np.isinf(us)
        self.prices = {math.inf: _Prices(us, exact, fast_finish, {})}
        self.every = {}
        least: Floats = kinds.per_run(kinds.finish) @ held.T
        self.least_finish = np.where(np.isinf(us), np.inf, least)
        return True

    def _longest(self, cap_us: float) -> int:
        """Most instances that a stage can hold within the cap, at the best."""
        problem = self.problem
        most = problem.instances - len(problem.stages) + 1
        if cap_us == math.inf:
            return most
        fastest = np.repeat([min(c.busy_us for c in r.columns) for r in problem.runs], [r.count for r in problem.runs])
        ends = np.concatenate([[0.0], np.cumsum(fastest)])
        room = (cap_us - float(self.exposed.min())) / min(s.speed for s in problem.stages)
        reach = np.searchsorted(ends, ends + room * (1 + 1e-9), side="right") - 1
        return int(min(most, max(1, int((reach - np.arange(len(ends))).max()))))

    def _table(self, prices: _Prices, cap_us: float) -> Floats:
        """[stage, content]: prices, inf above the cap."""
        table: Floats = prices.us[self.kinds.of_stage]
        if cap_us < math.inf:
            table[table + self.exposed > cap_us] = np.inf
        return table

    def _slowest(self) -> tuple[float, float] | None:
        """The least slowest stage: by the first prices, and exact. None if nothing fits within the cap."""
        prices = self.prices[math.inf]
        first = None
        while True:
            table = self._table(prices, self.cap_us) + self.exposed
            found = self.cuts.best(table, np.maximum)
            if found is None:
                return None
            slowest, path = found
            first = slowest if first is None else first
            if self.pace * slowest >= self.limit_us or not self._settle(prices, path, math.inf):
                return first, slowest

    def _settle(self, prices: _Prices, path: Sequence[int], finish_cap: float) -> bool:
        """Make the prices that a path uses exact; False if they were."""
        open_places = dict.fromkeys(
            (k, e) for k, e in zip(self.kinds.of_stage.tolist(), path, strict=True) if not prices.exact[k, e]
        )
        cap = self.cap_us - float(self.exposed.min())
        for kind, e in open_places:
            if prices.exact[kind, e]:
                continue
            every = self._every_mix(e)
            if every is not None:
                self._settle_all(prices, e, every, finish_cap)
                continue
            held = tuple(self.cuts.contents[e].tolist())
            nodes = NODES if self.nodes < MOST_NODES else NODES // 10
            found = self.kinds.mixer(kind).best(held, finish_cap=finish_cap, cutoff_us=cap, nodes=nodes)
            self.nodes += found.nodes
            if found.mix:
                self.missed_us = max(self.missed_us, found.mix.us - found.open_us)
            else:
                self.dropped_us = min(self.dropped_us, found.open_us)
            prices.exact[kind, e] = True
            prices.us[kind, e] = found.mix.us if found.mix else np.inf
            if found.mix:
                prices.finish[kind, e] = found.mix.finish_us
                prices.mixes[kind, e] = found.mix.counts
        return bool(open_places)

    def _every_mix(self, e: int) -> AllMixes | None:
        """All mixes of a content, if they are few."""
        if e not in self.every:
            kinds, held = self.kinds, self.cuts.contents[e].tolist()
            columns = [len(use) for use in kinds.use]
            few = count_mixes(held, columns) * len(kinds.room) <= MOST_MIXES
            rows = all_mixes(held, columns) if few else None
            self.every[e] = (
                None if rows is None else AllMixes(rows, kinds.columns, kinds.room[:, None], kinds.in_flight)
            )
        return self.every[e]

    def _settle_all(self, prices: _Prices, e: int, every: AllMixes, finish_cap: float) -> None:
        """Exact prices of a content on all kinds of stage."""
        at, there = every.best(self.kinds.speed, finish_cap)
        speed = self.kinds.speed[:, 0]
        new = ~prices.exact[:, e]
        prices.us[new, e] = np.where(there, speed * every.us[at], np.inf)[new]
        prices.finish[new, e] = (speed * every.finish[at])[new]
        prices.exact[:, e] = True
        for kind in np.flatnonzero(new & there).tolist():
            prices.mixes[kind, e] = (every, int(at[kind]))

    def _by_run(self, row: Sequence[int]) -> Counts:
        """Instances by useful column, all runs side by side, as instances by run and column."""
        found = []
        for run, use, start in zip(self.problem.runs, self.kinds.use, self.kinds.starts, strict=False):
            counts = [0] * len(run.columns)
            for i, column in enumerate(use):
                counts[column] = row[start + i]
            found.append(tuple(counts))
        return tuple(found)

    def _solve(self, cap_us: float, finish_cap: float, floor_us: float) -> _Cut | None:
        """The least sum under both caps, kept if it is the best so far; None if there is none, or none of use.

        `floor_us`: what the region costs beside its sum.
        """
        prices = self._prices(finish_cap)
        while True:
            found = self.cuts.best(self._table(prices, cap_us), np.add)
            if found is None or floor_us + self.filling * found[0] >= self.enough_us:
                return None
            total, path = found
            if not self._settle(prices, path, finish_cap):
                break
        kinds = self.kinds.of_stage
        slowest = float((prices.us[kinds, path] + self.exposed[:, 0]).max())
        finish = float(prices.finish[kinds, path].max())
        value = self.pace * slowest + self.filling * total + finish
        if value < self.limit_us:
            self.limit_us = value
            self.found = tuple(self._counts(prices, k, e) for k, e in zip(kinds.tolist(), path, strict=True))
        return _Cut(total, slowest, finish)

    def _prices(self, finish_cap: float) -> _Prices:
        """Prices under a cap on finish: what is known without it stays exact if it keeps the cap, else is a bound."""
        if finish_cap not in self.prices:
            free = self.prices[math.inf]
            us = np.where(self.least_finish > finish_cap, np.inf, free.us)
            exact = (free.exact & (free.finish <= finish_cap)) | np.isinf(us)
            known = _Prices(us, exact, free.finish.copy(), dict(free.mixes))
            for cap in sorted(c for c in self.prices if finish_cap < c < math.inf):
                other = self.prices[cap]
                holds = other.exact & ~known.exact & ((other.finish <= finish_cap) | np.isinf(other.us))
                known.us[holds], known.finish[holds] = other.us[holds], other.finish[holds]
                known.exact |= holds
                known.mixes.update({place: mix for place, mix in other.mixes.items() if holds[place]})
            self.prices[finish_cap] = known
        return self.prices[finish_cap]

    def _counts(self, prices: _Prices, kind: int, e: int) -> Counts:
        """Instances by run and column."""
        mix = prices.mixes.get((kind, e))
        if mix is None:
            row = [0] * len(self.kinds.columns)
            for at, held in zip(self.kinds.fastest[kind].tolist(), self.cuts.contents[e].tolist(), strict=True):
                row[at] = held
            return self._by_run(row)
        if isinstance(mix[0], AllMixes):
            every, at = mix
            return self._by_run(every.rows[at].tolist())
        return mix


def _rest(region: _Region, cut: _Cut) -> list[tuple[float, float, float, float]]:
    """What is left of a region when its upper corner is solved: (low, cap, low finish, cap of finish) of each part.

    A better assignment has a faster slowest stage, or the same or a slower one and less finish.
    """
    parts = []
    top = cut.slowest_us * (1 - SAME)
    if region.low_us <= top < cut.slowest_us:
        middle = (region.low_us + top) / 2
        parts.append((region.low_us, middle, region.low_finish_us, region.cap_finish_us))
        parts.append((middle, top, region.low_finish_us, region.cap_finish_us))
    top = cut.finish_us * (1 - SAME)
    low = max(region.low_us, cut.slowest_us)
    if region.low_finish_us <= top < cut.finish_us and low <= region.cap_us:
        middle = (region.low_finish_us + top) / 2
        parts.append((low, region.cap_us, region.low_finish_us, middle))
        parts.append((low, region.cap_us, middle, top))
    return parts


def _fastest_columns(kinds: _Kinds) -> Ints:
    """[kind, run]: the fastest column of those that fit by themselves; of equal ones that of the shortest finish."""
    found = np.zeros((len(kinds.room), len(kinds.use)), dtype=np.int64)
    us = np.where(kinds.fits, kinds.us, NEVER)
    for run, (start, end) in enumerate(zip(kinds.starts, kinds.starts[1:], strict=False)):
        part = slice(int(start), int(end))
        least = us[:, part] == us[:, part].min(axis=1, keepdims=True)
        found[:, run] = start + np.argmin(np.where(least, kinds.finish[:, part], np.inf), axis=1)
    return found


def _fastest(kinds: _Kinds, held: Floats) -> tuple[Floats, Floats, Bools]:
    """[kind, content]: time and finish with all instances in their fastest columns, and whether that fits."""
    at = kinds.fastest
    us, finish, size = (np.take_along_axis(a, at, axis=1) @ held.T for a in (kinds.us, kinds.finish, kinds.size))
    transient = np.where(held[None, :, :] > 0, kinds.transient[at][:, None, :], 0.0).max(axis=2)
    return us, finish, size + transient <= kinds.room[:, None]


def _relaxed_us(kinds: _Kinds, held: Floats) -> Floats:
    """[kind, content]: a bound on the time of a mix.

    max over prices λ of Σ_r n_r · min_c (us + λ·bytes) − λ·(room − the least transient): the relaxation's value, if
    λ is among the slopes between two columns of a run, and a bound at any λ.
    """
    prices = _slopes(kinds)
    lines = np.where(kinds.fits, kinds.us, NEVER)[:, None, :] + prices[:, :, None] * kinds.size[:, None, :]
    least = kinds.per_run(lines)  # [kind, price, run]
    transient = np.where(held > 0, kinds.per_run(kinds.transient), 0.0).max(axis=1)
    room = kinds.room[:, None] - transient
    values = least @ held.T - prices[:, :, None] * room[:, None, :]
    bound: Floats = np.maximum(values.max(axis=1), 0.0)
    bound[bound >= NEVER / 2] = np.inf
    return bound * (1 - SAME)


def _slopes(kinds: _Kinds) -> Floats:
    """[kind, price]: slopes between two columns of a run, 0 first; `MOST_PRICES` of them at most."""
    first, second = [], []
    for start, end in zip(kinds.starts, kinds.starts[1:], strict=False):
        i, j = np.triu_indices(int(end - start), 1)
        first.append(i + start)
        second.append(j + start)
    i, j = np.concatenate(first), np.concatenate(second)
    more_us = kinds.us[:, i] - kinds.us[:, j]
    saved = kinds.size[:, j] - kinds.size[:, i]
    prices = np.zeros((len(kinds.room), 1 + len(i)))
    np.divide(more_us, saved, out=prices[:, 1:], where=more_us * saved > 0)
    prices = np.unique(prices, axis=1) if prices.shape[0] == 1 else np.sort(prices, axis=1)
    if prices.shape[1] > MOST_PRICES:
        prices = prices[:, np.linspace(0, prices.shape[1] - 1, MOST_PRICES).astype(int)]
    return prices
