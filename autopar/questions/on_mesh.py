"""The plan's own mesh with its best answer, and what other ways there are compared with.

Both sides are solved to the end (a search stops within half a percent of the best), so that a difference is exact:
forcing `next_best` through `pins` raises the objective by `difference_us`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar import sharding
from autopar.candidates import TIGHTER, Candidate, Task, plan_of, price_mesh, solve_problem, tightened
from autopar.cost_model.wiring import SlotKind
from autopar.errors import CompilerError
from autopar.ir.mesh import Mesh
from autopar.ir.options import RECOMPUTE
from autopar.ir.plan import Plan, mesh_of
from autopar.ir.problem import Problem
from autopar.ir.solution import Solution, Status
from autopar.present.words import bytes_words, time_words
from autopar.questions.answers import Binding
from autopar.solver import keep_strategies

Progress = Callable[[str, float], None]


ROUNDING = 1e-9
"""Relative difference of two objectives that is none."""


@dataclass(frozen=True, slots=True)
class OnMesh:
    """The plan's own mesh, solved to the end."""

    plan: Plan
    task: Task
    mesh: Mesh
    base: Candidate
    optimum: Solution
    best: Plan
    progress: Progress

    @property
    def problem(self) -> Problem:
        return self.base.problem

    def solve(self, problem: Problem, cutoff_us: float | None = None) -> Solution | None:
        found = solve_problem(
            problem, self.task.options, gap=0.0, cutoff_us=cutoff_us, within_us=self.task.within_us
        )  # fmt: skip
        return found if found is not None and found.choice else None

    def slot(self, kind: SlotKind, graph: str, name: str) -> int:
        """Index of the choice, by its own name."""
        slots = self.task.wiring.slots
        return next(i for i, s in enumerate(slots) if (s.kind, s.graph, s.name) == (kind, graph, name))

    def only(self, problem: Problem, slot: int, kept: list[int]) -> Solution | None:
        """The best answer with these of the slot's choices."""
        every = [list(range(len(n.cost_us))) for n in problem.nodes]
        every[slot] = kept
        reduction = keep_strategies(problem, every)
        found = self.solve(reduction.problem) if kept else None
        return replace(found, choice=reduction.lift(found.choice)) if found is not None else None


def on_mesh(plan: Plan, task: Task, progress: Progress) -> OnMesh:
    """Solves the plan's mesh to the end."""
    mesh = mesh_of(plan)
    progress(f"solve {mesh} to the end", 0.0)
    base = price_mesh(task, mesh)
    optimum = _solve(base, task)
    if optimum is None or not optimum.choice:
        raise CompilerError(f"the plan for {plan.model.name} on {mesh} is no answer of its own problem")
    answer = plan_of(task, base, optimum)
    for _ in range(TIGHTER):  # as the search does
        less = tightened(task, base, optimum, answer)
        found = _solve(less, task) if less is not None else None
        if less is None or found is None or not found.choice:
            break
        base, optimum, answer = less, found, plan_of(task, less, found)
    return OnMesh(plan, task, mesh, base, optimum, answer, progress)


def _solve(candidate: Candidate, task: Task) -> Solution | None:
    """To the end."""
    return solve_problem(candidate.problem, task.options, gap=0.0, cutoff_us=None, within_us=task.within_us)


def as_planned(task: Task, plan: Plan) -> Task:
    """With recomputation only where the plan recomputes, and no step longer than the plan's might be."""
    within = plan.solver.within_us if plan.solver.within_us is not None else math.inf
    return replace(task, options=replace(task.options, allow=(RECOMPUTE,) if plan.later else ()), within_us=within)


def peak(plan: Plan) -> int:
    """Bytes per device."""
    return plan.predicted.peak_memory_bytes


def standing(here: OnMesh, found: Other) -> Iterator[str]:
    """What limits the answer's exactness."""
    planned, best = here.plan.solver.objective_us, here.optimum.objective_us
    if planned - best > ROUNDING * best:
        yield (
            f"the plan takes {time_words(planned - best)} longer than the best on its mesh: a search stops within its "
            f"gap; differences are to that best"
        )
    if found.wider:
        yield "a search on this mesh has one layout for it; the next best was forced from outside what it looks at"
    if here.optimum.failure:
        yield f"{here.optimum.failure}: the difference is within the gap of local search, not exact"
    stopped = here.optimum.status is Status.TIME_LIMIT
    if stopped or (found.plan is not None and found.plan.solver.status != "optimal"):
        yield "the time limit stopped a solve: the difference is within its gap, not exact"


@dataclass(frozen=True, slots=True)
class Other:
    """The cheapest other way.

    `short_bytes`: where none fits, what the least demanding one lacks. `wider`: no search would have looked at it.
    """

    text: str = ""
    plan: Plan | None = None
    pins: Mapping[str, str | int] = ()  # type: ignore[assignment]
    short_bytes: int = 0
    wider: bool = False


def is_choice(pin: str) -> bool:
    """True for a pin that fixes how parameters are stored; False for one that fixes an axis."""
    return pin == "zero" or sharding.is_layout_pin(pin)


def lifting(here: OnMesh, pins: Mapping[str, str | int]) -> Binding:
    """What these pins cost."""
    free = here.task.pinned({k: v for k, v in here.task.options.pins.items() if k not in pins})
    solution = here.solve(price_mesh(free, here.mesh).problem)
    saved = here.optimum.objective_us - solution.objective_us if solution is not None else 0.0
    said = ", ".join(f"{k}={v}" for k, v in pins.items())
    words = (
        f"without it a step would take {time_words(saved)} less on this mesh"
        if saved > ROUNDING * here.optimum.objective_us
        else "without it nothing on this mesh would be faster"
    )
    return Binding(kind="pin", message=f"pin {said}: {words}", price_us=max(0.0, saved))


def memory_or_objective(here: OnMesh, slot: int, texts: list[str], chosen: str) -> Binding | None:
    """The limit binds a choice if without it the best plan that keeps the choice is not the best plan."""
    if not here.problem.moments or chosen not in texts:
        return None
    unlimited = replace(here.problem, moments=())
    options = replace(here.task.options, objective="time")
    free = solve_problem(unlimited, options, gap=0.0, cutoff_us=None)
    if free is None or here.optimum.objective_us - free.objective_us <= ROUNDING * free.objective_us:
        return None
    kept = keep_strategies(unlimited, [
        [texts.index(chosen)] if i == slot else list(range(len(n.cost_us))) for i, n in enumerate(unlimited.nodes)
    ])  # fmt: skip
    keeping = solve_problem(kept.problem, options, gap=0.0, cutoff_us=None)
    if keeping is None or keeping.objective_us - free.objective_us <= ROUNDING * free.objective_us:
        return None
    otherwise = texts[free.choice[slot]]
    price = here.optimum.objective_us - free.objective_us
    if here.task.options.objective == "memory":
        words = (
            f"least memory was asked for: for time alone it would be {otherwise}, and a step {time_words(price)} less"
        )
        return Binding(kind="objective", message=words, price_us=price)
    words = (
        f"the memory limit of {bytes_words(here.task.limit_bytes)} per device: without it this would be {otherwise}, "
        f"and a step would take {time_words(price)} less"
    )
    if here.optimum.memory_price_us_per_byte > 0:
        words += f"; one more GiB would save {time_words(here.optimum.memory_price_us_per_byte * 2**30)} a step"
    return Binding(kind="memory", message=words, price_us=price)
