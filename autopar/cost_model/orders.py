"""Schedules as small numbers: what the simulator goes through a quarter of a million times."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from autopar.ir.schedule import ActionKind, Schedule

KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_CODE = {kind: code for code, kind in enumerate(KINDS)}

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Order:
    """One stage's actions as (slot, micro-batch), and the slots alone.

    A slot is the place in KINDS times the number of chunks, plus the chunk.
    """

    pairs: list[tuple[int, int]]
    slots: Ints


def numbered(schedule: Schedule) -> list[Order]:
    """Every stage's order. Actions that stages share (one object) are read once."""
    known: dict[int, tuple[int, int]] = {}
    found = []
    for order in schedule.orders:
        places = list(map(id, order))
        distinct = dict(zip(places, order, strict=True))
        for place in distinct.keys() - known.keys():
            action = distinct[place]
            known[place] = (_CODE[action.kind] * schedule.chunks + action.chunk, action.micro_batch)
        pairs = list(map(known.__getitem__, places))
        found.append(Order(pairs, np.fromiter(map(itemgetter(0), pairs), dtype=np.int64, count=len(pairs))))
    return found
