"""The second adapter: PuLP, object by object. For export to .lp and .mps, and to let other solvers check HiGHS."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from autopar.errors import SolverError
from autopar.ir.problem import Problem
from autopar.solver.linear import LinearAnswer, LinearModel, LinearStatus, check_point
from autopar.solver.model import ProblemModel, build_model

if TYPE_CHECKING:
    import pulp

SOLVERS = ("pulp-cbc", "pulp-highs")
HINTS = {
    "pulp-cbc": "its program comes with PuLP; pip install --force-reinstall pulp, or take HiGHS",
    "pulp-highs": "pip install highspy",
}
_FINISHED = {
    "Optimal": LinearStatus.OPTIMAL,
    "Infeasible": LinearStatus.INFEASIBLE,
    "Not Solved": LinearStatus.TIME_LIMIT,
}
"""By name of PuLP's status."""


def _library() -> ModuleType:
    """pulp; looked for when it is first needed: a search needs none of it."""
    try:
        import pulp
    except ImportError as error:
        raise SolverError(f"PuLP cannot be loaded ({error}): pip install pulp") from None
    module: ModuleType = pulp
    return module


def version(name: str) -> str:
    """Name and version, for `Solution.solver`."""
    return f"{name.removeprefix('pulp-').upper()} by PuLP {_library().__version__}"


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
    pulp = _library()
    program, columns = _modelled(model, whole=whole, names=None)
    began = time.perf_counter()
    try:
        said = pulp.LpStatus[program.solve(_solver(name, time_limit_s))]
    except Exception as error:  # PuLP's own, and what reading garbage raises
        elapsed = time.perf_counter() - began
        hint = f": {HINTS[name]}" if name in HINTS else ""
        raise SolverError(
            f"{version(name)} failed after {elapsed:.1f} s with {type(error).__name__} ({error}){hint}"
        ) from error
    elapsed = time.perf_counter() - began
    late = time_limit_s is not None and elapsed >= 0.9 * time_limit_s
    status = LinearStatus.TIME_LIMIT if late else _FINISHED.get(said)
    if status is None:
        raise SolverError(f"{version(name)} ended with '{said}' after {elapsed:.1f} s")
    if status is LinearStatus.INFEASIBLE:
        return LinearAnswer(status=status, point=None, objective=math.inf, bound=math.inf)
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return LinearAnswer(status=LinearStatus.TIME_LIMIT, point=None, objective=math.inf, bound=-math.inf)
    point = np.array([c.value() or 0.0 for c in columns])
    objective = float(model.cost @ point) + model.offset
    bound = objective if status is LinearStatus.OPTIMAL else -math.inf
    answer = LinearAnswer(status=status, point=point, objective=objective, bound=bound)
    return check_point(answer, model, version(name), elapsed)


def _solver(name: str, time_limit_s: float | None) -> pulp.LpSolver:
    library = _library()
    if name == "pulp-cbc":
        return library.PULP_CBC_CMD(
            msg=False, timeLimit=time_limit_s, threads=1, gapRel=0.0, options=["randomSeed 1", "randomCbcSeed 1"]
        )
    return library.HiGHS(msg=False, timeLimit=time_limit_s, threads=1, gapRel=0.0, random_seed=1)


def _modelled(
    model: LinearModel, *, whole: bool, names: list[str] | None
) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """`model` as PuLP objects, columns in order. Rows with one finite side or two equal ones only."""
    library = _library()
    program = library.LpProblem("autopar", library.LpMinimize)
    names = names or [f"z_{j}" for j in range(model.columns)]
    columns = [
        library.LpVariable(
            names[j],
            lowBound=float(model.lower[j]) if math.isfinite(model.lower[j]) else None,
            upBound=float(model.upper[j]) if math.isfinite(model.upper[j]) else None,
            cat=library.LpInteger if whole and model.integer[j] else library.LpContinuous,
        )
        for j in range(model.columns)
    ]
    program += library.LpAffineExpression(
        ((columns[j], float(model.cost[j])) for j in range(model.columns)), constant=model.offset
    )
    terms: list[list[tuple[pulp.LpVariable, float]]] = [[] for _ in range(model.rows)]
    for j in range(model.columns):
        for k in range(model.start[j], model.start[j + 1]):
            terms[model.index[k]].append((columns[j], float(model.value[k])))
    for i, row in enumerate(terms):
        low, high = float(model.row_lower[i]), float(model.row_upper[i])
        below = library.LpConstraintLE if low == -math.inf else library.LpConstraintGE
        sense = library.LpConstraintEQ if low == high else below
        rhs = low if sense != library.LpConstraintLE else high
        program += library.LpConstraint(library.LpAffineExpression(row), sense=sense, rhs=rhs, name=f"row_{i}")
    return program, columns
