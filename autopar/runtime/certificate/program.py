"""What a lowered `Program` says in its conversions: the other side of what is read from its text."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import Phase
from autopar.ir.program import CallBlock, Convert, Function, Program
from autopar.ir.reshard import Collective
from autopar.runtime.certificate.calls import Call, Trace, Where


def trace_of(program: Program) -> Trace:
    """One rank's collectives, forward then backward, those inside local forms of ops left out.

    The program is one for all ranks; `Where.line` is 0, since nothing is written yet.
    """
    return tuple(c for phase in Phase for c in _calls(program, program.function(_top(program), phase)))


def _top(program: Program) -> str:
    return next(f.graph for f in program.functions if not f.block)


def _calls(program: Program, function: Function) -> Iterator[Call]:
    for step in function.steps:
        match step:
            case Convert():
                yield from _converted(program, function, step)
            case CallBlock():
                yield from _calls(program, program.function(step.block, step.phase))


def _converted(program: Program, function: Function, convert: Convert) -> Iterator[Call]:
    shape = convert.before.meta.shape
    for part in convert.steps:
        step = part.step
        size = program.mesh.axis(step.axis).size
        if step.collective is not Collective.SLICE and size > 1:
            where = Where(line=0, function=function.name, text=str(part), source=convert.place.source)
            given = shape
            if step.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
                # These hand in a stack of the pieces, one for each rank.
                cut = step.dim if step.collective is Collective.REDUCE_SCATTER else step.to_dim
                given = (size, *(n // size if d == cut else n for d, n in enumerate(shape)))
            yield Call(kind=step.collective.value, axis=step.axis, shape=given,
                       dtype=convert.before.meta.dtype, where=where)  # fmt: skip
        shape = part.after.meta.shape
