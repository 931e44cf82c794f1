"""One LP asked again and again, with other costs, bounds and now and then one more row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.solver.highs import LP_OPTIONS, ended, loaded, lp_answer, run_of, solve_lp
from autopar.solver.linear import Floats, Ints, LinearAnswer, LinearModel


class Session:
    """Each answer starts from the last one's basis: a tenth of the time of an LP from the start.

    The same questions in the same order get the same answers; in another order, maybe another of equally good points.
    """

    def __init__(self, model: LinearModel) -> None:
        self._model, self._upper = model, model.upper
        self._forbidden: Ints = np.zeros(0, dtype=np.int64)
        self._highs = loaded(model, whole=False, options=LP_OPTIONS, time_limit_s=None)
        self._columns = np.arange(model.columns, dtype=np.int32)

    def forbid(self, columns: Ints) -> None:
        """Keep these columns at zero from now on, and no others."""
        if np.array_equal(columns, self._forbidden):
            return
        upper = self._upper.copy()
        upper[columns] = 0.0
        self._forbidden, self._model = columns, replace(self._model, upper=upper)
        self._highs.changeColsBounds(len(upper), self._columns, self._model.lower, upper)

    def solve(self, cost: Floats, row: tuple[Floats, float] | None = None) -> LinearAnswer:
        """The LP with this cost and, if `row` is (a, most), with a · z <= most, whose dual is the last."""
        highs = self._highs
        highs.changeColsCost(len(cost), self._columns, cost)
        if row is not None:
            places = np.flatnonzero(row[0]).astype(np.int32)
            highs.addRow(-math.inf, row[1], len(places), places, row[0][places])
        run = run_of(highs, "LP")
        answer = lp_answer(highs, self._model, run) if ended(highs) else None
        if row is not None:
            highs.deleteRows(1, np.array([self._model.rows], dtype=np.int32))
        if answer is None:  # it lost its way: from the start, and other ways
            model = replace(self._model, cost=cost)
            answer = solve_lp(model if row is None else with_row(model, *row))
            self._highs = loaded(self._model, whole=False, options=LP_OPTIONS, time_limit_s=None)
        return answer


def with_row(model: LinearModel, sizes: Floats, most: float) -> LinearModel:
    """The model with one more row, the last: sizes · z <= most."""
    places = np.flatnonzero(sizes)
    at = model.start[places + 1]
    more = np.zeros(model.columns + 1, dtype=np.int64)
    more[places + 1] = 1
    return replace(
        model,
        row_lower=np.append(model.row_lower, -math.inf),
        row_upper=np.append(model.row_upper, most),
        start=model.start + np.cumsum(more),
        index=np.insert(model.index, at, model.rows),
        value=np.insert(model.value, at, sizes[places]),
    )
