"""How much a stage holds as its schedule goes: micro-batches between their forward and their backward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost_model.orders import KINDS, Ints, Order, numbered
from autopar.ir.schedule import ActionKind, Schedule
from autopar.ir.timeline import StageMemory
from autopar.ir.work import StageWork

RESIDENT, HELD, TRANSIENT, END = "resident", "held", "transient", "end of step"


def stage_memory(stage: int, schedule: Schedule, order: Order, works: Sequence[StageWork]) -> StageMemory:
    """The most that a device of the stage holds.

    A micro-batch holds a chunk's `held_bytes` from the begin of its forward to the end of its backward. While an action
    of a chunk runs it needs the chunk's `transient_bytes` beside; `end` needs the sum of `end_bytes`.
    """
    resident = sum(w.resident_bytes for w in works)
    last = sum(w.end_bytes for w in works)
    slots = order.slots
    takes, gives = (np.array([row[k] for row in map(_change, *_slots(works))])[slots] for k in (0, 1))
    transient = np.array([w.transient_bytes for _ in KINDS for w in works])[slots]
    held = np.cumsum(takes) - np.cumsum(gives) + gives  # during each action
    at = int(np.argmax(held + transient))
    peak = int(held[at] + transient[at])
    if last >= peak:
        parts, name = {RESIDENT: resident, END: last}, END
    else:
        count = int(_flight(order, len(works))[at])
        name = str(schedule.orders[stage][at])
        parts = {RESIDENT: resident, f"{HELD} of {count} micro-batches": int(held[at]), TRANSIENT: int(transient[at])}
    listed = sorted(((what, size) for what, size in parts.items() if size), key=lambda x: (-x[1], x[0]))
    return StageMemory(stage=stage, peak_bytes=resident + max(peak, last), at=name, contributors=tuple(listed))


def _slots(works: Sequence[StageWork]) -> tuple[list[ActionKind], list[StageWork]]:
    return [kind for kind in KINDS for _ in works], [work for _ in KINDS for work in works]


def _change(kind: ActionKind, work: StageWork) -> tuple[int, int]:
    """Bytes that an action takes at its begin, and gives back at its end."""
    left = work.held_bytes if work.held_for_weights_bytes is None else work.held_for_weights_bytes
    match kind:
        case ActionKind.FORWARD:
            return work.held_bytes, 0
        case ActionKind.BACKWARD:
            return 0, work.held_bytes
        case ActionKind.BACKWARD_INPUT:
            return 0, work.held_bytes - left
        case ActionKind.BACKWARD_WEIGHT:
            return 0, left


def in_flight(schedule: Schedule, stage: int) -> int:
    """The most micro-batches, over all chunks, that a stage has between forward and the last of backward."""
    return int(_flight(numbered(schedule)[stage], schedule.chunks).max())


def _flight(order: Order, chunks: int) -> Ints:
    """Of each action, how many are in flight while it runs."""
    per_kind = {ActionKind.FORWARD: (1, 0), ActionKind.BACKWARD_INPUT: (0, 0)}
    rows = [per_kind.get(kind, (0, 1)) for kind in KINDS for _ in range(chunks)]
    begins, ends = (np.array([row[k] for row in rows], dtype=np.int64)[order.slots] for k in (0, 1))
    found: Ints = np.cumsum(begins) - np.cumsum(ends) + ends
    return found
