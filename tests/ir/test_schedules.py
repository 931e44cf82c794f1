"""Every schedule is complete, waits for nothing in vain, and holds what its paper says."""

from __future__ import annotations

import itertools

import pytest

from autopar.cost_model.held import in_flight
from autopar.ir.schedule import Action, ActionKind, Schedule, check_schedule
from autopar.ir.schedules import V_SHAPED, build_schedule, schedule_names

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


@pytest.mark.parametrize("name", schedule_names())
def test_every_size_runs(name: str) -> None:
    chunks = {"interleaved": (1, 2, 3), **dict.fromkeys(V_SHAPED, (2,))}.get(name, (1,))
    stages = (1,) if name == "none" else (1, 2, 3, 4, 5)
    for p, v, m in itertools.product(stages, chunks, range(1, 14)):
        check_schedule(build_schedule(name, stages=p, chunks=v, micro_batches=m))


def test_1f1b_holds_p_minus_i() -> None:
    for p, m in ((4, 8), (3, 3), (5, 20)):
        schedule = build_schedule("1f1b", stages=p, micro_batches=m)
        assert [in_flight(schedule, i) for i in range(p)] == [p - i for i in range(p)]


def test_gpipe_holds_all_and_zero_bubble_what_its_paper_says() -> None:
    held = {
        name: max(in_flight(build_schedule(name, stages=4, micro_batches=16), i) for i in range(4))
        for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")
    }
    assert held == {"gpipe": 16, "1f1b": 4, "zb-h1": 4, "zb-h2": 7}  # H2: 2p - 1


@pytest.mark.parametrize("p", range(1, 9))
def test_v_holds_what_the_first_stage_of_1f1b_does(p: int) -> None:
    """2p halves of a stage's layers, on every stage; no more with few micro-batches."""
    for m in (2 * p, 2 * p + 1, 5 * p):
        schedule = build_schedule("zb-v", stages=p, micro_batches=m, chunks=2)
        assert [in_flight(schedule, i) for i in range(p)] == [2 * p] * p
    for m in range(1, 2 * p):
        schedule = build_schedule("zb-v", stages=p, micro_batches=m, chunks=2)
        assert max(in_flight(schedule, i) for i in range(p)) <= min(2 * p, 2 * m)


@pytest.mark.parametrize("p", range(1, 17))
def test_timetables_hold_a_half_and_a_third(p: int) -> None:
    """Halves of a stage, of the 2p that 1F1B's first stage holds."""
    held = {
        name: max(in_flight(build_schedule(name, stages=p, micro_batches=4 * p, chunks=2), i) for i in range(p))
        for name in ("v-half", "v-min")
    }
    assert held == {"v-half": {1: 2, 2: 4, 3: 4}.get(p, p + 3), "v-min": 2 * -(-(p - 1) // 3) + 2}


def test_v_goes_down_and_up_again() -> None:
    v = build_schedule("zb-v", stages=3, micro_batches=6, chunks=2)
    assert [v.place(g) for g in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert all(v.part(*v.place(g)) == g for g in range(6))
    assert " ".join(map(str, build_schedule("zb-v", stages=2, micro_batches=4, chunks=2).orders[1])) == (
        "F0.0 F1.0 F0.1 F1.1 I1.0 W1.0 F0.2 I0.0 W0.0 F1.2 I1.1 W1.1 F0.3 I0.1 W0.1 F1.3 I1.2 W1.2 "
        "I0.2 I1.3 I0.3 W0.2 W1.3 W0.3"
    )


def test_order_of_1f1b_and_interleaved() -> None:
    assert " ".join(map(str, build_schedule("1f1b", stages=2, micro_batches=3).orders[0])) == (
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    )
    first = build_schedule("interleaved", stages=2, micro_batches=2, chunks=2).orders[0]
    assert " ".join(map(str, first)) == "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"


def test_parts_and_places() -> None:
    loop = build_schedule("interleaved", stages=3, micro_batches=3, chunks=2)
    assert [loop.place(g) for g in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert all(loop.part(*loop.place(g)) == g for g in range(6))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((Action(F, 0, 0),), "lacks a pass"),
        ((Action(B, 0, 0), Action(F, 0, 0)), "waits for ever: stage 0 at B0.0"),
        ((Action(F, 0, 0), Action(F, 0, 0)), "twice"),
    ],
)
def test_the_check_sees(order: tuple[Action, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_schedule(Schedule(name="x", stages=1, chunks=1, micro_batches=1, orders=(order,)))


def test_sizes_that_a_schedule_lacks() -> None:
    with pytest.raises(ValueError, match="wanted one of none, gpipe"):
        build_schedule("zigzag")
    with pytest.raises(ValueError, match="none: 2 stages"):
        build_schedule("none", stages=2)
    with pytest.raises(ValueError, match="interleaved takes more"):
        build_schedule("1f1b", stages=2, chunks=2)
    with pytest.raises(ValueError, match="zb-v: 1 chunks: wanted 2"):
        build_schedule("zb-v", stages=2)
