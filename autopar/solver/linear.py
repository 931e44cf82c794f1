"""A mixed-integer linear model as arrays, and a builder that collects them block by block.

minimise offset + cost · z   subject to   row_lower <= A z <= row_upper,  lower <= z <= upper,  z[integer] whole.

A is stored by columns (CSC), sorted, without repeats, so the same problem always gives the same bytes to a solver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from autopar.errors import SolverError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModel:
    """See the module's docstring. `start`, `index`, `value` are the CSC arrays of A."""

    cost: Floats
    lower: Floats
    upper: Floats
    integer: Bools
    row_lower: Floats
    row_upper: Floats
    start: Ints
    index: Ints
    value: Floats
    offset: float = 0.0

    @property
    def columns(self) -> int:
        return len(self.cost)

    @property
    def rows(self) -> int:
        return len(self.row_lower)

    def __str__(self) -> str:
        whole = int(self.integer.sum())
        return f"linear model: {self.columns} columns ({whole} whole), {self.rows} rows, {len(self.value)} entries"


class LinearStatus(Enum):
    """How a linear solver ended."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAnswer:
    """What a linear solver says.

    Attributes:
        point: column values, or None where the solver has none.
        objective: value of `point`, offset included; inf without one.
        bound: no point can cost less (-inf if unknown).
        column_dual, row_dual: of the LP; empty for a MIP.
    """

    status: LinearStatus
    point: Floats | None
    objective: float
    bound: float
    column_dual: Floats = field(default_factory=lambda: np.zeros(0))
    row_dual: Floats = field(default_factory=lambda: np.zeros(0))


def check_point(answer: LinearAnswer, model: LinearModel, solver: str, elapsed_s: float) -> LinearAnswer:
    """The answer, if its figures are numbers and as many as there are columns; else SolverError. The bound may be -inf.

    Whether the point is any good is the referee's to say.
    """
    if answer.point is None:
        return answer
    numbers = len(answer.point) == model.columns and bool(np.isfinite(answer.point).all())
    if not numbers or not math.isfinite(answer.objective) or math.isnan(answer.bound) or answer.bound == math.inf:
        raise SolverError(
            f"{solver} ended with '{answer.status.value}' after {elapsed_s:.1f} s, but its answer is no point of the "
            f"{model} (objective {answer.objective}, bound {answer.bound})"
        )
    return answer


class LinearBuilder:
    """Collects columns, rows and entries in blocks of arrays; `build` sorts them into a `LinearModel`."""

    def __init__(self) -> None:
        self.columns = 0
        self.rows = 0
        self._column_blocks: list[tuple[Floats, float, bool]] = []
        self._row_blocks: list[tuple[int, float, float]] = []
        self._entries: list[tuple[Ints, Ints, Floats | float]] = []
        self._extra_cost: list[tuple[Ints, Floats]] = []
        self._forbidden: list[Ints] = []

    def add_columns(self, cost: Floats, *, upper: float = math.inf, integer: bool = False) -> Ints:
        """New columns in [0, upper]; returns their indices."""
        first = self.columns
        self.columns += len(cost)
        self._column_blocks.append((cost, upper, integer))
        return np.arange(first, self.columns)

    def add_rows(self, count: int, lower: float, upper: float) -> Ints:
        """New rows with lower <= A z <= upper; returns their indices."""
        first = self.rows
        self.rows += count
        self._row_blocks.append((count, lower, upper))
        return np.arange(first, self.rows)

    def add_entries(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        """A[rows[i], columns[i]] += values[i]."""
        self._entries.append((rows, columns, values))

    def add_cost(self, columns: Ints, values: Floats) -> None:
        """cost[columns[i]] += values[i]; a column may occur more than once."""
        self._extra_cost.append((columns, values))

    def forbid(self, columns: Ints) -> None:
        """Fix columns to zero."""
        self._forbidden.append(columns)

    def cost(self) -> Floats:
        """The objective so far, per column."""
        cost = np.concatenate([b[0] for b in self._column_blocks]) if self._column_blocks else np.zeros(0)
        for columns, values in self._extra_cost:
            np.add.at(cost, columns, values)
        return cost

    def build(self, offset: float = 0.0) -> LinearModel:
        """Sort, sum repeats and freeze."""
        cost = self.cost()
        sizes = [len(b[0]) for b in self._column_blocks]
        upper = np.repeat([b[1] for b in self._column_blocks], sizes)
        integer = np.repeat(np.array([b[2] for b in self._column_blocks], dtype=bool), sizes)
        for columns in self._forbidden:
            upper[columns] = 0.0
        counts = [b[0] for b in self._row_blocks]
        row_lower = np.repeat(np.array([b[1] for b in self._row_blocks], dtype=float), counts)
        row_upper = np.repeat(np.array([b[2] for b in self._row_blocks], dtype=float), counts)
        start, index, value = self._compressed()
        return LinearModel(
            cost=cost, lower=np.zeros(self.columns), upper=upper.astype(float), integer=integer,
            row_lower=row_lower, row_upper=row_upper, start=start, index=index, value=value, offset=offset,
        )  # fmt: skip

    def _values(self) -> Floats:
        """Of the entries, those of one value for all written out."""
        lengths = [len(e[1]) for e in self._entries]
        values = np.repeat([0.0 if isinstance(e[2], np.ndarray) else e[2] for e in self._entries], lengths)
        ends = np.cumsum(lengths)
        for (_, _, each), end, length in zip(self._entries, ends.tolist(), lengths, strict=True):
            if isinstance(each, np.ndarray):
                values[end - length : end] = each
        return values

    def _compressed(self) -> tuple[Ints, Ints, Floats]:
        """Entries as CSC arrays (start, row index, value), repeats summed, zeros dropped."""
        if not self._entries:
            return np.zeros(self.columns + 1, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
        rows = np.concatenate([e[0] for e in self._entries])
        columns = np.concatenate([e[1] for e in self._entries])
        values = self._values()
        order = np.lexsort((rows, columns))
        rows, columns, values = rows[order], columns[order], values[order]
        first = np.ones(len(rows), dtype=bool)
        first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
        starts = np.flatnonzero(first)
        values = np.add.reduceat(values, starts)
        rows, columns = rows[starts], columns[starts]
        kept = values != 0
        rows, columns, values = rows[kept], columns[kept], values[kept]
        start = np.searchsorted(columns, np.arange(self.columns + 1))
        return start.astype(np.int64), rows, values
