"""What a stage's memory is worth: the price of a byte at which the parts' relaxation bounds the stage best.

    max over price >= 0 of  min over points of (us + price * bytes)  -  price * room

is the relaxation under that memory, asked without a row for it: at each price it has a point, the points of too many
bytes and of few cross at the next price, and where there is no better point, that is the price. Such LPs start where
the last one ended. With a row across all columns they take ten times as long on problems of ten thousand columns, most
of all where nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.solver.parts import SLACK, Held, PartsModel, PriceBound, Priced

START = 0.25
"""The first price: for all the room this part of the stage's least time."""
STEEPER = 8.0
"""From one price to the next, until what is chosen fits."""
FIRST_PRICES = 3
"""Such steps, before it is asked whether anything fits."""
MOST_PRICES = 40
CLOSE = 1e-6
"""Relative: how near the best price the last one is."""


def price_of_room(
    model: PartsModel, held: Held, once_weight: float, least_us: float, enough: Callable[[PriceBound], bool] | None
) -> PriceBound:
    """The best bound; one of bytes alone if nothing fits. Ends with the first that is `enough`.

    `least_us`: about the stage's time, where memory costs nothing.
    """
    if least_us == math.inf:  # the parts have no choice at all
        return model.priced(held, once_weight, 0.0).bound
    room = model.room_of(held)
    fast: Priced | None = None
    small: Priced | None = None
    price = START * least_us / room
    best = now = model.priced(held, once_weight, price)
    for step in range(MOST_PRICES):
        if step:
            now = model.priced(held, once_weight, price)
            best = max(best, now, key=lambda p: _value(p, room))
        if enough is not None and enough(now.bound):
            return now.bound
        if now.bytes > room:
            fast = now
        elif price == 0:
            return now.bound
        else:
            small = now
        if small is None and step + 1 >= FIRST_PRICES:
            small = model.priced(held, 0.0, 1.0, busy=0.0)
            if small.bytes > room * (1 + SLACK):
                return small.bound
        if fast is not None and small is not None:
            if fast.bytes <= max(room, small.bytes):
                break
            price = (small.us - fast.us) / (fast.bytes - small.bytes)
            most = fast.us + price * (fast.bytes - room)
            if most - _value(best, room) <= CLOSE * abs(most):
                break
        else:
            price = price * STEEPER if small is None else 0.0
    return best.bound


def _value(found: Priced, room: float) -> float:
    """What the stage takes at the least, at this price."""
    return found.us + found.price * (found.bytes - room)
