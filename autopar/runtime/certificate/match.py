"""Do the calls of all ranks fit together? Per group in order; sends with receives; and no circle of ranks that wait.

Ranks that share one `Trace` object stand for each other, so 1024 ranks that run one program cost as much as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from autopar.errors import CertificateError
from autopar.ir.mesh import Mesh
from autopar.runtime.certificate.calls import Call, Trace


def check(mesh: Mesh, traces: Sequence[Trace]) -> None:
    """`traces`: one per rank of the mesh. Raises CertificateError naming the two lines."""
    talking = any(call.peer >= 0 for trace in _distinct(traces) for call in trace)
    if len(_distinct(traces)) == 1 and not talking:
        return  # All do the same: the k-th call of each rank meets the k-th of all others.
    _check_groups(mesh, traces)
    if talking:
        _check_pairs(traces)
    _check_waits(mesh, traces)


def _distinct(traces: Sequence[Trace]) -> list[Trace]:
    return list({id(t): t for t in traces}.values())


def _check_groups(mesh: Mesh, traces: Sequence[Trace]) -> None:
    """Members of a group issue the same collectives in the same order."""
    along: dict[tuple[int, str], list[Call]] = {}
    for trace in _distinct(traces):
        for axis in mesh.names:
            along[id(trace), axis] = [c for c in trace if c.axis == axis]
    seen: set[tuple[str, int, int]] = set()
    for axis in mesh.names:
        for group in mesh.groups(axis):
            first = group[0]
            for other in group[1:]:
                pair = axis, id(traces[first]), id(traces[other])
                if pair not in seen:
                    seen.add(pair)
                    _check_two(axis, group, first, other, along[pair[1], axis], along[pair[2], axis])


def _check_two(axis: str, group: tuple[int, ...], a: int, b: int, mine: list[Call], theirs: list[Call]) -> None:
    if mine is theirs:
        return
    for at, (x, y) in enumerate(zip_longest(mine, theirs)):
        if x is None or y is None or x.agreed != y.agreed:
            raise CertificateError(
                f'ranks {a} and {b} of the "{axis}" group {_listed(group)} do not issue the same collectives; '
                f"number {at + 1} of the group is\n  {_told(a, x)}\n  {_told(b, y)}"
            )


def _told(rank: int, call: Call | None) -> str:
    return f"rank {rank}: nothing: its program ends here" if call is None else f"rank {rank}: {call}, {call.where}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}, … {len(ranks)} ranks]" if len(ranks) > 8 else f"[{shown}]"


def _check_pairs(traces: Sequence[Trace]) -> None:
    """The k-th send from a to b meets the k-th receive of b from a."""
    sends: defaultdict[tuple[int, int], list[Call]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[Call]] = defaultdict(list)
    for rank, trace in enumerate(traces):
        for call in trace:
            if call.peer < 0:
                continue
            if call.peer >= len(traces) or call.peer == rank:
                raise CertificateError(f"there is no such rank among {len(traces)}: {_told(rank, call)}")
            if call.kind == "send":
                sends[rank, call.peer].append(call)
            else:
                receives[call.peer, rank].append(call)
    for a, b in sorted(sends.keys() | receives.keys()):
        for at, (x, y) in enumerate(zip_longest(sends[a, b], receives[a, b])):
            if x is None or y is None:
                left, rank = (x, a) if y is None else (y, b)
                what = "send has no receive" if y is None else "receive has no send"
                last = (receives[a, b] if y is None else sends[a, b])[-1:]
                other = b if y is None else a
                after = f"the last one there is {last[0]}, {last[0].where}" if last else "it has none for this pair"
                raise CertificateError(
                    f"from rank {a} to rank {b}: a {what}: {_told(rank, left)}\n  rank {other}: {after}"
                )
            if x.agreed[1:] != y.agreed[1:]:
                raise CertificateError(
                    f"from rank {a} to rank {b}: send and receive number {at + 1} do not fit\n"
                    f"  {_told(a, x)}\n  {_told(b, y)}"
                )


def _check_waits(mesh: Mesh, traces: Sequence[Trace]) -> None:
    """Runs all ranks, each waiting in every call until the others of it are there, and finds who waits for ever."""
    groups = {axis: {r: group for group in mesh.groups(axis) for r in group} for axis in mesh.names}
    at = [0] * len(traces)

    def head(rank: int) -> Call | None:
        return traces[rank][at[rank]] if at[rank] < len(traces[rank]) else None

    def partners(rank: int) -> tuple[int, ...]:
        call = head(rank)
        assert call is not None
        return groups[call.axis][rank] if call.axis else (rank, call.peer)

    def here(rank: int, other: int) -> bool:
        """True if `other` stands in the call that `rank` stands in."""
        mine, theirs = head(rank), head(other)
        if mine is None or theirs is None:
            return False
        if mine.axis:
            return theirs.axis == mine.axis
        return theirs.peer == rank and {mine.kind, theirs.kind} == {"send", "receive"}

    ready = list(range(len(traces)))
    while ready:
        rank = ready.pop()
        if head(rank) is None or not all(other == rank or here(rank, other) for other in partners(rank)):
            continue
        met = partners(rank)
        for other in met:
            at[other] += 1
        ready.extend(met)
    stuck = [r for r in range(len(traces)) if head(r) is not None]
    if stuck:
        circle = list(_circle(stuck[0], lambda r: next(o for o in partners(r) if o != r and not here(r, o))))
        lines = [f"  {_told(r, head(r))}" for r in circle]
        raise CertificateError("\n".join([f"ranks {_listed(circle)} wait for each other in a circle:", *lines]))


def _circle(start: int, waits_for: object) -> Iterator[int]:
    """The ranks of the circle that following `waits_for` from `start` ends in."""
    path: list[int] = []
    rank = start
    while rank not in path:
        path.append(rank)
        rank = waits_for(rank)  # type: ignore[operator]
    yield from path[path.index(rank) :]
