"""Every small problem, every solver: brute force says what is right, the referee says what a choice costs."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import CompilerError, SolverError
from autopar.ir.problem import INFINITY, Consumer, Moment, NodeBytes, Problem, ProblemNode, ProblemValue, evaluate
from autopar.ir.solution import Status
from autopar.solver import api, highs, lower_bound_us, solve
from autopar.solver.linear import LinearAnswer
from autopar.solver.model import build_model, choice_of, point_of
from autopar.solver.search import first_of_equals
from tests.solver.problems import all_choices, brute_force, hard_problem, random_problem

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pulp.*")
SEEDS = st.integers(min_value=0, max_value=10**6)


def close(found: float, wanted: float) -> bool:
    return found == wanted or abs(found - wanted) <= 1e-5 * max(1.0, abs(wanted))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(SEEDS)
def test_answer_is_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    solution = solve(problem)
    best = brute_force(problem)
    assert close(solution.objective_us, best)
    if math.isinf(best):
        assert solution.status is Status.INFEASIBLE and solution.choice == ()
    else:
        priced = evaluate(problem, solution.choice)
        assert solution.status is Status.OPTIMAL and solution.gap == 0.0
        assert priced.feasible and priced.objective_us == solution.objective_us


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS)
def test_model_prices_a_choice_as_the_referee_does(seed: int) -> None:
    problem = random_problem(seed)
    model = build_model(problem)
    for choice in list(all_choices(problem))[:40]:
        priced = evaluate(problem, choice)
        if not math.isfinite(priced.objective_us):
            continue
        point = point_of(problem, model, choice)
        linear = model.linear
        activity = [0.0] * linear.rows
        for j in range(linear.columns):
            for k in range(linear.start[j], linear.start[j + 1]):
                activity[linear.index[k]] += linear.value[k] * point[j]
        inside = all(
            low - 1e-6 <= a <= high + 1e-6
            for low, a, high in zip(linear.row_lower, activity, linear.row_upper, strict=True)
        )
        assert inside == priced.feasible
        assert close(float(linear.cost @ point) + linear.offset, priced.objective_us)
        assert choice_of(model, point) == (choice, True)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(SEEDS)
def test_model_needs_no_reduction(seed: int) -> None:
    problem = random_problem(seed)
    model = build_model(problem)
    relaxed, whole = highs.solve_lp(model.linear), highs.solve_mip(model.linear)
    assert close(whole.objective, brute_force(problem))
    assert relaxed.bound <= whole.objective + 1e-6 or whole.point is None
    if whole.point is not None:
        assert evaluate(problem, choice_of(model, whole.point)[0]).feasible


@pytest.mark.parametrize("backend", ["pulp-cbc", "pulp-highs"])
@pytest.mark.parametrize("seed", range(25))
def test_both_adapters_agree(seed: int, backend: str) -> None:
    problem = random_problem(seed)
    ours, theirs = solve(problem), solve(problem, backend=backend)
    assert theirs.status is ours.status
    assert close(theirs.objective_us, ours.objective_us)
    assert backend.removeprefix("pulp-").upper() in theirs.solver


@settings(max_examples=80, deadline=None, derandomize=True)
@given(SEEDS)
def test_lower_bound_is_one(seed: int) -> None:
    problem = random_problem(seed)
    assert lower_bound_us(problem) <= brute_force(problem) + 1e-6


def test_lower_bound_is_tight_on_a_chain() -> None:
    problem = hard_problem(nodes=6, memory=False)
    assert lower_bound_us(problem, sweeps=40) == pytest.approx(solve(problem).objective_us)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.sampled_from([0.5, 0.9, 1.0, 1.1]))
def test_cutoff_gives_up_only_with_proof(seed: int, factor: float) -> None:
    problem = random_problem(seed)
    best = brute_force(problem)
    cutoff = factor * best if math.isfinite(best) else 1.0
    solution = solve(problem, cutoff_us=cutoff)
    if solution is None:
        assert best >= cutoff - 1e-6
    else:
        assert close(solution.objective_us, best)
        assert best < cutoff + 1e-6


def test_same_choice_twice_and_under_any_hash_seed() -> None:
    program = (
        "from autopar.solver import solve; from tests.solver.problems import hard_problem, random_problem\n"
        "print([solve(p).choice for p in [hard_problem(nodes=14)] + [random_problem(s) for s in range(20)]])"
    )
    root = Path(__file__).parents[2]
    said = {
        subprocess.run(
            [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PATH": ""},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    here = [solve(p).choice for p in [hard_problem(nodes=14)] + [random_problem(s) for s in range(20)]]
    assert said == {f"{here}\n"}  # and nothing else is printed: HiGHS keeps its banner to itself


def test_of_equal_choices_the_lowest() -> None:
    nodes = tuple(ProblemNode(name=f"n{i}", cost_us=(2.0, 1.0, 1.0, 1.0)) for i in range(3))
    problem = Problem(name="ties", nodes=nodes, values=())
    assert solve(problem).choice == (1, 1, 1)
    assert first_of_equals(problem, (3, 1, 2)) == (1, 1, 1)


def test_shared_conversion_is_paid_once() -> None:
    # a makes layout 0; b and c want 1: one conversion of 10, not two
    a, b, c = (ProblemNode(name=n, cost_us=(1.0, 100.0)) for n in "abc")
    value = ProblemValue(
        name="t", producer=0, made=(0, 1), reshard_us=((0.0, 10.0), (10.0, 0.0)),
        consumers=(Consumer(node=1, wants=(1, 0)), Consumer(node=2, wants=(1, 0))),
    )  # fmt: skip
    problem = Problem(name="shared", nodes=(a, b, c), values=(value,))
    assert solve(problem).objective_us == 1 + 1 + 1 + 10
    assert 3 < lower_bound_us(problem) <= 1 + 1 + 1 + 10


def test_communication_hides_behind_its_group() -> None:
    # 10 us of conversion beside 7 us of computation: 3 us stick out
    a = ProblemNode(name="a", cost_us=(1.0,))
    b = ProblemNode(name="b", cost_us=(7.0,), cover_us=(7.0,), group=0)
    value = ProblemValue(
        name="t", producer=0, made=(0,), reshard_us=((0.0, 10.0), (0.0, 0.0)), group=0,
        consumers=(Consumer(node=1, wants=(1,)),),
    )  # fmt: skip
    assert solve(Problem(name="hide", nodes=(a, b), values=(value,), groups=1)).objective_us == 1 + 7 + 3


def test_memory_price_is_the_slope() -> None:
    # 10 bytes less cost 20 us: 2 us a byte, for whole nodes at a time
    nodes = tuple(ProblemNode(name=f"n{i}", cost_us=(0.0, 20.0)) for i in range(4))
    held = tuple(NodeBytes(node=i, bytes=(10, 0)) for i in range(4))
    problem = Problem(name="price", nodes=nodes, values=(), moments=(Moment(name="m", limit_bytes=20, nodes=held),))
    solution = solve(problem)
    assert solution.objective_us == 40
    assert solution.memory_price_us_per_byte == pytest.approx(2.0)
    slack = replace(problem, moments=(replace(problem.moments[0], limit_bytes=40),))
    assert solve(slack).memory_price_us_per_byte == 0.0


def test_time_limit_keeps_the_choice_and_the_bound() -> None:
    problem = hard_problem(nodes=60)
    solution = solve(problem, time_limit_s=0.0)
    assert solution.status is Status.TIME_LIMIT
    assert evaluate(problem, solution.choice).feasible
    assert solution.bound_us <= solve(problem, gap=0.01).objective_us
    assert 0 < solution.gap < 1


def test_time_limit_in_the_mip_keeps_the_choice_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = highs.solve_mip
    monkeypatch.setattr(highs, "solve_mip", lambda model, **given: honest(model, **{**given, "time_limit_s": 0.0}))
    problem = hard_problem(nodes=40)
    solution = solve(problem, time_limit_s=100.0)
    assert solution.status is Status.TIME_LIMIT and "time limit" in solution.status.value
    assert evaluate(problem, solution.choice).objective_us == solution.objective_us
    monkeypatch.undo()
    assert solution.bound_us <= solve(problem).objective_us <= solution.objective_us


def test_time_limit_without_a_choice_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hard_problem(nodes=20)
    monkeypatch.setattr(api, "find_choice", lambda problem, start=None: (0,) * len(problem.nodes))
    tight = replace(problem, moments=(replace(problem.moments[0], limit_bytes=problem.moments[0].limit_bytes // 2),))
    solution = solve(tight, time_limit_s=0.0)
    assert (solution.status, solution.choice, solution.objective_us) == (Status.TIME_LIMIT, (), math.inf)


def test_gap_is_reported() -> None:
    problem = hard_problem(nodes=40)
    exact, loose = solve(problem), solve(problem, gap=0.2)
    assert exact.status is Status.OPTIMAL
    assert loose.bound_us <= exact.objective_us <= loose.objective_us
    assert loose.gap <= 0.2 and (loose.status is Status.FEASIBLE or loose.gap == 0.0)


def test_a_lying_solver_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = highs.solve_lp

    def lying(model, **options) -> LinearAnswer:  # type: ignore[no-untyped-def]
        answer = honest(model, **options)
        return replace(answer, objective=answer.objective + 1.0, bound=answer.bound + 1.0)

    monkeypatch.setattr(highs, "solve_lp", lying)
    with pytest.raises(CompilerError, match=r"the solver says .* us, the referee says"):
        solve(hard_problem(nodes=5, memory=False))


def test_a_failing_solver_gives_one_clear_error() -> None:
    model = build_model(hard_problem(nodes=5)).linear
    with pytest.raises(CompilerError, match=r"HiGHS .* refused option no_such_option"):
        highs.solve_lp(model, options={"no_such_option": 1})
    with pytest.raises(SolverError, match=r"HiGHS .* ended the LP with '.*' .* after \d+\.\d s"):
        highs.solve_lp(model, options={"simplex_iteration_limit": 0})


def test_bad_numbers_are_refused() -> None:
    a, b = ProblemNode(name="a", cost_us=(1.0,)), ProblemNode(name="b", cost_us=(1.0,))
    value = ProblemValue(
        name="t", producer=0, made=(0,), consumers=(Consumer(node=1, wants=(1,)),), reshard_us=((0.0, -1.0), (0.0, 0.0))
    )
    with pytest.raises(ValueError, match="t: reshard_us must not be negative"):
        solve(Problem(name="bad", nodes=(a, b), values=(value,)))
    with pytest.raises(ValueError, match="unknown solver backend 'abacus'; choose one of: highs, pulp-cbc"):
        solve(Problem(name="bad", nodes=(a, b), values=()), backend="abacus")


def test_no_finite_choice_is_infeasible_at_any_limit() -> None:
    a, b = ProblemNode(name="a", cost_us=(1.0,)), ProblemNode(name="b", cost_us=(1.0,))
    value = ProblemValue(
        name="t", producer=0, made=(0,), consumers=(Consumer(node=1, wants=(1,)),),
        reshard_us=((0.0, INFINITY), (0.0, 0.0)),
    )  # fmt: skip
    solution = solve(Problem(name="none", nodes=(a, b), values=(value,)))
    assert solution.status is Status.INFEASIBLE and solution.needed_bytes == 0


def test_empty_problem() -> None:
    solution = solve(Problem(name="empty", nodes=(), values=(), fixed_us=2.0))
    assert (solution.status, solution.choice, solution.objective_us) == (Status.OPTIMAL, (), 2.0)


def test_tolerance_cannot_let_a_choice_over_the_limit() -> None:
    # one byte over a limit of 2^40 is below any solver's tolerance; the referee sees it and a cut excludes the choice
    huge = 2**40
    nodes = tuple(ProblemNode(name=f"n{i}", cost_us=(0.0, 5.0 + i)) for i in range(3))
    held = (
        NodeBytes(node=0, bytes=(huge - 1, 3)), NodeBytes(node=1, bytes=(1, 0)), NodeBytes(node=2, bytes=(1, 0)),
    )  # fmt: skip
    problem = Problem(name="edge", nodes=nodes, values=(), moments=(Moment(name="m", limit_bytes=huge, nodes=held),))
    solution = solve(problem)
    assert solution.objective_us == brute_force(problem) == 5.0
