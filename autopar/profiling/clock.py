"""Timing in step with other ranks: windows of calls, repeated until the time settles or the cap is reached.

A sample is the mean over a window, not one call: where ranks share a core, waiting for it is part of the time. All
ranks time the same point in the same windows, and its quantiles are over the samples of all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

LEAST_SAMPLES, MOST_SAMPLES = 3, 16
WINDOWS = 6
LEAST_WINDOW_S, MOST_WINDOW_S = 0.001, 0.05
SETTLED = 0.15
"""(p90 − p10)/p50 up to which a time counts as stable."""
KEEP_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}
"""Results held before all of them are let go, as a step holds its activations: fresh memory has its price."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Quantiles of the time of a call, µs."""

    p10: float
    p50: float
    p90: float
    stable: bool


@final
class Crew:
    """The ranks that measure together. One alone needs no process group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    def worst(self, *numbers: float) -> tuple[float, ...]:
        """The largest of each over the ranks; also where all ranks meet."""
        if self.size == 1:
            return numbers
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return tuple(mine.tolist())

    def pooled(self, samples: Sequence[float]) -> list[float]:
        """Samples of all ranks, at most MOST_SAMPLES of each."""
        if self.size == 1:
            return list(samples)
        mine = torch.full((MOST_SAMPLES,), math.nan, dtype=torch.float64, device=self.device)
        mine[: len(samples)] = torch.tensor(list(samples), dtype=torch.float64)
        every = torch.empty(self.size * MOST_SAMPLES, dtype=torch.float64, device=self.device)
        dist.all_gather_single(every, mine)
        return [x for x in every.tolist() if not math.isnan(x)]

    def finish(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class MeasureError(Exception):
    """A point could not be measured, on this rank or on another."""


def time_calls(crew: Crew, prepare: Callable[[], tuple[Callable[[int], Any], int]], seconds: float) -> Timed:
    """Time a call on all ranks at once. `prepare` gives (call of a running number, bytes that a call makes).

    Windows are a part of `seconds`; a time that has not settled by then counts as unstable.

    Raises:
        MeasureError: on all ranks alike, if it fails on one.
    """
    clock: _Clock | None = None
    failed, start = "", time.perf_counter()
    try:
        clock = _Clock(crew, *prepare(), min(MOST_WINDOW_S, max(LEAST_WINDOW_S, seconds / WINDOWS)))
    except Exception as error:  # whatever an op, a dtype or a full memory says: the point is left out, with a note
        failed = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if crew.worst(float(bool(failed)))[0] or clock is None:
        raise MeasureError(failed or "failed on another rank")
    samples: list[float] = []
    # A collective is called equally often on every rank: the slowest one's count is everyone's.
    count = int(crew.worst(-clock.count)[0] * -1)
    while len(samples) < MOST_SAMPLES:
        samples.append(clock.window_us(count))
        enough = len(samples) >= LEAST_SAMPLES
        late = enough and time.perf_counter() - start > seconds
        (unsettled, ended) = crew.worst(float(not enough or spread(samples) > SETTLED), float(late))
        if not unsettled or ended:
            break
    every = crew.pooled(samples)
    p10, p50, p90 = quantiles(every)
    return Timed(p10, p50, p90, spread(every) <= 2 * SETTLED)


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """p10, p50 and p90."""
    ordered = sorted(samples)

    def at(part: float) -> float:
        place = part * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return at(0.1), at(0.5), at(0.9)


def spread(samples: Sequence[float]) -> float:
    """(p90 − p10)/p50."""
    p10, p50, p90 = quantiles(samples)
    return (p90 - p10) / p50


@final
class _Clock:
    """One call and its window. Results are kept a while, as a step keeps them."""

    def __init__(self, crew: Crew, call: Callable[[int], Any], out_bytes: int, window_s: float) -> None:
        self.crew, self.call = crew, call
        self.keep = max(1, KEEP_BYTES[crew.device.type] // max(1, out_bytes))
        self.kept: list[Tensor] = []
        self.at = 0
        self._run(2)
        start = time.perf_counter()
        self._run(1)
        once = max(time.perf_counter() - start, 1e-7)
        self.count = max(1, int(window_s / once))

    def window_us(self, count: int) -> float:
        """Mean time of `count` calls."""
        start = time.perf_counter()
        self._run(count)
        return (time.perf_counter() - start) / count * 1e6

    def _run(self, count: int) -> None:
        call, kept, keep = self.call, self.kept, self.keep
        for i in range(self.at, self.at + count):
            kept.append(call(i))
            if len(kept) >= keep:
                kept.clear()
        self.at += count
        self.crew.finish()
