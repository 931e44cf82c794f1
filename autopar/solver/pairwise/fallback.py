"""The bound's message passing of native/pairwise/dual.cpp in numpy, for where the library is not built: right, slower.

Messages M along pairs, prices on rows; b_n = cost + prices * amounts + messages to n, and n's weight
w_n = 1 / max(pairs forward, pairs back). A sweep forward leaves on each pair n < m, for each y,

    min over x of [ w_n b_n(x) + t(x, y) - M_mn(x) - M_nm(y) ] = 0

so that Σ_n (1 - w_n pairs forward) min b_n - Σ price * room is a bound. What a sweep would choose, node after node, is
a choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.linear import Floats, Ints
from autopar.solver.pairwise.model import PairwiseModel

ROUNDING = 1e-9  # of the sum of a bound's terms
FORBIDDEN_COST = 2.0**49  # instead of inf, which has no differences; at least 16 times the largest cost
SMOOTHING, HOPE, FIRST_PACE, SLOWER, SLOWEST = 0.7, 0.1, 0.3, 0.8, 1e-3
PATIENCE = 30  # sweeps without a better bound before the prices' steps get smaller
ROUNDS = 600  # sweeps without progress after which it ends


@dataclass(slots=True)
class _Link:
    """A pair as one of its nodes sees it: `table` is strategies of the other × its own."""

    other: int
    table: Floats
    message: Floats
    back: _Link | None = None


@dataclass(slots=True)
class Passing:
    """State of the sweeps, and the best that they came by."""

    model: PairwiseModel
    links: list[list[_Link]]
    cost: Floats
    price: Floats
    slope: Floats
    best_price: Floats
    decoded: Ints
    choice: Ints | None = None
    fitting: float = math.inf
    bound: float = 0.0
    last: float = -math.inf
    pace: float = FIRST_PACE
    idle: int = 0
    used: Floats = field(default_factory=lambda: np.zeros(0))


def pass_messages(
    model: PairwiseModel, time_limit_s: float, rounds: int | None, told: Callable[[float, float, float], bool]
) -> tuple[Ints | None, float, bool]:
    """(choice or None, bound without the constant, ended by itself)."""
    began = time.perf_counter()
    state = _start(model)
    since = sweeps = 0
    while since < ROUNDS and (rounds is None or sweeps < rounds):
        elapsed = time.perf_counter() - began
        if elapsed >= time_limit_s or told(elapsed, state.fitting, state.bound):
            return state.choice, state.bound, False
        before = state.fitting, state.bound
        _sweep(state)
        sweeps += 1
        if state.fitting - state.bound < 1.0 - 1e-6:
            break
        since = since + 1 if state.fitting >= before[0] and state.bound <= before[1] * (1 + 1e-6) else 0
    return state.choice, state.bound, True


def _start(model: PairwiseModel) -> Passing:
    finite = np.concatenate([model.cost, model.tables])
    finite = finite[np.isfinite(finite)]
    large = max(FORBIDDEN_COST, 16.0 * float(finite.max(initial=0.0)))
    links: list[list[_Link]] = [[] for _ in range(model.nodes)]
    starts, sizes = model.table_start(), np.diff(model.start)
    tables = np.where(np.isfinite(model.tables), model.tables, large)
    for e, (a, b) in enumerate(model.ends.tolist()):
        table = tables[starts[e] : starts[e + 1]].reshape(sizes[a], sizes[b])
        one = _Link(b, np.ascontiguousarray(table.T), np.zeros(sizes[a]))
        two = _Link(a, table, np.zeros(sizes[b]), one)
        one.back = two
        links[a].append(one)
        links[b].append(two)
    zeros = np.zeros(len(model.room))
    return Passing(
        model, links, np.where(np.isfinite(model.cost), model.cost, large), zeros, zeros.copy(), zeros.copy(),
        np.zeros(model.nodes, dtype=np.int64),
    )  # fmt: skip


def _sweep(state: Passing) -> None:
    paid = _paid(state)
    forward = _pass(state, paid, range(state.model.nodes), 1)
    _look(state)
    state.last = max(forward, _pass(state, paid, range(state.model.nodes - 1, -1, -1), -1))
    _look(state)
    if state.last > state.bound or not state.price.any():
        state.bound, state.best_price, state.idle = max(state.bound, state.last), state.price.copy(), 0
    else:
        state.idle += 1
        if state.idle >= PATIENCE:
            state.idle, state.pace, state.price = 0, max(SLOWEST, SLOWER * state.pace), state.best_price.copy()
    _reprice(state)


def _paid(state: Passing) -> Floats:
    """Costs with what the loads pay."""
    model = state.model
    paid = state.cost.copy()
    if not state.price.any() or not len(model.load_node):
        return paid
    before = np.concatenate([[0.0], np.cumsum(state.price)])
    sizes = np.diff(model.start)[model.load_node]
    each = np.repeat(before[model.load_rows[:, 1]] - before[model.load_rows[:, 0]], sizes)
    starts = model.load_start()
    place = np.repeat(model.start[model.load_node] - starts[:-1], sizes) + np.arange(len(model.amounts))
    np.add.at(paid, place, each * model.amounts)
    return paid


def _pass(state: Passing, paid: Floats, order: range, direction: int) -> float:
    bound = terms = 0.0
    start, decoded = state.model.start, state.decoded
    for n in order:
        links = state.links[n]
        belief = paid[start[n] : start[n + 1]].copy()
        seen = belief.copy()
        onward = 0
        for link in links:
            ahead = (link.other - n) * direction > 0
            onward += ahead
            belief += link.message
            seen += link.message if ahead else link.table[decoded[link.other]]
        decoded[n] = int(np.argmin(seen))
        weight = 1.0 / max(onward, len(links) - onward) if links else 0.0
        low = (1.0 - weight * onward) * float(belief.min())
        bound += low
        terms += abs(low)
        share = weight * belief
        for link in links:
            if (link.other - n) * direction > 0 and link.back is not None:
                link.back.message = (link.table + (share - link.message)).min(axis=1)
    rent = float(state.price @ state.model.room)
    return bound - rent - ROUNDING * (terms + rent)


def _look(state: Passing) -> None:
    state.used = state.model.used(state.decoded)
    if (state.used > state.model.room).any():
        return
    cost = state.model.cost_of(state.decoded)
    if cost < state.fitting:
        state.fitting, state.choice = cost, state.decoded.copy()


def _reprice(state: Passing) -> None:
    """Polyak's step along the usage less the room."""
    state.slope = SMOOTHING * state.slope + (1 - SMOOTHING) * (state.used - state.model.room)
    moving = state.slope[(state.price > 0) | (state.slope > 0)]
    length = float(moving @ moving)
    if length == 0.0:
        return
    target = min(state.fitting, state.bound + HOPE * abs(state.bound) + 1.0)
    step = state.pace * max(target - state.last, 1e-6 * abs(target)) / length
    state.price = np.maximum(0.0, state.price + step * state.slope)
