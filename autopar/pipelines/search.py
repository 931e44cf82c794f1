"""The best of all trials: what bounds them is made tighter for that with the lowest bound, until it is solved.

kind      trials of one tensor, expert and context parallelism and one size of micro-batch run the same ops on the same
          pieces. What these take at the least, with memory for nothing, bounds every trial of the kind; of a kind that
          nothing is known of, that of larger micro-batches, as fewer rows take no less for each
own       the trial's own problem, with all communication and what is done once a step, under the memory of its stages
solved    its best plan (`solver.whole`), while its bound is the lowest

The search ends when no bound is below the best plan's step by more than the gap.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar import sharding
from autopar.candidates import Progress, Task
from autopar.cost_model.build import Priced
from autopar.cost_model.moments import COPIES
from autopar.ir.parts import Amount, PartedProblem, WholeSolution
from autopar.pipelines.problem import TrialProblem, frame_of, problem_of
from autopar.pipelines.trials import KindKey, Trial, chunks_of, trials
from autopar.solver import PartsModel, PriceBound, WholeSearch, least_of
from autopar.solver.even_cut import even_share

PROVEN = 1e-6
"""A gap below which a step is called optimal."""
STAGES_GAP = 0.01
"""The least gap that is asked for, if there may be one: a stage holds whole blocks, the bound parts of them."""

GUESSES = 4
"""Trials from which a first plan is tried."""
TAKEN = (0.25, 0.5)
"""Parts of the memory that weights take at the least in trials from which it is tried first."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What bounds all trials of the same `Trial.ranks` and `rows`, and of fewer rows.

    `problem`: of one of its trials, with `data` data-parallel ranks, and `parts` its model. `free`: with memory for
    nothing, once for nothing.
    """

    rows: int
    data: int
    problem: TrialProblem
    parts: PartsModel
    free: PriceBound

    def taken(self, task: Task, trial: Trial) -> float:
        """About which part of the first stage's room is taken all through a step at the least: for guesses only."""
        parted, frame = self.problem.parted, frame_of(task, trial, self.problem)
        held = even_share(parted, trial.load.stages)
        size = 0.0
        for term in parted.terms:
            if term.amount is Amount.RESIDENT:
                share = 1.0 if term.label == COPIES else self.data / trial.data
                size += share * min(term.sizes) * sum(held[p] / parted.counts[p] for p in term.parts)
        return size / max(1, frame.stages[0].limit_bytes - parted.fixed_bytes)

    def least_us(self, task: Task, trial: Trial) -> float:
        """No plan of the trial takes less."""
        fewer = trial.rows / self.rows
        frame, passed = frame_of(task, trial, self.problem), self.parts.least_passed() * fewer
        bounds = [self.free.scaled(fewer)]
        return min(least_of(self.parts.parted, frame, v, bounds, passed) for v in chunks_of(task, trial))


@dataclass(frozen=True, slots=True)
class Solved:
    """A trial's best plan."""

    trial: Trial
    priced: Priced
    parted: PartedProblem
    solution: WholeSolution

    @property
    def step_us(self) -> float:
        """Of the step."""
        return self.solution.step_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of a search.

    Attributes:
        bound_us: no trial's step is shorter.
        trials, looked: how many there were, and got a problem of their own.
        in_time: the search was not ended by `Options.time_limit_s`.
    """

    best: Solved | None
    bound_us: float
    trials: tuple[Trial, ...]
    looked: int
    in_time: bool


@dataclass
class Known:
    """What is known of a trial. `search`: of its own problem."""

    trial: Trial
    bound_us: float = 0.0
    own_kind: bool = False
    priced: Priced | None = None
    search: WholeSearch | None = None

    @property
    def solved(self) -> Solved | None:
        """Its best plan so far."""
        if self.search is None or self.search.best is None or self.priced is None:
            return None
        return Solved(self.trial, self.priced, self.search.parts.parted, self.search.best)


@dataclass
class Models:
    """One linear model of each form."""

    known: dict[int, PartsModel] = field(default_factory=dict)

    def of(self, parted: PartedProblem) -> PartsModel:
        """The model of a problem, with what problems of its form share."""
        found = PartsModel(parted, self.known.values())
        self.known.setdefault(found.form, found)
        return found


class Kinds:
    """Kinds by `Trial.kind`, worked out when they are asked for."""

    def __init__(self, task: Task, every: Iterable[Trial] = ()) -> None:
        self.task, self.models = task, Models()
        self.found: dict[KindKey, Kind] = {}
        self.fewest: dict[KindKey, Trial] = {}
        for trial in sorted(every, key=lambda t: t.data):
            self.fewest.setdefault(trial.kind, trial)

    def nearest(self, trial: Trial) -> Kind | None:
        """Of the same rows, or of the next larger ones that are known; one whose batch isn't cut may choose more."""
        ranks, least, cut = trial.kind
        larger = [k for k in self.found if k[0] == ranks and k[1] >= least and k[2] <= cut]
        return self.found[min(larger, key=lambda k: (k[1], not k[2]))] if larger else None

    def of(self, trial: Trial) -> Kind:
        """The trial's kind; worked out if it isn't known. Raises PinError.

        What a micro-batch takes at the least, with memory for nothing, is the same for any number of data-parallel
        ranks, each with whole weights and its own rows, but for what they wait for (the sum of their losses): so it is
        worked out on the fewest.
        """
        key = trial.kind
        if key not in self.found:
            fewest = self.fewest.get(key, trial)
            self._add(key, fewest, problem_of(self.task, fewest))
        return self.found[key]

    def bound(self, alike: list[Trial]) -> None:
        """Work out what bounds all of these, of one tensor and expert parallelism: raises PinError.

        The largest micro-batch, of a batch that isn't cut if some trial's isn't.
        """
        largest = max(alike, key=lambda t: (t.rows, -t.data))
        if all(t.load.micro_batches > 1 for t in alike):
            self.of(largest)
        else:
            key = (*largest.kind[:2], False)
            fewest = self.fewest.get(key, self.fewest.get(largest.kind, largest))
            self._add(key, fewest, problem_of(self.task, fewest, joined=True))

    def _add(self, key: KindKey, trial: Trial, problem: TrialProblem) -> None:
        parts = self.models.of(problem.parted)
        self.found[key] = Kind(trial.rows, trial.data, problem, parts, parts.free())

    def search_of(self, trial: Trial) -> tuple[Priced, WholeSearch]:
        """The trial's own problem. Raises PinError."""
        kind = self.of(trial)
        problem = problem_of(self.task, trial, kind.problem)
        parts = self.models.of(problem.parted)
        frame = frame_of(self.task, trial, problem)
        return problem.priced, WholeSearch(parts, frame, chunks_of(self.task, trial), [kind.free])


class Search:
    """Trials by their bounds."""

    def __init__(self, task: Task, progress: Progress, below_us: float = math.inf) -> None:
        self.task, self.progress, self.below_us = task, progress, below_us
        self.every = tuple(sorted(trials(task), key=lambda t: t.order))
        self.kinds = Kinds(task, self.every)
        self.gap = max(task.options.gap, STAGES_GAP) if task.options.gap else 0.0
        self.best: Solved | None = None
        self.ended: list[float] = []
        self.refused: list[sharding.PinError] = []
        self.looked = 0

    @property
    def cutoff_us(self) -> float:
        """Of the best plan, or what it must be below."""
        return min(self.below_us, self.best.step_us if self.best else math.inf)

    def run(self, end: float) -> bool:
        """Search until no trial can be better by more than the gap, or `end`. True if it was not stopped."""
        for i, ranks in enumerate(sorted({t.ranks for t in self.every})):
            alike = [t for t in self.every if t.ranks == ranks]
            self.progress(f"bound {alike[0].mesh}", 0.02 * i)
            with contextlib.suppress(sharding.PinError):  # of this one, which says nothing of the others
                self.kinds.bound(alike)
        found = [Known(t) for t in self.every]
        for known in found:
            kind = self.kinds.nearest(known.trial)
            known.bound_us = kind.least_us(self.task, known.trial) if kind else 0.0
        self._guess(found, end)
        left = [(known.bound_us, i) for i, known in enumerate(found)]
        heapq.heapify(left)
        while left:
            bound, i = heapq.heappop(left)
            enough = self.cutoff_us * (1 - self.gap) if self.best else self.below_us
            if math.isinf(bound) or bound >= enough:
                self.ended.append(bound)
                return True
            if time.monotonic() >= end:
                self.ended.append(bound)
                return False
            self.progress(f"{len(left)} left: {found[i].trial}", 1 - 0.9 * (len(left) + 1) / len(found))
            if self._closer(found[i]):
                heapq.heappush(left, (found[i].bound_us, i))
        return True

    def _guess(self, found: list[Known], end: float) -> None:
        """A first plan, against which others are measured: of a trial whose weights leave most of the memory free.

        Trials of least bound come first in the search, and need more than there is: without a plan each of them is
        bounded as well as can be.
        """
        order = []
        for i, known in enumerate(found):
            kind = self.kinds.nearest(known.trial)
            taken = kind.taken(self.task, known.trial) if kind else math.inf
            if taken < 1 and known.bound_us < self.below_us:
                order.append((sum(taken > part for part in TAKEN), known.bound_us, i))
        for _, _, i in sorted(order)[:GUESSES]:
            known = found[i]
            self.progress(f"first {known.trial}", 0.1)
            while self.best is None and time.monotonic() < end and not math.isinf(known.bound_us):
                if not self._closer(known):
                    break
            if self.best is not None:
                break

    def _closer(self, known: Known) -> bool:
        """Look closer at a trial. False: nothing more is to be known of it."""
        trial = known.trial
        if known.search is not None:
            if not known.search.step(self.cutoff_us, self.gap):
                self.ended.append(known.bound_us)
                return False
            solved = known.solved
            if solved is not None and solved.step_us < self.cutoff_us:
                self.best = solved
            known.bound_us = max(known.bound_us, known.search.least_us())
            return True
        try:
            if not known.own_kind:
                known.own_kind = True
                known.bound_us = max(known.bound_us, self.kinds.of(trial).least_us(self.task, trial))
            else:
                self.looked += 1
                known.priced, known.search = self.kinds.search_of(trial)
        except sharding.PinError as error:
            self.refused.append(error)
            return False
        return True


def best_of(task: Task, progress: Progress, below_us: float = math.inf) -> Found:
    """The best plan found that takes less than `below_us`, and a lower bound on the steps of all trials.

    Raises PinError if no trial holds the pins.
    """
    end = time.monotonic() + (math.inf if task.options.time_limit_s is None else task.options.time_limit_s)
    search = Search(task, progress, below_us)
    in_time = search.run(end)
    if len(search.refused) == len(search.every):
        raise search.refused[0]
    bound = min([*search.ended, search.cutoff_us])
    return Found(best=search.best, bound_us=bound, trials=search.every, looked=search.looked, in_time=in_time)
