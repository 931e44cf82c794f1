"""The first choice by memory prices: it fits, and is found where the relaxation's rounding does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import SolverError
from autopar.ir.problem import Problem, evaluate
from autopar.solver import highs
from autopar.solver.backends import backend_named
from autopar.solver.model import build_model
from autopar.solver.priced import priced_choice
from tests.solver.problems import brute_force, random_problem

SEEDS = range(400)


def _without_versions(problem: Problem) -> Problem:
    """Prices are paid per strategy: bytes of shared versions have none."""
    return replace(problem, moments=tuple(replace(m, versions=()) for m in problem.moments))


def test_what_prices_choose_fits() -> None:
    solver, found, worse = backend_named("highs"), 0, 0
    for seed in SEEDS:
        problem = _without_versions(random_problem(seed))
        model = build_model(problem)
        lp = solver.lp(model.linear, None)
        if lp.point is None:
            continue
        choice = priced_choice(problem, model, lp, solver)
        if choice:
            found += 1
            priced = evaluate(problem, choice)
            assert priced.feasible
            best = brute_force(problem)
            assert priced.objective_us >= best - 1e-9
            worse += priced.objective_us > best + 1e-9
    assert found >= 20 and worse < found


def test_an_lp_that_ends_without_an_answer_is_tried_another_way(monkeypatch: pytest.MonkeyPatch):
    model = build_model(random_problem(3)).linear
    right = highs.solve_lp(model)
    stopped: dict[str, str | float | int] = {"simplex_iteration_limit": 0}
    monkeypatch.setattr(highs, "OTHER_WAYS", (stopped, *highs.OTHER_WAYS[1:]))
    assert highs.solve_lp(model).objective == pytest.approx(right.objective)
    monkeypatch.setattr(highs, "OTHER_WAYS", (stopped,))
    with pytest.raises(SolverError, match="ended the LP with"):
        highs.solve_lp(model)
