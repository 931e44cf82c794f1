"""`solve`: the best choice for a problem, and how sure it is.

reduce           exactly: same optimum, fewer strategies                     reduce.py
LP relaxation    integral: it is the optimum, with proof, and no MIP starts  model.py, highs.py
local search     from the LP's rounding: a choice, and an upper bound        search.py
prices           where that doesn't fit: the choice that the LP's memory prices make    priced.py
fix              a strategy whose reduced cost exceeds the gap is in no better choice
MIP              on what is left
no solver        where that fails, or isn't there: local search's choice with a bound that needs no solver, and why
referee          the solver's objective must be the referee's                ir/problem.py: evaluate
tie-break        every node to its lowest strategy that costs no more        search.py: first_of_equals
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from autopar.errors import CompilerError, SolverError
from autopar.ir.problem import Evaluation, Problem, check_problem, evaluate
from autopar.ir.solution import Solution, Status
from autopar.solver.backends import Backend, backend_named
from autopar.solver.bound import lower_bound_us
from autopar.solver.cuts import without_choice
from autopar.solver.linear import LinearAnswer, LinearStatus
from autopar.solver.memory import minimise_memory
from autopar.solver.model import ProblemModel, build_model, choice_of, point_of
from autopar.solver.priced import priced_choice
from autopar.solver.reduce import reduce_problem
from autopar.solver.reduction import Reduction, keep_strategies
from autopar.solver.search import find_choice, first_of_equals

TOLERANCE = 1e-6  # of an objective, relative; the linear solvers' own
LOOSE = 1e-5  # the same for a MIP's own objective: it may take each x as whole that is so up to 1e-6
PRICING = 1e-9  # relative difference, by rounding alone, of the model's price of a choice and the referee's
INFEASIBLE_S = 5.0  # time that an infeasible problem gets, at least, to say how many bytes would do
MAX_CUTS = 50


@overload
def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    backend: str = "highs",
    gap: float = 0.0,
    explain: bool = True,
) -> Solution: ...


@overload
def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    backend: str = "highs",
    gap: float = 0.0,
    cutoff_us: float | None,
    explain: bool = True,
) -> Solution | None: ...


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    backend: str = "highs",
    gap: float = 0.0,
    cutoff_us: float | None = None,
    explain: bool = True,
) -> Solution | None:
    """The cheapest choice that fits every moment.

    Args:
        time_limit_s: stop after about so long; the best choice found by then comes back with status TIME_LIMIT and a
            bound (with no choice, and objective inf, if none was found).
        backend: "highs"; "pulp-cbc" and "pulp-highs" for checking.
        gap: a relative gap that will do: a choice proven to be so close comes back with status FEASIBLE and the bound.
        explain: False leaves `needed_bytes` of an infeasible answer 0, which saves the search for it.
        cutoff_us: return None as soon as a bound proves that no choice costs less than this.

    Returns:
        A `Solution`. With status INFEASIBLE `needed_bytes` is the smallest limit that would admit a choice
        (`minimise_memory` says which); 0 if none would, as no choice has all its conversions, or if time ran out.
        Where the linear solver fails, `failure` says how: the choice is local search's (status FEASIBLE, with a bound),
        or there is none (status FAILED).
        `memory_price_us_per_byte` sums the LP duals of the moments that share the limit of the dearest one.

    Raises:
        ValueError: an index or a table of the problem is wrong, or the backend is unknown.
        CompilerError: the linear solver's objective is not the referee's.
        SolverError: the linear solver failed while it looked for the bytes that would do.
    """
    check_problem(problem)
    check_numbers(problem)
    clock = _Clock(time_limit_s)
    solver = backend_named(backend)
    if not problem.nodes:
        return _without_nodes(problem, solver.name)
    if cutoff_us is not None and lower_bound_us(problem, cutoff_us=cutoff_us) >= cutoff_us:
        return None
    reduction: Reduction | None = None
    try:
        found = _by_relaxation(problem, solver, clock, cutoff_us)
        if found is None:
            reduction = reduce_problem(problem)
            found = (
                _NO_CHOICE if reduction is None else _solve_reduced(reduction.problem, solver, clock, gap, cutoff_us)
            )
    except SolverError as error:
        reduction, found = None, _without_solver(problem, error)
    if cutoff_us is not None and (found.bound_us >= cutoff_us or found.status is Status.INFEASIBLE):
        return None
    if found.status is Status.INFEASIBLE:
        return _infeasible(problem, solver.name, clock, explain=explain)
    choice = reduction.lift(found.choice) if reduction is not None and found.choice else found.choice
    if choice:
        choice = _checked(problem, found, first_of_equals(problem, choice), choice)
    objective = evaluate(problem, choice).objective_us if choice else math.inf
    return Solution(
        status=found.status, choice=choice, objective_us=objective,
        bound_us=objective if found.status is Status.OPTIMAL else min(found.bound_us, objective),
        time_s=clock.elapsed_s(), solver=solver.name, integral_lp=found.integral_lp,
        memory_price_us_per_byte=found.memory_price, failure=found.failure,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The answer on the reduced problem; `objective_us` is the solver's word."""

    status: Status
    choice: tuple[int, ...] = ()
    objective_us: float = math.inf
    bound_us: float = -math.inf
    integral_lp: bool = False
    memory_price: float = 0.0
    failure: str = ""


_NO_CHOICE = _Found(status=Status.INFEASIBLE, bound_us=math.inf)


class _Clock:
    """Time since the start, and what is left of the limit."""

    def __init__(self, limit_s: float | None) -> None:
        self.began = time.perf_counter()
        self.limit_s = limit_s

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def left_s(self, at_least_s: float = 0.0) -> float | None:
        return None if self.limit_s is None else max(at_least_s, self.limit_s - self.elapsed_s())


def check_numbers(problem: Problem) -> None:
    """Raise ValueError for what `check_problem` lets through and no model holds: negative or NaN prices and sizes."""
    for value in problem.values:
        if not all(r >= 0 for row in value.reshard_us for r in row):
            raise ValueError(f"{value.name}: reshard_us must not be negative or NaN")
    for node in problem.nodes:
        if not all(math.isfinite(c) for c in node.cover_us):
            raise ValueError(f"problem node {node.name}: cover_us must be finite: {node.cover_us}")
    for moment in problem.moments:
        sizes = [b for v in moment.versions for b in v.bytes] + [b for h in moment.nodes for b in h.bytes]
        if any(b < 0 for b in sizes):
            raise ValueError(f"moment {moment.name}: bytes must not be negative")


def relaxed(problem: Problem) -> tuple[float, float]:
    """The LP relaxation: its optimum in µs, which no choice beats, and what a byte more would save of it.

    (inf, inf) where even that cannot fit. Where the linear solver fails, a weaker bound, and inf as memory may bind.
    """
    model = build_model(problem)
    try:
        lp = backend_named("highs").lp(model.linear, None)
    except SolverError:  # `solve` meets it again, and says it
        return lower_bound_us(problem), math.inf if problem.moments else 0.0
    if lp.status is LinearStatus.INFEASIBLE:
        return math.inf, math.inf
    return lp.bound, _memory_price(problem, model, lp)


def _by_relaxation(problem: Problem, solver: Backend, clock: _Clock, cutoff_us: float | None) -> _Found | None:
    """What the LP of the problem as given settles by itself; None where it leaves something open.

    Reducing takes ten times as long as this LP (a Llama on two axes: 1.3 s, 0.1 s) and pays only for a MIP.
    """
    model = build_model(problem)
    lp = solver.lp(model.linear, clock.left_s())
    if lp.status is LinearStatus.INFEASIBLE:
        return _NO_CHOICE
    if lp.point is None:
        return None
    if cutoff_us is not None and lp.bound >= cutoff_us:
        return _Found(status=Status.FEASIBLE, bound_us=lp.bound)
    choice, whole = choice_of(model, lp.point)
    if not (whole and evaluate(problem, choice).feasible):
        return None
    if _priced(problem, model, choice) > lp.bound + TOLERANCE * abs(lp.bound):
        return None
    return _Found(
        status=Status.OPTIMAL, choice=choice, objective_us=lp.objective, bound_us=lp.bound, integral_lp=True,
        memory_price=_memory_price(problem, model, lp),
    )  # fmt: skip


def _solve_reduced(problem: Problem, solver: Backend, clock: _Clock, gap: float, cutoff_us: float | None) -> _Found:
    """LP first, then what it leaves open."""
    model = build_model(problem)
    lp = solver.lp(model.linear, clock.left_s())
    if lp.status is LinearStatus.INFEASIBLE:
        return _NO_CHOICE
    if lp.point is None:
        choice = _fitting(problem, find_choice(problem))
        return _stopped(problem, choice, lower_bound_us(problem), 0.0)
    price = _memory_price(problem, model, lp)
    if cutoff_us is not None and lp.bound >= cutoff_us:
        return _Found(status=Status.FEASIBLE, bound_us=lp.bound)
    choice, whole = choice_of(model, lp.point)
    if not (whole and evaluate(problem, choice).feasible):
        choice = (
            _fitting(problem, find_choice(problem, start=choice))
            or priced_choice(problem, model, lp, solver)
            or _fitting(problem, find_choice(problem))
        )
    objective = _priced(problem, model, choice) if choice else math.inf
    if choice and objective <= lp.bound + TOLERANCE * abs(lp.bound):
        return _Found(
            status=Status.OPTIMAL, choice=choice, objective_us=lp.objective, bound_us=lp.bound, integral_lp=True,
            memory_price=price,
        )  # fmt: skip
    if choice and objective - lp.bound <= gap * objective:
        return _Found(
            status=Status.FEASIBLE, choice=choice, objective_us=objective, bound_us=lp.bound, memory_price=price
        )  # fmt: skip
    return _solve_whole(problem, solver, clock, gap, lp, choice, objective, price)


def _solve_whole(
    problem: Problem, solver: Backend, clock: _Clock, gap: float, lp: LinearAnswer,
    choice: tuple[int, ...], objective: float, price: float,
) -> _Found:  # fmt: skip
    """The MIP, over the strategies that a choice better than `choice` could take."""
    kept = _worth_keeping(problem, lp, objective)
    fixed = keep_strategies(problem, kept)
    later = reduce_problem(fixed.problem)
    if later is None:  # can't be with `choice` in it
        return _NO_CHOICE
    small = fixed.then(later)
    model = build_model(small.problem)
    for _ in range(MAX_CUTS):
        try:
            mip = solver.mip(model.linear, clock.left_s(), gap)
        except SolverError as error:
            if not choice:
                raise
            return replace(_stopped(problem, choice, lp.bound, price), status=Status.FEASIBLE, failure=str(error))
        if mip.point is not None and mip.objective < lp.bound - LOOSE * (1.0 + abs(lp.bound)):
            raise CompilerError(
                f"{problem.name}: the MIP gives {mip.objective} us, below the {lp.bound} us of its relaxation"
            )
        bound = max(lp.bound, min(mip.bound, objective))
        if mip.point is None:
            if mip.status is LinearStatus.TIME_LIMIT:
                return _stopped(problem, choice, bound, price)
            return _NO_CHOICE if not choice else _proved(choice, objective, price)
        picked = choice_of(model, mip.point)[0]
        answer = small.lift(picked)
        priced = evaluate(problem, answer)
        if priced.feasible:
            _priced(small.problem, model, picked)
            if mip.status is LinearStatus.OPTIMAL:
                return _proved(answer, mip.objective, price, bound)
            return _stopped(problem, answer if priced.objective_us < objective else choice, bound, price)
        model = without_choice(model, _over_limit(small.problem, picked), picked)
    return _Found(
        status=Status.FEASIBLE, choice=choice, objective_us=objective, bound_us=lp.bound, memory_price=price
    ) if choice else _stopped(problem, (), lp.bound, price)  # fmt: skip


def _proved(choice: tuple[int, ...], objective: float, price: float, bound: float = math.inf) -> _Found:
    """Optimal, or feasible if the solver stopped at a gap that will do."""
    tight = objective - bound <= TOLERANCE * (1.0 + abs(objective))
    return _Found(
        status=Status.OPTIMAL if tight else Status.FEASIBLE, choice=choice, objective_us=objective,
        bound_us=min(bound, objective), memory_price=price,
    )  # fmt: skip


def _stopped(problem: Problem, choice: tuple[int, ...], bound: float, price: float) -> _Found:
    objective = evaluate(problem, choice).objective_us if choice else math.inf
    return _Found(
        status=Status.TIME_LIMIT, choice=choice, objective_us=objective, bound_us=bound, memory_price=price
    )  # fmt: skip


def _without_solver(problem: Problem, error: SolverError) -> _Found:
    """Local search's choice, from the cheapest strategy of every node."""
    choice = _fitting(problem, find_choice(problem))
    status = Status.FEASIBLE if choice else Status.FAILED
    return replace(_stopped(problem, choice, lower_bound_us(problem), 0.0), status=status, failure=str(error))


def _fitting(problem: Problem, choice: tuple[int, ...]) -> tuple[int, ...]:
    """`choice`, or nothing if the referee refuses it."""
    return choice if evaluate(problem, choice).feasible else ()


def _worth_keeping(problem: Problem, lp: LinearAnswer, objective: float) -> list[list[int]]:
    """Strategies with LP bound + reduced cost <= the objective in hand: no better choice takes another."""
    sizes = [len(n.cost_us) for n in problem.nodes]
    if not len(lp.column_dual) or math.isinf(objective):
        return [list(range(size)) for size in sizes]
    room = objective - lp.bound + TOLERANCE * (1.0 + abs(objective))
    ends = np.cumsum([0, *sizes])
    return [
        [s for s in range(size) if lp.column_dual[first + s] <= room]
        for first, size in zip(ends[:-1], sizes, strict=True)
    ]


def _priced(problem: Problem, model: ProblemModel, choice: tuple[int, ...]) -> float:
    """The referee's price of a choice; the model's price of it must be the same."""
    priced = evaluate(problem, choice)
    claimed = float(model.linear.cost @ point_of(problem, model, choice)) + model.linear.offset
    if abs(claimed - priced.objective_us) > PRICING * (1.0 + abs(priced.objective_us)):
        raise CompilerError(_disagreement(problem, claimed, priced))
    return priced.objective_us


def _over_limit(problem: Problem, choice: tuple[int, ...]) -> list[int]:
    """Nodes whose strategies decide the bytes of the moments that `choice` breaks."""
    used = evaluate(problem, choice).used_bytes
    nodes: set[int] = set()
    for moment, bytes_used in zip(problem.moments, used, strict=True):
        if bytes_used > moment.limit_bytes:
            nodes.update(held.node for held in moment.nodes)
            nodes.update(problem.values[v.value].consumers[k].node for v in moment.versions for k in v.consumers)
    if not nodes:
        raise CompilerError(f"{problem.name}: the solver's choice has an infinite conversion: {choice}")
    return sorted(nodes)


def _memory_price(problem: Problem, model: ProblemModel, lp: LinearAnswer) -> float:
    """µs per byte: -dual of the dearest memory row, with those of the moments that have the same limit."""
    if not len(lp.row_dual):
        return 0.0
    prices = [
        max(0.0, -float(lp.row_dual[row])) / scale if row >= 0 else 0.0
        for row, scale in zip(model.moment_rows, model.moment_scale, strict=True)
    ]
    if not any(prices):
        return 0.0
    limit = problem.moments[int(np.argmax(prices))].limit_bytes
    return float(sum(p for p, m in zip(prices, problem.moments, strict=True) if m.limit_bytes == limit))


def _checked(problem: Problem, found: _Found, tidy: tuple[int, ...], choice: tuple[int, ...]) -> tuple[int, ...]:
    """The referee agrees with the solver, and no single move beats a proven optimum."""
    priced, moved = evaluate(problem, choice), evaluate(problem, tidy)
    room = LOOSE * max(1.0, abs(priced.objective_us))
    if not priced.feasible or abs(priced.objective_us - found.objective_us) > room:
        raise CompilerError(_disagreement(problem, found.objective_us, priced))
    if found.status is Status.OPTIMAL and moved.objective_us < found.objective_us - room:
        raise CompilerError(
            f"{problem.name}: {found.objective_us} us was proven optimal, but one move gives {moved.objective_us} us"
        )
    return tidy


def _disagreement(problem: Problem, claimed_us: float, priced: Evaluation) -> str:
    return (
        f"{problem.name}: the solver says {claimed_us} us, the referee says {priced.objective_us} us"
        f" ({'fits' if priced.feasible else 'does not fit'}, bytes {priced.used_bytes})"
    )


def _without_nodes(problem: Problem, solver: str) -> Solution:
    """Nothing to choose: the fixed bytes fit or they don't."""
    priced = evaluate(problem, ())
    objective = priced.objective_us if priced.feasible else math.inf
    return Solution(
        status=Status.OPTIMAL if priced.feasible else Status.INFEASIBLE, choice=(), objective_us=objective,
        bound_us=objective, time_s=0.0, solver=solver, integral_lp=priced.feasible,
        needed_bytes=0 if priced.feasible else max(priced.used_bytes),
    )  # fmt: skip


def _infeasible(problem: Problem, solver: str, clock: _Clock, *, explain: bool) -> Solution:
    """What the limits would have to be."""
    least = minimise_memory(problem, time_limit_s=clock.left_s(INFEASIBLE_S)) if explain and problem.moments else None
    return Solution(
        status=Status.INFEASIBLE, choice=(), objective_us=math.inf, bound_us=math.inf, time_s=clock.elapsed_s(),
        solver=solver, needed_bytes=least.needed_bytes if least else 0,
    )  # fmt: skip
