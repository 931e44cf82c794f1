"""The least memory that admits a choice, and what fills it.

With used_m the bytes at moment m, minimise e = max_m (used_m - limit_m) over every choice without an infinite
conversion, or over those whose step takes no longer than a given time. The limits admit a choice if and only if e <= 0;
raised by e bytes they admit one, by e - 1 they do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import CompilerError
from autopar.ir.problem import INFINITY, Moment, Problem, check_problem, evaluate
from autopar.solver import highs
from autopar.solver.linear import LinearStatus
from autopar.solver.model import build_model, choice_of
from autopar.solver.reduce import reduce_problem

TOLERANCE = 1e-6
"""Relative: the linear solver's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The choice that needs least.

    Attributes:
        choice: strategy per node.
        moment: index of the moment that decides.
        needed_bytes: limit of that moment that would just admit the choice.
        excess_bytes: needed_bytes - limit of that moment; <= 0 if the limits admit a choice already.
        proven: False if the time limit or a gap stopped the search; then less may do.
    """

    choice: tuple[int, ...]
    moment: int
    needed_bytes: int
    excess_bytes: int
    proven: bool


def minimise_memory(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    within_us: float = math.inf,
    gap: float = 0.0,
    cutoff_bytes: float = math.inf,
) -> LeastMemory | None:
    """The smallest limits that admit a choice; None if no choice does, whatever the limits (or none was found in time).

    Exact to the byte while a limit is below about 100 GB (solver tolerance 1e-6 on limit / 2^17 or on the sizes'
    greatest common divisor, whichever is larger).

    Args:
        within_us: of choices whose step takes no longer.
        gap: a relative gap to the least bytes that will do.
        cutoff_bytes: None as soon as a bound proves that no choice needs so little.

    Raises:
        ValueError: the problem has no moment.
    """
    if not problem.moments:
        raise ValueError(f"{problem.name} has no memory moment: there is nothing to minimise")
    check_problem(problem)
    timed = math.isfinite(within_us)
    reduction = reduce_problem(problem if timed else without_times(problem), keep_moments=True)
    if reduction is None:
        return None
    model = build_model(reduction.problem, least_memory=True, within_us=within_us)
    unit = max(model.moment_scale)
    # A gap is relative to the bytes themselves: as far as all moments have one limit, that is the excess and the limit.
    offset = max(m.limit_bytes for m in problem.moments) / unit
    linear = replace(model.linear, offset=offset)
    answer = highs.solve_lp(linear, time_limit_s=time_limit_s)
    if answer.point is None or not choice_of(model, answer.point)[1]:
        if answer.status is LinearStatus.INFEASIBLE or answer.bound * unit > cutoff_bytes * (1 + TOLERANCE):
            return None
        answer = highs.solve_mip(linear, time_limit_s=time_limit_s, gap=gap)
    if answer.point is None:
        return None
    choice = reduction.lift(choice_of(model, answer.point)[0])
    used = evaluate(problem, choice).used_bytes
    excess = [u - m.limit_bytes for u, m in zip(used, problem.moments, strict=True)]
    moment = int(np.argmax(excess))
    if answer.status is LinearStatus.OPTIMAL:
        _check_excess(problem, (answer.objective - offset) * unit, excess[moment])
    near = answer.bound >= answer.objective - TOLERANCE * (1 + abs(answer.objective))
    return LeastMemory(
        choice=choice, moment=moment, needed_bytes=used[moment], excess_bytes=excess[moment],
        proven=answer.status is LinearStatus.OPTIMAL and near,
    )  # fmt: skip


def without_times(problem: Problem) -> Problem:
    """The same choices and bytes with every finite time 0."""
    nodes = tuple(replace(n, cost_us=(0.0,) * len(n.cost_us), cover_us=(), group=None) for n in problem.nodes)
    values = tuple(
        replace(
            v,
            reshard_us=tuple(tuple(INFINITY if r == INFINITY else 0.0 for r in row) for row in v.reshard_us),
            group=None,
        )
        for v in problem.values
    )
    return replace(problem, nodes=nodes, values=values, groups=0, fixed_us=0.0)


def largest_terms(
    problem: Problem, choice: tuple[int, ...], moment: int | Moment, count: int = 10
) -> tuple[tuple[str, int], ...]:
    """(what, bytes) of the largest contributors at a moment under `choice`, largest first, zeros left out."""
    held = problem.moments[moment] if isinstance(moment, int) else moment
    terms = {} if held.fixed_bytes == 0 else {"fixed": held.fixed_bytes}
    for term in held.nodes:
        name = problem.nodes[term.node].name
        terms[name] = terms.get(name, 0) + term.bytes[choice[term.node]]
    for version in held.versions:
        value = problem.values[version.value]
        consumers = [value.consumers[k] for k in version.consumers]
        wanted = {c.wants[choice[c.node]] for c in consumers}
        terms[value.name] = terms.get(value.name, 0) + sum(version.bytes[q] for q in wanted)
    ordered = sorted(terms.items(), key=lambda item: (-item[1], item[0]))
    return tuple(item for item in ordered[:count] if item[1] > 0)


def _check_excess(problem: Problem, claimed_bytes: float, found_bytes: int) -> None:
    """The solver's excess is the referee's."""
    size = max(m.limit_bytes for m in problem.moments) + abs(found_bytes)
    if abs(claimed_bytes - found_bytes) > 1 + 1e-6 * size:
        raise CompilerError(
            f"{problem.name}: the solver says that the best choice is {claimed_bytes:.0f} bytes over its limits, "
            f"the referee says {found_bytes}"
        )
