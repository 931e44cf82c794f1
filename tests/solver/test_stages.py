"""Blocks to stages: the optimum is that of trying everything, under the referee."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.schedule import ActionKind, Schedule
from autopar.ir.schedules import build_schedule
from autopar.ir.solution import Status
from autopar.ir.stages import (
    Assignment,
    Column,
    Run,
    Stage,
    StageObjective,
    StageProblem,
    StageSolution,
    device_cuts,
    evaluate_stages,
    even_split,
    in_flight,
)
from autopar.solver import mixes, solve_stages, stages_bound_us
from autopar.solver import stages as room
from tests.solver.stage_problems import BruteForce, line_cuts, random_column, random_stage_problem

SEEDS = st.integers(min_value=0, max_value=10**6)


def solved(problem: StageProblem) -> StageSolution:
    solution = solve_stages(problem)
    assert solution is not None
    if solution.assignment is not None:
        evaluation = evaluate_stages(problem, solution.assignment)
        assert evaluation == solution.evaluation and evaluation.feasible
        assert solution.step_us == evaluation.step_us >= solution.bound_us
        if problem.objective is StageObjective.STEP:
            assert stages_bound_us(problem) <= solution.bound_us * (1 + 1e-12)
    return solution


def limited(problem: StageProblem, limit_bytes: int) -> StageProblem:
    """The same limit on every stage."""
    return replace(problem, stages=tuple(replace(s, limit_bytes=limit_bytes) for s in problem.stages))


def check_against_everything(problem: StageProblem) -> None:
    brute, solution = BruteForce(problem), solved(problem)
    if brute.best is not None:
        assert solution.status is Status.OPTIMAL and solution.bound_us == solution.step_us
        assert solution.step_us == pytest.approx(brute.step_us, rel=1e-9)
        assert evaluate_stages(problem, brute.best).step_us == pytest.approx(brute.step_us, rel=1e-12)
        return
    assert solution.status is Status.INFEASIBLE
    if math.isinf(brute.needed_bytes):
        assert solution.needed_bytes is None
        return
    needed = solution.needed_bytes
    assert needed is not None and needed == brute.needed_bytes
    assert solved(limited(problem, needed)).status is Status.OPTIMAL
    if needed:
        assert solved(limited(problem, needed - 1)).status is Status.INFEASIBLE


@settings(max_examples=250, deadline=None, derandomize=True)
@given(SEEDS)
def test_optimum_is_that_of_trying_everything(seed: int) -> None:
    check_against_everything(random_stage_problem(seed))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS)
def test_optimum_of_cuts_that_are_decided(seed: int) -> None:
    """Seen to fail: the best of all cuts."""
    problem = random_stage_problem(seed)
    every = list(line_cuts(problem))
    if every:
        check_against_everything(replace(problem, cuts=random.Random(seed).choice(every)))


def test_decided_cuts_are_held_to() -> None:
    problem = next(p for p in map(random_stage_problem, range(99)) if len(p.stages) > 1 < len(list(line_cuts(p))))
    first, second = list(line_cuts(problem))[:2]
    counts = tuple(
        tuple((n, *(0,) * (len(r.columns) - 1)) for n, r in zip(held, problem.runs, strict=True)) for held in second
    )
    with pytest.raises(ValueError, match="stages must hold"):
        evaluate_stages(replace(problem, cuts=first), Assignment(counts=counts))
    with pytest.raises(ValueError, match="2 chunks"):
        replace(problem, cuts=first, chunks=2)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS)
def test_optimum_with_chunks(seed: int) -> None:
    check_against_everything(random_stage_problem(seed, chunks=2))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_optimum_by_knapsacks(seed: int) -> None:
    """Small contents are looked up among all mixes; here each is a search, which compares pairs from the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "MOST_MIXES", 0)
        patch.setattr(mixes, "PAIRS_FROM", 1)
        check_against_everything(random_stage_problem(seed))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS)
def test_a_knapsack_finds_the_best_of_all_mixes(seed: int) -> None:
    """Two runs, up to 9 instances in up to 5 columns, with and without a cap on finish."""
    rng = random.Random(seed)
    runs = tuple(
        Run(name="r", count=n, columns=tuple(random_column(rng, "c", False) for _ in range(rng.randint(2, 5))))
        for n in (rng.randint(1, 3), rng.randint(2, 6))
    )
    stage = Stage(limit_bytes=rng.randint(300, 900) * sum(r.count for r in runs), in_flight=rng.choice([0.5, 1.0, 2.0]))
    held = tuple(r.count for r in runs)
    every = []
    for row in mixes.all_mixes(held, [len(r.columns) for r in runs]).tolist():
        counts = (tuple(row[: len(runs[0].columns)]), tuple(row[len(runs[0].columns) :]))
        problem = StageProblem(name="one", runs=runs, stages=(stage,), ramp=0.0)
        every.append(evaluate_stages(problem, Assignment(counts=(counts,))))
    fitting = [(e.busy_us[0], e.finish_us[0]) for e in every if e.feasible]
    mixer = mixes.Mixer(runs, [range(len(r.columns)) for r in runs], stage)
    middle = sorted(f for _, f in fitting)[len(fitting) // 3] if fitting else 0.0
    for cap in (math.inf, middle):
        wanted = min((us for us, finish in fitting if finish <= cap), default=None)
        found = mixer.best(held, finish_cap=cap)
        assert (None if found.mix is None else found.mix.us) == wanted
        assert math.isinf(found.open_us)
        if wanted is not None:
            assert mixer.best(held, finish_cap=cap, cutoff_us=wanted * (1 - 1e-9)).mix is None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SEEDS)
def test_a_search_given_up_still_bounds(seed: int) -> None:
    problem = random_stage_problem(seed)
    brute = BruteForce(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "MOST_MIXES", 0)
        patch.setattr(room, "NODES", 1)
        solution = solved(problem)
    assert (solution.assignment is None) == (brute.best is None)
    if brute.best is not None:
        assert solution.bound_us * (1 - 1e-9) <= brute.step_us <= solution.step_us * (1 + 1e-9)
        assert (solution.status is Status.OPTIMAL) == (solution.bound_us == solution.step_us)


def test_a_search_given_up_says_so_where_it_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    worse = 0
    for seed in range(10, 33):
        rng = random.Random(seed)
        run = Run(name="r", count=17, columns=tuple(random_column(rng, "c", False) for _ in range(5)))
        stages = tuple(Stage(limit_bytes=rng.randint(3000, 6000), in_flight=3 - s) for s in range(3))
        problem = StageProblem(name="given up", runs=(run,), stages=stages, micro_batches=6)
        best = solved(problem)
        with monkeypatch.context() as patch:
            patch.setattr(room, "MOST_MIXES", 0)
            patch.setattr(room, "NODES", 1)
            found = solved(problem)
        if best.assignment is not None and found.step_us > best.step_us * (1 + 1e-9):
            worse += 1
            assert found.status is Status.FEASIBLE and found.bound_us <= best.step_us
    assert worse


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS)
def test_least_memory(seed: int) -> None:
    problem = replace(random_stage_problem(seed), objective=StageObjective.MEMORY)
    brute, solution = BruteForce(problem), solved(problem)
    if brute.best is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.evaluation is not None and solution.evaluation.peak_bytes == brute.peak_bytes
    assert solution.step_us == pytest.approx(brute.step_at_peak_us, rel=1e-9)


def worsened(column: Column, rng: random.Random) -> Column:
    """No better in anything."""
    more = [rng.choice([0, 0, 1, 50]) for _ in range(6)]
    return Column(
        name=column.name + "-",
        forward_us=column.forward_us + more[0],
        backward_us=column.backward_us + more[1],
        saved_bytes=column.saved_bytes + more[2],
        resident_bytes=column.resident_bytes + more[3],
        transient_bytes=column.transient_bytes + more[4],
        finish_us=column.finish_us + more[5],
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS)
def test_reductions_change_nothing(seed: int) -> None:
    """Columns that are nowhere better, another order of columns, and a run cut in two."""
    problem, rng = random_stage_problem(seed), random.Random(seed)
    wanted = solved(problem)
    runs = []
    for run in problem.runs:
        columns = [*run.columns, *(worsened(c, rng) for c in run.columns)]
        rng.shuffle(columns)
        first = rng.randint(0, run.count)
        runs += [Run(name=run.name, count=n, columns=tuple(columns)) for n in (first, run.count - first) if n]
    found = solved(replace(problem, runs=tuple(runs)))
    assert found.status is wanted.status and found.needed_bytes == wanted.needed_bytes
    assert found.step_us == pytest.approx(wanted.step_us, rel=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.integers(min_value=1, max_value=400))
def test_more_memory_is_never_slower(seed: int, more: int) -> None:
    problem = random_stage_problem(seed)
    wider = replace(problem, stages=tuple(replace(s, limit_bytes=s.limit_bytes + more) for s in problem.stages))
    assert solved(wider).step_us <= solved(problem).step_us * (1 + 1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS)
def test_cutoff_and_repetition(seed: int) -> None:
    problem = random_stage_problem(seed)
    solution = solved(problem)
    assert solve_stages(problem) == solution
    if solution.assignment is None:
        return
    assert solve_stages(problem, cutoff_us=solution.step_us * (1 - 1e-9)) is None
    again = solve_stages(problem, cutoff_us=solution.step_us * (1 + 1e-9))
    assert again is not None and again.step_us == pytest.approx(solution.step_us, rel=1e-9)


def transformer(stages: int, layers: int, limit_bytes: int, micro_batches: int) -> StageProblem:
    """Embedding, layers in 4 columns with less and less saved, head; 1F1B."""
    layer = tuple(
        Column(
            name=f"c{i}",
            forward_us=100,
            backward_us=200 + 35 * i + 4 * i * i,
            saved_bytes=1000 - 290 * i,
            resident_bytes=400 + 7 * i,
            transient_bytes=50 + 20 * (i > 0),
            finish_us=30 - 2 * i,
        )
        for i in range(4)
    )
    edge = (Column(name="edge", forward_us=40, backward_us=70, saved_bytes=100, resident_bytes=900, finish_us=60),)
    flights = in_flight("1f1b", stages=stages, micro_batches=micro_batches)
    return StageProblem(
        name="transformer",
        runs=(
            Run(name="embedding", count=1, columns=edge),
            Run(name="layer", count=layers, columns=layer),
            Run(name="head", count=1, columns=edge),
        ),
        stages=tuple(Stage(limit_bytes=limit_bytes, in_flight=f) for f in flights),
        micro_batches=micro_batches,
        boundary_us=5.0,
    )


def test_both_ways_to_find_mixes_agree_at_size(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = transformer(stages=6, layers=29, limit_bytes=15_000, micro_batches=12)
    wanted = solved(problem)
    assert wanted.status is Status.OPTIMAL and wanted.assignment is not None
    used = {c for stage in wanted.assignment.counts for c, n in enumerate(stage[1]) if n}
    assert len(used) > 1  # memory binds
    monkeypatch.setattr(room, "MOST_MIXES", 0)
    assert solved(problem).step_us == pytest.approx(wanted.step_us, rel=1e-9)


def test_a_deep_pipeline_is_solved_and_balanced() -> None:
    problem = transformer(stages=16, layers=62, limit_bytes=1_000_000, micro_batches=64)
    solution = solved(problem)
    assert solution.status is Status.OPTIMAL and solution.evaluation is not None and solution.assignment is not None
    assert [sum(held) for held in solution.assignment.cuts].count(4) >= 14
    assert max(solution.evaluation.busy_us) == 1200.0  # 4 layers of 300 µs; 62 on 16 stages can't do with 3 each


def test_first_stages_recompute_more_than_the_last() -> None:
    """1F1B holds p − s micro-batches on stage s: what is recomputed falls along the pipeline."""
    solution = solved(transformer(stages=4, layers=16, limit_bytes=13_000, micro_batches=16))
    assert solution.assignment is not None
    kept = [stage[1][0] for stage in solution.assignment.counts]
    assert kept[0] < kept[-1]


def column(forward_us: float, backward_us: float = 0.0, **more: float) -> Column:
    return Column(name="c", forward_us=forward_us, backward_us=backward_us, **more)  # type: ignore[arg-type]


def test_the_step_in_closed_form() -> None:
    runs = (
        Run(name="a", count=2, columns=(column(3, 5, saved_bytes=7, resident_bytes=11, transient_bytes=2),)),
        Run(name="b", count=1, columns=(column(1, 1, finish_us=9), column(10, 20, transient_bytes=5, finish_us=4))),
    )
    problem = StageProblem(
        name="closed form",
        runs=runs,
        stages=(Stage(limit_bytes=40, fixed_bytes=1, in_flight=1.5), Stage(limit_bytes=40, speed=2.0)),
        micro_batches=5,
        boundary_us=1.5,
    )
    # stage 0: two of a, 16 µs; 1 + 2·11 + 2 + 1.5·14 = 46 bytes. stage 1: b in its second column, 2·30 µs, finish 2·4.
    found = evaluate_stages(problem, Assignment(counts=(((2,), (0, 0)), ((0,), (0, 1)))))
    assert found.busy_us == (16, 60) and found.finish_us == (0, 8) and found.used_bytes == (46, 5)
    assert found.step_us == 4 * 60 + 76 + 2 * 1.5 + 8 and not found.feasible
    exposed = replace(problem, boundary_hidden=False)
    assert evaluate_stages(exposed, Assignment(counts=(((2,), (0, 0)), ((0,), (0, 1))))).step_us == found.step_us + 6
    # one of a each: 8 µs, 1 + 11 + 2 + ⌈10.5⌉ = 25 bytes; and 2·(8 + 2) µs, 11 + 2 + 7 bytes.
    best = solved(problem)
    assert best.assignment == Assignment(counts=(((1,), (0, 0)), ((1,), (1, 0))))
    assert best.evaluation is not None and best.evaluation.used_bytes == (25, 20)
    assert best.step_us == 4 * 20 + 28 + 3 + 18


def test_interleaved_step_and_split() -> None:
    """m·T + (p − 1)·T / v, with stages that hold equal parts."""
    runs = (
        Run(name="embedding", count=1, columns=(column(0),)),
        Run(name="layer", count=24, columns=(column(1, 2),)),
        Run(name="head", count=1, columns=(column(0),)),
    )
    problem = StageProblem(
        name="chunks", runs=runs, stages=(Stage(limit_bytes=0),) * 4, micro_batches=8, chunks=3
    )  # fmt: skip
    assert even_split(problem) == ((1, 2, 0), *(((0, 2, 0),) * 10), (0, 2, 1))
    assert solved(problem).step_us == pytest.approx(8 * 18 + 3 * 18 / 3)
    # 27 layers: three parts of one more, on stages that follow one another
    odd = replace(problem, runs=(runs[0], replace(runs[1], count=27), runs[2]))
    assert device_cuts(odd) == ((1, 7, 0), (0, 7, 0), (0, 7, 0), (0, 6, 1))
    assert even_split(replace(problem, runs=runs[:1] * 11)) is None
    none = solved(replace(problem, runs=runs[:1] * 11))
    assert none.status is Status.INFEASIBLE and none.needed_bytes is None
    assert even_split(replace(problem, runs=runs[:1] * 12)) == tuple(
        tuple(int(r == part) for r in range(12)) for part in range(12)
    )


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((((1,), (1,)),), "to 1 stages, wanted 2"),
        ((((2,), (0, 0)), ((0,), (1,))), "other runs or columns"),
        ((((3,), (0,)), ((-1,), (1,))), "negative"),
        ((((2,), (1,)), ((0,), (0,))), "stage 1 holds no instance"),
        ((((0,), (1,)), ((2,), (0,))), "out of order"),
        ((((1,), (1,)), ((1,), (0,))), "leaves out"),
        ((((1,), (0,)), ((1,), (0,))), "instances placed"),
    ],
)
def test_the_referee_refuses(counts: tuple[tuple[tuple[int, ...], ...], ...], message: str) -> None:
    runs = (Run(name="a", count=2, columns=(column(1),)), Run(name="b", count=1, columns=(column(1),)))
    problem = StageProblem(name="refused", runs=runs, stages=(Stage(limit_bytes=1),) * 2)
    with pytest.raises(ValueError, match=message):
        evaluate_stages(problem, Assignment(counts=counts))


def held_at_most(schedule: Schedule, stage: int) -> float:
    """Micro-batches that a stage has forwarded and not wholly backwarded, at most, in parts of its chunks."""
    now = most = 0
    for action in schedule.orders[stage]:
        if action.kind is ActionKind.FORWARD:
            now += 1
        elif action.kind is not ActionKind.BACKWARD_INPUT:
            now -= 1
        most = max(most, now)
    return most / schedule.chunks


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 6, 14, 23])
def test_in_flight_is_what_the_schedule_holds(name: str, stages: int, micro_batches: int) -> None:
    for chunks in (1, 2, 3) if name == "interleaved" else (1,):
        schedule = build_schedule(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
        found = in_flight(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
        assert found == tuple(held_at_most(schedule, s) for s in range(stages))


def test_bad_input_is_refused() -> None:
    run = Run(name="a", count=1, columns=(column(1),))
    with pytest.raises(ValueError, match="0 or more"):
        column(math.nan)
    with pytest.raises(ValueError, match="0 instances"):
        replace(run, count=0)
    with pytest.raises(ValueError, match="speed 0"):
        Stage(limit_bytes=1, speed=0.0)
    with pytest.raises(ValueError, match="0 stages"):
        StageProblem(name="p", runs=(run,), stages=())
    with pytest.raises(ValueError, match="ramp 2"):
        StageProblem(name="p", runs=(run,), stages=(Stage(limit_bytes=1),), ramp=2.0)
    with pytest.raises(ValueError, match="no count"):
        in_flight("dualpipe", stages=2, micro_batches=2)
