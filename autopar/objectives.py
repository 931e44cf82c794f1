"""What is best by another measure than time, of whole searches: fewest device-hours, or with stages least memory.

With d devices a step of t µs costs d·t. Every part of the cluster that `parts_of` names is searched, the smallest
first, under a cutoff: what costs no less than the best known must take less than (its cost)/d, and a mesh or trial
whose bound says that it doesn't isn't solved. A plan of perfect scaling would cost the same on any part.

Least memory within a time is the smallest limit under which a search finds a plan so fast: by halving.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Protocol

from msgspec.structs import replace as replace_fields

from autopar.candidates import ROUNDING, Progress, Task, of_least_memory
from autopar.cost_model.search_space import parts_of
from autopar.errors import UserError
from autopar.ir.plan import Plan, PlanNote

MEMORY_GAP = 0.01
"""How near to the smallest limit is near enough, as a part of it."""
OUT_OF_TIME = "not known, the time was over"
"""Said where a search ended before it had a plan."""


class Search(Protocol):
    """The best plan by time that takes less than `cutoff_us`; None where there is none and none is `required`."""

    def __call__(self, task: Task, /, *, cutoff_us: float, required: bool) -> Plan | None: ...


@dataclass(frozen=True, slots=True)
class _Looked:
    """One part of the cluster: its plan, or why it has none."""

    task: Task
    plan: Plan | None
    why: str = ""

    @property
    def cost_us(self) -> float:
        """Of a step, all devices together."""
        return self.task.cluster.devices * self.plan.solver.objective_us if self.plan is not None else math.inf


def cheapest(task: Task, search: Search, progress: Progress) -> tuple[Plan, Task]:
    """The plan of the fewest device-hours per token, with the part of the cluster that it is for; a note says which
    parts were looked at.

    Raises InfeasibleError where nothing fits the whole cluster either, UserError for pins that no part can hold.
    """
    clock = _Clock(task)
    best: _Looked | None = None
    looked: list[_Looked] = []
    refused: UserError | None = None
    parts = parts_of(task.cluster)
    for i, part in enumerate(parts):
        progress(f"{part.devices} devices", i / len(parts))
        mine = replace(task, cluster=part)
        if best is not None and clock.is_over:
            looked.append(_Looked(mine, None, "not looked at, the time was over"))
            continue
        cutoff = best.cost_us / part.devices if best is not None else math.inf
        own = _Clock(task)
        try:
            plan = search(mine, cutoff_us=cutoff, required=False)
        except UserError as error:
            refused = error
            looked.append(_Looked(mine, None, "can't hold what is pinned"))
            continue
        why = OUT_OF_TIME if own.is_over else "no less" if best is not None else "too small"
        looked.append(_Looked(mine, plan, "" if plan is not None else why))
        if plan is not None and (best is None or looked[-1].cost_us < best.cost_us):
            best = looked[-1]
    if best is None or best.plan is None:
        if refused is not None and all(x.why.startswith("can't") for x in looked):
            raise refused
        plan = search(task, cutoff_us=math.inf, required=True)
        assert plan is not None
        return plan, task
    note = PlanNote(kind="objective", where="", message=_words(best, looked))
    return replace_fields(best.plan, notes=[*best.plan.notes, note]), best.task


def least_memory(task: Task, search: Search, progress: Progress) -> Plan:
    """The plan of the smallest limit under which the search finds one within the task's slack of the fastest.

    Raises InfeasibleError where nothing fits.
    """
    timed = replace(task, options=replace(task.options, objective="time"))
    fastest = search(timed, cutoff_us=math.inf, required=True)
    assert fastest is not None
    slack = task.options.memory_slack
    within = math.inf if slack is None else fastest.solver.objective_us * (1 + slack)
    best, low, stopped = fastest, 0, False
    while best.solver.memory_bytes - low > MEMORY_GAP * best.solver.memory_bytes:
        limit = (best.solver.memory_bytes + low) // 2
        progress(f"within {limit / 2**20:.0f} MiB", low / best.solver.memory_bytes)
        tried = replace(timed, options=replace(timed.options, memory_limit=limit))
        own = _Clock(task)
        found = search(tried, cutoff_us=within * (1 + ROUNDING), required=False)
        stopped |= found is None and own.is_over
        best, low = (found, low) if found is not None else (best, limit)
    near = f", whether less would do is {OUT_OF_TIME}" if stopped else f", to {MEMORY_GAP:.0%}"
    return of_least_memory(fastest, best, task, None if slack is None else within, near)


class _Clock:
    """Of one search: whether the task's time for it is over."""

    def __init__(self, task: Task) -> None:
        limit = task.options.time_limit_s
        self.end = math.inf if limit is None else time.monotonic() + limit

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end


def _words(best: _Looked, looked: list[_Looked]) -> str:
    assert best.plan is not None
    each = ", ".join(
        f"{x.task.cluster.devices}: {x.plan.predicted.device_hours_per_million_tokens:.3g}" if x.plan else
        f"{x.task.cluster.devices}: {x.why}"
        for x in looked
    )  # fmt: skip
    whole = looked[-1].task.cluster
    return (
        f"{best.task.cluster.devices} of the {whole.devices} devices of {whole.name} cost least, in device-hours per "
        f"million tokens: looked at {each}"
    )
