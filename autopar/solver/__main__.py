"""`python -m autopar.solver FILE`: the cheapest choice of a large problem (docs/large-problems.md).

The result goes to stdout, progress to stderr. Exit: 0 done, 2 bad input, 3 no choice fits, or none was found in time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from autopar.errors import AutoparError
from autopar.ir.solution import Status
from autopar.solver.pairwise import PairwiseProblem, PairwiseSolution, read_problem, solve_pairwise

PROGRESS_S = 5.0  # between lines of progress
RESERVE_S = 1.0  # of the time limit, for the referee, the answer and leaving
RESERVE_PART = 0.02
SHOWN = 60  # strategies of a choice in one line for people


def main(arguments: list[str] | None = None, spent_s: float = 0.0) -> int:
    """The exit code. `spent_s`: seconds of the time limit that went before the call."""
    began = time.perf_counter() - spent_s
    given = _parser().parse_args(arguments)
    if not given.time_limit > 0:
        print("error: --time-limit must be more than 0 seconds", file=sys.stderr)
        return 2
    try:
        problem = read_problem(given.file)
        spent = time.perf_counter() - began
        solution = solve_pairwise(
            problem,
            time_limit_s=given.time_limit
            - spent
            - min(RESERVE_S, given.time_limit / 10)
            - RESERVE_PART * given.time_limit,
            rounds=given.rounds,
            threads=given.threads,
            say=_Progress(spent),
        )
    except AutoparError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(_as_json(solution) if given.json else _as_text(problem, solution, time.perf_counter() - began))
    if solution.cost is None:
        print(f"error: {given.file}: {_why_none(solution)}", file=sys.stderr)
        return 3
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autopar.solver", description="The cheapest choice of strategies in a problem of pairwise costs."
    )
    parser.add_argument("file", help="the problem: JSON, plain or gzip")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds in all (default: 60)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="end the search after N rounds: the same on any machine"
    )
    parser.add_argument(
        "--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), choices=(1, 2),
        help="threads of the search; the answer is the same",
    )  # fmt: skip
    return parser


class _Progress:
    """Lines on stderr, once something has taken a second and every few seconds then."""

    def __init__(self, spent_s: float) -> None:
        self.next = time.perf_counter() + max(0.0, 1.0 - spent_s)
        self.waiting: list[str] = []
        self.shown = False

    def __call__(self, line: str) -> None:
        self.waiting.append(line)
        if time.perf_counter() >= self.next:
            print("\n".join(self.waiting), file=sys.stderr, flush=True)
            self.next = time.perf_counter() + PROGRESS_S
            self.waiting = []
            self.shown = True
        elif self.shown:  # the next says what is newer
            self.waiting = []


def _as_json(solution: PairwiseSolution) -> str:
    return json.dumps(
        {
            "cost": solution.cost,
            "bound": solution.bound,
            "status": solution.status.name.lower(),
            "choice": list(solution.choice),
        }
    )


def _as_text(problem: PairwiseProblem, solution: PairwiseSolution, time_s: float) -> str:
    lines = [str(problem), f"status   {solution.status.value}"]
    if solution.cost is not None and solution.priced is not None:
        used, limit = solution.priced.peak_usage, problem.limit
        shown = " ".join(map(str, solution.choice[:SHOWN]))
        more = f" ... ({len(solution.choice)} nodes; all with --json)" if len(solution.choice) > SHOWN else ""
        lines += [
            f"cost     {solution.cost}",
            f"bound    {solution.bound} (gap {solution.gap:.3%})",
            f"usage    {used} of {limit} at its peak" + (f" ({used / limit:.2%})" if limit else ""),
            f"choice   {shown}{more}",
        ]
    else:
        lines.append(f"bound    {'none: ' + _why_none(solution) if solution.bound is None else solution.bound}")
    lines += [f"note     {note}" for note in solution.notes]
    return "\n".join([*lines, f"time     {time_s:.1f} s"])


def _why_none(solution: PairwiseSolution) -> str:
    if solution.status is Status.INFEASIBLE:
        return "no choice without a forbidden cost fits the usage limit"
    return "no choice that fits was found in time; give a larger --time-limit"


if __name__ == "__main__":
    sys.exit(main(spent_s=time.process_time()))  # about what starting Python and the imports took
