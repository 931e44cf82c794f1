"""What a solver answers: a choice and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How a solve ended. The value is what a user reads."""

    OPTIMAL = "optimal: no cheaper plan exists under this cost model"
    FEASIBLE = "feasible: a plan was found, and the gap says how far from the best it can be at most"
    TIME_LIMIT = "stopped at the time limit; give a larger --time-limit to close the gap"
    INFEASIBLE = "infeasible: no choice fits the memory limit"
    FAILED = "failed: the linear solver did, and local search without it found no choice that fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's answer, re-priced by the referee.

    Attributes:
        choice: strategy index per problem node; empty if infeasible.
        objective_us: the referee's price of `choice`; inf if infeasible.
        bound_us: no choice can cost less.
        integral_lp: True if the LP relaxation was integral, which is the proof of optimality.
        memory_price_us_per_byte: dual of the tightest memory limit in the final LP (0 if slack or unknown).
        needed_bytes: when infeasible, the smallest limit that would admit a choice (else 0).
        failure: what the linear solver failed with, so that the choice is local search's; "" where it did not.
    """

    status: Status
    choice: tuple[int, ...]
    objective_us: float
    bound_us: float
    time_s: float
    solver: str
    integral_lp: bool = False
    memory_price_us_per_byte: float = 0.0
    needed_bytes: int = 0
    failure: str = ""

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; 0 when proven."""
        if not self.choice or self.objective_us == 0:
            return 0.0
        return max(0.0, (self.objective_us - self.bound_us) / self.objective_us)
