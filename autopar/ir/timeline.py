"""What the simulator says happens when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.schedule import Action, Schedule

SPANS = 100_000
"""About how many spans `Timeline.spans` gives; a trace viewer takes ten times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that goes on on one stream of one device of a stage."""

    stage: int
    stream: str
    name: str
    kind: str
    start_us: float
    end_us: float

    def moved(self, stage: int, by_us: float) -> Span:
        """The same on another stage, later."""
        return replace(self, stage=stage, start_us=self.start_us + by_us, end_us=self.end_us + by_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The most that a device of the stage holds, and when.

    `contributors`: what -> bytes, the largest first, modules by their path; `kinds`: the same bytes by what they are.
    """

    stage: int
    peak_bytes: int
    at: str
    contributors: tuple[tuple[str, int], ...]
    kinds: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        listed = ", ".join(f"{what} {size / 2**20:.1f} MiB" for what, size in self.contributors[:8])
        return f"stage {self.stage}: {self.peak_bytes / 2**20:.1f} MiB at {self.at} ({listed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step.

    Attributes:
        step_us: from a step's begin to the next one's on the same stage.
        starts, ends: µs of each action of `schedule.orders`.
        inside: of each stage, what goes on during an action ("F0" of chunk 0; "F0 first" and "B0 last" where those
            differ), from the action's start.
        around: what goes on beside the actions: begin, sends, synchronisation, optimizer.
        breakdown_us: of the stage with the least bubble. "compute:KIND", "exposed:KIND" (communication that the
            device waits for), "slow-down" (of either by the other), "optimizer" and "bubble" add up to `step_us`;
            "hidden:KIND" (communication beside computation) comes on top.
        stage_breakdown_us: of every stage.
    """

    step_us: float
    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    inside: tuple[Mapping[str, tuple[Span, ...]], ...]
    around: tuple[Span, ...]
    breakdown_us: Mapping[str, float]
    stage_breakdown_us: tuple[Mapping[str, float], ...]
    memory: tuple[StageMemory, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def actions(self, limit: int = SPANS) -> Iterator[tuple[int, Action, float, float]]:
        """(stage, action, start, end), all stages alike, the first so many."""
        each = max(1, limit // self.schedule.stages)
        for stage, order in enumerate(self.schedule.orders):
            times = zip(order, self.starts[stage], self.ends[stage], strict=True)
            for (action, start, end), _ in zip(times, range(each), strict=False):
                yield stage, action, start, end

    def spans(self, limit: int = SPANS) -> Iterator[Span]:
        """Everything, in the order of stages; ops only of the first actions of each stage where there are too many."""
        yield from self.around
        left = {s: limit // self.schedule.stages for s in range(self.schedule.stages)}
        for stage, action, start, _ in self.actions(limit):
            ops = self.inside[stage][self.inside_key(stage, action)]
            if left[stage] >= len(ops):
                left[stage] -= len(ops)
                yield from (span.moved(stage, start) for span in ops)

    def inside_key(self, stage: int, action: Action) -> str:
        """Which entry of `inside` an action runs."""
        key = f"{action.kind.value}{action.chunk}"
        if action.micro_batch == 0 and f"{key} first" in self.inside[stage]:
            return f"{key} first"
        last = action.micro_batch == self.schedule.micro_batches - 1
        return f"{key} last" if last and f"{key} last" in self.inside[stage] else key

    def __str__(self) -> str:
        lines = [f"step {self.step_us:.1f} µs, {self.schedule.name}, {self.schedule.stages} stages"]
        lines += [f"  {what} {us:.1f} µs" for what, us in self.breakdown_us.items()]
        return "\n".join([*lines, *(f"  {m}" for m in self.memory)])
