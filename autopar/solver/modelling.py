"""The second adapter: PuLP, object by object. For export to .lp and .mps, and to let other solvers check HiGHS."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pulp

from autopar.errors import CompilerError
from autopar.ir.problem import Problem
from autopar.solver.linear import LinearAnswer, LinearModel, LinearStatus
from autopar.solver.model import ProblemModel, build_model

SOLVERS = ("pulp-cbc", "pulp-highs")
_FINISHED = {
    pulp.LpStatusOptimal: LinearStatus.OPTIMAL,
    pulp.LpStatusInfeasible: LinearStatus.INFEASIBLE,
    pulp.LpStatusNotSolved: LinearStatus.TIME_LIMIT,
}


def version(name: str) -> str:
    """Name and version, for `Solution.solver`."""
    return f"{name.removeprefix('pulp-').upper()} by PuLP {pulp.__version__}"


def write_lp(problem: Problem, path: Path) -> None:
    """Write the problem as a CPLEX .lp text that any solver reads."""
    _modelled(build_model(problem).linear, whole=True, names=column_names(problem))[0].writeLP(str(path))


def write_mps(problem: Problem, path: Path) -> None:
    """Write the problem as a free .mps text that any solver reads."""
    _modelled(build_model(problem).linear, whole=True, names=column_names(problem))[0].writeMPS(str(path))


def column_names(problem: Problem, model: ProblemModel | None = None) -> list[str]:
    """x_node_strategy, f_value_consumer_p_q, g_value_p_q, u_value_q, h_group: by index, as solvers restrict names."""
    model = model or build_model(problem)
    names = [f"e_{j}" for j in range(model.linear.columns)]
    for node, first in enumerate(model.node_start[:-1]):
        for s in range(int(model.node_start[node + 1] - first)):
            names[first + s] = f"x_{node}_{s}"
    for flow in model.flows:
        label = f"g_{flow.value}" if flow.position < 0 else f"f_{flow.value}_{flow.position}"
        for p, q in zip(*np.nonzero(flow.columns >= 0), strict=True):
            names[flow.columns[p, q]] = f"{label}_{p}_{q}"
    for number, versions in enumerate(model.versions):
        for q in np.flatnonzero(versions.columns >= 0):
            names[versions.columns[q]] = f"u_{number}_{versions.value}_{q}"
    for group, column in enumerate(model.group_columns):
        names[column] = f"h_{group}"
    return names


def solve_lp(model: LinearModel, name: str, *, time_limit_s: float | None = None) -> LinearAnswer:
    """The LP relaxation, without duals."""
    return _solve(model, name, whole=False, time_limit_s=time_limit_s)


def solve_mip(model: LinearModel, name: str, *, time_limit_s: float | None = None) -> LinearAnswer:
    """The best whole point; its bound is known only if it is optimal."""
    return _solve(model, name, whole=True, time_limit_s=time_limit_s)


def _solve(model: LinearModel, name: str, *, whole: bool, time_limit_s: float | None) -> LinearAnswer:
    program, columns = _modelled(model, whole=whole, names=None)
    began = time.perf_counter()
    try:
        code = program.solve(_solver(name, time_limit_s))
    except pulp.PulpSolverError as error:
        elapsed = time.perf_counter() - began
        raise CompilerError(f"{version(name)} failed after {elapsed:.1f} s: {error}") from error
    elapsed = time.perf_counter() - began
    late = time_limit_s is not None and elapsed >= 0.9 * time_limit_s
    status = LinearStatus.TIME_LIMIT if late else _FINISHED.get(code)
    if status is None:
        raise CompilerError(f"{version(name)} ended with '{pulp.LpStatus[code]}' after {elapsed:.1f} s")
    if status is LinearStatus.INFEASIBLE:
        return LinearAnswer(status=status, point=None, objective=math.inf, bound=math.inf)
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return LinearAnswer(status=LinearStatus.TIME_LIMIT, point=None, objective=math.inf, bound=-math.inf)
    point = np.array([c.value() or 0.0 for c in columns])
    objective = float(model.cost @ point) + model.offset
    bound = objective if status is LinearStatus.OPTIMAL else -math.inf
    return LinearAnswer(status=status, point=point, objective=objective, bound=bound)


def _solver(name: str, time_limit_s: float | None) -> pulp.LpSolver:
    if name == "pulp-cbc":
        return pulp.PULP_CBC_CMD(
            msg=False, timeLimit=time_limit_s, threads=1, gapRel=0.0, options=["randomSeed 1", "randomCbcSeed 1"]
        )
    return pulp.HiGHS(msg=False, timeLimit=time_limit_s, threads=1, gapRel=0.0, random_seed=1)


def _modelled(
    model: LinearModel, *, whole: bool, names: list[str] | None
) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """`model` as PuLP objects, columns in order. Rows with one finite side or two equal ones only."""
    program = pulp.LpProblem("autopar", pulp.LpMinimize)
    names = names or [f"z_{j}" for j in range(model.columns)]
    columns = [
        pulp.LpVariable(
            names[j],
            lowBound=float(model.lower[j]) if math.isfinite(model.lower[j]) else None,
            upBound=float(model.upper[j]) if math.isfinite(model.upper[j]) else None,
            cat=pulp.LpInteger if whole and model.integer[j] else pulp.LpContinuous,
        )
        for j in range(model.columns)
    ]
    program += pulp.LpAffineExpression(
        ((columns[j], float(model.cost[j])) for j in range(model.columns)), constant=model.offset
    )
    terms: list[list[tuple[pulp.LpVariable, float]]] = [[] for _ in range(model.rows)]
    for j in range(model.columns):
        for k in range(model.start[j], model.start[j + 1]):
            terms[model.index[k]].append((columns[j], float(model.value[k])))
    for i, row in enumerate(terms):
        low, high = float(model.row_lower[i]), float(model.row_upper[i])
        sense = pulp.LpConstraintEQ if low == high else pulp.LpConstraintLE if low == -math.inf else pulp.LpConstraintGE
        rhs = low if sense != pulp.LpConstraintLE else high
        program += pulp.LpConstraint(pulp.LpAffineExpression(row), sense=sense, rhs=rhs, name=f"row_{i}")
    return program, columns
