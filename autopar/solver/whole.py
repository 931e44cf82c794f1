"""The whole model on its stages: choices for its parts, and the assignment of these to stages, for one frame.

bounds     prices of memory at which no part can be had for less (`parts`), and what a step takes at the least under
           them (`stage_bound`), for every number of chunks
columns    choices for the whole model at prices about these: each says of every part what it takes
stages     the exact assignment of instances and columns (`stages`)
refine     where the two differ: the price that the memory of the stage that sets the pace has, as a bound and as
           columns, until they are near enough or nothing new is found
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.ir.parts import Amount, Choice, Frame, WholeSolution
from autopar.ir.problem import Problem, evaluate
from autopar.ir.stages import Run, StageProblem
from autopar.solver.even_cut import even_share, unchosen
from autopar.solver.parts import Held, PartsModel, PriceBound, Weights
from autopar.solver.room import price_of_room
from autopar.solver.stage_bound import least_of, once_weight, stage_work_us
from autopar.solver.stages import solve_stages

FACTORS = (1.01, 0.99, 0.3, 1.5, 4.0)
"""Prices of memory tried at first, in that of the first stage's. The first decides what passes between parts."""
NEAR = (0.99, 1.01)
"""The same when one stage's memory is looked at: the choices on both sides of its price."""
FILL = 0.01
"""Stages within this part of the slowest one set the pace."""
EVERY = 4096
"""Choices of a problem up to which all are tried, where bounds leave something open."""
ROUNDS = 6
"""Of refining."""
TIGHTER = 4
"""Bounds that a plan's stages are looked at for, in a round."""


@dataclass
class WholeSearch:
    """One frame: bounds and the best plan so far, for each number of chunks."""

    parts: PartsModel
    frame: Frame
    chunks: tuple[int, ...]
    bounds: list[PriceBound] = field(default_factory=list)
    choices: dict[Choice, None] = field(default_factory=dict)
    closed: dict[int, float] = field(default_factory=dict)
    """Chunks -> the bound that its search ended with."""
    looked: dict[tuple[float, float, float, tuple[int, ...]], PriceBound] = field(default_factory=dict)
    known: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Chunks -> (bounds that were known, their least step)."""
    best: WholeSolution | None = None

    def __post_init__(self) -> None:
        if not self.bounds:
            self.bounds.append(self.parts.free())
        every = range(len(self.parts.parted.parts))
        self.transient = [self.parts.smallest_transient(p) for p in every]
        self.passed_bytes = self.parts.least_passed()

    def least_us(self) -> float:
        """No plan takes less."""
        return min(map(self._least_us, self.chunks))

    def step(self, cutoff_us: float, gap: float) -> bool:
        """Raise the bound, or find the best plan of the chunks that hold it down; False where neither can be done.

        Plans that take `cutoff_us` or more are not looked for; a `gap` as a part of the step is near enough.
        """
        chunks = self._lowest()
        if chunks in self.closed:
            return False
        before = len(self.bounds)
        self.look(chunks, cutoff_us * (1 - gap))
        if len(self.bounds) == before:
            self.solve(chunks, cutoff_us, gap)
        return True

    def _lowest(self) -> int:
        return min(self.chunks, key=lambda v: (self._least_us(v), v))

    def _least_us(self, chunks: int) -> float:
        known = self.known.get(chunks)
        if known is None or known[0] != len(self.bounds):
            known = self.known[chunks] = (len(self.bounds), self._least_by(chunks, self.bounds))
        return max(known[1], self.closed.get(chunks, 0.0))

    def _least_by(self, chunks: int, bounds: Sequence[PriceBound]) -> float:
        return least_of(self.parts.parted, self.frame, chunks, bounds, self.passed_bytes, self.transient)

    def look(self, chunks: int, enough_us: float = math.inf) -> PriceBound:
        """The bound at the price of the first stage's memory, for an even share of the model; or at the first price
        that says that no plan of so many chunks takes less than `enough_us`."""
        problem = self._problem(chunks, ())

        def enough(bound: PriceBound) -> bool:
            return self._least_by(chunks, [bound]) >= enough_us

        share = even_share(self.parts.parted, len(problem.stages))
        return self._limited(problem, 0, share, enough if enough_us < math.inf else None)[0]

    def solve(self, chunks: int, cutoff_us: float, gap: float) -> None:
        """Improve `best` with plans of so many chunks that take less than `cutoff_us`."""
        first = self.look(chunks)
        self._add_choices(chunks, first, FACTORS)
        found: WholeSolution | None = None
        for _ in range(ROUNDS):
            if self._least_us(chunks) >= cutoff_us:
                break
            found = self._assigned(chunks, first, math.inf) or found or self._smaller(chunks, first)
            if found is None:
                break
            if self.best is None or found.step_us < self.best.step_us:
                self.best = found
                cutoff_us = min(cutoff_us, found.step_us)
            if self._tighten(chunks, found, gap) or not (self._refine(chunks, found) or self._fill(found)):
                break
        self.closed[chunks] = self._least_us(chunks)
        if self.closed[chunks] < cutoff_us * (1 - gap) and _products(self.parts.parted.problem) <= EVERY:
            self._try_every(chunks, first)

    def _try_every(self, chunks: int, first: PriceBound) -> None:
        """Of a problem with few choices, all: the answer is then the optimum."""
        nodes = self.parts.parted.problem.nodes
        for choice in itertools.product(*(range(len(n.cost_us)) for n in nodes)):
            if evaluate(self.parts.parted.problem, choice).feasible:
                self.choices.setdefault(choice)
        found = self._assigned(chunks, first, math.inf)
        self.closed[chunks] = found.step_us if found is not None else math.inf
        if found is not None and (self.best is None or found.step_us < self.best.step_us):
            self.best = found

    def _problem(self, chunks: int, choices: Sequence[Choice]) -> StageProblem:
        parted = self.parts.parted
        runs = parted.runs_of(choices) if choices else unchosen(parted)
        passed = parted.passed_bytes(choices[0]) if choices else self.passed_bytes
        return self.frame.problem(parted, runs, chunks, passed)

    def _limited(
        self, problem: StageProblem, stage: int, held: tuple[int, ...],
        enough: Callable[[PriceBound], bool] | None = None,
    ) -> tuple[PriceBound, bool]:  # fmt: skip
        """The bound at the price of one stage's memory, and whether it is new."""
        place = problem.stages[stage]
        room = place.limit_bytes - place.fixed_bytes
        once = _once(problem)
        key = (once, place.in_flight, room, held)
        known = key in self.looked
        if not known:
            least = sum(n * us for n, us in zip(held, self.bounds[0].least, strict=True) if n)
            found = price_of_room(self.parts, Held(held, place.in_flight, float(room)), once, least, enough)
            self.looked[key] = found
            self.bounds.append(found)
        return self.looked[key], not known

    def _add_choices(self, chunks: int, bound: PriceBound, factors: Sequence[float]) -> bool:
        """Choices at prices about a bound's; True if some are new."""
        before = len(self.choices)
        problem = self._problem(chunks, ())
        priced = bound.busy_weight and bound.resident_price > 0
        for factor in factors if priced else (0.0,):
            weights = self._weights(problem, factor * bound.saved_price, factor * bound.resident_price)
            choice = self.parts.choice_at(weights)
            if choice is not None:
                if not self.choices:  # of choices that are as good, those that go together
                    self.parts.agree_with(choice)
                self.choices.setdefault(choice)
        return len(self.choices) > before

    def _smaller(self, chunks: int, first: PriceBound) -> WholeSolution | None:
        """The best assignment with choices that take less memory, where none of those there are fits."""
        problem = self._problem(chunks, ())
        bounds = [b for b in self.bounds if b.busy_weight and b.resident_price > 0]
        price = max((b.resident_price for b in bounds), default=1e-9)
        flying = sorted({s.in_flight for s in problem.stages}, reverse=True)
        for factor in (4.0, 16.0, 256.0, 1e5):
            before = len(self.choices)
            for n in flying if factor > 16 else flying[:1]:
                choice = self.parts.choice_at(self._weights(problem, factor * price * n, factor * price))
                if choice is not None:
                    self.choices.setdefault(choice)
            found = self._assigned(chunks, first, math.inf) if len(self.choices) > before else None
            if found is not None:
                return found
        return None

    def _weights(self, problem: StageProblem, saved: float, resident: float) -> Weights:
        """Of one instance, in an objective for the whole model: what it takes, with bytes at these prices.

        The last part of the model is where least is in flight.
        """
        once, last = _once(problem), len(self.parts.parted.parts) - 1
        found: dict[tuple[int, Amount], float] = {}
        sides = 2 * (len(problem.stages) * problem.chunks - 1)
        for part in range(last + 1):
            ends = part == last and len(problem.stages) > 1
            found[part, Amount.FORWARD] = found[part, Amount.BACKWARD] = 1.0
            found[part, Amount.ONCE] = once
            found[part, Amount.SAVED] = resident if ends else saved
            found[part, Amount.RESIDENT] = resident
            found[part, Amount.PASSED] = sides / self.frame.bytes_per_us
        return found

    def _assigned(self, chunks: int, first: PriceBound, cutoff_us: float) -> WholeSolution | None:
        """The best assignment of the choices that agree about what passes between parts."""
        groups: dict[tuple[int, ...], list[Choice]] = {}
        for choice in self.choices:
            groups.setdefault(self.parts.parted.agreed(choice), []).append(choice)
        best: WholeSolution | None = None
        for group in groups.values():
            problem = self._problem(chunks, group)
            assigned = solve_stages(problem, cutoff_us=min(cutoff_us, best.step_us if best else math.inf))
            if assigned is None or assigned.assignment is None:
                continue
            best = WholeSolution(
                choices=tuple(group), problem=problem, assignment=assigned,
                price_us_per_byte=first.resident_price,
            )  # fmt: skip
        return best

    def _fill(self, found: WholeSolution) -> bool:
        """Choices between two that a stage which sets the pace mixes, for the bytes that it leaves; False: none is new.

        A stage holds few instances, so two choices of the lower hull leave bytes that only a third one fills.
        """
        problem, evaluation = found.problem, found.assignment.evaluation
        assert evaluation is not None and found.assignment.assignment is not None
        before = len(self.choices)
        pace = [us + problem.exposed_us(s) for s, us in enumerate(evaluation.busy_us)]
        kinds: set[tuple[float, tuple[tuple[int, ...], ...]]] = set()
        for stage in sorted(range(len(pace)), key=lambda s: -pace[s]):
            counts, place = found.assignment.assignment.counts[stage], problem.stages[stage]
            if (place.in_flight, counts) in kinds or pace[stage] < max(pace) * (1 - FILL):
                continue
            kinds.add((place.in_flight, counts))
            left = place.limit_bytes - evaluation.used_bytes[stage]
            for (part, _), run, held in zip(self.parts.parted.runs, problem.runs, counts, strict=True):
                self._fill_run(found, part, run, held, place.in_flight, left)
        return len(self.choices) > before

    def _fill_run(
        self, found: WholeSolution, part: int, run: Run, held: tuple[int, ...], in_flight: float, left: float
    ) -> None:
        """What lies between the slowest column that is held and faster ones, within what is left."""
        used = [c for c, n in zip(run.columns, held, strict=True) if n]
        if not used:
            return
        slow = max(used, key=lambda c: c.busy_us)
        faster = [c for c in run.columns if c.busy_us < slow.busy_us]
        size = slow.resident_bytes + in_flight * slow.saved_bytes
        for fast in sorted(faster, key=lambda c: c.resident_bytes + in_flight * c.saved_bytes)[:2]:
            more = fast.resident_bytes + in_flight * fast.saved_bytes - size
            for room in {left, left / 2, more / 2} if more > 0 else ():
                if 0 < room < more:
                    smaller, larger = found.choices[int(slow.name)], found.choices[int(fast.name)]
                    choice = self.parts.choice_between(
                        smaller, larger, part, in_flight, size + room, _once(found.problem)
                    )
                    if choice is not None:
                        self.choices.setdefault(choice)

    def _tighten(self, chunks: int, found: WholeSolution, gap: float) -> bool:
        """True if the plan is near enough to the bound: with more of these, at the prices of the memory of those of its
        stages that take most above what is known."""
        problem, evaluation = found.problem, found.assignment.evaluation
        assert evaluation is not None and found.assignment.assignment is not None
        cuts, parts = found.assignment.assignment.cuts, [p for p, _ in self.parts.parted.runs]
        for _ in range(TIGHTER):
            if self._least_us(chunks) >= found.step_us * (1 - gap):
                return True
            least = stage_work_us(problem, cuts, parts, self.bounds, self.transient)
            above = [
                busy + _once(problem) * finish - us
                for busy, finish, us in zip(evaluation.busy_us, evaluation.finish_us, least, strict=True)
            ]
            order = sorted(range(len(above)), key=lambda s: -above[s])
            if not any(self._limited(problem, s, self._held(cuts[s]))[1] for s in order):
                break
        return self._least_us(chunks) >= found.step_us * (1 - gap)

    def _held(self, cut: Sequence[int]) -> tuple[int, ...]:
        """Instances of each part, of instances of each run."""
        held = [0] * len(self.parts.parted.parts)
        for (part, _), count in zip(self.parts.parted.runs, cut, strict=True):
            held[part] += count
        return tuple(held)

    def _refine(self, chunks: int, found: WholeSolution) -> bool:
        """A bound and choices at the price of the memory of the stages that set the pace; False if nothing is new."""
        problem, evaluation = found.problem, found.assignment.evaluation
        assert evaluation is not None and found.assignment.assignment is not None
        pace = [us + problem.exposed_us(s) for s, us in enumerate(evaluation.busy_us)]
        for stage in sorted(range(len(pace)), key=lambda s: -pace[s])[:2]:
            bound, new = self._limited(problem, stage, self._held(found.assignment.assignment.cuts[stage]))
            if new:
                self._add_choices(chunks, bound, NEAR)
                return True
        return False


def _products(problem: Problem) -> int:
    """How many choices there are."""
    return math.prod(len(n.cost_us) for n in problem.nodes)


def _once(problem: StageProblem) -> float:
    return once_weight(len(problem.stages), problem.micro_batches, problem.chunks)
