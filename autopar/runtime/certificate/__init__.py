"""Proof before the run that all ranks say the same things to each other in the same order.

`certify` reads the program that is really going to run, with whatever a person changed in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from autopar.ir.mesh import Mesh
from autopar.runtime.certificate.calls import Call, Certificate, Trace, Where
from autopar.runtime.certificate.match import check
from autopar.runtime.certificate.program import trace_of
from autopar.runtime.certificate.read import Arguments, Text, read

Program = str | Trace
Ranks = int | tuple[int, ...] | range

__all__ = [
    "Arguments",
    "Call",
    "Certificate",
    "Program",
    "Trace",
    "Where",
    "certified",
    "certify",
    "trace_of",
    "traces_of",
]


def certify(
    programs: Program | Mapping[Ranks, Program],
    mesh: Mesh,
    arguments: Arguments | Callable[[int], Arguments] | None = None,
    sources: Mapping[int, str] | None = None,
) -> Certificate:
    """Prove that no rank waits for another in vain.

    Args:
        programs: emitted text (or a hand-made trace) of all ranks, or of each set of ranks that plays one role.
        mesh: of all ranks together.
        arguments: local shapes of what the runtime hands in, of a rank; None: as the text's comments say.
        sources: line -> the user's line that it comes from, for messages.

    Raises:
        CertificateError: names the two lines that do not fit, or the line that nothing can be proven of.
    """
    traces = traces_of(programs, mesh, arguments, sources)
    check(mesh, traces)
    distinct = {id(t): t for t in traces}
    return Certificate(ranks=mesh.size, roles=len(distinct), calls=tuple(len(t) for t in distinct.values()))


def traces_of(
    programs: Program | Mapping[Ranks, Program],
    mesh: Mesh,
    arguments: Arguments | Callable[[int], Arguments] | None = None,
    sources: Mapping[int, str] | None = None,
) -> Sequence[Trace]:
    """What each rank says, in rank order."""
    roles = programs if isinstance(programs, Mapping) else {range(mesh.size): programs}
    found: dict[int, Trace] = {}
    for ranks, program in roles.items():
        members = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        name = f"the program of {_named(members)}" if len(roles) > 1 else ""
        found |= _read_role(program, name, members, mesh, arguments, sources or {})
    missing = sorted(set(range(mesh.size)) - found.keys())
    if missing or len(found) != mesh.size:
        raise ValueError(f"programs for ranks {sorted(found)}, the mesh has {mesh.size}")
    return [found[rank] for rank in range(mesh.size)]


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:4]))}" + (
        ", …" if len(ranks) > 4 else ""
    )  # fmt: skip


def _read_role(
    program: Program,
    name: str,
    ranks: tuple[int, ...],
    mesh: Mesh,
    arguments: Arguments | Callable[[int], Arguments] | None,
    sources: Mapping[int, str],
) -> dict[int, Trace]:
    """Ranks that are given the same shapes and never ask which rank they are do the same: one is read for all."""
    if not isinstance(program, str):
        return dict.fromkeys(ranks, program)
    text = Text(program, name, sources)
    shared: dict[Arguments | None, Trace] = {}
    same: dict[Trace, Trace] = {}
    found: dict[int, Trace] = {}
    for rank in ranks:
        given = arguments(rank) if callable(arguments) else arguments
        if given in shared:
            found[rank] = shared[given]
            continue
        reading = read(text, mesh, rank, given)
        found[rank] = same.setdefault(reading.trace, reading.trace)
        if reading.alike:
            shared[given] = found[rank]
    return found


_ONE = threading.Lock()
_KEPT = 16
_certified: dict[object, Certificate] = {}


def certified(text: str, mesh: Mesh, arguments: Callable[[int], Arguments], sources: Mapping[int, str]) -> Certificate:
    """`certify` of one text on all ranks, once for each text in a process, also where ranks are threads.

    Ranks are given the same shapes if the first and the last are: cuts put the shorter pieces at the end.
    """
    first, last = arguments(0), arguments(mesh.size - 1)
    key = text, mesh, first, last
    with _ONE:
        found = _certified.get(key)
        if found is None:
            found = certify(text, mesh, first if first == last else arguments, sources)
            while len(_certified) >= _KEPT:
                del _certified[next(iter(_certified))]
            _certified[key] = found
    return found
