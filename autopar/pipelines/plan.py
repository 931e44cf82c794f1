"""`staged`: the fastest plan with its stages and micro-batches, or what would be needed for one."""

from __future__ import annotations

import time

from autopar import sharding
from autopar.candidates import Progress, Task, nothing_fits, out_of_time
from autopar.cost_model.answer import with_idle
from autopar.cost_model.prices import MeshPrices, model_flops
from autopar.cost_model.staged import Cut, staged_plan
from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan, PlanSolver
from autopar.ir.problem import Problem
from autopar.ir.strategy import Note
from autopar.pipelines.problem import frame_of, problem_of
from autopar.pipelines.search import PROVEN, Found, Solved, best_of
from autopar.pipelines.trials import Trial, devices_are_many
from autopar.solver import LeastMemory, minimise_memory, with_memory


def staged(task: Task, progress: Progress) -> Plan:
    """The fastest plan with its stages and micro-batches. Raises InfeasibleError where none fits."""
    start = time.monotonic()
    found = best_of(task, progress)
    if found.best is None:
        raise _nothing_fits(task, found, progress) if found.in_time else out_of_time(task, "stages and micro-batches")
    return _plan(task, found, found.best, start)


def staged_below(task: Task, progress: Progress, below_us: float) -> Plan | None:
    """The same of those that take less than `below_us`; None where there is none."""
    start = time.monotonic()
    found = best_of(task, progress, below_us)
    return _plan(task, found, found.best, start) if found.best is not None else None


def _plan(task: Task, found: Found, best: Solved, start: float) -> Plan:
    cut = Cut(task.captured, best.priced, best.parted, best.solution)
    gap = max(0.0, 1 - found.bound_us / best.step_us)
    status = "time_limit" if not found.in_time else "optimal" if gap < PROVEN else "feasible"
    solver = PlanSolver(
        status=status, objective_us=best.step_us, bound_us=found.bound_us, gap=gap,
        time_s=round(time.monotonic() - start, 3), memory_price=best.solution.price_us_per_byte,
        memory_bytes=cut.evaluation.peak_bytes,
    )  # fmt: skip
    table = sharding.build_table(task.captured, best.trial.pieces, task.options, rules=task.rules)
    notes = table.notes + tuple(Note(*n) for n in task.captured.notes)
    notes += (Note("search", "", _searched(task, found)),)
    prices = MeshPrices(task.cluster, best.trial.mesh, best.trial.pieces)
    flops = model_flops(task.captured, task.wiring)
    return with_idle(staged_plan(cut, prices, task.cluster, task.options, notes, flops, solver))


def _searched(task: Task, found: Found) -> str:
    words = f"{len(found.trials)} ways of stages × mesh × micro-batches, {found.looked} of them looked at by themselves"
    if not devices_are_many(task):
        return words
    return f"{words}; tensor parallelism beyond {task.cluster.levels[0].name} only where it is pinned or in the space"


def _nothing_fits(task: Task, found: Found, progress: Progress) -> InfeasibleError:
    """The least memory over trials of the smallest micro-batch, for what would do."""
    least: list[tuple[int, int, Problem, LeastMemory, Trial]] = []
    small: dict[tuple[int, Mesh], Trial] = {}
    for trial in sorted(found.trials, key=lambda t: t.order):
        small.setdefault((trial.load.stages, trial.mesh), trial)
    for i, trial in enumerate(small.values()):
        progress(f"nothing fits: the least memory of {trial}", i / len(small))
        own = problem_of(task, trial)
        problem = with_memory(own.parted, frame_of(task, trial, own))
        needs = minimise_memory(problem)
        if needs is not None:
            least.append((needs.needed_bytes, i, problem, needs, trial))
    if not least:
        return InfeasibleError(
            f"{task.captured.model_name}: no plan exists under these pins{_micro(found)}", needed_bytes=0,
            budget_bytes=task.limit_bytes, largest_terms=(),
        )  # fmt: skip
    _, _, problem, needs, trial = min(least, key=lambda x: x[:2])
    return nothing_fits(task, problem, needs, "with an even cut the least is", f"with {trial}")


def _micro(found: Found) -> str:
    """What micro-batches rule out, where there must be some."""
    if any(t.load.micro_batches == 1 for t in found.trials):
        return ""
    return ": an op reads what other micro-batches compute (a batch norm does), so try --micro-batches 1"
