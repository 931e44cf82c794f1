"""The whole model: pipeline stages × mesh of one stage × micro-batches × schedule, with layouts and recomputation.

trials      every (stages, data, tensor, micro-batch) that the options allow
bounds      one relaxation for each (tensor, rows of a micro-batch): what the blocks and ends cost at the least, with
            nothing to wait for among data-parallel ranks and no memory limit; as often as a step pays it, it bounds
            every trial of that kind
solve       the most promising first, until no bound is below the best step: the relaxation under the memory of the
            first and the last stage of an even cut; choices at prices of memory about its own are the columns of
            every part; then blocks and columns to stages, for each schedule
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar import sharding
from autopar.candidates import Progress, Task, nothing_fits, out_of_time
from autopar.cost_model.build import Priced, build_problem
from autopar.cost_model.pipeline import Choice, Parts, block_runs, stage_problem
from autopar.cost_model.prices import MeshPrices, model_flops
from autopar.cost_model.search_space import allowed_degrees, axis_pins, divisors, stage_mesh
from autopar.cost_model.staged import Cut, staged_plan
from autopar.cost_model.wiring import SlotKind
from autopar.errors import InfeasibleError, UserError
from autopar.ir.graph import InputKind
from autopar.ir.load import Load
from autopar.ir.mesh import Mesh
from autopar.ir.options import Options
from autopar.ir.plan import Plan, PlanSolver
from autopar.ir.problem import Problem
from autopar.ir.stages import StageProblem, StageSolution
from autopar.ir.strategy import Note
from autopar.solver import LeastMemory, Relaxation, Sweep, minimise_memory, relaxed, solve_stages, sweep

LARGEST_MICRO_BATCH = 16
"""Rows of one micro-batch on one rank: more gain nothing on matrices of 2 048 tokens a row."""
SOLVES = 24
"""Trials solved at most; what is left out then widens the gap that the plan states."""
FACTORS = (0.3, 0.99, 1.01, 1.5, 4.0)
"""Prices of memory tried, in the relaxation's own."""
PROVEN = 1e-6
"""A gap below which a step is called optimal."""
MOST_CHUNKS = 12
"""Parts of the model on one stage at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to spread the step.

    Attributes:
        mesh: of a stage.
        rows: of one micro-batch on one rank.
        bound_us: no plan of the trial takes less.
    """

    load: Load
    mesh: Mesh
    rows: int
    bound_us: float = 0.0

    @property
    def tensor(self) -> int:
        return next((a.size for a in self.mesh.axes if a.name == "tp"), 1)

    @property
    def pieces(self) -> Mesh:
        """The mesh that cuts a tensor as small as a rank's piece of one micro-batch."""
        times = self.load.micro_batches
        return Mesh(axes=tuple(replace(a, size=a.size * times) if a.name == "dp" else a for a in self.mesh.axes))

    def __str__(self) -> str:
        return f"{self.load}, {self.mesh}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A trial's answer. `choices`: one for each column's name."""

    trial: Trial
    priced: Priced
    choices: tuple[Choice, ...]
    stages: StageProblem
    assignment: StageSolution
    price_us_per_byte: float

    @property
    def step_us(self) -> float:
        """Of the step."""
        return self.assignment.step_us

    @property
    def order(self) -> tuple[float, ...]:
        """Smaller is better; equals are told apart by what is simpler."""
        return (self.step_us, self.trial.load.stages, self.stages.chunks, self.trial.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of a search.

    Attributes:
        bound_us: no trial's step is shorter, of those whose first and last stage hold an even share of the blocks.
        trials, solved: how many there were, and how many of them were solved.
        in_time: the search was not ended by `Options.time_limit_s`.
    """

    best: Solved | None
    bound_us: float
    trials: tuple[Trial, ...]
    solved: int
    in_time: bool


def batch_size(task: Task) -> int:
    """Rows of the global batch: of the model's inputs, the first dim of the largest."""
    metas = [i.value.meta for i in task.captured.top.inputs if i.kind is InputKind.INPUT]
    return max((m.shape[0] for m in metas if m.shape), default=1)


def trials(task: Task) -> tuple[Trial, ...]:
    """Every way within pins and search space; tensor parallel ranks on the innermost links, unless pinned."""
    pins, allowed = axis_pins(task.options), allowed_degrees(task.options)
    for axis in ("cp", "free"):
        if pins.get(axis, 1) != 1 or set(allowed.get(axis, (1,))) != {1}:
            raise UserError(f"axis {axis} is not searched with pipeline stages or micro-batches: leave it out")
    found = tuple(t for p in _stage_counts(task, pins, allowed) for t in _of_stages(task, p, pins, allowed))
    if not found:
        raise UserError(_no_trial(task))
    return found


def _no_trial(task: Task) -> str:
    options = task.options
    asked = [f"{k}={v}" for k, v in options.pins.items()]
    asked += [f"{name} in {list(sizes)}" for name, sizes in options.search_space.items()]
    asked += [f"{options.micro_batches} micro-batches"] if options.micro_batches else []
    blocks = sum(count for _, count in block_runs(task.captured))
    return (
        f"{', '.join(asked) or 'no limits'}: no stages × data × tensor on {task.cluster.devices} devices of "
        f"{task.cluster.name} cut {batch_size(task)} rows and {blocks} blocks so"
    )


Pins = Mapping[str, int]
Allowed = Mapping[str, tuple[int, ...]]


def _may(degree: str, size: int, pins: Pins, allowed: Allowed) -> bool:
    return size == pins.get(degree, size) and size in allowed.get(degree, (size,))


def _stage_counts(task: Task, pins: Pins, allowed: Allowed) -> Iterator[int]:
    blocks = sum(count for _, count in block_runs(task.captured))
    for stages in divisors(task.cluster.devices):
        if stages <= max(1, blocks) and _may("pp", stages, pins, allowed):
            yield stages


def _of_stages(task: Task, stages: int, pins: Pins, allowed: Allowed) -> Iterator[Trial]:
    devices, batch = task.cluster.devices // stages, batch_size(task)
    chunks = max(chunk_counts(task, stages, 2**31))
    near = task.cluster.levels[0].size if task.cluster.levels else 1
    asked = "tp" in pins or "tp" in allowed
    for tensor in divisors(devices):
        data = devices // tensor
        if not _may("tp", tensor, pins, allowed) or not _may("dp", data, pins, allowed) or batch % data:
            continue
        if tensor > near and not asked:
            continue
        mesh = stage_mesh(data, tensor, task.cluster)
        for rows in _micro_batch_rows(task.options, batch // data):
            yield Trial(
                load=Load(stages=stages, micro_batches=batch // data // rows, chunks=chunks), mesh=mesh, rows=rows
            )


def chunk_counts(task: Task, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Parts of the model that a stage may hold: of equally many blocks, and with as many micro-batches as stages."""
    blocks = sum(count for _, count in block_runs(task.captured))
    if stages == 1 or blocks % stages or micro_batches < stages:
        return (1,)
    return tuple(v for v in divisors(blocks // stages) if v <= MOST_CHUNKS)


def _micro_batch_rows(options: Options, rows: int) -> Iterator[int]:
    """Sizes of a rank's micro-batch: powers of two that divide its rows, or what the options ask."""
    if options.micro_batches is not None:
        if rows % options.micro_batches == 0:
            yield rows // options.micro_batches
        return
    size = 1
    while size <= min(rows, LARGEST_MICRO_BATCH):
        if rows % size == 0:
            yield size
        size *= 2


def bounded(task: Task, found: tuple[Trial, ...], progress: Progress) -> list[Trial]:
    """The trials with their lower bounds, lowest first."""
    kinds = sorted({(t.tensor, t.rows) for t in found})
    work = {}
    for i, (tensor, rows) in enumerate(kinds):
        progress(f"bound tp={tensor}, {rows} rows", 0.5 * i / len(kinds))
        work[(tensor, rows)] = _work_us(task, tensor, rows)
    known = [replace(t, bound_us=t.load.runs * work[(t.tensor, t.rows)]) for t in found]
    return sorted(known, key=lambda t: (t.bound_us, t.load.stages, t.tensor, t.rows))


def _work_us(task: Task, tensor: int, rows: int) -> float:
    """What the whole model costs on one micro-batch of so many rows, at the least: nothing done once is counted."""
    times = batch_size(task) // rows
    mesh = stage_mesh(1, tensor, task.cluster)
    trial = Trial(load=Load(micro_batches=times), mesh=mesh, rows=rows)
    try:
        priced = _priced(task, trial, limit_bytes=0)
    except sharding.PinError:  # on this mesh; each trial's own says
        return 0.0
    storage = {i for i, s in enumerate(priced.wiring.slots) if s.kind is SlotKind.STORAGE}
    nodes = tuple(
        replace(n, cost_us=(0.0,) * len(n.cost_us)) if i in storage else n for i, n in enumerate(priced.problem.nodes)
    )
    return relaxed(replace(priced.problem, nodes=nodes))[0] / times


def _priced(task: Task, trial: Trial, limit_bytes: int) -> Priced:
    """Raises PinError for pins that the trial's mesh can't hold."""
    table = sharding.build_table(task.captured, trial.pieces, task.options, rules=task.rules)
    prices = MeshPrices(task.cluster, trial.mesh, trial.pieces)
    return build_problem(
        task.captured, task.wiring, table, prices, task.options, limit_bytes, load=trial.load, mesh=trial.mesh,
        once_prices=MeshPrices(task.cluster, trial.mesh),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tight:
    """A trial with its problem and the relaxation of it, under the memory of its devices."""

    trial: Trial
    priced: Priced
    relaxation: Relaxation


def tightened(task: Task, trial: Trial) -> Tight:
    """Its `trial` has the bound of its own relaxation: inf where nothing fits."""
    priced = _priced(task, trial, task.limit_bytes)
    relaxation = Relaxation.of(priced.problem)
    return Tight(replace(trial, bound_us=max(relaxation.bound_us, trial.bound_us)), priced, relaxation)


def solve_trial(task: Task, tight: Tight, cutoff_us: float) -> Solved | None:
    """The best of one trial; None if nothing fits, or nothing is below `cutoff_us`."""
    return _staged(task, tight, sweep(tight.relaxation, FACTORS), cutoff_us)


def _staged(task: Task, tight: Tight, found: Sweep, cutoff_us: float) -> Solved | None:
    """Blocks and columns to stages, under the best schedule, from the choices that fit together."""
    trial, priced = tight.trial, tight.priced
    parts = Parts.of(task.captured, priced)
    best: Solved | None = None
    for group in _alike(parts, found.choices):
        for chunks in chunk_counts(task, trial.load.stages, trial.load.micro_batches):
            stages = stage_problem(parts, group, task.cluster, trial.pieces, task.limit_bytes, chunks)
            assigned = solve_stages(stages, cutoff_us=min(cutoff_us, best.step_us if best else math.inf))
            if assigned is None or assigned.assignment is None:
                continue
            solved = Solved(
                trial=trial, priced=priced, choices=group, stages=stages, assignment=assigned,
                price_us_per_byte=found.price_us_per_byte,
            )  # fmt: skip
            if best is None or solved.order < best.order:
                best = solved
    return best


def _alike(parts: Parts, choices: tuple[Choice, ...]) -> list[tuple[Choice, ...]]:
    """Choices that agree about what passes between parts, together."""
    groups: dict[tuple[int, ...], list[Choice]] = {}
    for choice in choices:
        groups.setdefault(parts.boundary(choice), []).append(choice)
    return [tuple(group) for group in groups.values()]


def best_of(task: Task, progress: Progress) -> Found:
    """The best plan found and a lower bound on the steps of all trials.

    Of the trials left, that with the lowest bound is looked at: its own relaxation, then itself. Raises PinError where
    no trial can hold the pins.
    """
    end = time.monotonic() + (math.inf if task.options.time_limit_s is None else task.options.time_limit_s)
    every = bounded(task, trials(task), progress)
    left: list[tuple[float, int, Trial | Tight]] = [(t.bound_us, i, t) for i, t in enumerate(every)]
    best: Solved | None = None
    bounds: list[float] = []
    refused: list[sharding.PinError] = []
    solved = 0
    in_time = True
    while left:
        bound, i, trial = heapq.heappop(left)
        in_time = time.monotonic() < end
        if not in_time or math.isinf(bound) or _enough(best, bound, solved, task.options):
            bounds.append(bound)
            break
        progress(f"{len(left)} left: {every[i]}", 0.5 + 0.5 * (1 - len(left) / len(every)))
        if isinstance(trial, Trial):
            try:
                tight = tightened(task, trial)
                heapq.heappush(left, (tight.trial.bound_us, i, tight))
            except sharding.PinError as error:
                refused.append(error)
            continue
        solved += 1
        bounds.append(bound)
        found = solve_trial(task, trial, best.step_us if best else math.inf)
        if found is not None and (best is None or found.order < best.order):
            best = found
    if len(refused) == len(every):
        raise refused[0]
    bound = min([*bounds, best.step_us if best else math.inf])
    return Found(best=best, bound_us=bound, trials=tuple(every), solved=solved, in_time=in_time)


def _enough(best: Solved | None, bound_us: float, solved: int, options: Options) -> bool:
    """True if no trial left is worth a look: none of them is better by more than the gap, or enough were solved."""
    return best is not None and (bound_us >= best.step_us * (1 - options.gap) or solved >= SOLVES)


def staged(task: Task, progress: Progress) -> Plan:
    """The fastest plan with its stages and micro-batches. Raises InfeasibleError where none fits."""
    start = time.monotonic()
    found = best_of(task, progress)
    best = found.best
    if best is None:
        raise _nothing_fits(task, found, progress) if found.in_time else out_of_time(task, "stages and micro-batches")
    assert best.assignment.assignment is not None and best.assignment.evaluation is not None
    parts = Parts.of(task.captured, best.priced)
    cut = Cut(parts, best.choices, best.stages, best.assignment.assignment, best.assignment.evaluation)
    gap = max(0.0, 1 - found.bound_us / best.step_us)
    proven = gap < PROVEN and all(t.load.stages == 1 for t in found.trials)  # the bound knows even cuts only
    status = "time_limit" if not found.in_time else "optimal" if proven else "feasible"
    solver = PlanSolver(
        status=status, objective_us=best.step_us, bound_us=found.bound_us, gap=gap,
        time_s=round(time.monotonic() - start, 3), memory_price=best.price_us_per_byte,
        memory_bytes=best.assignment.evaluation.peak_bytes,
    )  # fmt: skip
    table = sharding.build_table(task.captured, best.trial.pieces, task.options, rules=task.rules)
    notes = table.notes + tuple(Note(*n) for n in task.captured.notes)
    notes += (Note("search", "", _searched(found)),)
    prices = MeshPrices(task.cluster, best.trial.mesh, best.trial.pieces)
    flops = model_flops(task.captured, task.wiring)
    return staged_plan(cut, prices, task.cluster, task.options, notes, flops, solver)


def _searched(found: Found) -> str:
    words = f"{len(found.trials)} ways of stages × mesh × micro-batches, {found.solved} solved"
    if all(t.load.stages == 1 for t in found.trials):
        return words
    return f"{words}; the gap is to cuts whose first and last stage have an even share of the blocks"


def _nothing_fits(task: Task, found: Found, progress: Progress) -> InfeasibleError:
    """The least memory over trials of the smallest micro-batch, for what would do."""
    least: list[tuple[int, int, Problem, LeastMemory, Trial]] = []
    small: dict[tuple[int, Mesh], Trial] = {}
    for trial in sorted(found.trials, key=lambda t: (t.load.stages, t.tensor, t.rows)):
        small.setdefault((trial.load.stages, trial.mesh), trial)
    for i, trial in enumerate(small.values()):
        progress(f"nothing fits: the least memory of {trial}", i / len(small))
        problem = _priced(task, trial, task.limit_bytes).problem
        needs = minimise_memory(problem) if problem.moments else None
        if needs is not None:
            least.append((needs.needed_bytes, i, problem, needs, trial))
    if not least:
        return InfeasibleError(
            f"{task.captured.model_name}: no plan exists under these pins", needed_bytes=0,
            budget_bytes=task.limit_bytes, largest_terms=(),
        )  # fmt: skip
    _, _, problem, needs, trial = min(least, key=lambda x: x[:2])
    return nothing_fits(task, problem, needs, "with an even cut the least is", f"with {trial}")
