"""A problem as numpy tables, and who touches what: shared by the search, the bound and the reductions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import Problem
from autopar.solver.linear import Floats, Ints

PRODUCER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A node that reads a value, with the layout that each of its strategies wants."""

    node: int
    wants: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionTable:
    """Bytes [moment, layout] of the versions of `value` that `readers` share, over all moments that name them."""

    value: int
    readers: tuple[Reader, ...]
    sizes: Floats


class View:
    """Tables of one problem.

    Attributes:
        cost, cover: [strategy] per node.
        price: reshard table per value.
        made: [strategy of the producer] per value.
        readers: distinct readers per value (two reads by one node in the same layouts are one).
        values_of: indices of the values that a node makes or reads, sorted.
        held: [moment, strategy] bytes per node.
        versions: distinct version tables; versions_of: their indices per node.
        room: limit - fixed bytes per moment.
        moments_of: per node, moments that differ in what the node and the versions that it reads may hold there; one
            of each kind, and none where that is nothing.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = [np.array(n.cost_us, dtype=float) for n in problem.nodes]
        self.cover = [np.array(n.cover_us or (0.0,) * len(n.cost_us), dtype=float) for n in problem.nodes]
        self.group = [n.group if n.cover_us else None for n in problem.nodes]
        self.price = [np.array(v.reshard_us, dtype=float) for v in problem.values]
        self.made = [np.array(v.made, dtype=np.int64) for v in problem.values]
        self.readers = [
            distinct_readers(tuple(Reader(node=c.node, wants=np.array(c.wants, dtype=np.int64)) for c in v.consumers))
            for v in problem.values
        ]
        touched: list[set[int]] = [set() for _ in problem.nodes]
        for index, value in enumerate(problem.values):
            for node in (value.producer, *(c.node for c in value.consumers)):
                touched[node].add(index)
        self.values_of = [sorted(t) for t in touched]
        self.room = np.array([m.limit_bytes - m.fixed_bytes for m in problem.moments], dtype=float)
        self._add_moments()

    def _add_moments(self) -> None:
        problem, moments = self.problem, len(self.problem.moments)
        self.held = [np.zeros((moments, len(c))) for c in self.cost]
        tables: dict[tuple[int, tuple[int, ...]], Floats] = {}
        for m, moment in enumerate(problem.moments):
            for held in moment.nodes:
                self.held[held.node][m] += np.array(held.bytes, dtype=float)
            for version in moment.versions:
                key = (version.value, version.consumers)
                layouts = len(problem.values[version.value].reshard_us)
                tables.setdefault(key, np.zeros((moments, layouts)))[m] += np.array(version.bytes, dtype=float)
        self.versions: list[VersionTable] = []
        self.versions_of: list[list[int]] = [[] for _ in problem.nodes]
        for (value, positions), sizes in tables.items():
            consumers = [problem.values[value].consumers[k] for k in positions]
            readers = distinct_readers(
                tuple(Reader(node=c.node, wants=np.array(c.wants, dtype=np.int64)) for c in consumers)
            )
            for node in sorted({r.node for r in readers}):
                self.versions_of[node].append(len(self.versions))
            self.versions.append(VersionTable(value=value, readers=readers, sizes=sizes))
        self.moments_of = [self._distinct_moments(node) for node in range(len(problem.nodes))]

    def _distinct_moments(self, node: int) -> list[int]:
        terms = np.concatenate([self.held[node], *(self.versions[v].sizes for v in self.versions_of[node])], axis=1)
        kinds: dict[bytes, int] = {}
        for moment in np.flatnonzero(terms.any(axis=1)):
            kinds.setdefault(terms[moment].tobytes(), int(moment))
        return list(kinds.values())


def distinct_readers(readers: tuple[Reader, ...]) -> tuple[Reader, ...]:
    """Readers without repeats, in order."""
    seen: dict[tuple[int, bytes], Reader] = {}
    for reader in readers:
        seen.setdefault((reader.node, reader.wants.tobytes()), reader)
    return tuple(seen.values())
