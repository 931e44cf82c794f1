"""Large problems that don't fold: strategies, costs of pairs, and usage while nodes are live."""

from __future__ import annotations

from autopar.solver.pairwise.problem import PairwiseProblem, Priced, price_choice
from autopar.solver.pairwise.read import parse_problem, read_problem
from autopar.solver.pairwise.solve import PairwiseSolution, solve_pairwise

__all__ = [
    "PairwiseProblem",
    "PairwiseSolution",
    "Priced",
    "parse_problem",
    "price_choice",
    "read_problem",
    "solve_pairwise",
]
