"""What autopar raises.

`UserError` and its children are the user's to mend: a shell command prints their message as one line and exits 2
(3 for `InfeasibleError`, 4 for `RankError`). `CompilerError` is ours: a promise between two rooms was broken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class AutoparError(Exception):
    """Root of every exception that autopar raises on purpose."""

    exit_code = 1


class UserError(AutoparError, ValueError):
    """Bad input: the message says what was found, what was wanted and what to do."""

    exit_code = 2


class CaptureError(UserError):
    """The model does something that cannot be captured; names the user's file, line and expression."""


class ClusterError(UserError):
    """A cluster description that is unknown, malformed or impossible."""


class PlanError(UserError):
    """A plan file that is truncated, of another version, for another model, or for other ranks."""


class InputError(UserError):
    """Call arguments that do not fit the captured model (missing, of another shape, a changed flag)."""


class CertificateError(UserError):
    """Ranks would not issue the same collectives, a send has no receive, or ranks wait in a circle; names the lines.

    An emitted program that somebody edited is the usual reason.
    """


class InfeasibleError(AutoparError):
    """No plan fits the memory limit. Carries what would.

    Attributes:
        needed_bytes: smallest memory per device for which this search finds a plan.
        budget_bytes: the limit that was given.
        largest_terms: (what, bytes) pairs, largest first.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, needed_bytes: int, budget_bytes: int, largest_terms: tuple[tuple[str, int], ...]
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.largest_terms = largest_terms


class RankError(AutoparError):
    """A rank failed; names the rank and carries its message."""

    exit_code = 4


class LostRankError(RankError):
    """Another rank has ended, was stopped, or did not come: the reason is that rank's."""


class CompilerError(AutoparError):
    """A broken promise between rooms: a bug in autopar, with the value that broke it."""


class SolverError(AutoparError):
    """A linear solver is missing, died, or gave no answer: its status, after how long, and what to do.

    A search goes on without it where it can (`autopar.solver.solve`), and says so in the plan's notes.
    """


def without_frames(public: Callable[P, T]) -> Callable[P, T]:
    """A function whose `UserError`s come without the frames inside it: what is printed ends at the user's own call.

    Under `python -X dev` all frames stay.
    """

    @wraps(public)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return public(*args, **kwargs)
        except UserError as error:
            if sys.flags.dev_mode:
                raise
            raise error.with_traceback(None) from None

    return call
