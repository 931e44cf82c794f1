"""One training step over time: the actions of every pipeline stage, one device standing for each stage.

    start(a) = max(end of the action before on its stage, arrival of its input)
    arrival at part g+1 (forward) or g-1 (backward) = end + send_us

Sends either run beside computation, one after the other on each boundary and direction, or the sender waits for each
(`overlap_sends=False`). A chunk's gradients are synchronised once its last backward has ended, beside the stage's
other actions or after all of them (`overlap_sync=False`); several chunks' one after the other, and `end` after that,
on all stages together where the optimizer needs a number from all of them (`joint_end`: the norm of all gradients).
Late tasks of a chunk's last backward run on like its synchronisation; other actions last until theirs have ended.

The step lasts max over stages of (end - begin): then the same can begin again on every stage. All times are exact
sums and maxima of what `tasks` finds for each distinct list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_model.held import stage_memory
from autopar.cost_model.orders import KINDS, Floats, Ints, Order, numbered
from autopar.cost_model.tasks import BUBBLE, EXPOSED, HIDDEN, Overlap, Ran, Runner, to_the_end
from autopar.ir.schedule import ActionKind, Schedule
from autopar.ir.timeline import Span, Timeline
from autopar.ir.work import StageWork, Tasks

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741

SEND = "send"


def simulate(
    schedule: Schedule,
    works: Sequence[Sequence[StageWork]],
    *,
    overlap: Overlap | None = None,
    overlap_sends: bool = True,
    overlap_sync: bool = True,
    joint_end: bool = False,
) -> Timeline:
    """The step of `works[stage][chunk]` in the order of `schedule`. Equal work should be the same object: it runs once.

    Raises:
        ValueError: another number of stages or chunks, a work without the halves that the schedule runs, or a schedule
            in which stages wait for each other for ever.
    """
    orders = numbered(schedule)
    halves = any(KINDS[slot // schedule.chunks] is I for order in orders for slot in np.unique(order.slots))
    _check(schedule, halves, works)
    runner = Runner(overlap or Overlap())
    stages = [_Stage(s, schedule, row, runner, halves) for s, row in enumerate(works)]
    _Pipeline(schedule, orders, stages, overlap_sends).run()
    gradients = [_after_actions(s, overlap_sync) for s in stages]
    common = max(gradients) if joint_end else None
    for stage, done in zip(stages, gradients, strict=True):
        _finish(stage, done if common is None else common)
    step = max(s.over - s.first for s in stages)
    spent = tuple(_breakdown(s, step) for s in stages)
    busiest = min(range(len(stages)), key=lambda s: (spent[s].get(BUBBLE, 0.0), s))
    return Timeline(
        step_us=step,
        schedule=schedule,
        starts=tuple(tuple(s.starts) for s in stages),
        ends=tuple(tuple(s.ends) for s in stages),
        inside=tuple({key: ran.spans for key, ran in s.lists.items()} for s in stages),
        around=tuple(span for s in stages for span in s.around),
        breakdown_us=spent[busiest],
        stage_breakdown_us=spent,
        memory=tuple(stage_memory(s, schedule, orders[s], row) for s, row in enumerate(works)),
    )


def _check(schedule: Schedule, halves: bool, works: Sequence[Sequence[StageWork]]) -> None:
    if len(works) != schedule.stages or any(len(row) != schedule.chunks for row in works):
        raise ValueError(
            f"schedule {schedule.name} has {schedule.stages} stages of {schedule.chunks} chunks, the work is for "
            f"{[len(row) for row in works]}"
        )
    if halves and any(w.backward and not (w.backward_input or w.backward_weight) for row in works for w in row):
        raise ValueError(f"schedule {schedule.name} runs the halves of a backward apart: wanted both in every work")


@dataclass
class _Stage:
    """What happens on one stage.

    `halves`: whether the schedule runs the halves of a backward apart. `lists`: what each kind of action runs; `first`,
    `over`: begin and end of the stage's step.
    """

    number: int
    schedule: Schedule
    work: Sequence[StageWork]
    runner: Runner
    halves: bool
    lists: dict[str, Ran] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    around: list[Span] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first: float = 0.0
    over: float = 0.0
    busy: float = 0.0

    def __post_init__(self) -> None:
        for c, work in enumerate(self.work):
            named = {"F": work.forward, "B": work.backward, "I": work.backward_input, "W": work.backward_weight}
            last = "W" if self.halves else "B"
            for kind, tasks in named.items():
                self.lists[f"{kind}{c}"] = to_the_end(self.runner.run(tasks))
            if work.first_forward:
                self.lists[f"F{c} first"] = to_the_end(self.runner.run(work.first_forward))
            if work.last_backward:
                self.lists[f"{last}{c} last"] = self.runner.run(work.last_backward)

    def key(self, kind: ActionKind, chunk: int, micro_batch: int) -> str:
        """Which of `lists` an action runs."""
        key = f"{kind.value}{chunk}"
        if micro_batch == 0 and f"{key} first" in self.lists:
            return f"{key} first"
        if micro_batch == self.schedule.micro_batches - 1 and f"{key} last" in self.lists:
            return f"{key} last"
        return key

    def count_run(self, ran: Ran, times: int) -> None:
        """Count a list that runs so many times; its late tasks aside."""
        self.busy += ran.us * times
        for what, us in ran.spent.items():
            self.spent[what] += us * times

    def do(self, tasks: Tasks, start: float) -> float:
        """Run a list that happens once; when all of it has ended."""
        ran = to_the_end(self.runner.run(tasks))
        self.around += (s.moved(self.number, start) for s in ran.spans)
        self.count_run(ran, 1)
        return start + ran.us


class _Pipeline:
    """Runs the actions of all stages, each as soon as it can.

    `ready` holds when things arrive, -1 before that is known: of micro-batch j at part g its input at g·m + j and the
    gradient of its output at (parts + g)·m + j; after them a cell that is there from the start, for what waits for
    nothing, and one that nobody reads. A link is 2·(sender's part), and 1 more for forwards; `send` its µs for each.
    """

    def __init__(self, schedule: Schedule, orders: list[Order], stages: list[_Stage], overlap_sends: bool) -> None:
        self.schedule = schedule
        self.orders = orders
        self.stages = stages
        self.overlap_sends = overlap_sends
        parts, count = schedule.parts, schedule.micro_batches
        # The last part's backward follows its own forward, which stands before it on the same stage.
        self.ready = [0.0] * count + [-1.0] * (2 * count * (parts - 1)) + [0.0] * (count + 2)
        self.begun, self.nobody = 2 * parts * count, 2 * parts * count + 1
        self.send = [0.0] * (2 * parts)
        self.link_free = [0.0] * (2 * parts)

    def run(self) -> None:
        """Until every order is done. ValueError if none can go on."""
        free = [0.0] * len(self.stages)
        for s, stage in enumerate(self.stages):
            for work in stage.work:
                free[s] = stage.do(work.begin, free[s])
        going = [self._actions(stage, order, free) for stage, order in zip(self.stages, self.orders, strict=True)]
        wanted, done = sum(len(order.slots) for order in self.orders), 0
        while done < wanted:
            before, done = done, sum(next(actions) for actions in going)
            if done == before:
                stuck = [s for s, o in enumerate(self.orders) if len(self.stages[s].starts) < len(o.slots)]
                raise ValueError(f"schedule {self.schedule.name}: stages {stuck} wait for ever")
        for s, stage in enumerate(self.stages):
            begun = any(w.begin for w in stage.work)
            stage.first = 0.0 if begun or not stage.starts else stage.starts[0]
            stage.over = free[s]

    def _slots(self, stage: _Stage, order: Order) -> list[_Slot]:
        """One entry a slot. Counts what the actions take."""
        schedule, count = self.schedule, self.schedule.micro_batches
        found = []
        times = np.bincount(order.slots, minlength=len(KINDS) * schedule.chunks).tolist()
        for slot in range(len(KINDS) * schedule.chunks):
            kind, chunk = KINDS[slot // schedule.chunks], slot % schedule.chunks
            part = schedule.part(stage.number, chunk)
            to = {F: part + 1, B: part - 1, I: part - 1}.get(kind, -1)
            if not 0 <= to < schedule.parts:
                to = -1
            edge = min(part, to)  # the gradient goes back over the boundary that the output came by
            sender, chunk_there = schedule.place(max(edge, 0))
            away = to >= 0 and schedule.place(to)[0] != stage.number
            us = self.stages[sender].work[chunk_there].send_us if away else 0.0
            keys = [f"{kind.value}{chunk}"]
            keys += [k for k in (f"{keys[0]} first", f"{keys[0]} last") if k in stage.lists and times[slot]]
            for key in keys:
                again = times[slot] - len(keys) + 1 if key is keys[0] else 1
                stage.count_run(stage.lists[key], again)
            link = -1
            if us:
                stage.spent[(HIDDEN if self.overlap_sends else EXPOSED) + SEND] += us * times[slot]
                stage.busy += 0.0 if self.overlap_sends else us * times[slot]
                link = 2 * part + (kind is F)
                self.send[link] = us
            plain, first, last = (stage.lists[stage.key(kind, chunk, j)].us for j in (1, 0, count - 1))
            gradients = 0 if kind is F else schedule.parts * count
            reads = -1 if kind is W else gradients + part * count
            writes = gradients + to * count if to >= 0 else -1
            found.append((reads, writes, plain, first, last, link))
        return found

    def _actions(self, stage: _Stage, order: Order, free: list[float]) -> Iterator[int]:
        """Run the actions of a stage. Gives, each time that one has to wait for another stage, how many ran so far."""
        slots, at = order.slots, order.micro_batches
        table = np.array(self._slots(stage, order), dtype=np.float64)
        reads, writes, links = (table[:, k].astype(np.int64)[slots] for k in (0, 1, 5))
        lasting = _lasting(table[:, 2:5], slots, at, self.schedule.micro_batches)
        ready, send, link_free, overlap = self.ready, self.send, self.link_free, self.overlap_sends
        now, starts = free[stage.number], stage.starts
        for cell, us, told, link in zip(
            np.where(reads < 0, self.begun, reads + at).tolist(),
            lasting.tolist(),
            np.where(writes < 0, self.nobody, writes + at).tolist(),
            links.tolist(),
            strict=True,
        ):
            while (when := ready[cell]) < 0:
                yield len(starts)
            if when > now:
                now = when
            starts.append(now)
            now += us
            if link < 0:
                ready[told] = now
            elif overlap:
                begin = link_free[link]
                link_free[link] = ready[told] = (begin if begin > now else now) + send[link]
            else:
                now += send[link]
                ready[told] = now
        free[stage.number] = now
        stage.ends = (np.array(starts) + lasting).tolist()
        while True:
            yield len(starts)


def _lasting(us: Floats, slots: Ints, micro_batches: Ints, count: int) -> Floats:
    """µs of each action; `us[slot]`: of a middle, the first and the last micro-batch."""
    which = np.where(micro_batches == 0, 1, np.where(micro_batches == count - 1, 2, 0))
    found: Floats = us[slots, which]
    return found


_Slot = tuple[int, int, float, float, float, int]
"""Of a slot: first cell of its part that it waits for and first that it tells (-1: none), µs of a middle, the first and
the last micro-batch, which link (-1: none)."""


def _after_actions(stage: _Stage, overlap_sync: bool) -> float:
    """When the stage's gradients are whole: late tasks and `sync` of each chunk in the order in which chunks end."""
    over = stage.over
    last: dict[int, float] = {}
    for action, end in zip(reversed(stage.schedule.orders[stage.number]), reversed(stage.ends), strict=True):
        if action.kind is not F:
            last.setdefault(action.chunk, end)
        if len(last) == len(stage.work):
            break
    link = 0.0
    for chunk, end in sorted(last.items(), key=lambda x: (x[1], x[0])):
        work = stage.work[chunk]
        tails = [r for k in ("B", "W") if (r := stage.lists.get(f"{k}{chunk} last")) is not None]
        sync = stage.runner.run(work.sync)
        for ran, beside in (*((t, True) for t in tails), (sync, overlap_sync)):
            us, kinds = (ran.tail_us, ran.tail) if ran is not sync else _whole(sync)
            start = max(link, end if beside else over)
            link = start + us if us else link
            exposed = min(us, max(0.0, start + us - over)) if us else 0.0
            for kind, part in kinds.items():
                stage.spent[EXPOSED + kind] += part * (exposed / us)
                stage.spent[HIDDEN + kind] += part * (1 - exposed / us)
            stage.busy += exposed
            if ran is sync:
                stage.around += (s.moved(stage.number, start) for s in sync.spans)
    return max(over, link)


def _whole(ran: Ran) -> tuple[float, dict[str, float]]:
    """(µs, kind -> µs) of a list that runs beside other work."""
    kinds: dict[str, float] = defaultdict(float)
    for what, us in ran.spent.items():
        if not what.startswith(HIDDEN):
            kinds[what.split(":")[-1]] += us
    for kind, us in ran.tail.items():
        kinds[kind] += us
    return ran.us + ran.tail_us, kinds


def _finish(stage: _Stage, start: float) -> None:
    at = start
    for work in stage.work:
        at = stage.do(work.end, at)
    stage.over = at


def _breakdown(stage: _Stage, step: float) -> dict[str, float]:
    """What the step's time went to on one stage: busy time by kind, and the rest as bubble."""
    found = {what: us for what, us in sorted(stage.spent.items()) if us > 0}
    bubble = step - stage.busy
    return found | {BUBBLE: max(0.0, bubble)}
