"""What one rank says to others, in order: the noun that certificates compare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A line of a program. `source`: the user's line that it comes from; `branch`: the rank-dependent branch around it.

    `program` tells texts apart where roles have several ("" where there is one).
    """

    line: int
    function: str
    text: str
    source: str = ""
    branch: str = ""
    program: str = ""

    def __str__(self) -> str:
        at = f"line {self.line}" if self.line else "no line"
        of = f" of {self.program}" if self.program else ""
        place = f"{at}{of} ({self.function})" if self.function else f"{at}{of}"
        origin = f"  [{self.source}]" if self.source else ""
        return f"{place}: {self.text}{origin}" + (f", under {self.branch}" if self.branch else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective along a mesh axis, or one send or receive.

    Attributes:
        kind: "all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows",
            "pass_on", "send" or "receive".
        axis: the mesh axis of a collective, "" of a send or receive.
        peer: the other rank of a send or receive, -1 of a collective.
        shape, dtype: of the tensor that this rank hands in (of a receive: takes); of rows in unequal counts: of none.
    """

    kind: str
    axis: str = ""
    peer: int = -1
    shape: tuple[int, ...]
    dtype: str
    where: Where

    @property
    def agreed(self) -> tuple[str, tuple[int, ...], str]:
        """What all members of a group must have in common."""
        return self.kind, self.shape, self.dtype

    def __str__(self) -> str:
        to = f'along "{self.axis}"' if self.axis else f"{'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        return f"{self.kind} {to} of {self.dtype}[{', '.join(map(str, self.shape))}]"


Trace = tuple[Call, ...]
"""All calls of one rank in order. Ranks that do the same share one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was proven: `calls` per role, for `ranks` ranks that play `roles` roles."""

    ranks: int
    roles: int
    calls: tuple[int, ...]

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.calls))
        return f"{self.ranks} ranks in {self.roles} roles agree; calls per role: {counts}"
