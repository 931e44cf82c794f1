"""What the actions of a stage take: read off the clock in steps that ask for it, beside what was predicted.

An action's time is without what it waits for from other stages, which is counted by itself.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch

from autopar.errors import UserError
from autopar.ir.account import StageRow, StagesReport
from autopar.ir.plan import STAGE, Plan
from autopar.ir.schedule import Schedule
from autopar.ir.timeline import Timeline
from autopar.runtime.comm import Communicator

NOTHING = "report: no step was measured; call module.measure(steps=3), train 4 steps or more, then report again"
NOISE_US = 1e-3
"""What sums of prices may be off by."""
BEFORE, AFTER, STEP, WAITED = "before", "after", "step", "waits"
"""What is no action: what a step does before its first and after its last one; all of the step; waiting."""


@dataclass
class StageClock:
    """Seconds of one step by action ("F0": forward of chunk 0), and those that it waited for other stages."""

    device: torch.device
    seconds: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around an action, or what comes before or after all of them."""
        start, waited = time.perf_counter(), self.waited_s
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - start - (self.waited_s - waited)  # type: ignore[assignment]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for another stage."""
        start = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - start


@final
class StageMeasuring:
    """The steps that are measured: one to warm up, then `steps`."""

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise UserError(f"measure(steps={steps}): wanted 1 or more")
        self.left = steps + 1
        self.done: list[tuple[StageClock, float]] = []

    @contextmanager
    def step(self, device: torch.device) -> Iterator[StageClock | None]:
        """Around a step: its clock; None for one that isn't measured."""
        clock = StageClock(device)
        start = time.perf_counter()
        yield clock if self.left else None
        if self.left:
            self.left -= 1
            self.done.append((clock, time.perf_counter() - start))

    def report(self, plan: Plan, predicted: Timeline, everyone: Communicator) -> StagesReport:
        """Medians of the measured steps, of all stages. Collective. UserError where not one was."""
        if len(self.done) < 2:
            raise UserError(NOTHING)
        names = (*_actions(predicted.schedule), BEFORE, AFTER, WAITED, STEP)
        mine = [_median_us(self.done[1:], name) for name in names]
        found = torch.zeros(predicted.schedule.stages, len(names), dtype=torch.float64, device=everyone.device)
        found[everyone.index(STAGE)] = torch.tensor(mine, dtype=torch.float64)
        found = everyone.all_reduce(found, STAGE)
        rows = []
        for stage, order in enumerate(predicted.schedule.orders):
            calls = Counter(f"{a.kind.value}{a.chunk}" for a in order)
            priced = _predicted(predicted, stage)
            for name, us in zip(names, found[stage].tolist(), strict=True):
                if name in calls or name in (BEFORE, AFTER, WAITED, STEP):
                    rows.append(
                        StageRow(
                            stage=stage, what=name, calls=calls.get(name, 1), predicted_us=priced.get(name, 0.0),
                            measured_us=us,
                        )
                    )  # fmt: skip
        return StagesReport(
            model=plan.model.name, cluster=plan.cluster.name, ranks=everyone.mesh.size, rank=everyone.rank,
            schedule=str(predicted.schedule).partition("\n")[0].removeprefix("schedule "), steps=len(self.done) - 1,
            rows=tuple(rows),
        )  # fmt: skip


def _actions(schedule: Schedule) -> list[str]:
    """Kinds of actions, in the order in which they first run."""
    return list(dict.fromkeys(f"{a.kind.value}{a.chunk}" for order in schedule.orders for a in order))


def _median_us(done: list[tuple[StageClock, float]], name: str) -> float:
    """Of all calls of one step."""
    if name == STEP:
        return 1e6 * statistics.median(seconds for _, seconds in done)
    if name == WAITED:
        return 1e6 * statistics.median(clock.waited_s for clock, _ in done)
    return 1e6 * statistics.median(float(clock.seconds[name]) for clock, _ in done)


def _predicted(timeline: Timeline, stage: int) -> dict[str, float]:
    """µs of a stage by what: the optimizer is no part of a measured step, and the bubble is what it waits."""
    found: Counter[str] = Counter()
    for action, start, end in zip(
        timeline.schedule.orders[stage], timeline.starts[stage], timeline.ends[stage], strict=True
    ):
        found[f"{action.kind.value}{action.chunk}"] += end - start  # type: ignore[assignment]
    spent = timeline.stage_breakdown_us[stage]
    optimizer = spent.get("optimizer", 0.0)
    waits = spent.get("bubble", 0.0) + spent.get("exposed:send", 0.0)
    found[WAITED], found[STEP] = waits, timeline.step_us - optimizer  # type: ignore[assignment]
    rest = found[STEP] - waits - sum(us for name, us in found.items() if name not in (WAITED, STEP))
    found[AFTER] = rest if rest > NOISE_US else 0.0  # type: ignore[assignment]
    return dict(found)
