"""Schedules as small numbers: what the simulator goes through a quarter of a million times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.schedule import Action, ActionKind, Schedule

KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_CODE = {kind: code for code, kind in enumerate(KINDS)}

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Order:
    """One stage's actions: the slot and the micro-batch of each.

    A slot is the place in KINDS times the number of chunks, plus the chunk.
    """

    slots: Ints
    micro_batches: Ints


def numbered(schedule: Schedule) -> list[Order]:
    """Every stage's order. Actions that stages share (one object) are read once."""
    known: dict[int, int] = {}
    count = schedule.micro_batches
    found = []
    for order in schedule.orders:
        try:
            codes = _codes(order, known)
        except KeyError:
            known |= {id(a): (_CODE[a.kind] * schedule.chunks + a.chunk) * count + a.micro_batch for a in order}
            codes = _codes(order, known)
        found.append(Order(codes // count, codes % count))
    return found


def _codes(order: tuple[Action, ...], known: dict[int, int]) -> Ints:
    return np.fromiter(map(known.__getitem__, map(id, order)), dtype=np.int64, count=len(order))
