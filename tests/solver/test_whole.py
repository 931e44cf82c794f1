"""The whole model's plan equals brute force over every choice, and bounds hold: small random problems in parts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.ir.parts import Amount, Frame, PartedProblem, Term
from autopar.ir.problem import Problem, ProblemNode
from autopar.ir.stages import Stage, evaluate_stages
from autopar.solver import PartsModel, WholeSearch, minimise_memory, solve_stages, whole, with_memory
from tests.solver.parts import every_choice, random_parts

SEEDS = range(240)


def chunks_of(parted: PartedProblem, frame: Frame) -> tuple[int, ...]:
    stages, blocks = len(frame.stages), parted.counts[1]
    if stages == 1 or blocks % stages or frame.micro_batches < stages:
        return (1,)
    return tuple(v for v in range(1, blocks // stages + 1) if blocks // stages % v == 0)


def brute_force(parted: PartedProblem, frame: Frame) -> float:
    """Every choice as a column of every part, those that agree together; the assignment to stages is exact."""
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for choice in every_choice(parted):
        groups.setdefault(parted.agreed(choice), []).append(choice)
    best = math.inf
    for group in groups.values():
        for chunks in chunks_of(parted, frame):
            passed = parted.passed_bytes(group[0])
            found = solve_stages(frame.problem(parted, parted.runs_of(group), chunks, passed))
            assert found is not None
            best = min(best, found.step_us)
    return best


def searched(parted: PartedProblem, frame: Frame, like: tuple[PartsModel, ...] = ()) -> WholeSearch:
    search = WholeSearch(PartsModel(parted, like), frame, chunks_of(parted, frame))
    while search.step(search.best.step_us if search.best else math.inf, 0.0):
        pass
    return search


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_is_the_optimum(seed: int):
    parted, frame = random_parts(seed)
    best = brute_force(parted, frame)
    search = searched(parted, frame)
    assert (search.best.step_us if search.best else math.inf) == pytest.approx(best, rel=1e-6)
    assert search.least_us() <= best * (1 + 1e-9)
    if search.best is not None:
        solution = search.best
        assert solution.assignment.assignment is not None
        cost = evaluate_stages(solution.problem, solution.assignment.assignment)
        assert cost.feasible and cost.step_us == solution.step_us


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_and_plans_enclose_the_optimum(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Without trying every choice: no bound is above it, at any time, and no plan below."""
    monkeypatch.setattr(whole, "EVERY", 0)
    parted, frame = random_parts(seed)
    best = brute_force(parted, frame)
    search = WholeSearch(PartsModel(parted), frame, chunks_of(parted, frame))
    assert search.least_us() <= best * (1 + 1e-7)
    while search.step(math.inf, 0.0):
        assert search.least_us() <= best * (1 + 1e-7)
        assert search.best is None or search.best.step_us >= best * (1 - 1e-7)


@pytest.mark.parametrize("seed", range(0, 240, 8))
def test_sharing_arrays_changes_nothing(seed: int):
    parted, frame = random_parts(seed)
    cheaper = tuple(replace(n, cost_us=tuple(us / 2 for us in n.cost_us)) for n in parted.problem.nodes)
    other = replace(parted, problem=replace(parted.problem, nodes=cheaper))
    first = PartsModel(other)
    assert PartsModel(parted, [first]).form == first.form
    apart, shared = searched(parted, frame), searched(parted, frame, (first,))
    assert (apart.best is None) == (shared.best is None)
    if apart.best is not None and shared.best is not None:
        assert shared.best.step_us == pytest.approx(apart.best.step_us, rel=1e-9)


@pytest.mark.parametrize("seed", range(0, 240, 8))
def test_what_fits_an_even_cut_fits(seed: int):
    """With the least memory that `with_memory` finds, and one choice for all, an even cut is possible."""
    parted, frame = random_parts(seed)
    if parted.counts[1] % len(frame.stages):
        return
    needs = minimise_memory(with_memory(parted, frame))
    if needs is None:
        assert not every_choice(parted)
        return
    roomy = replace(frame, stages=tuple(replace(s, limit_bytes=needs.needed_bytes) for s in frame.stages))
    assert math.isfinite(brute_force(parted, roomy))


def unlike_stages() -> tuple[PartedProblem, Frame]:
    """Blocks that are faster where they save more and finish a step late, on eight stages: the last have room."""
    costs = ((0.0,), (12.0, 16.0), (200.0,), (0.0,))
    nodes = tuple(ProblemNode(name=f"n{i}", cost_us=us) for i, us in enumerate(costs))
    homes = ((0,), (1,), (1,), (2,))
    amounts = (Amount.FORWARD, Amount.FORWARD, Amount.ONCE, Amount.FORWARD)
    terms = [Term(i, homes[i], amount, "", costs[i]) for i, amount in enumerate(amounts)]
    terms.append(Term(1, (1,), Amount.SAVED, "", (640.0, 0.0)))
    parted = PartedProblem(
        problem=Problem(name="unlike", nodes=nodes, values=()), parts=("first", "block", "last"), counts=(1, 16, 1),
        homes=homes, runs=((0, 1), (1, 16), (2, 1)), terms=tuple(terms), paid=(), ties=(),
    )  # fmt: skip
    return parted, Frame(stages=(Stage(limit_bytes=300),) * 8, micro_batches=4)


def test_stages_with_memory_of_their_own_tighten_the_bound(monkeypatch: pytest.MonkeyPatch):
    """Seen to fail: where only the stages that set the pace were looked at, a Llama of 405 B kept a gap of 1.2 %."""
    monkeypatch.setattr(whole, "EVERY", 0)
    gaps = []
    for tighter in (0, 4):
        monkeypatch.setattr(whole, "TIGHTER", tighter)
        search = WholeSearch(PartsModel(unlike_stages()[0]), unlike_stages()[1], (1,))
        while search.step(math.inf, 0.0):
            pass
        assert search.best is not None
        gaps.append(1 - search.least_us() / search.best.step_us)
    assert gaps[1] < 0.5 * gaps[0]
