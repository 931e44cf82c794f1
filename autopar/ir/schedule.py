"""In which order each pipeline stage works through its micro-batches.

A model cut over P stages of v chunks has P·v *parts* in forward order. Looped placement: chunk c of stage s is part
c·P + s. V-shaped placement (two chunks): chunk 0 of stage s is part s, chunk 1 is part 2P − 1 − s, so that the last
stage holds the middle. Builders by name are in `schedules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """BACKWARD is both halves at once: the gradient of the input, and those of the weights."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one chunk of a stage. Prints as "F0.3": forward, chunk 0, micro-batch 3."""

    kind: ActionKind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`orders`: of each stage, its actions in order. `v_shaped`: see the module."""

    name: str
    stages: int
    chunks: int
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]
    v_shaped: bool = False

    def __post_init__(self) -> None:
        if min(self.stages, self.chunks, self.micro_batches) < 1 or len(self.orders) != self.stages:
            raise ValueError(
                f"schedule {self.name}: {self.stages} stages, {self.chunks} chunks, {self.micro_batches} "
                f"micro-batches, {len(self.orders)} orders: wanted 1 or more of each, and an order for each stage"
            )
        if self.v_shaped and self.chunks != 2:
            raise ValueError(f"schedule {self.name}: V-shaped with {self.chunks} chunks: wanted 2")

    @property
    def parts(self) -> int:
        """Parts of the model."""
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        """Which part of the model a chunk is."""
        if self.v_shaped and chunk:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def place(self, part: int) -> tuple[int, int]:
        """(stage, chunk) of a part."""
        if self.v_shaped and part >= self.stages:
            return 2 * self.stages - 1 - part, 1
        return part % self.stages, part // self.stages

    def __str__(self) -> str:
        head = f"schedule {self.name}: {self.stages} stages × {self.chunks} chunks, {self.micro_batches} micro-batches"
        return "\n".join([head, *(f"  {s}: {' '.join(map(str, order))}" for s, order in enumerate(self.orders))])


def check_schedule(schedule: Schedule) -> None:
    """Raise ValueError unless each chunk runs each micro-batch once each way, and the stages can do so.

    A forward follows that of the part before, a backward its own forward and the backward of the part after (its
    input half is enough), a weight half its own input half; and no stage waits for ever.
    """
    for stage, order in enumerate(schedule.orders):
        _check_complete(schedule, stage, order)
    done: set[tuple[ActionKind, int, int]] = set()
    at = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(schedule.orders):
            while at[stage] < len(order) and _ready(schedule, stage, order[at[stage]], done):
                action = order[at[stage]]
                done.add((action.kind, schedule.part(stage, action.chunk), action.micro_batch))
                at[stage] += 1
                moved = True
    stuck = [f"stage {s} at {o[i]}" for s, (o, i) in enumerate(zip(schedule.orders, at, strict=True)) if i < len(o)]
    if stuck:
        raise ValueError(f"schedule {schedule.name} waits for ever: {', '.join(stuck)}")


def _check_complete(schedule: Schedule, stage: int, order: tuple[Action, ...]) -> None:
    seen = set(order)
    if len(seen) != len(order):
        raise ValueError(f"schedule {schedule.name}: stage {stage} does an action twice")
    wanted = 0
    for chunk in range(schedule.chunks):
        for micro_batch in range(schedule.micro_batches):
            whole = Action(ActionKind.BACKWARD, chunk, micro_batch) in seen
            halves = [Action(k, chunk, micro_batch) in seen for k in HALVES]
            if Action(ActionKind.FORWARD, chunk, micro_batch) not in seen or not (whole ^ all(halves)):
                raise ValueError(
                    f"schedule {schedule.name}: stage {stage} lacks a pass of chunk {chunk}, micro-batch {micro_batch}"
                )
            wanted += 2 if whole else 3
    if wanted != len(order):
        raise ValueError(f"schedule {schedule.name}: stage {stage} has {len(order)} actions, wanted {wanted}")


HALVES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def _ready(schedule: Schedule, stage: int, action: Action, done: set[tuple[ActionKind, int, int]]) -> bool:
    part, micro_batch = schedule.part(stage, action.chunk), action.micro_batch
    match action.kind:
        case ActionKind.FORWARD:
            return part == 0 or (ActionKind.FORWARD, part - 1, micro_batch) in done
        case ActionKind.BACKWARD_WEIGHT:
            return (ActionKind.BACKWARD_INPUT, part, micro_batch) in done
        case _:
            if (ActionKind.FORWARD, part, micro_batch) not in done:
                return False
            after = ((k, part + 1, micro_batch) for k in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT))
            return part == schedule.parts - 1 or any(a in done for a in after)
