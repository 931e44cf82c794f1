"""`solve_pairwise`: the cheapest choice that was found, and a bound.

pairs       edges over one node or many become pairs                        model.py
reduce      exactly: what is left has the same optimum                      native/pairwise/reduce.cpp
search      bound by message passing and prices, choices by local search    native/pairwise, or fallback.py
program     where little is left, a MIP settles what the search leaves      exact.py
referee     every choice is priced from the problem as it was given         problem.py: price_choice
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import CompilerError
from autopar.ir.solution import Status
from autopar.native import found
from autopar.solver.linear import Ints
from autopar.solver.pairwise.exact import solve_exactly
from autopar.solver.pairwise.fallback import pass_messages
from autopar.solver.pairwise.model import as_pairs, model_of
from autopar.solver.pairwise.native import Reduced, Told, library, reduced
from autopar.solver.pairwise.problem import FORBIDDEN, PairwiseProblem, Priced, price_choice

SMALL_ENTRIES = 3_000  # edge costs for which a MIP is quicker than a search
MIDDLE_ENTRIES = 40_000  # edge costs for which a MIP is tried with the time that a search leaves
LEAST_PROGRAM_S = 2.0  # less time than this is not worth a MIP
PROGRAM_PART = 0.9  # of the time left is the MIP's: it looks at the clock between steps that can take long
SUM_BITS = 59  # all costs together stay below 2^59 in the search, and that below FORBIDDEN

Said = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairwiseSolution:
    """An answer, priced by the referee.

    Attributes:
        choice: strategy per node; empty where none was found.
        cost: of the choice; None without one.
        bound: no choice can cost less; None where there is none at all (status INFEASIBLE).
        priced: the referee's word on the choice.
        notes: for people, such as that the native library is not there.
    """

    status: Status
    choice: tuple[int, ...]
    cost: int | None
    bound: int | None
    priced: Priced | None
    time_s: float
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """(cost - bound) / cost; inf without a choice."""
        if self.cost is None or self.bound is None:
            return math.inf
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Of a method: choice of the problem's nodes and bound, both of scaled costs; `done`: proven or ended by itself."""

    choice: Ints | None
    bound: float
    done: bool
    impossible: bool = False
    proven: bool = False


def solve_pairwise(
    problem: PairwiseProblem,
    *,
    time_limit_s: float = 60.0,
    rounds: int | None = None,
    threads: int = 1,
    native: bool = True,
    say: Said | None = None,
) -> PairwiseSolution:
    """The cheapest choice found, with a bound.

    Args:
        time_limit_s: wall time; reductions are not cut short, so very little of it may be passed.
        rounds: of the search, at most, and no MIP after it: an end that doesn't depend on the machine's speed.
        threads: that the search may use, 1 or 2; the answer is the same.
        native: False leaves the C++ library out.
        say: takes lines of progress.

    Returns:
        Status OPTIMAL where the bound is the cost (or a MIP proved it within 1e-6), FEASIBLE where the search ended by
        itself, TIME_LIMIT where time, or whoever listens, ended it (perhaps with no choice), INFEASIBLE where no choice
        without a forbidden cost fits.

    Raises:
        UserError: an edge over more than two nodes is too large.
        CompilerError: the referee says that a choice doesn't fit.
    """
    began = time.perf_counter()
    notes: list[str] = []
    bits = max(0, _sum_of_largest(problem).bit_length() - SUM_BITS)
    scaled = as_pairs(_shifted(problem, bits))
    say = say or (lambda line: None)
    say(str(problem))
    if bits:
        notes.append(f"costs add up to more than a 64-bit number holds: searched in units of {1 << bits}")
    if native and library() is not None:
        outcome = _natively(scaled, began, time_limit_s, rounds, threads, say)
    else:
        reason = found().reason if native else "left out"
        notes.append(f"the native search is not there ({reason}): a slower one ran, without local search")
        outcome = _plainly(scaled, began, time_limit_s, rounds, say)
    return _answer(problem, outcome, bits, tuple(notes), time.perf_counter() - began)


def _natively(
    problem: PairwiseProblem, began: float, limit_s: float, rounds: int | None, threads: int, say: Said
) -> _Outcome:
    def left() -> float:
        return limit_s - (time.perf_counter() - began)

    with reduced(problem) as small:
        if small.impossible:
            return _Outcome(choice=None, bound=math.inf, done=True, impossible=True)
        say(f"reduced to {small}")
        if small.entries <= SMALL_ENTRIES:
            outcome = _program(small, None, 0.0, left())
            if outcome.done:
                return outcome
        told = _progress(say, time.perf_counter() - began, small.constant)
        walked = small.search(left(), rounds, threads, told)
        proven = walked.choice is not None and walked.cost - walked.bound < 1.0
        outcome = _Outcome(choice=walked.choice, bound=walked.bound, done=walked.ended, proven=proven)
        if proven or rounds is not None or not walked.ended or small.entries > MIDDLE_ENTRIES:
            return outcome
        cut_short = replace(outcome, done=False)  # by time, if the MIP is
        if left() < LEAST_PROGRAM_S:
            return cut_short
        say("the rest of the time goes to a MIP of what is left")
        return _program(small, cut_short, walked.bound, PROGRAM_PART * left())


def _program(small: Reduced, known: _Outcome | None, bound: float, left_s: float) -> _Outcome:
    """What a MIP says of the reduced problem, or what was known where it doesn't end."""
    model = small.model()
    exact = solve_exactly(model, left_s)
    bound = max(bound, model.constant + exact.bound)
    if exact.done:
        if exact.choice is None:
            return _Outcome(choice=None, bound=math.inf, done=True, impossible=True)
        return _Outcome(choice=small.lift(exact.choice), bound=bound, done=True, proven=True)
    if known is None:
        return _Outcome(choice=None, bound=bound, done=False)
    return replace(known, bound=bound)


def _plainly(problem: PairwiseProblem, began: float, limit_s: float, rounds: int | None, say: Said) -> _Outcome:
    """Without the library: the model as it is, through the MIP or message passing in numpy."""
    model = model_of(problem)

    def left() -> float:
        return limit_s - (time.perf_counter() - began)

    if len(model.tables) <= MIDDLE_ENTRIES:
        exact = solve_exactly(model, left())
        if exact.done:
            return _Outcome(
                choice=exact.choice, bound=exact.bound, done=True,
                impossible=exact.choice is None, proven=exact.choice is not None,
            )  # fmt: skip
    choice, bound, ended = pass_messages(model, left(), rounds, _progress(say, time.perf_counter() - began))
    if choice is not None and not math.isfinite(model.cost_of(choice)):
        choice = None
    proven = choice is not None and model.cost_of(choice) - bound < 1.0 - 1e-6
    return _Outcome(choice=choice, bound=bound, done=ended, proven=proven)


def _progress(say: Said, offset_s: float, constant: int = 0) -> Told:
    """Progress in words; Ctrl-C stops the search and keeps what it has."""

    def told(seconds: float, cost: float, bound: float) -> bool:
        try:
            known = "no choice that fits yet" if math.isinf(cost) else f"cost {cost + constant:.0f}"
            say(f"{seconds + offset_s:.0f} s: {known}, bound {bound + constant:.0f}")
        except KeyboardInterrupt:
            return True
        return False

    return told


def _answer(
    problem: PairwiseProblem, outcome: _Outcome, bits: int, notes: tuple[str, ...], time_s: float
) -> PairwiseSolution:
    if outcome.impossible:
        return PairwiseSolution(
            status=Status.INFEASIBLE, choice=(), cost=None, bound=None, priced=None, time_s=time_s, notes=notes
        )
    bound = _whole(outcome.bound) << bits
    if outcome.choice is None:
        return PairwiseSolution(
            status=Status.TIME_LIMIT, choice=(), cost=None, bound=bound, priced=None, time_s=time_s, notes=notes
        )
    choice = tuple(outcome.choice[: problem.nodes].tolist())
    priced = price_choice(problem, choice)
    if not (priced.fits and priced.allowed):
        raise CompilerError(
            f"{problem.name}: the search's choice {'has a forbidden cost' if priced.fits else 'does not fit'}:"
            f" it uses {priced.peak_usage} of {problem.limit}"
        )
    proven = outcome.proven and not bits
    status = Status.OPTIMAL if proven else Status.FEASIBLE if outcome.done else Status.TIME_LIMIT
    return PairwiseSolution(
        status=status, choice=choice, cost=priced.cost, bound=min(bound, priced.cost),
        priced=priced, time_s=time_s, notes=notes,
    )  # fmt: skip


def _whole(bound: float) -> int:
    """Costs are whole: none is below the whole number at or above a bound, as long as doubles hold each."""
    return math.ceil(max(0.0, bound) - 1e-6) if bound < 2.0**50 else math.floor(bound * (1 - 1e-12))


def _sum_of_largest(problem: PairwiseProblem) -> int:
    """No choice costs more, forbidden costs not counted."""

    def largest(values: Ints, starts: Ints) -> int:
        allowed = np.where(values < FORBIDDEN, values, 0)
        return sum(np.maximum.reduceat(allowed, starts[:-1]).tolist()) if len(starts) > 1 else 0

    return largest(problem.cost, problem.start) + largest(problem.tables, problem.table_start)


def _shifted(problem: PairwiseProblem, bits: int) -> PairwiseProblem:
    """Costs in units of 2^bits, rounded down."""
    if not bits:
        return problem
    small = [np.where(c < FORBIDDEN, c >> bits, c) for c in (problem.cost, problem.tables)]
    return replace(problem, cost=small[0], tables=small[1])
