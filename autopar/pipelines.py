"""The whole model: pipeline stages × mesh of one stage × micro-batches, each with its layouts and recomputation.

trials      every (stages, data, tensor, micro-batches) that the options allow
bounds      one relaxation for each (tensor, sequences of a micro-batch): what the blocks and ends cost at the least,
            with nothing to wait for among data-parallel ranks and no memory limit; times (m + p - 1)/p it bounds
            every trial of that kind
solve       the most promising first, until no bound is below the best step: layouts under the memory of the first
            and the last stage, recomputation allowed if memory binds without it; then blocks to stages
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar import sharding
from autopar.candidates import Candidate, Task, solve_problem
from autopar.cost_model.build import Priced, build_problem
from autopar.cost_model.pipeline import block_runs, stage_problem
from autopar.cost_model.prices import MeshPrices
from autopar.cost_model.search_space import axis_pins, divisors, stage_mesh
from autopar.cost_model.wiring import SlotKind
from autopar.ir.graph import InputKind
from autopar.ir.load import Load
from autopar.ir.mesh import Mesh
from autopar.ir.options import RECOMPUTE, Options
from autopar.ir.problem import Problem
from autopar.ir.solution import Solution
from autopar.ir.stages import StageProblem, StageSolution
from autopar.solver import relaxation_bound_us
from autopar.solver.stages import solve_stages

Progress = Callable[[str, float], None]
LARGEST_MICRO_BATCH = 16
"""Sequences of one micro-batch on one rank: more gain nothing on matrices of 2 048 rows a sequence."""
SOLVES = 16
"""Trials solved at most; what is left out then widens the gap that the plan states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to spread the step: `mesh` is that of a stage, `rows` the sequences of a micro-batch on one rank."""

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
    """A trial's answer. `bound_us` holds for the trial."""

    trial: Trial
    candidate: Candidate
    solution: Solution
    stages: StageProblem
    assignment: StageSolution

    @property
    def step_us(self) -> float:
        return self.assignment.step_us


def batch_size(task: Task) -> int:
    """Rows of the global batch: of the model's inputs, the first dim of the largest."""
    metas = [i.value.meta for i in task.captured.top.inputs if i.kind is InputKind.INPUT]
    return max((m.shape[0] for m in metas if m.shape), default=1)


def trials(task: Task) -> tuple[Trial, ...]:
    """Every way within pins and search space; tensor parallel ranks on the innermost links, unless pinned."""
    found = [t for p in _stage_counts(task) for t in _of_stages(task, p)]
    return tuple(found)


def _stage_counts(task: Task) -> Iterator[int]:
    instances = sum(count for _, count in block_runs(task.captured))
    allowed = task.options.search_space.get("pipeline")
    pinned = task.options.pins.get("pp")
    for stages in divisors(task.cluster.devices):
        if stages > 1 and stages > instances:
            continue
        if pinned is not None and int(pinned) != stages:
            continue
        if pinned is not None or allowed is None or stages in allowed:
            yield stages


def _of_stages(task: Task, stages: int) -> Iterator[Trial]:
    space = task.options.search_space
    pins = axis_pins(replace(task.options, pins={k: v for k, v in task.options.pins.items() if k != "pp"}))
    devices, batch = task.cluster.devices // stages, batch_size(task)
    near = task.cluster.levels[0].size if task.cluster.levels else 1
    for tensor in divisors(devices):
        if tensor != pins.get("tp", tensor) or tensor not in space.get("tensor", (tensor,)):
            continue
        data = devices // tensor
        if data != pins.get("dp", data) or data not in space.get("data", (data,)) or batch % data:
            continue
        if tensor > near and "tp" not in pins and "tensor" not in space:
            continue
        mesh = stage_mesh({"dp": data, "tp": tensor}, task.cluster)
        for rows in _micro_batch_rows(task.options, batch // data):
            yield Trial(load=Load(stages=stages, micro_batches=batch // data // rows), mesh=mesh, rows=rows)


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
        progress(f"bound tp={tensor}, {rows} sequences", 0.5 * i / len(kinds))
        work[(tensor, rows)] = _work_us(task, tensor, rows)
    known = [replace(t, bound_us=t.load.runs * work[(t.tensor, t.rows)]) for t in found]
    return sorted(known, key=lambda t: (t.bound_us, t.load.stages, t.tensor, t.rows))


def _work_us(task: Task, tensor: int, rows: int) -> float:
    """What the whole model costs on one micro-batch of so many rows, at the least: nothing done once is counted."""
    times = batch_size(task) // rows
    mesh = stage_mesh({"dp": 1, "tp": tensor}, task.cluster)
    trial = Trial(load=Load(micro_batches=times), mesh=mesh, rows=rows)
    priced = _priced(task, trial, task.options, limit_bytes=0)
    storage = {i for i, s in enumerate(priced.wiring.slots) if s.kind is SlotKind.STORAGE}
    nodes = tuple(
        replace(n, cost_us=(0.0,) * len(n.cost_us)) if i in storage else n for i, n in enumerate(priced.problem.nodes)
    )
    return relaxation_bound_us(replace(priced.problem, nodes=nodes)) / times


def _priced(task: Task, trial: Trial, options: Options, limit_bytes: int) -> Priced:
    table = sharding.build_table(task.captured, trial.pieces, task.options, rules=task.rules)
    prices = MeshPrices(task.cluster, trial.mesh, trial.pieces)
    return build_problem(
        task.captured, task.wiring, table, prices, options, limit_bytes, load=trial.load, mesh=trial.mesh
    )


def solve_trial(task: Task, trial: Trial, cutoff_us: float) -> Solved | None:
    """The best of one trial; None if nothing fits, or nothing is below `cutoff_us`."""
    plain = replace(task.options, allow=())
    found = _solve(task, trial, plain, cutoff_us)
    if RECOMPUTE in task.options.allow and (found is None or found.solution.memory_price_us_per_byte > 0):
        again = _solve(
            task, trial, replace(plain, allow=(RECOMPUTE,)), min(cutoff_us, found.step_us if found else cutoff_us)
        )
        found = again or found
    return found


def _solve(task: Task, trial: Trial, options: Options, cutoff_us: float) -> Solved | None:
    priced = _priced(task, trial, options, task.limit_bytes)
    problem: Problem = priced.problem
    solution = solve_problem(problem, options, gap=options.gap, cutoff_us=None if math.isinf(cutoff_us) else cutoff_us)
    if solution is None or not solution.choice:
        return None
    stages = stage_problem(task.captured, priced, solution.choice, task.cluster, trial.pieces, task.limit_bytes)
    assignment = solve_stages(stages, cutoff_us=cutoff_us)
    if assignment is None or assignment.assignment is None:
        return None
    table = sharding.build_table(task.captured, trial.pieces, task.options, rules=task.rules)
    candidate = Candidate(trial.mesh, table, priced, trial.bound_us)
    return Solved(trial=trial, candidate=candidate, solution=solution, stages=stages, assignment=assignment)


def best_of(task: Task, progress: Progress) -> tuple[Solved | None, float]:
    """The best plan found and a lower bound on all trials' steps."""
    left = bounded(task, trials(task), progress)
    best: Solved | None = None
    bound = math.inf
    for count, trial in enumerate(left):
        if best is not None and (trial.bound_us >= best.step_us or count >= SOLVES):
            bound = min(bound, trial.bound_us)
            break
        progress(f"solve {trial}", 0.5 + 0.5 * count / max(1, min(SOLVES, len(left))))
        found = solve_trial(task, trial, best.step_us if best else math.inf)
        if found is not None:
            bound = min(bound, found.solution.bound_us)
            if best is None or found.step_us < best.step_us:
                best = found
    return best, min(bound, best.step_us if best else math.inf)
