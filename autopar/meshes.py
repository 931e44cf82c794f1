"""Plans of one stage: the best over meshes, each solved as `candidates` says, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar import sharding
from autopar.candidates import (
    TIGHTER,
    Candidate,
    Progress,
    Task,
    candidates_on,
    failed,
    needed_bytes,
    nothing_fits,
    of_least_memory,
    out_of_time,
    plan_of,
    rank,
    solve_mesh,
    tightened,
)
from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.solution import Solution, Status
from autopar.solver import LeastMemory, minimise_memory

SMALL = 700
"""Strategies up to which a mesh's problem is solved to the end (that of a model of three layers: 300 to 600)."""

Dump = Callable[[str, object], None]
"""Called with the name of what a stage hands on, and that."""


def best_plan(
    task: Task, meshes: Sequence[Mesh], progress: Progress, dump: Dump, *, cutoff_us: float = math.inf,
    required: bool = True,
) -> Plan | None:  # fmt: skip
    """The fastest plan that fits, or that which needs least memory. A mesh proven to be no better isn't solved.

    With `cutoff_us` it must be faster than that.

    Raises InfeasibleError where nothing fits (None where none is `required`), UserError for pins that no mesh can hold.
    """
    slack = task.options.memory_slack if task.options.objective == "memory" else None
    if slack is None:
        solves = _Solves(task, _candidates(task, meshes, progress, dump), progress, cutoff_us)
        return _fitting(task, solves, required=required)
    timed = replace(task, options=replace(task.options, objective="time"))
    fastest = best_plan(timed, meshes, progress, dump)
    assert fastest is not None
    within = replace(task, within_us=fastest.solver.objective_us * (1 + slack))
    least = _fitting(within, _Solves(within, _candidates(within, meshes, progress, dump), progress), required=False)
    if least is None or _needs(fastest) <= _needs(least):
        least = fastest
    return of_least_memory(fastest, least, within, within.within_us)


def _needs(plan: Plan) -> tuple[float, ...]:
    """Memory of the program, then time, then memory as the search counts it."""
    return plan.predicted.peak_memory_bytes, plan.predicted.step_time_us, plan.solver.memory_bytes


def _fitting(task: Task, solves: _Solves, *, required: bool) -> Plan | None:
    """The best plan whose program keeps the limit. What the search counts may be less than its program needs; then that
    mesh is solved again with so much less. Where nothing is left to choose, the plan that needs least is given, noted.
    """
    plans: list[Plan] = []
    while len(plans) <= TIGHTER and (best := solves.best(required=required and not plans)) is not None:
        plans.append(plan_of(task, *best))
        less = tightened(task, *best, plans[-1])
        if less is None:
            return plans[-1]
        solves.instead(best[0], less)
    return min(plans, key=lambda plan: plan.predicted.peak_memory_bytes, default=None)


class _Solves:
    """Candidates, the lowest bound first, and their answers as far as they are known: those below `cutoff_us`."""

    def __init__(
        self, task: Task, candidates: list[Candidate], progress: Progress, cutoff_us: float = math.inf
    ) -> None:
        self.task, self.candidates, self.progress, self.cutoff_us = task, candidates, progress, cutoff_us
        self.known: list[Solution | None] = [None] * len(candidates)

    def best(self, *, required: bool) -> tuple[Candidate, Solution] | None:
        """The best choice over all meshes, with the bound of the whole search; None, or InfeasibleError if one is
        required, where nothing fits."""
        options = self.task.options
        best: tuple[Candidate, Solution] | None = None
        bounds = []
        stopped: list[Mesh] = []
        without: list[tuple[Mesh, Solution]] = []
        for i, candidate in enumerate(self.candidates):
            self.progress(f"solve {candidate.mesh}", i / len(self.candidates))
            solution = self.known[i] or solve_mesh(
                candidate, self.task, gap=_gap(candidate, options), cutoff_us=self._cutoff_us(best),
                cutoff_bytes=needed_bytes(*best) if best and options.objective == "memory" else math.inf,
            )  # fmt: skip
            if solution is None:
                continue
            self.known[i] = solution
            bounds.append(solution.bound_us)
            if solution.status is Status.TIME_LIMIT and not solution.choice:
                stopped.append(candidate.mesh)
            if solution.status is Status.FAILED:
                without.append((candidate.mesh, solution))
            if solution.choice and (best is None or rank(candidate, solution, options) < rank(*best, options)):
                best = candidate, solution
        if best is not None:
            return best[0], _over_meshes(best[1], bounds, options)
        if not required:
            return None
        if without:
            raise failed(self.task, without[0][1], f"mesh {without[0][0]}")
        if stopped:
            raise out_of_time(self.task, "mesh " + ", ".join(map(str, stopped[:3])))
        raise _infeasible(self.task, self.candidates, self.progress)

    def _cutoff_us(self, best: tuple[Candidate, Solution] | None) -> float | None:
        """What a better answer must take less than."""
        if self.task.options.objective == "memory":
            return None
        limit = min(self.cutoff_us, best[1].objective_us if best else math.inf)
        return limit if limit < math.inf else None

    def instead(self, candidate: Candidate, other: Candidate) -> None:
        """From now on look at `other`, which has no answer yet."""
        at = next(i for i, c in enumerate(self.candidates) if c is candidate)
        self.candidates[at], self.known[at] = other, None


def _gap(candidate: Candidate, options: Options) -> float:
    """How far from proven optimal this mesh's answer may be. Small problems are solved to the end at once anyway."""
    return options.gap if sum(len(n.cost_us) for n in candidate.problem.nodes) > SMALL else 0.0


def _candidates(task: Task, meshes: Sequence[Mesh], progress: Progress, dump: Dump) -> list[Candidate]:
    """Every mesh with its problem, the lowest bound first; without those that can't hold a pinned layout."""
    found: list[Candidate] = []
    refused = []
    for i, mesh in enumerate(meshes):
        progress(f"price {mesh}", i / len(meshes))
        try:
            on_mesh = candidates_on(task, mesh)
        except sharding.PinError as error:
            refused.append(error)
            continue
        for candidate in on_mesh:
            dump(f"problem {mesh}", candidate.problem)
        found += on_mesh
    if not found:
        raise refused[0]
    return sorted(found, key=lambda c: c.bound_us)


def _over_meshes(solution: Solution, bounds: list[float], options: Options) -> Solution:
    """The best mesh's answer with the bound of the whole search: a mesh solved to a gap may hide a cheaper plan.

    Meshes left out were proven to be no cheaper than an answer at hand.
    """
    bound = min([solution.objective_us, *bounds])
    if options.objective == "memory" or solution.status is not Status.OPTIMAL or bound == solution.objective_us:
        return replace(solution, bound_us=solution.bound_us if options.objective == "memory" else bound)
    return replace(solution, bound_us=bound, status=Status.FEASIBLE)


def _no_choice_since(candidates: list[Candidate]) -> str:
    """The cuts that the meshes lack, as their tables note them: ": a dim of size 12 can't be cut 5 ways …"."""
    kinds = ("indivisible", "role", "whole")
    notes = [n.message for kind in kinds for c in candidates for n in c.table.notes if n.kind == kind]
    meshes = ", ".join(str(c.mesh) for c in candidates[:3])
    return f" on mesh {meshes}: " + ("; ".join(dict.fromkeys(notes[:3])) or "no layouts of its ops fit together")


def _infeasible(task: Task, candidates: list[Candidate], progress: Progress) -> InfeasibleError:
    """Says what would fit: the smallest memory over all meshes, and what takes the most of it."""
    name, limit = task.captured.model_name, task.limit_bytes
    least: list[tuple[int, int, LeastMemory]] = []
    for i, candidate in enumerate(candidates):
        progress(f"nothing fits: the least memory on {candidate.mesh}", i / len(candidates))
        found = minimise_memory(candidate.problem) if candidate.problem.moments else None
        if found is not None:
            least.append((found.needed_bytes, i, found))
    if not least:
        return InfeasibleError(
            f"{name}: no plan exists under these pins{_no_choice_since(candidates)}",
            needed_bytes=0,
            budget_bytes=limit,
            largest_terms=(),
        )
    _, at, choice = min(least, key=lambda x: x[:2])
    return nothing_fits(task, candidates[at].problem, choice, "the least is", f"on mesh {candidates[at].mesh}")
