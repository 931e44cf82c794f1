"""Cuts of a line of instances into stages: the best one under a table of prices, by dynamic programming.

A stage's *content* is the instances it holds, by run. A table has a row for each stage and a column for each distinct
content, inf where it is not allowed. With D the longest stretch, one call costs O(stages · D · instances) in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from autopar.ir.stages import StageProblem, fixed_cuts
from autopar.solver.linear import Floats, Ints


class Cuts(Protocol):
    """Ways to give each stage one content."""

    contents: Ints
    """[content, run]: instances."""

    def best(self, table: Floats, add: np.ufunc) -> tuple[float, list[int]] | None:
        """The least Σ (add = np.add) or maximum (np.maximum) of a row's entries, and the contents; None if all inf."""
        ...


class FixedCuts:
    """One way: `cuts[stage][run]`."""

    def __init__(self, cuts: Sequence[tuple[int, ...]]) -> None:
        places = {held: e for e, held in enumerate(dict.fromkeys(cuts))}
        self.contents: Ints = np.array(list(places), dtype=np.int64)
        self.path = [places[held] for held in cuts]

    def best(self, table: Floats, add: np.ufunc) -> tuple[float, list[int]] | None:
        value = 0.0
        for row, e in zip(table, self.path, strict=True):
            value = float(add(value, row[e]))
        return (value, self.path) if value < math.inf else None


class LineCuts:
    """Every cut of a line into `stages` stretches of 1 to `longest` instances."""

    def __init__(self, counts: Sequence[int], stages: int, longest: int) -> None:
        self.stages, self.longest = stages, longest
        self.instances = n = sum(counts)
        ends = np.cumsum(counts)
        run_of = np.repeat(np.arange(len(counts)), counts)
        begin, length = np.meshgrid(np.arange(n), np.arange(1, longest + 1))
        begin, end = begin[begin + length <= n], (begin + length)[begin + length <= n]
        first, last = run_of[begin], run_of[end - 1]
        # What a stretch holds is told by its first and last run and how many of each.
        head = np.minimum(ends[first], end) - begin
        foot = np.where(first == last, head, end - (ends - counts)[last])
        key = ((first * len(counts) + last) * (n + 1) + head) * (n + 1) + foot
        _, where, content = np.unique(key, return_index=True, return_inverse=True)
        before = np.concatenate([[0], ends])
        held = [
            np.clip(before[1:], b, e) - np.clip(before[:-1], b, e)
            for b, e in zip(begin[where], end[where], strict=True)
        ]
        self.contents: Ints = np.array(held, dtype=np.int64).reshape(-1, len(counts))
        # content_at[d, j]: of the stretch of d + 1 instances that ends before instance j; one more than all: none.
        self.content_at = np.full((longest, n + 1), len(where), dtype=np.int64)
        self.content_at[end - begin - 1, end] = content

    def best(self, table: Floats, add: np.ufunc) -> tuple[float, list[int]] | None:
        """See `Cuts`. Among equals the shortest last stretches."""
        padded = np.concatenate([table, np.full((self.stages, 1), np.inf)], axis=1)
        price = padded[:, self.content_at]
        values = np.full((self.stages + 1, self.instances + 1), np.inf)
        values[0, 0] = 0.0
        sums = np.empty_like(price[0])
        # `before` is a view of `line`: before[d, j] is the value of position j - d - 1, inf before the first.
        line = np.full(self.longest + self.instances + 1, np.inf)
        now, step = line[self.longest :], line.strides[0]
        before = np.lib.stride_tricks.as_strided(line[self.longest - 1 :], price.shape[1:], (-step, step))
        for s in range(self.stages):
            now[:] = values[s]
            add(price[s], before, out=sums)
            np.minimum.reduce(sums, axis=0, out=values[s + 1])
        value = float(values[-1, -1])
        if value == math.inf:
            return None
        path = []
        j = self.instances
        for s in reversed(range(self.stages)):
            most = min(self.longest, j)
            back = values[s, j - most : j][::-1]
            d = int(np.argmin(add(price[s, :most, j], back)))
            path.append(int(self.content_at[d, j]))
            j -= d + 1
        return value, path[::-1]


def cuts_of(problem: StageProblem, longest: int) -> Cuts:
    """The one cut that is decided, or every one into stretches of up to `longest` instances."""
    cuts = fixed_cuts(problem)
    if cuts is not None:
        return FixedCuts(cuts)
    return _line_cuts(tuple(run.count for run in problem.runs), len(problem.stages), longest)


@lru_cache(maxsize=64)
def _line_cuts(counts: tuple[int, ...], stages: int, longest: int) -> LineCuts:
    """Made of whole numbers only, and asked for with every bound."""
    return LineCuts(counts, stages, longest)
