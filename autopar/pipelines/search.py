"""The best of all trials: what bounds them is made tighter for that with the lowest bound, until it is solved.

kind      trials of one tensor parallelism and one size of micro-batch have the same work and the same activations. What
          these take at the least, under the memory of a device, bounds every trial of the kind. A size of which nothing
          is known yet takes no less for each row than a larger one
joined    the same, with what is done once a step, on the fewest data-parallel ranks of any trial
own       the trial's own problem: its communication, and all that its stages hold
solved    its best plan (`solver.whole`), while its bound is the lowest

The search ends when no bound is below the best plan's step by more than the gap.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, field

from autopar import sharding
from autopar.candidates import Progress, Task
from autopar.cost_model.build import Priced
from autopar.cost_model.pipeline import stages_of
from autopar.cost_model.search_space import stage_mesh
from autopar.ir.load import Load
from autopar.ir.parts import PartedProblem, WholeSolution
from autopar.pipelines.problem import frame_of, priced_trial
from autopar.pipelines.trials import Trial, batch_size, chunks_of, trials
from autopar.solver import Held, PartsModel, PriceBound, WholeSearch, least_of, once_weight

PROVEN = 1e-6
"""A gap below which a step is called optimal."""
STAGES_GAP = 0.01
"""The least gap that is asked for, if there may be one: a stage holds whole blocks, the bound parts of them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What bounds all trials of one tensor parallelism and `rows`. `parts`: of its problem; None if it has none.

    `bounds`: with nothing done once. Those of fewer rows are as many times smaller.
    """

    rows: int
    parts: PartsModel | None = None
    bounds: tuple[PriceBound, ...] = ()

    def scaled(self, rows: int) -> tuple[PriceBound, ...]:
        """The bounds for fewer rows."""
        return tuple(b.scaled(rows / self.rows) for b in self.bounds)


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
    """What is known of a trial. `kind_rows`: of the kind that bounds it; `search`: of its own problem."""

    trial: Trial
    bound_us: float = 0.0
    kind_rows: int = 0
    bounds: tuple[PriceBound, ...] = ()
    joined: bool = False
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
    """Kinds by (tensor, rows), worked out when they are asked for."""

    def __init__(self, task: Task, every: tuple[Trial, ...], models: Models) -> None:
        self.task, self.models = task, models
        self.found: dict[tuple[int, int], Kind] = {}
        self.data = {t.tensor: min(o.data for o in every if o.tensor == t.tensor) for t in every}
        room = max(s.limit_bytes for s in stages_of(task.cluster, 1, task.limit_bytes))
        self.room = float(room)

    def nearest(self, trial: Trial) -> Kind:
        """Of the same rows, or of the next larger ones that are known."""
        rows = min(rows for tensor, rows in self.found if tensor == trial.tensor and rows >= trial.rows)
        return self.found[trial.tensor, rows]

    def work_out(self, tensor: int, rows: int) -> Kind:
        """Bounds with memory for nothing, and under a device's memory for what waits for the backward.

        A first stage has as many micro-batches in flight as there are stages, each of as large a part of the model.
        """
        task, data, batch = self.task, self.data[tensor], batch_size(self.task)
        data = data if batch % (data * rows) == 0 else 1
        mesh = stage_mesh(data, tensor, task.cluster)
        try:
            _, whole = priced_trial(task, Trial(load=Load(micro_batches=batch // data // rows), mesh=mesh, rows=rows))
        except sharding.PinError:  # of this mesh, which says nothing of its trials
            found = Kind(rows)
        else:
            parts = self.models.of(whole)
            found = Kind(rows, parts, (parts.free(), self._waiting(parts, 0.0)))
        self.found[tensor, rows] = found
        return found

    def _waiting(self, parts: PartsModel, once: float) -> PriceBound:
        whole = parts.parted
        return parts.limited(Held(whole.counts, 1.0, self.room - whole.fixed_bytes), once, resident=0.0)

    def joined(self, trial: Trial, kind: Kind) -> tuple[PriceBound, ...]:
        """The kind's bounds, of the trial's own rows, and one with what is done once a step."""
        if kind.parts is None:
            return ()
        chunks = chunks_of(self.task, trial)
        once = min(once_weight(trial.load.stages, trial.load.micro_batches, v) for v in chunks)
        return (*kind.bounds, self._waiting(kind.parts, once))

    def least_us(self, trial: Trial, kind: Kind, bounds: tuple[PriceBound, ...]) -> float:
        """No plan of the trial takes less, by bounds of its kind."""
        if kind.parts is None:
            return 0.0
        frame, passed = frame_of(self.task, trial), kind.parts.least_passed() * trial.rows / kind.rows
        return min(least_of(kind.parts.parted, frame, v, bounds, passed) for v in chunks_of(self.task, trial))


@dataclass
class Search:
    """Trials by their bounds."""

    task: Task
    progress: Progress
    below_us: float = math.inf
    every: tuple[Trial, ...] = ()
    best: Solved | None = None
    ended: list[float] = field(default_factory=list)
    refused: list[sharding.PinError] = field(default_factory=list)
    looked: int = 0

    def __post_init__(self) -> None:
        self.every = tuple(sorted(trials(self.task), key=lambda t: t.order))
        self.models = Models()
        self.kinds = Kinds(self.task, self.every, self.models)
        asked = self.task.options.gap
        self.gap = max(asked, STAGES_GAP) if asked else 0.0

    @property
    def cutoff_us(self) -> float:
        """Of the best plan, or what it must be below."""
        return min(self.below_us, self.best.step_us if self.best else math.inf)

    def run(self, end: float) -> bool:
        """Search until no trial can be better by more than the gap, or `end`. True if it was not stopped."""
        for i, tensor in enumerate(sorted({t.tensor for t in self.every})):
            self.progress(f"bound tp={tensor}", 0.02 * i)
            self.kinds.work_out(tensor, max(t.rows for t in self.every if t.tensor == tensor))
        found = []
        for trial in self.every:
            kind = self.kinds.nearest(trial)
            found.append(Known(trial, self.kinds.least_us(trial, kind, kind.scaled(trial.rows))))
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
        elif known.kind_rows != trial.rows:
            kind = self.kinds.found.get((trial.tensor, trial.rows)) or self.kinds.work_out(trial.tensor, trial.rows)
            known.kind_rows = kind.rows
            known.bound_us = max(known.bound_us, self.kinds.least_us(trial, kind, kind.bounds))
        elif not known.joined:
            known.joined = True
            kind = self.kinds.nearest(trial)
            known.bounds = self.kinds.joined(trial, kind)
            known.bound_us = max(known.bound_us, self.kinds.least_us(trial, kind, known.bounds))
        else:
            self.looked += 1
            try:
                known.priced, whole = priced_trial(self.task, trial)
            except sharding.PinError as error:
                self.refused.append(error)
                return False
            parts = self.models.of(whole)
            chunks = chunks_of(self.task, trial)
            known.search = WholeSearch(parts, frame_of(self.task, trial), chunks, list(known.bounds))
            known.bound_us = max(known.bound_us, known.search.least_us())
        return True


def look(task: Task, trial: Trial) -> tuple[Priced, WholeSearch]:
    """The trial's own problem. Raises PinError for pins that its mesh can't hold."""
    priced, whole = priced_trial(task, trial)
    return priced, WholeSearch(PartsModel(whole), frame_of(task, trial), chunks_of(task, trial))


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
