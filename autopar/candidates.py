"""One mesh: its choices, its problem, its answer. `meshes` compares them; `questions` asks again on the same one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from autopar import codegen, sharding
from autopar.cost_model.answer import make_plan, with_idle, with_memory
from autopar.cost_model.build import Priced, build_problem
from autopar.cost_model.emitted import as_emitted
from autopar.cost_model.ends import Ends
from autopar.cost_model.live import ROUND, ROUND_CPU, program_memory
from autopar.cost_model.prices import MeshPrices, model_flops
from autopar.cost_model.wiring import Wiring, wire
from autopar.errors import InfeasibleError, SolverError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph
from autopar.ir.mesh import Mesh
from autopar.ir.options import HALF, RECOMPUTE, Options
from autopar.ir.plan import Plan, PlanNote, PlanRequest, asked_options, options_of
from autopar.ir.problem import Problem, evaluate
from autopar.ir.program import Program
from autopar.ir.solution import Solution, Status
from autopar.ir.strategy import Note, StrategyTable
from autopar.ir.timeline import StageMemory
from autopar.solver import LeastMemory, largest_terms, minimise_memory, relaxed, solve

Progress = Callable[[str, float], None]
"""Called with (what is being done, part done 0..1)."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is searched: a captured model on a cluster. `rules` are shared by all meshes of it. `within_us`: where least
    memory is asked for, no step is longer."""

    captured: CapturedGraph
    cluster: ClusterSpec
    options: Options
    wiring: Wiring
    ends: Ends
    rules: sharding.RuleCache
    within_us: float = math.inf

    @classmethod
    def of(
        cls, captured: CapturedGraph, cluster: ClusterSpec, options: Options, rules: sharding.RuleCache | None = None
    ) -> Task:
        """With the parts that are the same for every mesh. `rules` keeps answers about ops for another search."""
        wiring = wire(captured)
        return cls(captured, cluster, options, wiring, Ends.of(captured, wiring), rules or sharding.RuleCache())

    def pinned(self, pins: Mapping[str, str | int]) -> Task:
        """The same task under these pins alone."""
        return replace(self, options=replace(self.options, pins=dict(pins)))

    @property
    def limit_bytes(self) -> int:
        """Bytes per device."""
        limit = self.options.memory_limit
        return limit if limit is not None else self.cluster.memory_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mesh with its problem; no plan on it costs less than `bound_us`."""

    mesh: Mesh
    table: StrategyTable
    priced: Priced
    bound_us: float

    @property
    def problem(self) -> Problem:
        """In plain numbers."""
        return self.priced.problem

    def limited(self, limit_bytes: int) -> Candidate:
        """The same with this limit; its bound still holds."""
        moments = tuple(replace(m, limit_bytes=limit_bytes) for m in self.problem.moments)
        return replace(self, priced=replace(self.priced, problem=replace(self.problem, moments=moments)))


def price_mesh(task: Task, mesh: Mesh) -> Candidate:
    """Choices, prices and the lower bound. Raises UserError for pins that can't hold (PinError: on this mesh)."""
    return _priced(task, mesh)[0]


def candidates_on(task: Task, mesh: Mesh) -> tuple[Candidate, ...]:
    """The problems of one mesh: with all kept that the backward reads, and, where memory binds, with recomputation too.

    Recomputation costs time and the problem with it is three times as large, so it is not built where memory binds
    nothing. For least memory it is the only one.
    """
    if RECOMPUTE not in task.options.allow or task.options.objective == "memory":
        return (price_mesh(task, mesh),)
    kept, memory_price = _priced(replace(task, options=replace(task.options, allow=())), mesh)
    return (kept, price_mesh(task, mesh)) if memory_price else (kept,)


def _priced(task: Task, mesh: Mesh) -> tuple[Candidate, float]:
    """The candidate, and what a byte more would save of its relaxation in µs."""
    table = sharding.build_table(task.captured, mesh, task.options, rules=task.rules)
    prices = MeshPrices(task.cluster, mesh)
    priced = build_problem(task.captured, task.wiring, table, prices, task.options, task.limit_bytes, emitted=True)
    bound_us, memory_price = relaxed(priced.problem)
    return Candidate(mesh, table, priced, bound_us), memory_price


TIGHTER = 3
"""How often a search is done again with less memory, where the program of what it found needs more than it may."""
ROUNDING = 1e-9
"""Relative difference of two times that is none."""
RECOMPUTE_GAP = 0.02
"""The least gap that a problem with recomputation is solved to, if it may have one (docs/decisions/0007)."""


def solve_mesh(
    candidate: Candidate, task: Task, *, gap: float, cutoff_us: float | None, cutoff_bytes: float = math.inf
) -> Solution | None:
    """The answer on one mesh; None if nothing fits, or if none costs less than `cutoff_us` or, where least memory is
    asked for, all need more than `cutoff_bytes` or a longer step than the task allows."""
    if task.options.objective == "memory":
        if candidate.bound_us > task.within_us * (1 + ROUNDING):
            return None
    elif cutoff_us is not None and candidate.bound_us >= cutoff_us:
        return None
    if candidate.priced.later and gap:
        gap = max(gap, RECOMPUTE_GAP)
    return solve_problem(
        candidate.problem, task.options, gap=gap, cutoff_us=cutoff_us, cutoff_bytes=cutoff_bytes,
        within_us=task.within_us,
    )  # fmt: skip


def solve_problem(
    problem: Problem, options: Options, *, gap: float, cutoff_us: float | None, cutoff_bytes: float = math.inf,
    within_us: float = math.inf,
) -> Solution | None:  # fmt: skip
    """The fastest choice that fits, or of those `within_us` that need the least memory. None as for `solve_mesh`."""
    if options.objective == "memory" and problem.moments:
        return _least_memory(problem, options, gap, cutoff_bytes, within_us)
    return solve(problem, time_limit_s=options.time_limit_s, gap=gap, cutoff_us=cutoff_us, explain=False)


def _least_memory(
    problem: Problem, options: Options, gap: float, cutoff_bytes: float, within_us: float
) -> Solution | None:
    """The fastest of the choices that need the least memory, and that keep the limit."""
    least = minimise_memory(
        problem, time_limit_s=options.time_limit_s, within_us=within_us, gap=gap, cutoff_bytes=cutoff_bytes
    )
    if least is None or least.excess_bytes > 0:
        return None
    moments = tuple(replace(m, limit_bytes=least.needed_bytes) for m in problem.moments)
    found = solve(replace(problem, moments=moments), time_limit_s=options.time_limit_s, gap=gap)
    if not least.proven and found.status is Status.OPTIMAL:
        return replace(found, status=Status.FEASIBLE)
    return found


def rank(candidate: Candidate, solution: Solution, options: Options) -> tuple[float, float]:
    """What is minimised, then what decides between equals."""
    if options.objective == "memory":
        return needed_bytes(candidate, solution), solution.objective_us
    return solution.objective_us, 0.0


def needed_bytes(candidate: Candidate, solution: Solution) -> int:
    """What the search counts that a solution needs per device."""
    return max(evaluate(candidate.problem, solution.choice).used_bytes, default=0)


def plan_of(task: Task, candidate: Candidate, solution: Solution) -> Plan:
    """The plan of one solved mesh; its memory, and the time of its slices, are those of the program that it becomes."""
    notes = candidate.table.notes + tuple(Note(*n) for n in task.captured.notes) + _without_solver(solution)
    prices = MeshPrices(task.cluster, candidate.mesh)
    flops = model_flops(task.captured, task.wiring)
    plan = make_plan(task.captured, candidate.priced, solution, prices, task.cluster, task.options, notes, flops)
    program = codegen.lower(task.captured, plan, candidate.mesh)
    plan = with_idle(as_emitted(plan, program, prices))
    return with_memory(plan, step_memory(task.captured, program, plan), task.limit_bytes)


def _without_solver(solution: Solution) -> tuple[Note, ...]:
    """What the linear solver failed with, where the choice was made without it."""
    if not solution.failure:
        return ()
    return (Note("solver", "", f"{solution.failure}; local search chose without it, at most {solution.gap:.1%} off"),)


def tightened(task: Task, candidate: Candidate, solution: Solution, plan: Plan) -> Candidate | None:
    """The candidate with as much less memory as the solution's `plan` needs too much as a program; None if it keeps the
    limit, or there is none."""
    over = plan.predicted.peak_memory_bytes - task.limit_bytes
    if over <= 0 or not candidate.problem.moments:
        return None
    return candidate.limited(max(1, needed_bytes(candidate, solution) - over))


def nothing_fits(task: Task, problem: Problem, least: LeastMemory, how: str, where: str) -> InfeasibleError:
    """What would fit, and what takes the most of it. `how` sure that is: "the least is", "about"."""
    terms = largest_terms(problem, least.choice, least.moment)
    listed = ", ".join(f"{_held(what)} {_size(size)}" for what, size in terms[:3])
    return InfeasibleError(
        f"{task.captured.model_name}: no plan fits {_size(task.limit_bytes)} per device; {how} "
        f"{_size(least.needed_bytes)} {where} (largest: {listed}). --memory-limit {least.needed_bytes} would do; less "
        f"may with {', '.join(_savers(task.options))}.",
        needed_bytes=least.needed_bytes, budget_bytes=task.limit_bytes, largest_terms=terms,
    )  # fmt: skip


def _held(what: str) -> str:
    """What holds memory, for people: a parameter's own name stands for all instances of it."""
    name = what.removeprefix("storage:top:")
    return what if name == what else f"{name} and its like, gradients and optimizer state,"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _savers(options: Options) -> Iterator[str]:
    """What takes memory off a device and is not asked for, or ruled out."""
    yield "more devices"
    yield "a smaller batch"
    if RECOMPUTE not in options.allow:
        yield "recomputation (without --forbid recompute)"
    if str(options.pins.get("zero")) == "0":
        yield "ZeRO-3 (without pin zero=0)"
    if not options.searches_stages:
        yield "pipeline stages (--stages)"
    if options.micro_batches is None and not options.searches_stages:
        yield "micro-batches (--micro-batches)"
    if options.precision not in HALF:
        yield "bf16 (--precision)"
    yield "but not offload, which this version lacks"


def out_of_time(task: Task, where: str) -> InfeasibleError:
    """Nothing is known not to fit: the search ended before it had a plan."""
    return InfeasibleError(
        f"{task.captured.model_name}: no plan was found in {task.options.time_limit_s:g} s (on {where}): "
        f"allow more with --time-limit",
        needed_bytes=0, budget_bytes=task.limit_bytes, largest_terms=(),
    )  # fmt: skip


def failed(task: Task, solution: Solution, where: str) -> SolverError:
    """The linear solver failed, and nothing was found without it."""
    return SolverError(
        f"{task.captured.model_name}: {solution.failure}; without it no plan that fits was found on {where} in "
        f"{solution.time_s:.1f} s: mend the solver (autopar doctor says what is installed), or ask for less"
    )


def of_least_memory(fastest: Plan, least: Plan, task: Task, within_us: float | None, more: str = "") -> Plan:
    """`least` as the answer to what `task` asks, with a note on what it saves. `within_us`: no step is longer.

    `more`: said of how sure that is.
    """
    slack, p, q = task.options.memory_slack, fastest.predicted, least.predicted
    words = "of any step" if slack is None else f"within {slack:.1%} of the fastest step"
    saved = (
        f"{q.peak_memory_bytes / 2**20:.0f} MiB per device and {q.step_time_us / 1e3:.3f} ms a step, where the fastest "
        f"takes {p.peak_memory_bytes / 2**20:.0f} MiB and {p.step_time_us / 1e3:.3f} ms"
    )
    if least is fastest:
        saved = "the fastest itself"
    note = PlanNote(kind="objective", where="", message=f"least memory of the plans {words}{more}: {saved}")
    return replace_fields(
        least, solver=replace_fields(least.solver, within_us=within_us), notes=[*least.notes, note],
        request=replace_fields(least.request or PlanRequest(), options=asked_options(task.options)),
    )  # fmt: skip


def step_memory(captured: CapturedGraph, program: Program, plan: Plan) -> StageMemory:
    """What a rank of a plan's cluster holds during a step of its program."""
    gpus = plan.cluster.spec is None or plan.cluster.spec.backend == "nccl"
    state = options_of(plan).optimizer_bytes_per_parameter
    return program_memory(captured, program, state, rounding=ROUND if gpus else ROUND_CPU, gpus=gpus)
