"""A small model as a mixed-integer program:

    x[n, s] ∈ {0, 1},  Σ_s x[n, s] = 1                                             _program
    f[e, p, q] >= 0 where allowed:  Σ_q f = x[a, p],  Σ_p f = x[b, q]              _program
    minimise Σ cost x + Σ table f
    Σ of the loads' amounts x <= room                                              _room_row

Rows of room are many and few of them bind: only those that an answer breaks are written, and the program asked again.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autopar.solver.highs import solve_mip
from autopar.solver.linear import Floats, Ints, LinearBuilder, LinearModel, LinearStatus
from autopar.solver.pairwise.model import PairwiseModel

ROWS_A_TURN = 8  # rows of room that are added at once, the worst first
TOLERANCE = 1e-6  # of an objective, relative; the solver's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """`choice` is None where none was found; with `done` that is because there is none, else time ended it."""

    choice: Ints | None
    bound: float
    done: bool


@dataclass(frozen=True, slots=True)
class _Row:
    columns: Ints
    amounts: Floats
    room: float


def solve_exactly(model: PairwiseModel, time_limit_s: float, known: Ints | None = None) -> Exact:
    """The cheapest choice, or how far that came in `time_limit_s`. `known`: a choice that fits, if time ends first."""
    began = time.perf_counter()
    rows: list[_Row] = []
    bound = 0.0
    while True:
        left = time_limit_s - (time.perf_counter() - began)
        if left <= 0:
            return Exact(choice=known, bound=bound, done=False)
        program = _program(model, rows)
        answer = solve_mip(program, time_limit_s=left)
        if answer.status is LinearStatus.INFEASIBLE:
            return Exact(choice=None, bound=math.inf, done=True)
        bound = max(bound, answer.bound - TOLERANCE * abs(answer.bound))
        if answer.status is LinearStatus.TIME_LIMIT or answer.point is None:
            return Exact(choice=known, bound=bound, done=False)
        picked = _picked(model, answer.point)
        broken = _broken(model, picked)
        if not len(broken):
            return Exact(choice=picked, bound=bound, done=True)
        rows += [row for r in broken for row in _room_rows(model, picked, int(r), rows)]


def _program(model: PairwiseModel, rows: list[_Row]) -> LinearModel:
    builder = LinearBuilder()
    x = builder.add_columns(np.where(np.isfinite(model.cost), model.cost, 0.0), upper=1.0, integer=True)
    builder.forbid(x[~np.isfinite(model.cost)])
    owner = np.repeat(np.arange(model.nodes), np.diff(model.start))
    builder.add_entries(builder.add_rows(model.nodes, 1.0, 1.0)[owner], x, 1.0)
    starts = model.table_start()
    for e, (a, b) in enumerate(model.ends.tolist()):
        columns = np.arange(model.start[b], model.start[b + 1])
        lines = np.arange(model.start[a], model.start[a + 1])
        table = model.tables[starts[e] : starts[e + 1]]
        allowed = np.flatnonzero(np.isfinite(table))
        f = builder.add_columns(table[allowed])
        for mine, place in ((lines, allowed // len(columns)), (columns, allowed % len(columns))):
            balance = builder.add_rows(len(mine), 0.0, 0.0)
            builder.add_entries(balance[place], f, 1.0)
            builder.add_entries(balance, x[mine], -1.0)
    for row in rows:
        index = builder.add_rows(1, -math.inf, row.room)
        builder.add_entries(np.repeat(index, len(row.columns)), x[row.columns], row.amounts)
    return builder.build()


def _picked(model: PairwiseModel, point: Floats) -> Ints:
    return np.array([int(np.argmax(point[a:b])) for a, b in zip(model.start[:-1], model.start[1:], strict=True)])


def _broken(model: PairwiseModel, picked: Ints) -> Ints:
    """The rows that a choice breaks most, each worse than its neighbours or as bad as the one before."""
    excess = model.used(picked) - model.room
    padded = np.concatenate([[-math.inf], excess, [-math.inf]])
    peaks = np.flatnonzero((excess > 0) & (excess >= padded[2:]) & (excess > padded[:-2]))
    return peaks[np.argsort(-excess[peaks], kind="stable")][:ROWS_A_TURN]


def _room_rows(model: PairwiseModel, picked: Ints, row: int, known: list[_Row]) -> list[_Row]:
    """The row as it is, or, where it is there and the solver's tolerance let it be broken, without this choice."""
    starts = model.load_start()
    over = np.flatnonzero((model.load_rows[:, 0] <= row) & (row < model.load_rows[:, 1]))
    amounts = np.zeros(len(model.cost))
    for k in over.tolist():
        n = model.load_node[k]
        amounts[model.start[n] : model.start[n + 1]] += model.amounts[starts[k] : starts[k + 1]]
    columns = np.flatnonzero(amounts)
    divisor = math.gcd(*(int(a) for a in amounts[columns])) or 1
    fresh = _Row(columns, amounts[columns] / divisor, math.floor(model.room[row] / divisor))
    if not any(np.array_equal(old.columns, columns) and old.room == fresh.room for old in known):
        return [fresh]
    nodes = np.unique(model.load_node[over])
    return [_Row(model.start[:-1][nodes] + picked[nodes], np.ones(len(nodes)), len(nodes) - 1.0)]
