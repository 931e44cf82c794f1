"""Where the time of a step goes: an emitted program that reads the clock after every line, in steps that ask for it.

A line's time is from the end of the line before, less what reading the clock takes. What is outside of the lines is
clocked too, in rows of its own, so that rows add up to the step. Steps that are not measured run the program as it was
emitted.
"""

from __future__ import annotations

import ast
import datetime
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import UserError
from autopar.ir.account import BETWEEN, FREES, OUTSIDE, TIMER, WITH_COLLECTIVE, Row, RunReport
from autopar.ir.plan import Plan
from autopar.ir.profile import OPTIMIZER, Fingerprint, op_class
from autopar.ir.program import Made, Source
from autopar.runtime.comm import Communicator
from autopar.runtime.held import Held
from autopar.runtime.torch_private import leave

NOTHING = "report: no step was measured; call module.measure(steps=3), train 8 steps or more, then report again"
SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Delete)
TRIES = 400
"""Empty lines that are timed to know what timing one takes."""


def ticking(source: Source) -> Source:
    """The program with `rt.tick(line)` after every simple statement of its functions; no line moves."""
    rows = source.text.splitlines()
    ends: dict[int, int] = {}
    for function in ast.parse(source.text).body:
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, SIMPLE) and node.end_lineno is not None and not _is_text(node):
                    ends[node.end_lineno] = len(rows[node.end_lineno - 1].encode()[: node.end_col_offset].decode())
    for line, end in ends.items():
        row = rows[line - 1]
        rows[line - 1] = f"{row[:end]}; rt.tick({line}){row[end:]}"
    return replace(source, text="\n".join(rows) + "\n")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@final
class Ticker:
    """Seconds and runs by line. `own_s`: what one reading of the clock adds to each."""

    def __init__(self, device: torch.device, own_s: float = 0.0) -> None:
        self.seconds: Counter[int] = Counter()
        self.runs: Counter[int] = Counter()
        self._cuda = device if device.type == "cuda" else None
        self._last = 0.0
        self.own_s = own_s

    @classmethod
    def tried(cls, device: torch.device) -> Ticker:
        """One that knows what it takes itself: the least over a few rounds of empty lines."""
        least = float("inf")
        for _ in range(4):
            empty = cls(device)
            empty.restart()
            for _ in range(TRIES // 4):
                empty(0)
            least = min(least, empty.seconds[0] / empty.runs[0])
        return cls(device, least)

    def spent(self) -> dict[int, float]:
        """Seconds by line without the clock's own."""
        return {line: max(0.0, seconds - self.own_s * self.runs[line]) for line, seconds in self.seconds.items()}

    @property
    def clock_s(self) -> float:
        """Seconds that went into reading the clock."""
        return sum(self.seconds.values()) - sum(self.spent().values())

    def restart(self) -> None:
        """The next line starts now."""
        self._last = time.perf_counter()

    def __call__(self, line: int) -> None:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        now = time.perf_counter()
        self.seconds[line] += now - self._last  # type: ignore[assignment]
        self.runs[line] += 1
        self._last = now


@dataclass
class _Step:
    """One measured step. `lines`: of a timed step; `ended`: the forward, the backward or the optimizer, as yet."""

    plan: Plan
    source: Source
    started: float
    ended: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    lines: Ticker | None = None
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        """From the call to the end of the optimizer's step, or of what was last where there was none."""
        return self.ended - self.started

    @property
    def between_s(self) -> float:
        """Of these, those in neither the module nor the optimizer: the loss, autograd, clipping."""
        return max(0.0, self.seconds - self.forward_s - self.backward_s - self.optimizer_s)


WARM_UP, PLAIN, TIMED, MEMORY = "warm-up", "plain", "timed", "memory"


@final
class Measuring:
    """The steps that are measured: one to warm up, `steps` as they are, as many with every line timed, one with memory
    watched.

    The optimizer is any that steps meanwhile.
    """

    def __init__(self, steps: int, rt: Communicator, there: Callable[[], Iterable[object]]) -> None:
        if steps < 1:
            raise UserError(f"measure(steps={steps}): wanted 1 or more")
        self.rt = rt
        self.left = [WARM_UP] + [PLAIN] * steps + [TIMED] * steps + [MEMORY]
        self.done: dict[str, list[_Step]] = {WARM_UP: [], PLAIN: [], TIMED: [], MEMORY: []}
        self.spans: list[float] = []
        self._there = there
        self._open: tuple[str, _Step] | None = None
        self._memory: _Memory | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._optimizer_start = 0.0
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._before_update()),  # type: ignore[arg-type]
            register_optimizer_step_post_hook(lambda optimizer, *_: self._after_update(optimizer)),  # type: ignore[arg-type]
        ]

    @property
    def active(self) -> bool:
        """True while a step is measured or to be measured."""
        return bool(self.left) or self._open is not None

    @property
    def times_next(self) -> bool:
        """True if the step that comes next has its lines timed."""
        return bool(self.left) and self.left[0] == TIMED

    @property
    def timing(self) -> bool:
        """True if the step that runs now has its lines timed."""
        return self._open is not None and self._open[0] == TIMED

    def begin(self, plan: Plan, source: Source) -> None:
        """A call of the module starts: the step before has ended."""
        now = time.perf_counter()
        if self._open is not None and self._open[0] == PLAIN:
            self.spans.append(now - self._open[1].started)
        self.end()
        if not self.left:
            self.stop()
            return
        kind = self.left.pop(0)
        step = _Step(plan, source, now)
        if kind == TIMED:
            step.lines = Ticker.tried(self.rt.device)
            self.rt.tick = step.lines
        elif kind == MEMORY:
            state = [x for o in self._optimizers for held in o.state.values() for x in held.values()]
            self._memory = _Memory(self.rt.device, [*self._there(), *state])
        step.started = time.perf_counter()
        self._open = kind, step

    def hold(self, tensors: Iterable[object], given: Iterable[object]) -> None:
        """The open step's inputs on this rank, and the arguments that they are cut from."""
        if self._memory is not None:
            self._memory.hold(tensors, given)

    def restart(self) -> None:
        """The program of the open step starts: what went before is no line's time."""
        if self._open is not None and self._open[1].lines is not None:
            self._open[1].lines.restart()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around the forward or the backward of the open step."""
        if self._open is None:
            yield
            return
        step = self._open[1]
        start = time.perf_counter()
        with nullcontext() if self._memory is None else self._memory.watching():
            yield
        if self.rt.device.type == "cuda":
            torch.cuda.synchronize(self.rt.device)
        step.ended = time.perf_counter()
        setattr(step, name, getattr(step, name) + step.ended - start)

    def end(self) -> None:
        """The open step has ended."""
        if self._open is None:
            return
        kind, step = self._open
        if self._memory is not None:
            step.peak_bytes, self._memory = self._memory.peak(), None
        self.done[kind].append(step)
        self._open = None

    def stop(self) -> None:
        """Nothing is measured any more."""
        self.end()
        self.left.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_update(self) -> None:
        self._optimizer_start = time.perf_counter()
        if self._memory is not None:
            self._memory.before_update()

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._memory is not None:
            self._memory.after_update()
        if self._open is not None:
            if self.rt.device.type == "cuda":
                torch.cuda.synchronize(self.rt.device)
            self._open[1].ended = time.perf_counter()
            self._open[1].optimizer_s += self._open[1].ended - self._optimizer_start
        self._optimizers.add(optimizer)

    def report(self, hardware: Fingerprint | None) -> RunReport:
        """Medians of what was measured. UserError where not one step was."""
        self.end()
        if not self.done[PLAIN]:
            raise UserError(NOTHING)
        plan = self.done[PLAIN][-1].plan
        profile = plan.cluster.spec.profile if plan.cluster.spec is not None else None
        timed = self.done[TIMED]
        return RunReport(
            model=plan.model.name, cluster=plan.cluster.name, ranks=self.rt.mesh.size, rank=self.rt.rank,
            date=datetime.date.today().isoformat(), torch=str(torch.__version__), hardware=hardware,
            profile=profile.digest if profile is not None else "",
            factors={s.what: profile.factor(s.what) for s in profile.scales} if profile is not None else {},
            steps=len(self.done[PLAIN]),
            predicted_us=plan.predicted.step_time_us,
            measured_us=_median_us(s.seconds for s in self.done[PLAIN]),
            timed_us=_median_us(s.seconds for s in timed) if timed else 0.0,
            between_us=_median_us(self.spans) if self.spans else 0.0,
            predicted_bytes=plan.predicted.peak_memory_bytes,
            measured_bytes=max((s.peak_bytes for s in self.done[MEMORY]), default=0),
            rows=tuple(_rows(timed, _median_us(s.seconds for s in self.done[PLAIN]))) if timed else (),
        )  # fmt: skip


def _median_us(seconds: Iterable[float]) -> float:
    return float(statistics.median(seconds)) * 1e6


@final
class _Memory:
    """The peak over a step: on a GPU what its allocator gave out, elsewhere storages that are alive while the module or
    the optimizer runs; `there`: tensors from before."""

    def __init__(self, device: torch.device, there: Iterable[object]) -> None:
        self.device = device
        self._held: Held | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._held = Held()
            self._held.see(there)

    def hold(self, tensors: Iterable[object], given: Iterable[object]) -> None:
        """A rank's own tensors, made of what the caller has given and holds."""
        if self._held is not None:
            self._held.leave_out(given)
            self._held.see(tensors)

    def watching(self) -> AbstractContextManager[object]:
        """Around what is part of the step."""
        return nullcontext() if self._held is None else self._held

    def before_update(self) -> None:
        """An optimizer's step begins."""
        if self._held is not None:
            self._held.__enter__()  # type: ignore[no-untyped-call]

    def after_update(self) -> None:
        """It has ended."""
        if self._held is not None:
            leave(self._held)

    def peak(self) -> int:
        """Bytes."""
        if self._held is None:
            return int(torch.cuda.max_memory_allocated(self.device))
        return self._held.peak_bytes


@dataclass
class _Sum:
    calls: int = 0
    predicted_us: float = 0.0
    measured_us: float = 0.0


def _rows(steps: list[_Step], step_us: float) -> Iterator[Row]:
    """Rows of the timed step whose time is the median one; they add up to `step_us`, a plain step's."""
    step = sorted(steps, key=lambda s: s.seconds)[(len(steps) - 1) // 2]
    sums: dict[tuple[str, str], _Sum] = {}
    prices = Prices(step.plan)
    assert step.lines is not None
    for line, seconds in step.lines.spent().items():
        runs = step.lines.runs[line]
        kind, what, us = prices.of(step.source.made.get(line), runs)
        row = sums.setdefault((kind, what), _Sum())
        row.calls += runs if kind != "other" else 0
        row.predicted_us += us
        row.measured_us += seconds * 1e6
    found = [
        Row(kind=kind, what=what, calls=row.calls, predicted_us=row.predicted_us, measured_us=row.measured_us)
        for (kind, what), row in sums.items()
    ]
    updating_us = step.plan.predicted.breakdown_us.get("optimizer", 0.0)
    found.append(
        Row(
            kind="optimizer", what=OPTIMIZER, calls=1, predicted_us=updating_us, measured_us=step.optimizer_s * 1e6
        )
    )  # fmt: skip
    found += [_other(OUTSIDE, _outside_s(step) * 1e6), _other(BETWEEN, step.between_s * 1e6)]
    yield from (*found, _other(TIMER, step_us - sum(row.measured_us for row in found)))


def _other(what: str, us: float) -> Row:
    """A row that nothing was predicted for."""
    return Row(kind="other", what=what, calls=0, predicted_us=0.0, measured_us=us)


def _outside_s(step: _Step) -> float:
    """Seconds in the module's forward and backward that no line of the program took."""
    assert step.lines is not None
    return max(0.0, step.forward_s + step.backward_s - sum(step.lines.seconds.values()))


@final
class Prices:
    """What the plan says of each line."""

    def __init__(self, plan: Plan) -> None:
        self.strategies = {(g, key): s for g, nodes in plan.strategies.items() for key, s in nodes.items()}
        self.conversions = {(c.graph, c.value, c.before, c.after): c for c in plan.conversions}

    def of(self, made: Made | None, runs: int) -> tuple[str, str, float]:
        """(kind, class or collective, µs of all its runs in one step) of a line."""
        if made is None or made.called:
            return "other", FREES, 0.0
        if made.converts:
            us = sum(self._step_us(made.graph, converts, made.part) for converts in made.converts)
            return "collective", made.op.replace("(", " ").split(",")[0].rstrip(")"), us * runs / len(made.converts)
        found = [s for t in made.turns if (s := self.strategies.get((made.graph, t.key))) is not None]
        us = sum(s.us for s in found) * runs / len(made.turns)
        talks = any(any(s.tags) for s in found)
        return "op", op_class(made.op) + (f", {WITH_COLLECTIVE}" if talks else ""), us

    def _step_us(self, graph: str, converts: tuple[str, str, str], part: int) -> float:
        found = self.conversions.get((graph, *converts))
        if found is None:
            return 0.0
        return found.steps_us[part] if part < len(found.steps_us) else found.us / max(1, len(found.steps))
