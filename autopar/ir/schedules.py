"""Pipeline schedules by name: each a pure function from sizes to the order of every stage.

none         one stage; each micro-batch forward, then backward
gpipe        all forwards, then all backwards
1f1b         stage i forwards P − 1 − i micro-batches ahead, then one forward, one backward; P − i in flight
interleaved  1F1B over v chunks a stage, micro-batches in groups of P or more (Narayanan et al., arXiv 2104.04473)
zb-h1        1F1B whose weight halves wait to fill the drain; in flight as 1F1B's first stage (arXiv 2401.10241)
zb-h2        the same, and the ramp filled with further forwards: no bubble, twice the activations
zb-v         two chunks a stage, placed as a V: no bubble where F, I and W take equally long, and no more activations
             than 1F1B's first stage, on every stage (arXiv 2401.10241, section 6; "V-ZB" of arXiv 2405.15362)
v-half       the same V by a timetable: half of 1F1B's bubble at half of its activations (arXiv 2405.15362)
v-min        the same: two thirds of the bubble at a third of the activations
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from operator import itemgetter

from autopar.ir.schedule import Action, ActionKind, Schedule

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741

Order = tuple[Action, ...]


def build_schedule(name: str, *, stages: int = 1, micro_batches: int = 1, chunks: int = 1) -> Schedule:
    """The schedule of this name. Raises ValueError for a name or sizes that it does not have."""
    if name not in _BUILDERS:
        raise ValueError(f"schedule {name!r}: wanted one of {', '.join(_BUILDERS)}")
    if min(stages, micro_batches, chunks) < 1:
        raise ValueError(
            f"schedule {name}: {stages} stages, {micro_batches} micro-batches, {chunks} chunks: wanted 1 or more"
        )
    if name == "none" and stages > 1:
        raise ValueError(f"schedule none: {stages} stages: wanted 1, or a pipeline schedule")
    v_shaped = name in V_SHAPED
    if v_shaped and chunks != 2:
        raise ValueError(f"schedule {name}: {chunks} chunks: wanted 2, down and up again")
    if name != "interleaved" and not v_shaped and chunks > 1:
        raise ValueError(f"schedule {name}: {chunks} chunks: wanted 1; interleaved takes more")
    orders = _BUILDERS[name](stages, micro_batches, chunks)
    return Schedule(
        name=name, stages=stages, chunks=chunks, micro_batches=micro_batches, orders=tuple(orders), v_shaped=v_shaped
    )


def in_halves(name: str) -> bool:
    """True of a schedule that runs gradients of inputs and of weights apart."""
    return name in V_SHAPED or name.startswith("zb-")


def schedule_names() -> tuple[str, ...]:
    """Names that `build_schedule` knows."""
    return tuple(_BUILDERS)


def _row(kind: ActionKind, micro_batches: int, chunk: int = 0) -> Order:
    return tuple(Action(kind, chunk, j) for j in range(micro_batches))


def _gpipe(stages: int, micro_batches: int, chunks: int) -> list[Order]:
    return [_row(F, micro_batches) + _row(B, micro_batches)] * stages


def _one_forward_one_backward(stages: int, micro_batches: int, chunks: int) -> list[Order]:
    forwards, backwards = _row(F, micro_batches), _row(B, micro_batches)
    return [_alternate(forwards, backwards, stages - 1 - i) for i in range(stages)]


def _alternate(forwards: Order, backwards: Order, ahead: int) -> Order:
    """`ahead` forwards, then one forward and one backward until the forwards are done, then the other backwards."""
    ahead = min(ahead, len(forwards))
    left = len(forwards) - ahead
    pairs = itertools.chain.from_iterable(zip(forwards[ahead:], backwards[:left], strict=True))
    return (*forwards[:ahead], *pairs, *backwards[left:])


def _interleaved(stages: int, micro_batches: int, chunks: int) -> list[Order]:
    """Forwards: of each group of micro-batches, chunk 0, then chunk 1, …; backwards the same from the last chunk.

    A stage is 2(P − 1 − i) + (v − 1)·(first group) forwards ahead. The published order has groups of P and a multiple
    of P micro-batches; here the groups share what is left over evenly, so that none is smaller than P.
    """
    groups = list(_groups(micro_batches, stages))
    rows = {kind: [_row(kind, micro_batches, c) for c in range(chunks)] for kind in (F, B)}
    forwards = tuple(a for g in groups for c in range(chunks) for a in rows[F][c][g])
    backwards = tuple(a for g in groups for c in reversed(range(chunks)) for a in rows[B][c][g])
    first = groups[0].stop
    return [_alternate(forwards, backwards, 2 * (stages - 1 - i) + (chunks - 1) * first) for i in range(stages)]


def _groups(micro_batches: int, stages: int) -> Iterator[slice]:
    count = max(1, micro_batches // stages)
    least, more = divmod(micro_batches, count)
    at = 0
    for k in range(count):
        size = least + (k < more)
        yield slice(at, at + size)
        at += size


def _zero_bubble(
    stages: int, micro_batches: int, ahead: Callable[[int], int], late: Callable[[int], int]
) -> list[Order]:
    """As 1F1B with `ahead(i)` forwards first; the weight half of a micro-batch runs `late(i)` input halves later.

    So the weight halves that a stage owes when its forwards are done fill its waits for the last input halves.
    """
    forwards, inputs, weights = (_row(k, micro_batches) for k in (F, I, W))
    found = []
    for i in range(stages):
        order: list[Action] = []
        owed = iter(weights)
        for action in _alternate(forwards, inputs, ahead(i)):
            order.append(action)
            if action.kind is I and action.micro_batch >= late(i):
                order.append(next(owed))
        found.append((*order, *owed))
    return found


def _zb_h1(stages: int, micro_batches: int, chunks: int) -> list[Order]:
    return _zero_bubble(stages, micro_batches, lambda i: stages - 1 - i, lambda i: i)


def _zb_h2(stages: int, micro_batches: int, chunks: int) -> list[Order]:
    return _zero_bubble(stages, micro_batches, lambda i: 2 * (stages - 1 - i), lambda i: 2 * i)


def _zb_v(stages: int, micro_batches: int, chunks: int) -> list[Order]:
    """Let F, I and W of a chunk take 1 each. Of p stages, stage i begins at i and then never waits:

        2(p − i) − 1 times  F0                       until the first micro-batch is back from the turn
        i times             F1 F0                    until its gradient comes down
        p − i times         F1 I1 W1                 until that is back from the turn
        m − 2p + 1 + i      F0 I0 W0 F1 I1 W1        until forwards begin to lack: F0, then F1
        p − i − 1           I0 W0 F1 I1 W1
        i times             I0 I1                    weight halves wait, so that gradients go up without a stop
        p − i times         I0 W                     of what is owed, the oldest first
        2i times            W

    Held at most: 2p halves of a stage's layers, on every stage. With fewer than 2p micro-batches it is the order of
    2p without the others: what remains waits for nothing new.
    """
    count = max(micro_batches, 2 * stages)
    rows = {(k, c): _row(k, count, c) for k in (F, I, W) for c in (0, 1)}
    orders = [_v_order(stages, i, count, rows) for i in range(stages)]
    return [tuple(a for a in order if a.micro_batch < micro_batches) for order in orders]


def _v_order(stages: int, i: int, count: int, rows: dict[tuple[ActionKind, int], Order]) -> Iterator[Action]:
    f0, i0, w0 = (iter(rows[k, 0]) for k in (F, I, W))
    f1, i1, w1 = (iter(rows[k, 1]) for k in (F, I, W))
    rounds: tuple[tuple[int, tuple[Iterator[Action], ...]], ...] = (
        (2 * (stages - i) - 1, (f0,)),
        (i, (f1, f0)),
        (stages - i, (f1, i1, w1)),
        (count - 2 * stages + 1 + i, (f0, i0, w0, f1, i1, w1)),
        (stages - i - 1, (i0, w0, f1, i1, w1)),
        (i, (i0, i1)),
    )
    for times, turns in rounds:
        for _ in range(times):
            yield from map(next, turns)
    owed = itertools.chain.from_iterable(itertools.zip_longest(w0, w1))
    weights = (action for action in owed if action is not None)
    for action in i0:
        yield action
        yield next(weights)
    yield from weights


def _v_half(stages: int, micro_batches: int, chunks: int) -> list[Order]:
    """Of 2p halves of a stage that 1F1B holds: p + 3 (p + 1 on 3 stages); bubble 3(p − 1), or 1 less, of 6(p − 1)."""
    few = {1: (1, 0, 0), 2: (1, 3, 0), 3: (1, 0, 0)}
    waits = few.get(stages, (0, 1, 4) if stages % 2 else (4, 0, 0))
    return _timetable(stages, micro_batches, (1, 2, 1, 2), waits)


def _v_min(stages: int, micro_batches: int, chunks: int) -> list[Order]:
    """2⌈(p − 1)/3⌉ + 2 halves of a stage; bubble 4p − 5, or 4p − 3 where 3 divides p."""
    return _timetable(stages, micro_batches, (1, 1, 1, 1), (0, 2, 0) if stages % 3 == 0 else (0, 0, 0))


def _timetable(
    stages: int, micro_batches: int, hops: tuple[int, int, int, int], waits: tuple[int, int, int]
) -> list[Order]:
    """Each micro-batch takes the way of the one before, 6 later, where F, I and W of a chunk take 1 each.

    Args:
        hops: from stage to stage on the way of F0 down, F1 up, I1 down and I0 up.
        waits: at the turns between them, beside the 1 that the action before takes.

    On no stage may two of the four fall together, modulo 6; W1 and W0 take what is left, each soon after its I.
    """
    ways = ((F, 0), (F, 1), (I, 1), (I, 0))
    found = []
    for i in range(stages):
        at, times = 0, []
        for way, (hop, wait) in enumerate(zip(hops, (*waits, 0), strict=True)):
            times.append(at + hop * (stages - 1 - i if way % 2 else i))
            at += hop * (stages - 1) + 1 + wait
        one, other = sorted(set(range(6)) - {t % 6 for t in times})
        _, _, i1, i0 = times
        weights = min(((_next(i1, a), _next(i0, b)) for a, b in ((one, other), (other, one))), key=sum)
        passes = (*zip(times, ways, strict=True), *zip(weights, ((W, 1), (W, 0)), strict=True))
        timed = [(t + 6 * j, Action(*way, j)) for j in range(micro_batches) for t, way in passes]
        found.append(tuple(action for _, action in sorted(timed, key=itemgetter(0))))
    return found


def _next(after: int, remainder: int) -> int:
    """The first time later than `after` with this remainder modulo 6."""
    return after + 1 + (remainder - after - 1) % 6


V_SHAPED = ("zb-v", "v-half", "v-min")
_BUILDERS: dict[str, Callable[[int, int, int], list[Order]]] = {
    "none": _one_forward_one_backward,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-v": _zb_v,
    "v-half": _v_half,
    "v-min": _v_min,
}
