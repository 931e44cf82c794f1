"""The least memory, to the byte, and what fills it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import Moment, NodeBytes, Problem, ProblemNode, evaluate
from autopar.ir.solution import Status
from autopar.solver import largest_terms, minimise_memory, solve
from tests.solver.problems import brute_force, least_excess, random_problem


def raised(problem: Problem, excess: int) -> Problem:
    """Every limit more by `excess` bytes."""
    return replace(
        problem, moments=tuple(replace(m, limit_bytes=m.limit_bytes + excess) for m in problem.moments)
    )  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(min_value=0, max_value=10**6))
def test_least_memory_is_exact(seed: int) -> None:
    problem = random_problem(seed)
    if not problem.moments:
        return
    wanted, least = least_excess(problem), minimise_memory(problem)
    if least is None:
        assert math.isinf(wanted)
        return
    assert least.proven and least.excess_bytes == wanted
    assert evaluate(problem, least.choice).used_bytes[least.moment] == least.needed_bytes
    assert solve(raised(problem, least.excess_bytes)).status is Status.OPTIMAL
    assert solve(raised(problem, least.excess_bytes - 1)).status is Status.INFEASIBLE


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(min_value=0, max_value=10**6), st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_least_memory_within_a_time_is_exact(seed: int, slack: float) -> None:
    problem = random_problem(seed)
    fastest = brute_force(replace(problem, moments=()))
    if not problem.moments or math.isinf(fastest):
        return
    within = fastest * (1 + slack)
    wanted, least = least_excess(problem, within * (1 + 1e-9)), minimise_memory(problem, within_us=within)
    assert least is not None and least.proven and least.excess_bytes == wanted
    assert evaluate(problem, least.choice).objective_us <= within * (1 + 1e-6)
    if least_excess(problem) < wanted:  # a smaller one takes longer
        shorter = minimise_memory(problem)
        assert shorter is not None and evaluate(problem, shorter.choice).objective_us > within
    if fastest:
        assert minimise_memory(problem, within_us=fastest * 0.9) is None


def test_what_needs_more_than_is_known_is_not_looked_for() -> None:
    found = 0
    for seed in range(200):
        problem = random_problem(seed)
        least = minimise_memory(problem) if problem.moments else None
        if least is None or len({m.limit_bytes for m in problem.moments}) > 1 or not least.needed_bytes:
            continue
        same = minimise_memory(problem, cutoff_bytes=least.needed_bytes)
        assert same is not None and same.needed_bytes == least.needed_bytes
        less = minimise_memory(problem, cutoff_bytes=least.needed_bytes / 2)
        assert less is None or less.needed_bytes == least.needed_bytes  # only a bound can stop it
        found += less is None
    assert found >= 3


def test_infeasible_says_what_would_do() -> None:
    nodes = tuple(ProblemNode(name=f"n{i}", cost_us=(0.0, 20.0)) for i in range(4))
    held = tuple(NodeBytes(node=i, bytes=(10_000_003, 5_000_001)) for i in range(4))
    problem = Problem(
        name="small", nodes=nodes, values=(), moments=(Moment(name="m", limit_bytes=7, fixed_bytes=5, nodes=held),)
    )
    solution = solve(problem)
    assert solution.status is Status.INFEASIBLE
    assert solution.needed_bytes == 5 + 4 * 5_000_001
    assert solve(raised(problem, solution.needed_bytes - 7)).choice == (1, 1, 1, 1)
    assert solve(raised(problem, solution.needed_bytes - 8)).status is Status.INFEASIBLE


def test_largest_terms_are_largest_first() -> None:
    nodes = tuple(ProblemNode(name=f"n{i}", cost_us=(0.0, 0.0)) for i in range(3))
    held = tuple(NodeBytes(node=i, bytes=(10 * i, 100)) for i in range(3))
    problem = Problem(
        name="t", nodes=nodes, values=(), moments=(Moment(name="m", limit_bytes=7, fixed_bytes=15, nodes=held),)
    )
    assert largest_terms(problem, (0, 0, 0), 0) == (("n2", 20), ("fixed", 15), ("n1", 10))
    assert largest_terms(problem, (0, 1, 0), 0, count=2) == (("n1", 100), ("n2", 20))


def test_nothing_to_minimise_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no memory moment"):
        minimise_memory(Problem(name="t", nodes=(), values=()))
