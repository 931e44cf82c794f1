"""The HiGHS adapter: arrays in, status first, then the answer.

One thread, a fixed seed, no time-dependent choice inside: the same arrays give the same answer bit for bit (unless a
time limit stops the search). Whatever is not an answer (a status, an exception, a library that isn't there, numbers
that are none) becomes one SolverError with status and elapsed time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.errors import CompilerError, SolverError
from autopar.solver.linear import LinearAnswer, LinearModel, LinearStatus, check_point

if TYPE_CHECKING:
    import highspy

SEED = 1
LP_OPTIONS: dict[str, str | float | int] = {"solver": "simplex", "presolve": "off"}
"""Fastest of those measured (benchmarks/solver_scaling.py --blocks 26 --memory 1.0; processor seconds, HiGHS 1.16):
600 values, 78 668 columns: simplex 1.06, simplex after presolve 1.64, interior point with crossover 3.37. The same
problem reduced, 11 759 columns: 0.09, 0.23, 0.47."""
OTHER_WAYS: tuple[dict[str, str | float | int], ...] = ({}, {"presolve": "on"}, {"solver": "ipm", "presolve": "on"})
"""Changes to them, tried in turn."""
_FINISHED = {
    "kOptimal": LinearStatus.OPTIMAL,
    "kInfeasible": LinearStatus.INFEASIBLE,
    "kUnboundedOrInfeasible": LinearStatus.INFEASIBLE,  # every objective here is bounded below
    "kTimeLimit": LinearStatus.TIME_LIMIT,
    "kModelEmpty": LinearStatus.OPTIMAL,
}
"""By name of HiGHS's model status."""


def solve_lp(
    model: LinearModel, *, time_limit_s: float | None = None, options: dict[str, str | float | int] | None = None
) -> LinearAnswer:
    """The LP relaxation of `model`, with duals. `options` are HiGHS options, for measuring one way of solving.

    Where the simplex method ends without an answer (a Mixtral on 64 devices, after losing its way in rounding errors),
    it is tried after presolve, and then the interior point method.
    """
    for more in OTHER_WAYS if options is None else OTHER_WAYS[:1]:
        way: dict[str, str | float | int] = {**LP_OPTIONS, **more, **(options or {})}
        highs = loaded(model, whole=False, options=way, time_limit_s=time_limit_s)
        run = run_of(highs, "LP")
        if ended(highs):
            break
    return lp_answer(highs, model, run)


def lp_answer(highs: highspy.Highs, model: LinearModel, run: Run) -> LinearAnswer:
    """What a run of `model` as an LP says. Raises SolverError unless it ended in one way or another."""
    status = _status(highs, run, "LP")
    if status is not LinearStatus.OPTIMAL:
        return LinearAnswer(status=status, point=None, objective=math.inf, bound=-math.inf)
    solution = highs.getSolution()
    objective = highs.getInfo().objective_function_value
    answer = LinearAnswer(
        status=status, point=np.array(solution.col_value), objective=objective, bound=objective,
        column_dual=np.array(solution.col_dual), row_dual=np.array(solution.row_dual),
    )  # fmt: skip
    return check_point(answer, model, version(), run.elapsed_s)


def solve_mip(model: LinearModel, *, time_limit_s: float | None = None, gap: float = 0.0) -> LinearAnswer:
    """The best whole point of `model`; `gap`: the relative gap that will do.

    It gets no point to start from: after presolve HiGHS 1.16 took one of 1080.3 for 1046.6 and called it the optimum,
    where that is 1059.9.
    """
    options: dict[str, str | float | int] = {"mip_rel_gap": gap, "mip_abs_gap": 1e-6}
    highs = loaded(model, whole=True, options=options, time_limit_s=time_limit_s)
    run = run_of(highs, "MIP")
    status = _status(highs, run, "MIP")
    info = highs.getInfo()
    if status is LinearStatus.INFEASIBLE:
        return LinearAnswer(status=status, point=None, objective=math.inf, bound=math.inf)
    found = info.primal_solution_status == int(_library().SolutionStatus.kSolutionStatusFeasible)
    answer = LinearAnswer(
        status=status,
        point=np.array(highs.getSolution().col_value) if found else None,
        objective=info.objective_function_value if found else math.inf,
        bound=info.mip_dual_bound if model.integer.any() else info.objective_function_value,
    )
    return check_point(answer, model, version(), run.elapsed_s)


def ended(highs: highspy.Highs) -> bool:
    """True unless it lost its way."""
    return highs.getModelStatus().name in _FINISHED


def version() -> str:
    """Name and version, for `Solution.solver`."""
    try:
        return f"HiGHS {_library_class()().version()}"
    except SolverError:
        return "HiGHS (not installed)"


def _library() -> ModuleType:
    """highspy; looked for when it is first needed, so that its absence is one line and ends nothing else."""
    try:
        import highspy
    except ImportError as error:
        raise SolverError(f"HiGHS cannot be loaded ({error}): pip install highspy") from None
    return highspy


@lru_cache(maxsize=1)
def _library_class() -> Any:
    """HiGHS prints its banner when its constructor enables callbacks; this one is silent before that."""
    base: Any = _library().Highs

    class Silent(base):  # type: ignore[misc]
        def enableCallbacks(self) -> None:  # noqa: N802 (HiGHS names it)
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Silent


def loaded(
    model: LinearModel, *, whole: bool, options: dict[str, str | float | int], time_limit_s: float | None
) -> highspy.Highs:
    """A HiGHS object that holds `model`."""
    library = _library()
    library.Highs.resetGlobalScheduler(True)  # another user of this process may have started it with more threads
    highs: highspy.Highs = _library_class()()
    fixed: dict[str, str | float | int] = {"threads": 1, "random_seed": SEED, **options}
    if time_limit_s is not None:
        fixed["time_limit"] = max(0.0, time_limit_s)
    for name, setting in fixed.items():
        if highs.setOptionValue(name, setting) != library.HighsStatus.kOk:
            raise CompilerError(f"HiGHS {highs.version()} refused option {name}={setting!r}")
    integrality = (model.integer if whole else np.zeros(model.columns)).astype(np.int32)
    status = highs.passModel(
        model.columns, model.rows, len(model.value),
        int(library.MatrixFormat.kColwise), int(library.ObjSense.kMinimize), model.offset,
        model.cost, model.lower, model.upper, model.row_lower, model.row_upper,
        model.start.astype(np.int32), model.index.astype(np.int32), model.value, integrality,
    )  # fmt: skip
    if status == library.HighsStatus.kError:
        raise CompilerError(f"HiGHS {highs.version()} refused the {model}")
    return highs


@dataclass(frozen=True, slots=True)
class Run:
    """How the library says that it ended, and when."""

    result: highspy.HighsStatus
    elapsed_s: float


def run_of(highs: highspy.Highs, what: str) -> Run:
    """Run it. An exception of the library's becomes a SolverError."""
    began = time.perf_counter()
    try:
        result = highs.run()
    except Exception as error:  # bindings raise what the library throws: no memory, say
        elapsed = time.perf_counter() - began
        raise SolverError(
            f"HiGHS {highs.version()} ended the {what} with {type(error).__name__} ({error}) after {elapsed:.1f} s"
        ) from error
    return Run(result, time.perf_counter() - began)


def _status(highs: highspy.Highs, run: Run, what: str) -> LinearStatus:
    """How it ended: read before anything else."""
    status = highs.getModelStatus()
    if run.result == _library().HighsStatus.kError or not ended(highs):
        name = highs.modelStatusToString(status)
        raise SolverError(
            f"HiGHS {highs.version()} ended the {what} with '{name}' ({run.result}) after {run.elapsed_s:.1f} s"
        )
    return _FINISHED[status.name]
