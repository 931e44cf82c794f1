"""The fastest mix of columns for what one stage holds: an integer knapsack of few kinds of item, each many times.

Given how many instances of each run a stage holds, choose n[r, c]: minimise Σ n·us with Σ n·bytes + the largest
transient <= what the stage has and, if asked, Σ n·finish <= a cap.

- The largest transient: one problem for each value x that it can have, over the columns with no more (`_Capped`).
- The relaxation (`_Capped.relax`) walks the lower hulls of the runs from fast to small, cheapest byte first. It ends
  between two columns of one run, the *pivot*; all other instances of a run take one column, its base. Its price of a
  byte λ (and of finish, ν) gives each column a reduced cost d >= 0: a mix costs at least the bound + Σ n·d.
- So few instances can take another column than base or pivot: those with Σ d below the gap that is left. `_search` goes
  through these, and fills up with the pivot's two columns, for which the best numbers are known in closed form.
- Few instances in few columns: all mixes, for all kinds of stage at once (`AllMixes`).
- Two instances in columns c, c' whose sums are no better than those of two others of the run never need to appear
  (`_Capped.worse_pairs`); that takes care of columns that lie on one line, where all d are 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.ir.stages import WHOLE_BYTE, Column, Run, Stage
from autopar.solver.linear import Bools, Floats, Ints

SAME = 1e-12
"""Relative difference of times below which two mixes count as equally fast."""

NODES = 5_000
"""Mixes that one search looks at before it gives up proving that none is faster."""

FINISH_PRICES = tuple(2.0 ** (k / 2) for k in range(-20, 42))
"""µs per micro-batch that a µs less to finish may cost, where finish is capped: prices that the relaxation tries."""

PAIRS_FROM = 64
"""Mixes after which it pays to compare pairs of columns."""


@dataclass(frozen=True, slots=True)
class Way:
    """A column on one stage: times with its speed, bytes with its micro-batches in flight."""

    us: float
    bytes: float
    transient: int
    finish_us: float
    column: int


@dataclass(frozen=True, slots=True)
class Mix:
    """`counts[run][column]`: instances; and their time and finish."""

    us: float
    finish_us: float
    counts: tuple[tuple[int, ...], ...]


def useful_columns(run: Run) -> list[int]:
    """The columns that are somewhere better than each other one, whatever the stage; of equal ones the first."""
    keys = [(c.busy_us, c.saved_bytes, c.resident_bytes, c.transient_bytes, c.finish_us) for c in run.columns]
    return [i for i, key in enumerate(keys) if not any(_stands_for(keys, j, i) for j in range(len(keys)))]


def _stands_for(keys: Sequence[tuple[float, ...]], j: int, i: int) -> bool:
    """Whether entry j is as good as entry i in all, and better in one or listed first."""
    if j == i or any(b > a for a, b in zip(keys[i], keys[j], strict=True)):
        return False
    return keys[i] != keys[j] or j < i


def _undominated(ways: Sequence[Way], finish: bool) -> list[Way]:
    """Without the ways that another is no worse than in time and bytes, and in finish if that matters."""
    kept: list[Way] = []
    for way in sorted(ways, key=lambda w: (w.us, w.bytes, w.finish_us, w.column)):
        if not any(k.bytes <= way.bytes and (not finish or k.finish_us <= way.finish_us) for k in kept):
            kept.append(way)
    return kept


def ways_of(run: Run, columns: Sequence[int], stage: Stage) -> list[Way]:
    """These columns of a run, on a stage."""
    found = []
    for i in columns:
        c = run.columns[i]
        size = c.resident_bytes + stage.in_flight * c.saved_bytes
        found.append(Way(stage.speed * c.busy_us, size, c.transient_bytes, stage.speed * c.finish_us, i))
    return found


@dataclass(frozen=True, slots=True)
class Found:
    """The best mix, or None; no better one is faster than `open_us` (inf: none exists); and how many were looked at."""

    mix: Mix | None
    open_us: float
    nodes: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """Of a run's hull: from a faster column to the next smaller one. `price`: µs per byte saved."""

    price: float
    run: int
    bytes: float
    fast: Way
    small: Way


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """An answer of the relaxation. `bound_us` holds for every mix; `base` by run (the pivot's: its smaller column)."""

    bound_us: float
    finish_us: float
    price: float
    finish_price: float
    base: list[Way | None]
    pivot: _Segment | None


@dataclass(frozen=True, slots=True)
class _Other:
    """A column that is no base: reduced cost and what an instance changes by taking it."""

    cost: float
    run: int
    us: float
    bytes: float
    finish_us: float
    way: Way


class _Capped:
    """The columns of a stage whose transient is at most a cap. `finish`: whether finishing times matter."""

    def __init__(self, ways: Sequence[Sequence[Way]], transient: int, finish: bool) -> None:
        self.ways = [_undominated([w for w in run if w.transient <= transient], finish) for run in ways]
        self.segments: dict[float, tuple[list[Way | None], list[_Segment]]] = {}
        self.pairs: dict[int, set[tuple[int, int]]] = {}

    def _segments(self, finish_price: float) -> tuple[list[Way | None], list[_Segment]]:
        """Of each run the fastest column, and the segments of all runs, cheapest byte first."""
        fastest: list[Way | None] = []
        segments = []
        for run, ways in enumerate(self.ways):
            hull = _hull(ways, finish_price)
            fastest.append(hull[0] if hull else None)
            for a, b in itertools.pairwise(hull):
                more = b.us - a.us + finish_price * (b.finish_us - a.finish_us)
                segments.append(_Segment(more / (a.bytes - b.bytes), run, a.bytes - b.bytes, a, b))
        segments.sort(key=lambda s: (s.price, s.run))
        return fastest, segments

    def relax(self, held: tuple[int, ...], room: float, finish_cap: float, finish_price: float) -> _Relaxed | None:
        """Instances may be divided between columns. None if even the smallest columns don't fit."""
        if finish_price not in self.segments:
            self.segments[finish_price] = self._segments(finish_price)
        fastest, segments = self.segments[finish_price]
        base = [way if n else None for way, n in zip(fastest, held, strict=True)]
        missing = sum(n * way.bytes for n, way in zip(held, fastest, strict=True) if n and way) - room
        pivot, part = None, 0.0
        if missing > 0:
            for segment in segments:
                n = held[segment.run]
                if not n:
                    continue
                base[segment.run] = segment.small
                if n * segment.bytes >= missing:
                    pivot, part = segment, missing / segment.bytes
                    break
                missing -= n * segment.bytes
            else:
                return None
        price = pivot.price if pivot else 0.0
        bound = -price * room - (finish_price * finish_cap if finish_price else 0.0)
        finish = 0.0
        for n, way in zip(held, base, strict=True):
            if n and way:
                bound += n * (way.us + finish_price * way.finish_us + price * way.bytes)
                finish += n * way.finish_us
        if pivot:
            finish += (held[pivot.run] - part) * (pivot.fast.finish_us - pivot.small.finish_us)
        return _Relaxed(bound, finish, price, finish_price, base, pivot)

    def relax_both(self, held: tuple[int, ...], room: float, finish_cap: float, enough_us: float) -> _Relaxed | None:
        """`relax` at the best of some prices of finish: the bound is concave in it, and finish falls. None: no mix.

        Stops as soon as a bound reaches `enough_us`.
        """
        best = self.relax(held, room, finish_cap, 0.0)
        if best is None or best.finish_us <= finish_cap or best.bound_us >= enough_us:
            return best
        least = sum(n * min(w.finish_us for w in ways) for n, ways in zip(held, self.ways, strict=True) if n)
        if least > finish_cap:
            return None
        low, high = -1, len(FINISH_PRICES)
        while high - low > 1:
            middle = (low + high) // 2
            found = self.relax(held, room, finish_cap, FINISH_PRICES[middle])
            assert found is not None
            best = max(best, found, key=lambda r: r.bound_us)
            if best.bound_us >= enough_us:
                break
            low, high = (low, middle) if found.finish_us <= finish_cap else (middle, high)
        return best

    def others(self, held: tuple[int, ...], relaxed: _Relaxed) -> list[_Other]:
        """What instances may take instead of base or pivot, least reduced cost first."""
        found = []
        pivot = relaxed.pivot
        for run, (n, base) in enumerate(zip(held, relaxed.base, strict=True)):
            if not n or base is None:
                continue
            taken = {base.column, pivot.fast.column} if pivot and pivot.run == run else {base.column}
            for way in self.ways[run]:
                if way.column not in taken:
                    us, size = way.us - base.us, way.bytes - base.bytes
                    finish = way.finish_us - base.finish_us
                    cost = us + relaxed.price * size + relaxed.finish_price * finish
                    found.append(_Other(max(0.0, cost), run, us, size, finish, way))
        return sorted(found, key=lambda o: (o.cost, o.run, o.way.column))

    def worse_pairs(self, run: int, finish: bool) -> set[tuple[int, int]]:
        """Pairs of columns of a run (the same one twice included) that another pair can stand for.

        Equal pairs: the one of columns farther apart stands for the other; so no circle of replacements exists.
        """
        if run in self.pairs:
            return self.pairs[run]
        ways = sorted(self.ways[run], key=lambda w: (w.bytes, w.us, w.column))
        sums = [
            (a.us + b.us, a.bytes + b.bytes, a.finish_us + b.finish_us if finish else 0.0, i * i + j * j, i, j)
            for i, a in enumerate(ways)
            for j, b in enumerate(ways[i:], i)
        ]
        worse: set[tuple[int, int]] = set()
        for us, size, end, apart, i, j in sums:
            for us2, size2, end2, apart2, _, _ in sums:
                as_good = us2 <= us * (1 + SAME) and size2 <= size and end2 <= end
                if as_good and (us2 < us * (1 - SAME) or size2 < size or end2 < end or apart2 > apart):
                    a, b = ways[i].column, ways[j].column
                    worse |= {(a, b), (b, a)}
                    break
        self.pairs[run] = worse
        return worse


class AllMixes:
    """Every mix of one content, fastest first, for several kinds of stage at once.

    `rows[mix, column]` are instances, columns of all runs side by side. Arrays of kinds are [kind, 1].
    """

    def __init__(self, rows: Ints, columns: Sequence[Column], room: Floats, in_flight: Floats) -> None:
        us, finish = (rows @ np.array(v) for v in ([c.busy_us for c in columns], [c.finish_us for c in columns]))
        order = np.lexsort((finish, us))
        self.rows = rows = rows[order]
        self.us, self.finish = us[order], finish[order]
        resident, saved = (
            rows @ np.array(v, dtype=np.float64)
            for v in ([c.resident_bytes for c in columns], [c.saved_bytes for c in columns])
        )
        transient = np.where(rows > 0, np.array([c.transient_bytes for c in columns]), 0).max(axis=1)
        self.fits = resident + transient + in_flight * saved <= room

    def best(self, speed: Floats, finish_cap: float) -> tuple[Ints, Bools]:
        """[kind]: the fastest mix that fits and keeps the cap, and whether there is one."""
        good = self.fits if finish_cap == math.inf else self.fits & (speed * self.finish <= finish_cap)
        at = good.argmax(axis=1)
        return at, good[np.arange(len(good)), at]


def count_mixes(held: Sequence[int], columns: Sequence[int]) -> int:
    """Mixes of a content, given the number of columns of each run."""
    return math.prod(math.comb(n + c - 1, c - 1) for n, c in zip(held, columns, strict=True))


def all_mixes(held: Sequence[int], columns: Sequence[int]) -> Ints:
    """[mix, column]: every way to divide the instances of each run among its columns."""
    rows = np.zeros((1, 0), dtype=np.int64)
    for n, c in zip(held, columns, strict=True):
        left = np.full(len(rows), n, dtype=np.int64)
        for k in range(c):
            if k == c - 1:
                taken = left
            else:
                again = np.repeat(np.arange(len(rows)), left + 1)
                begin = np.cumsum(left + 1) - (left + 1)
                taken = np.arange(len(again)) - begin[again]
                rows, left = rows[again], left[again]
            rows = np.concatenate([rows, taken[:, None]], axis=1)
            left = left - taken
    return rows


def _hull(ways: Sequence[Way], finish_price: float) -> list[Way]:
    """The lower hull of (bytes, us + price · finish), from the fastest way to the smallest; none on a line between."""
    points = sorted((w.us + finish_price * w.finish_us, w.bytes, w.finish_us, w.column, w) for w in ways)
    hull: list[tuple[float, float, Way]] = []
    for us, size, _, _, way in points:
        if hull and size >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (us0, size0, _), (us1, size1, _) = hull[-2], hull[-1]
            if (us1 - us0) * (size0 - size) < (us - us0) * (size0 - size1) * (1 - SAME):
                break
            hull.pop()
        hull.append((us, size, way))
    return [way for _, _, way in hull]


@dataclass(slots=True)
class _Best:
    """The best mix of a search so far: what replaces bases, and the pivot's faster column."""

    limit_us: float
    most_nodes: int
    picked: tuple[_Other, ...] | None = None
    fast: int = 0
    nodes: int = 0
    worse: dict[int, set[tuple[int, int]]] = field(default_factory=dict)


class Mixer:
    """The best mixes of one kind of stage. Remembers what it has prepared, nothing of what it answered."""

    def __init__(self, runs: Sequence[Run], columns: Sequence[Sequence[int]], stage: Stage) -> None:
        """`columns`: of each run, those that may be used."""
        self.runs = tuple(runs)
        self.room = stage.limit_bytes - stage.fixed_bytes + WHOLE_BYTE
        self.ways = [ways_of(run, use, stage) for run, use in zip(runs, columns, strict=True)]
        self._capped: dict[tuple[int, bool], _Capped] = {}

    def best(
        self, held: tuple[int, ...], *, finish_cap: float = math.inf, cutoff_us: float = math.inf, nodes: int = NODES
    ) -> Found:
        """The fastest mix of `held` instances of each run that fits and takes less than `cutoff_us`.

        Each cap on transients is given up after `nodes` mixes.
        """
        runs = [ways for n, ways in zip(held, self.ways, strict=True) if n]
        least = max(min(w.transient for w in ways) for ways in runs)
        caps = sorted({w.transient for ways in runs for w in ways if w.transient >= least})
        finish = finish_cap < math.inf
        best, open_us, looked, limit = None, math.inf, 0, cutoff_us
        for cap in caps:
            if (cap, finish) not in self._capped:
                self._capped[cap, finish] = _Capped(self.ways, cap, finish)
            capped, room = self._capped[cap, finish], self.room - cap
            if finish:
                relaxed = capped.relax_both(held, room, finish_cap, limit * (1 - SAME))
            else:
                relaxed = capped.relax(held, room, finish_cap, 0.0)
            if relaxed is None or relaxed.bound_us >= limit * (1 - SAME):
                continue
            found = _Best(limit, nodes)
            _search(capped, held, room, finish_cap, relaxed, found)
            looked += found.nodes
            if found.nodes >= nodes:
                open_us = min(open_us, relaxed.bound_us)
            if found.picked is not None:
                best = self._mix(held, relaxed, found)
                limit = best.us
        return Found(best, open_us, looked)

    def _mix(self, held: tuple[int, ...], relaxed: _Relaxed, found: _Best) -> Mix:
        """Counts of a search's best, and their sums in the order of columns, so that equal mixes have equal sums."""
        counts = [[0] * len(run.columns) for run in self.runs]
        for n, base, row in zip(held, relaxed.base, counts, strict=True):
            if n and base:
                row[base.column] = n
        takes = [(o.run, o.way) for o in found.picked or ()]
        if relaxed.pivot:
            takes += [(relaxed.pivot.run, relaxed.pivot.fast)] * found.fast
        for run, way in takes:
            base = relaxed.base[run]
            assert base is not None
            counts[run][base.column] -= 1
            counts[run][way.column] += 1
        used = [(row[w.column], w) for row, ways in zip(counts, self.ways, strict=True) for w in ways]
        return Mix(
            us=sum(n * w.us for n, w in used),
            finish_us=sum(n * w.finish_us for n, w in used),
            counts=tuple(map(tuple, counts)),
        )


def _search(
    capped: _Capped, held: tuple[int, ...], room: float, finish_cap: float, relaxed: _Relaxed, found: _Best
) -> None:
    """Every set of instances in other columns whose reduced costs leave it a chance; the best of them into `found`."""
    others = capped.others(held, relaxed)
    used = [(n, w) for n, w in zip(held, relaxed.base, strict=True) if n and w]
    pivot = relaxed.pivot
    stack: list[tuple[int, float, float, float, float, tuple[int, ...], tuple[_Other, ...]]] = [
        (
            0,
            relaxed.bound_us,
            sum(n * w.us for n, w in used),
            sum(n * w.bytes for n, w in used),
            sum(n * w.finish_us for n, w in used),
            held,
            (),
        )
    ]
    while stack and found.nodes < found.most_nodes:
        start, bound, us, size, finish, left, picked = stack.pop()
        found.nodes += 1
        fast = _pivot_count(pivot, left, room - size, finish_cap - finish)
        if fast is not None:
            total = us + fast * (pivot.fast.us - pivot.small.us) if pivot else us
            if total < found.limit_us * (1 - SAME):
                found.limit_us, found.picked, found.fast = total, picked, fast
        most = found.limit_us * (1 - SAME)
        if found.nodes == PAIRS_FROM:
            runs = {o.run for o in others}
            found.worse = {r: capped.worse_pairs(r, finish_cap < math.inf) for r in runs}
        further = []
        for i in range(start, len(others)):
            other = others[i]
            if bound + other.cost >= most:
                break
            if not left[other.run] or _has_worse_pair(found.worse.get(other.run), picked, other):
                continue
            rest = (*left[: other.run], left[other.run] - 1, *left[other.run + 1 :])
            further.append(
                (
                    i,
                    bound + other.cost,
                    us + other.us,
                    size + other.bytes,
                    finish + other.finish_us,
                    rest,
                    (*picked, other),
                )
            )
        stack.extend(reversed(further))


def _pivot_count(pivot: _Segment | None, left: tuple[int, ...], room: float, finish_room: float) -> int | None:
    """How many of the pivot run's instances take its faster column, at best; None if nothing fits.

    `room` and `finish_room` are what is left if all take the smaller one.
    """
    if room < 0:
        return None
    if pivot is None:
        return 0 if finish_room >= 0 else None
    least, most = 0, left[pivot.run]
    if most * pivot.bytes > room:
        most = int(room / pivot.bytes)
        most -= most * pivot.bytes > room
    more = pivot.fast.finish_us - pivot.small.finish_us
    if more > 0:
        if finish_room < 0:
            return None
        if most * more > finish_room:
            most = int(finish_room / more)
            most -= most * more > finish_room
    elif finish_room < 0:
        if more == 0:
            return None
        least = math.ceil(finish_room / more)
        least += finish_room - least * more < 0
    if least > most:
        return None
    return most if pivot.fast.us <= pivot.small.us else least


def _has_worse_pair(worse: set[tuple[int, int]] | None, picked: tuple[_Other, ...], other: _Other) -> bool:
    """Whether `other` beside one of `picked` is a pair that another stands for."""
    if not worse:
        return False
    return any((o.way.column, other.way.column) in worse for o in picked if o.run == other.run)
