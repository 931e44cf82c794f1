"""The HiGHS adapter: arrays in, status first, then the answer.

One thread, a fixed seed, no time-dependent choice inside: the same arrays give the same answer bit for bit (unless a
time limit stops the search). Any status that is not an answer becomes one CompilerError with status and elapsed time.
"""

from __future__ import annotations

import math

import highspy
import numpy as np

from autopar.errors import CompilerError
from autopar.solver.linear import LinearAnswer, LinearModel, LinearStatus

SEED = 1
LP_OPTIONS: dict[str, str | float | int] = {"solver": "simplex", "presolve": "off"}
"""Fastest of those measured (benchmarks/solver_scaling.py --blocks 26 --memory 1.0; processor seconds, HiGHS 1.16):
600 values, 78 668 columns: simplex 1.06, simplex after presolve 1.64, interior point with crossover 3.37. The same
problem reduced, 11 759 columns: 0.09, 0.23, 0.47."""
OTHER_WAYS: tuple[dict[str, str | float | int], ...] = ({}, {"presolve": "on"}, {"solver": "ipm", "presolve": "on"})
"""Changes to them, tried in turn."""
_STATUS = highspy.HighsModelStatus
_FINISHED = {
    _STATUS.kOptimal: LinearStatus.OPTIMAL,
    _STATUS.kInfeasible: LinearStatus.INFEASIBLE,
    _STATUS.kUnboundedOrInfeasible: LinearStatus.INFEASIBLE,  # every objective here is bounded below
    _STATUS.kTimeLimit: LinearStatus.TIME_LIMIT,
    _STATUS.kModelEmpty: LinearStatus.OPTIMAL,
}


def solve_lp(
    model: LinearModel, *, time_limit_s: float | None = None, options: dict[str, str | float | int] | None = None
) -> LinearAnswer:
    """The LP relaxation of `model`, with duals. `options` are HiGHS options, for measuring one way of solving.

    Where the simplex method ends without an answer (a Mixtral on 64 devices, after losing its way in rounding errors),
    it is tried after presolve, and then the interior point method.
    """
    for more in OTHER_WAYS if options is None else OTHER_WAYS[:1]:
        way: dict[str, str | float | int] = {**LP_OPTIONS, **more, **(options or {})}
        highs = _loaded(model, whole=False, options=way, time_limit_s=time_limit_s)
        result = highs.run()
        if highs.getModelStatus() in _FINISHED:
            break
    status = _status(highs, result, "LP")
    if status is not LinearStatus.OPTIMAL:
        return LinearAnswer(status=status, point=None, objective=math.inf, bound=-math.inf)
    solution = highs.getSolution()
    objective = highs.getInfo().objective_function_value
    return LinearAnswer(
        status=status, point=np.array(solution.col_value), objective=objective, bound=objective,
        column_dual=np.array(solution.col_dual), row_dual=np.array(solution.row_dual),
    )  # fmt: skip


def solve_mip(model: LinearModel, *, time_limit_s: float | None = None, gap: float = 0.0) -> LinearAnswer:
    """The best whole point of `model`; `gap`: the relative gap that will do.

    It gets no point to start from: after presolve HiGHS 1.16 took one of 1080.3 for 1046.6 and called it the optimum,
    where that is 1059.9.
    """
    options: dict[str, str | float | int] = {"mip_rel_gap": gap, "mip_abs_gap": 1e-6}
    highs = _loaded(model, whole=True, options=options, time_limit_s=time_limit_s)
    status = _status(highs, highs.run(), "MIP")
    info = highs.getInfo()
    if status is LinearStatus.INFEASIBLE:
        return LinearAnswer(status=status, point=None, objective=math.inf, bound=math.inf)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return LinearAnswer(
        status=status,
        point=np.array(highs.getSolution().col_value) if found else None,
        objective=info.objective_function_value if found else math.inf,
        bound=info.mip_dual_bound if model.integer.any() else info.objective_function_value,
    )


def version() -> str:
    """Name and version, for `Solution.solver`."""
    return f"HiGHS {_Silent().version()}"  # type: ignore[no-untyped-call]


class _Silent(highspy.Highs):
    """HiGHS prints its banner when its constructor enables callbacks; this one is silent before that."""

    def enableCallbacks(self) -> None:  # noqa: N802 (HiGHS names it)
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def _loaded(
    model: LinearModel, *, whole: bool, options: dict[str, str | float | int], time_limit_s: float | None
) -> highspy.Highs:
    """A HiGHS object that holds `model`."""
    highspy.Highs.resetGlobalScheduler(True)  # another user of this process may have started it with more threads
    highs = _Silent()  # type: ignore[no-untyped-call]
    fixed: dict[str, str | float | int] = {"threads": 1, "random_seed": SEED, **options}
    if time_limit_s is not None:
        fixed["time_limit"] = max(0.0, time_limit_s)
    for name, setting in fixed.items():
        if highs.setOptionValue(name, setting) != highspy.HighsStatus.kOk:
            raise CompilerError(f"HiGHS {highs.version()} refused option {name}={setting!r}")
    integrality = (model.integer if whole else np.zeros(model.columns)).astype(np.int32)
    status = highs.passModel(
        model.columns, model.rows, len(model.value),
        int(highspy.MatrixFormat.kColwise), int(highspy.ObjSense.kMinimize), model.offset,
        model.cost, model.lower, model.upper, model.row_lower, model.row_upper,
        model.start.astype(np.int32), model.index.astype(np.int32), model.value, integrality,
    )  # fmt: skip
    if status == highspy.HighsStatus.kError:
        raise CompilerError(f"HiGHS {highs.version()} refused the {model}")
    return highs


def _status(highs: highspy.Highs, result: highspy.HighsStatus, what: str) -> LinearStatus:
    """How it ended: read before anything else."""
    status = highs.getModelStatus()
    if result == highspy.HighsStatus.kError or status not in _FINISHED:
        name, elapsed = highs.modelStatusToString(status), highs.getRunTime()
        raise CompilerError(f"HiGHS {highs.version()} ended the {what} with '{name}' ({result}) after {elapsed:.1f} s")
    return _FINISHED[status]
