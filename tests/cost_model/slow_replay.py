"""The step by the definition, slowly: each action looks up what it waits for. What `simulate` is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.schedule import Action, ActionKind, Schedule
from autopar.ir.work import StageWork

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741

Key = tuple[bool, int, int]
"""(forward?, part, micro-batch)."""


class SlowReplay:
    """Starts and ends of every action; sends as `simulate` has them. Lists of tasks are taken to be one stream's."""

    def __init__(self, schedule: Schedule, works: Sequence[Sequence[StageWork]], overlap_sends: bool) -> None:
        self.schedule, self.works, self.overlap_sends = schedule, works, overlap_sends
        self.starts: list[list[float]] = [[] for _ in works]
        self.ends: list[list[float]] = [[] for _ in works]
        self.free = [sum(t.us for w in row for t in w.begin) for row in works]
        self.there: dict[Key, float] = {}
        self.links: dict[Key, float] = {}
        left = [list(order) for order in schedule.orders]
        while any(left):
            stage, order = next((s, o) for s, o in enumerate(left) if o and self.arrival(s, o[0]) is not None)
            self.act(stage, order.pop(0))

    def arrival(self, stage: int, action: Action) -> float | None:
        """When what an action waits for is there; None before that is known."""
        part, j = self.schedule.part(stage, action.chunk), action.micro_batch
        if action.kind is W or (action.kind is F and part == 0):
            return 0.0
        if action.kind is not F and part == self.schedule.parts - 1:
            return 0.0
        return self.there.get((action.kind is F, part, j))

    def act(self, stage: int, action: Action) -> None:
        """Run one action, then send what it made."""
        work = self.works[stage][action.chunk]
        arrival = self.arrival(stage, action)
        assert arrival is not None
        start = max(self.free[stage], arrival)
        end = start + self.us(work, action)
        self.starts[stage].append(start)
        self.ends[stage].append(end)
        part, forward = self.schedule.part(stage, action.chunk), action.kind is F
        to = part + 1 if forward else part - 1
        if action.kind is W or not 0 <= to < self.schedule.parts:
            self.free[stage] = end
            return
        there, _ = self.schedule.place(to)
        sender, chunk = self.schedule.place(min(part, to))
        us = self.works[sender][chunk].send_us if there != stage else 0.0
        link = (forward, part, 0)
        begin = max(end, self.links.get(link, 0.0)) if self.overlap_sends else end
        self.there[forward, to, action.micro_batch] = begin + us
        if us:
            self.links[link] = begin + us
        self.free[stage] = end if self.overlap_sends else begin + us

    def us(self, work: StageWork, action: Action) -> float:
        """How long an action takes."""
        first = action.micro_batch == 0
        last = action.micro_batch == self.schedule.micro_batches - 1
        tasks = {F: work.forward, B: work.backward, I: work.backward_input, W: work.backward_weight}[action.kind]
        halves = any(a.kind is I for order in self.schedule.orders for a in order)
        if action.kind is F and first and work.first_forward:
            tasks = work.first_forward
        if action.kind is (W if halves else B) and last and work.last_backward:
            tasks = work.last_backward
        return sum(t.us for t in tasks)


def most_held(schedule: Schedule, stage: int, works: Sequence[StageWork]) -> int:
    """Bytes, action by action."""
    held = most = 0
    for action in schedule.orders[stage]:
        work = works[action.chunk]
        left = work.held_bytes if work.held_for_weights_bytes is None else work.held_for_weights_bytes
        if action.kind is F:
            held += work.held_bytes
        most = max(most, held + work.transient_bytes)
        held -= {F: 0, B: work.held_bytes, I: work.held_bytes - left, W: left}[action.kind]
    return sum(w.resident_bytes for w in works) + max(most, sum(w.end_bytes for w in works))
