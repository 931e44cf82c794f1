"""Local search: a choice soon, and the first of equal choices.

One move gives one node another strategy. Everything is exact per move, nodes are visited in order, and equal moves go
to the lowest strategy, so the same start gives the same end. Memory over a limit costs `memory_us_per_byte`, raised
until the choice fits; a conversion that does not exist costs `BIG_US`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.ir.problem import Problem, evaluate
from autopar.solver.linear import Floats
from autopar.solver.view import Reader, View

BIG_US = 1e13
PASSES = 12


def find_choice(problem: Problem, view: View | None = None, start: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """A good choice near `start` (or near the cheapest strategy of every node); it may not fit: ask the referee."""
    view = view or View(problem)
    search = _Search(view, start or tuple(int(np.argmin(c)) for c in view.cost))
    search.descend(0.0)
    if evaluate(problem, tuple(search.choice)).feasible:
        return tuple(search.choice)
    spread_us = sum(float(c.max() - c.min()) for c in view.cost) + 1.0
    spread_bytes = sum(float((h.max(axis=1) - h.min(axis=1)).max(initial=0.0)) for h in view.held) + 1.0
    for factor in (1e-2, 1e-1, 1.0, 10.0, 100.0, 1e4):
        search.descend(factor * spread_us / spread_bytes)
        if evaluate(problem, tuple(search.choice)).feasible:
            search.descend(BIG_US)
            break
    return tuple(search.choice)


def first_of_equals(problem: Problem, choice: tuple[int, ...], view: View | None = None) -> tuple[int, ...]:
    """Move every node to the lowest strategy that costs no more and fits, until nothing moves.

    This is the tie-break: it never raises the objective, and its result depends on the problem and `choice` only.
    """
    search = _Search(view or View(problem), choice)
    for _ in range(PASSES):
        moved = False
        for node in range(len(choice)):
            price = search.price_us(node, BIG_US)
            here = search.choice[node]
            lower = np.flatnonzero(price[:here] <= price[here])
            if len(lower):
                search.move(node, int(lower[0]))
                moved = True
        if not moved:
            break
    before, after = evaluate(problem, choice), evaluate(problem, tuple(search.choice))
    kept = after.feasible and after.objective_us <= before.objective_us + 1e-9 * abs(before.objective_us)
    return tuple(search.choice) if kept else choice


class _Search:
    """A choice with its memory and its overlap balances, kept up to date move by move."""

    def __init__(self, view: View, choice: tuple[int, ...]) -> None:
        self.view = view
        self.choice = list(choice)
        self.moving = [g is not None or any(view.problem.values[v].group is not None for v in view.values_of[n])
                       for n, g in enumerate(view.group)]  # fmt: skip
        self.balance = self._balance()
        self.used = self._used()

    def _balance(self) -> Floats:
        """H_g - K_g of every group."""
        balance = np.zeros(self.view.problem.groups)
        for node, group in enumerate(self.view.group):
            if group is not None:
                balance[group] -= self.view.cover[node][self.choice[node]]
        for index, value in enumerate(self.view.problem.values):
            if value.group is not None:
                wanted = sorted({int(r.wants[self.choice[r.node]]) for r in self.view.readers[index]})
                made = self.view.made[index][self.choice[value.producer]]
                balance[value.group] += np.minimum(self.view.price[index][made, wanted], BIG_US).sum()
        return balance

    def _used(self) -> Floats:
        """Bytes at every moment, less the room."""
        used = -self.view.room.copy()
        for node, held in enumerate(self.view.held):
            used += held[:, self.choice[node]]
        for version in self.view.versions:
            wanted = sorted({int(r.wants[self.choice[r.node]]) for r in version.readers})
            used += version.sizes[:, wanted].sum(axis=1)
        return used

    def descend(self, memory_us_per_byte: float) -> None:
        """Coordinate descent until no single move helps."""
        for _ in range(PASSES):
            moved = False
            for node in range(len(self.choice)):
                price = self.price_us(node, memory_us_per_byte)
                pick, here = int(np.argmin(price)), self.choice[node]
                if price[pick] < price[here] - 1e-9 * abs(price[here]):
                    self.move(node, pick)
                    moved = True
            if not moved:
                break

    def move(self, node: int, pick: int) -> None:
        """Give `node` strategy `pick`."""
        here = self.choice[node]
        if self.moving[node]:
            for group, own in self._own_us(node)[1].items():
                self.balance[group] += own[pick] - own[here]
        if len(self.used):
            own = self._own_bytes(node)
            self.used = self.used + own[:, pick] - own[:, here]
        self.choice[node] = pick

    def price_us(self, node: int, memory_us_per_byte: float) -> Floats:
        """What the objective would be under each strategy of `node`, less what no strategy of it changes."""
        here = self.choice[node]
        price, hidden = self._own_us(node)
        for group, own in hidden.items():
            price = price + np.maximum(0.0, self.balance[group] - own[here] + own)
        if len(self.used) and memory_us_per_byte > 0:
            own = self._own_bytes(node)
            over = np.maximum(0.0, (self.used - own[:, here])[:, None] + own)
            price = price + memory_us_per_byte * over.sum(axis=0)
        return price

    def _own_us(self, node: int) -> tuple[Floats, dict[int, Floats]]:
        """Cost and waiting conversions per strategy of `node`; and per group its part of H_g - K_g."""
        price = self.view.cost[node].copy()
        hidden: dict[int, Floats] = {}
        for index in self.view.values_of[node]:
            paid = self._conversions_us(node, index)
            group = self.view.problem.values[index].group
            if group is None:
                price += paid
            else:
                hidden[group] = hidden.get(group, 0.0) + paid
        own_group = self.view.group[node]
        if own_group is not None:
            hidden[own_group] = hidden.get(own_group, 0.0) - self.view.cover[node]
        return price, hidden

    def _conversions_us(self, node: int, index: int) -> Floats:
        """Σ r over the distinct conversions of one value, per strategy of `node`; infinite ones cost BIG_US."""
        view, choice = self.view, self.choice
        producer, table = view.problem.values[index].producer, view.price[index]
        mine = [r for r in view.readers[index] if r.node == node]
        others = sorted({int(r.wants[choice[r.node]]) for r in view.readers[index] if r.node != node})
        made = view.made[index] if producer == node else view.made[index][choice[producer]]
        paid: Floats = np.zeros(len(view.cost[node]))
        for q in others:
            paid = paid + np.minimum(table[made, q], BIG_US)
        for reader, fresh in _fresh(mine, others):
            paid = paid + np.where(fresh, np.minimum(table[made, reader.wants], BIG_US), 0.0)
        return paid

    def _own_bytes(self, node: int) -> Floats:
        """[moment, strategy of node]: what it holds, and the layouts that only it wants."""
        own = self.view.held[node]
        for index in self.view.versions_of[node]:
            version = self.view.versions[index]
            mine = [r for r in version.readers if r.node == node]
            others = sorted({int(r.wants[self.choice[r.node]]) for r in version.readers if r.node != node})
            for reader, fresh in _fresh(mine, others):
                own = own + np.where(fresh, version.sizes[:, reader.wants], 0.0)
        return own


def _fresh(mine: list[Reader], others: list[int]) -> list[tuple[Reader, npt.NDArray[np.bool_]]]:
    """For each of a node's reads: the strategies under which no other read wants the same layout."""
    result = []
    for position, reader in enumerate(mine):
        fresh = np.ones(len(reader.wants), dtype=bool)
        for q in others:
            fresh &= reader.wants != q
        for earlier in mine[:position]:
            fresh &= earlier.wants != reader.wants
        result.append((reader, fresh))
    return result
