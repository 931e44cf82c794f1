"""How long a list of tasks takes when its streams run side by side.

A task starts when the one before it on its stream and all that it waits for have ended. While computation and
communication both run, each goes on at 1/slow-down of its speed (`Overlap`). Time is told apart at every moment: while
computation runs it is computation, and what it loses by the slow-down is "slow-down"; else the first other stream that
runs is exposed; communication beside computation is hidden, at its length without slow-down.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.timeline import Span
from autopar.ir.work import COMPUTE, Section, Task, Tasks

EXPOSED, HIDDEN, SLOWED, OPTIMIZER, BUBBLE = "exposed:", "hidden:", "slow-down", "optimizer", "bubble"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """By how much each is slower while the other runs: 1.1 takes a tenth longer."""

    compute: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        if not (1.0 <= self.compute < math.inf and 1.0 <= self.communication < math.inf):
            raise ValueError(f"slow-downs {self.compute} and {self.communication}: wanted 1 or more")


@dataclass(frozen=True, slots=True)
class Ran:
    """A list that ran.

    Attributes:
        us: until all but late tasks have ended.
        tail_us: how much longer late tasks take, should nothing else run.
        spent: what `us` went to (sums to it, "hidden:…" aside). `tail`: what `tail_us` goes to, by kind.
        spans: from the list's start; stage 0.
    """

    us: float
    tail_us: float
    spent: Mapping[str, float]
    tail: Mapping[str, float]
    spans: tuple[Span, ...]


NOTHING = Ran(0.0, 0.0, {}, {}, ())


def to_the_end(ran: Ran) -> Ran:
    """The same where what follows waits for late tasks too: they are exposed."""
    if not ran.tail_us:
        return ran
    spent: dict[str, float] = defaultdict(float, ran.spent)
    _add(spent, {EXPOSED + kind: us for kind, us in ran.tail.items()})
    return Ran(ran.us + ran.tail_us, 0.0, dict(spent), {}, ran.spans)


class Runner:
    """Runs lists; equal lists (the same object) once."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap
        self._known: dict[int, tuple[Tasks, Ran]] = {}

    def run(self, tasks: Tasks) -> Ran:
        """When everything in the list happens."""
        if not tasks:
            return NOTHING
        found = self._known.get(id(tasks))
        if found is None:
            found = self._known[id(tasks)] = (tasks, self._run(tasks))
        return found[1]

    def _run(self, tasks: Tasks) -> Ran:
        at = 0.0
        spent: dict[str, float] = defaultdict(float)
        spans: list[Span] = []
        parts = list(_parts(tasks))
        if len(parts) == 1 and isinstance(parts[0][0], list):
            return _side_by_side(parts[0][0], 0, self._overlap)
        ran = NOTHING
        for part, first in parts:
            ran = self.run(part.tasks) if isinstance(part, Section) else _side_by_side(part, first, self._overlap)
            ran = ran if part is parts[-1][0] else to_the_end(ran)  # what follows a section waits for all before it
            spans += (s.moved(0, at) for s in ran.spans)
            at += ran.us
            _add(spent, ran.spent)
        return Ran(at, ran.tail_us, dict(spent), ran.tail, tuple(spans))


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for what, us in more.items():
        total[what] += us


def _parts(tasks: Tasks) -> Iterator[tuple[Section | list[Task], int]]:
    """Sections, and the runs of tasks between them with the place of their first."""
    plain: list[Task] = []
    for i, item in enumerate(tasks):
        if isinstance(item, Task):
            plain.append(item)
            continue
        if plain:
            yield plain, i - len(plain)
            plain = []
        yield item, i
    if plain:
        yield plain, len(tasks) - len(plain)


def _side_by_side(tasks: list[Task], first: int, overlap: Overlap) -> Ran:
    """`first`: place of the first task in its list; what it says to wait for before that has ended."""
    state = _State(tasks, first, overlap)
    while state.begin_ready() or state.running:
        if state.running:
            state.pass_time()
    if state.ended < len(tasks):
        stuck = next(t for i, t in enumerate(tasks) if not state.done[i])
        raise ValueError(f"task {stuck.name} waits for itself: `after` must name earlier tasks, not across its stream")
    return state.result()


class _State:
    """What runs now on each stream, and what time went to so far."""

    def __init__(self, tasks: list[Task], first: int, overlap: Overlap) -> None:
        self.tasks = tasks
        self.overlap = overlap
        self.waits = [tuple(j - first for j in t.after if j >= first) for t in tasks]
        for i, waits in enumerate(self.waits):
            if any(j >= i for j in waits):
                raise ValueError(f"task {tasks[i].name}: waits for a task that is not before it in the list")
        self.queues: dict[str, list[int]] = {}
        for i, task in enumerate(tasks):
            self.queues.setdefault(task.stream, []).append(i)
        self.heads = dict.fromkeys(self.queues, 0)
        self.done = [False] * len(tasks)
        self.ended = 0
        self.left = sum(not t.late for t in tasks)
        self.running: dict[str, tuple[int, float]] = {}
        self.began = [0.0] * len(tasks)
        self.now = 0.0
        self.us = 0.0
        self.spent: dict[str, float] = defaultdict(float)
        self.tail: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []

    def begin_ready(self) -> bool:
        """Start whatever can start; tasks of no length end at once."""
        any_began = False
        moved = True
        while moved:
            moved = False
            for stream, queue in self.queues.items():
                while stream not in self.running and self.heads[stream] < len(queue):
                    i = queue[self.heads[stream]]
                    if not all(self.done[j] for j in self.waits[i]):
                        break
                    self.heads[stream] += 1
                    self.began[i] = self.now
                    moved = any_began = True
                    if self.tasks[i].us > 0:
                        self.running[stream] = (i, self.tasks[i].us)
                    else:
                        self._end(i)
        return any_began

    def pass_time(self) -> None:
        """To the next end of a task."""
        both = COMPUTE in self.running and len(self.running) > 1
        slow = {s: self._slowed(s) if both else 1.0 for s in self.running}
        step = min(left * slow[s] for s, (_, left) in self.running.items())
        self._account(step, slow)
        self.now += step
        for stream, (i, left) in list(self.running.items()):
            rest = left - step / slow[stream]
            if left * slow[stream] <= step or rest <= 1e-12 * self.tasks[i].us:
                del self.running[stream]
                self._end(i)
            else:
                self.running[stream] = (i, rest)

    def _slowed(self, stream: str) -> float:
        return self.overlap.compute if stream == COMPUTE else self.overlap.communication

    def _end(self, i: int) -> None:
        task = self.tasks[i]
        self.done[i] = True
        self.ended += 1
        if not task.late:
            self.left -= 1
            self.us = self.now
        self.spans.append(
            Span(stage=0, stream=task.stream, name=task.name, kind=task.kind, start_us=self.began[i], end_us=self.now)
        )

    def _account(self, step: float, slow: Mapping[str, float]) -> None:
        if not self.left:
            for i, _ in self.running.values():
                self.tail[self.tasks[i].kind] += step / len(self.running)
            return
        others = [self.tasks[i].kind for s, (i, _) in sorted(self.running.items()) if s != COMPUTE]
        if COMPUTE not in self.running:
            self.spent[EXPOSED + others[0]] += step
            return
        kind = self.tasks[self.running[COMPUTE][0]].kind
        nominal = step / slow[COMPUTE]
        self.spent[compute_key(kind)] += nominal
        if step > nominal:
            self.spent[SLOWED] += step - nominal
        for stream, (i, _) in self.running.items():
            if stream != COMPUTE:
                self.spent[HIDDEN + self.tasks[i].kind] += step / slow[stream]

    def result(self) -> Ran:
        spans = sorted(self.spans, key=lambda s: (s.start_us, s.end_us))
        return Ran(self.us, self.now - self.us, dict(self.spent), dict(self.tail), tuple(spans))


def compute_key(kind: str) -> str:
    """Where the time of a computation is counted."""
    return OPTIMIZER if kind == OPTIMIZER else f"compute:{kind}"
