"""A reduction must not change the optimum: each one against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import Consumer, Moment, NodeBytes, Problem, ProblemNode, ProblemValue, check_problem, evaluate
from autopar.solver.merge import merge_pairs
from autopar.solver.reduce import (
    drop_dominated,
    drop_impossible,
    drop_slack_moments,
    drop_unused_layouts,
    reduce_problem,
)
from autopar.solver.reduction import Reduction, keep_strategies
from tests.solver.problems import all_choices, brute_force, least_excess, random_problem

SEEDS = st.integers(min_value=0, max_value=10**6)
REDUCTIONS = [drop_impossible, drop_dominated, merge_pairs, drop_unused_layouts, drop_slack_moments, reduce_problem]


@pytest.mark.parametrize("reduce", REDUCTIONS, ids=lambda r: r.__name__)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_optimum_and_prices_stay(reduce: Callable[[Problem], Reduction | None], seed: int) -> None:
    problem = random_problem(seed)
    reduction = reduce(problem)
    best = brute_force(problem)
    if reduction is None:
        assert math.isinf(least_excess(problem) if problem.moments else best)
        return
    check_problem(reduction.problem)
    assert brute_force(reduction.problem) == pytest.approx(best)
    for choice in list(all_choices(reduction.problem))[:30]:
        before, after = evaluate(problem, reduction.lift(choice)), evaluate(reduction.problem, choice)
        assert after.objective_us == pytest.approx(before.objective_us)
        assert after.feasible == before.feasible


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_least_memory_stays_too(seed: int) -> None:
    problem = random_problem(seed)
    reduction = reduce_problem(problem, keep_moments=True)
    if problem.moments and reduction is not None:
        assert least_excess(reduction.problem) == least_excess(problem)


def test_follower_is_merged() -> None:
    # relu computes in any layout it is given, at the same price: only its producer chooses
    problem = _chain(relu_us=(2.0, 2.0))
    reduction = merge_pairs(drop_dominated(problem).problem)
    assert len(reduction.problem.nodes) == 1
    assert brute_force(reduction.problem) == brute_force(problem)


def test_a_node_that_had_better_convert_first_keeps_its_choice() -> None:
    # in layout 1 relu costs 50 us more than the conversion: making 1, converting to 0 first is a choice that must stay
    problem = _chain(relu_us=(2.0, 62.0), matmul_us=(100.0, 1.0))
    reduction = merge_pairs(problem)
    assert brute_force(reduction.problem) == brute_force(problem) == 1 + 10 + 2


def test_dominated_strategy_goes_and_of_equals_the_lowest_stays() -> None:
    node = ProblemNode(name="n", cost_us=(3.0, 2.0, 2.0))
    assert drop_dominated(Problem(name="d", nodes=(node,), values=())).pick == ((1,),)


def test_cheaper_but_larger_is_not_dominated() -> None:
    node = ProblemNode(name="n", cost_us=(1.0, 2.0))
    moment = Moment(name="m", limit_bytes=5, nodes=(NodeBytes(node=0, bytes=(9, 4)),))
    assert drop_dominated(Problem(name="d", nodes=(node,), values=(), moments=(moment,))).pick == ((0, 1),)


def test_free_conversion_lets_one_stand_for_another() -> None:
    # replicated (0) slices to 1 for nothing, so making 1 at the same price is never needed
    a, b = ProblemNode(name="a", cost_us=(5.0, 5.0)), ProblemNode(name="b", cost_us=(1.0, 1.5))
    value = ProblemValue(
        name="t", producer=0, made=(0, 1), consumers=(Consumer(node=1, wants=(0, 1)),),
        reshard_us=((0.0, 0.0), (9.0, 0.0)),
    )  # fmt: skip
    assert drop_dominated(Problem(name="free", nodes=(a, b), values=(value,))).pick[0] == (0,)


def test_lift_composes() -> None:
    node = ProblemNode(name="n", cost_us=(4.0, 3.0, 2.0, 1.0))
    first = keep_strategies(Problem(name="k", nodes=(node,), values=()), [[1, 2, 3]])
    second = keep_strategies(first.problem, [[0, 2]])
    assert first.then(second).lift((1,)) == (3,)


def _chain(*, relu_us: tuple[float, float], matmul_us: tuple[float, float] = (5.0, 5.0)) -> Problem:
    nodes = (ProblemNode(name="matmul", cost_us=matmul_us), ProblemNode(name="relu", cost_us=relu_us))
    value = ProblemValue(
        name="t", producer=0, made=(0, 1), consumers=(Consumer(node=1, wants=(0, 1)),),
        reshard_us=((0.0, 10.0), (10.0, 0.0)),
    )  # fmt: skip
    return Problem(name="chain", nodes=nodes, values=(value,))


def test_of_equal_pairs_one_stays() -> None:
    # two ways of making layout 0 at the same price can each stand for the other: one of them must be left
    nodes = (ProblemNode(name="a", cost_us=(1.0, 1.0, 5.0)), ProblemNode(name="b", cost_us=(2.0, 3.0)))
    value = ProblemValue(
        name="t", producer=0, made=(0, 0, 1), consumers=(Consumer(node=1, wants=(0, 1)),),
        reshard_us=((0.0, 10.0), (10.0, 0.0)),
    )  # fmt: skip
    reduction = merge_pairs(Problem(name="ties", nodes=nodes, values=(value,)))
    assert len(reduction.problem.nodes) == 1
    assert brute_force(reduction.problem) == 3.0
    assert reduction.pick == ((0, 2), (0, 1))
