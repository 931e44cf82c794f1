"""A problem in parts on an even cut into stages: what one stage holds, and the problem under the memory of these."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.parts import Amount, Frame, PartedProblem
from autopar.ir.problem import Moment, NodeBytes, Problem
from autopar.ir.stages import Column, Run


def unchosen(parted: PartedProblem) -> tuple[Run, ...]:
    """The runs, before anything is chosen."""
    nothing = Column(name="", forward_us=0.0, backward_us=0.0)
    return tuple(Run(name=parted.parts[p], count=n, columns=(nothing,)) for p, n in parted.runs)


def even_share(parted: PartedProblem, stages: int, *, last: bool = False) -> tuple[int, ...]:
    """Instances of each part on the first stage (or the `last`): an end, and as many blocks as all have."""
    ends, inside = (parted.runs[0], parted.runs[-1]), parted.runs[1:-1]
    blocks = sum(n for _, n in inside)
    left = max(1, blocks // stages) if blocks else 0
    held = [0] * len(parted.parts)
    for part, count in ends if stages == 1 else ends[1:] if last else ends[:1]:
        held[part] += count
    for part, count in reversed(inside) if last else inside:
        held[part] += min(count, left)
        left -= min(count, left)
    return tuple(held)


def with_memory(parted: PartedProblem, frame: Frame) -> Problem:
    """The problem under the memory of the first and the last stage of an even cut, with one of the largest ops."""
    count = len(frame.stages)
    problem = frame.problem(parted, unchosen(parted), 1)
    moments = []
    for stage, where in dict.fromkeys(((0, "first"), (count - 1, "last"))) if count > 1 else [(0, "")]:
        held = even_share(parted, count, last=stage == count - 1 and stage > 0)
        place = problem.stages[stage]
        nodes = _held_bytes(parted, held, place.in_flight)
        base = Moment(
            name=f"end of forward{f' of the {where} stage' if where else ''}", limit_bytes=place.limit_bytes,
            fixed_bytes=place.fixed_bytes, nodes=nodes,
        )  # fmt: skip
        working = [t for t in parted.terms if t.amount is Amount.WORKING and any(held[p] for p in t.parts)]
        moments += [
            replace(
                base, name=f"{base.name}, at {parted.problem.nodes[t.node].name}",
                nodes=(*nodes, NodeBytes(node=t.node, bytes=tuple(map(int, t.sizes)))),
            )
            for t in working
        ] or [base]  # fmt: skip
    return replace(parted.problem, moments=tuple(moments))


def _held_bytes(parted: PartedProblem, held: tuple[int, ...], in_flight: float) -> tuple[NodeBytes, ...]:
    """What nodes hold of a stage with so many instances of each part."""
    found: dict[int, list[int]] = {}
    for term in parted.terms:
        for part in term.parts:
            share = held[part] / parted.counts[part]
            match term.amount:
                case Amount.RESIDENT:
                    times = share
                case Amount.SAVED:
                    times = share * in_flight
                case Amount.REMADE:
                    times = float(held[part] > 0)
                case _:
                    continue
            sizes = found.setdefault(term.node, [0] * len(term.sizes))
            found[term.node] = [n + math.ceil(times * size) for n, size in zip(sizes, term.sizes, strict=True)]
    return tuple(NodeBytes(node=node, bytes=tuple(sizes)) for node, sizes in found.items() if any(sizes))
