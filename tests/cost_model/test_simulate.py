"""The simulated step against closed forms, and what must never happen when work grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.simulate import simulate
from autopar.cost_model.tasks import Overlap, Runner
from autopar.ir.schedules import build_schedule
from autopar.ir.timeline import Timeline
from autopar.ir.work import Section, StageWork, Task
from tests.cost_model.slow_replay import SlowReplay, most_held


def tasks(*us: float, kind: str = "matmul") -> tuple[Task, ...]:
    return tuple(Task(name=f"{kind} {i}", kind=kind, us=u) for i, u in enumerate(us))


def comm(us: float, *after: int, late: bool = False) -> Task:
    return Task(name="reduce", kind="all-reduce", us=us, stream="comm:dp", after=after, late=late)


def work(forward: float = 100.0, backward: float = 200.0, **more: object) -> StageWork:
    return StageWork(
        forward=tasks(forward),
        backward=tasks(backward),
        backward_input=tasks(backward / 2),
        backward_weight=tasks(backward / 2),
        **more,  # type: ignore[arg-type]
    )


def step(name: str, p: int, m: int, v: int = 1, one: StageWork | None = None, **more: object) -> Timeline:
    schedule = build_schedule(name, stages=p, micro_batches=m, chunks=v)
    return simulate(schedule, [[one or work(100 / v, 200 / v)] * v] * p, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (4, 9), (8, 64)])
def test_bubbles(p: int, m: int) -> None:
    ideal = m * 300.0
    for name in ("gpipe", "1f1b"):
        assert step(name, p, m).step_us == pytest.approx(ideal * (1 + (p - 1) / m))
    # A third: (p-1)(F + I - W) of the halves, 100 each, against (p-1)·300.
    assert step("zb-h1", p, max(m, 2 * p)).step_us == pytest.approx(max(m, 2 * p) * 300 + (p - 1) * 100)
    assert step("zb-h2", p, max(m, 2 * p)).step_us == pytest.approx(max(m, 2 * p) * 300)
    assert step("zb-v", p, max(m, 2 * p), 2).step_us == pytest.approx(max(m, 2 * p) * 300)
    for v in (2, 4):
        assert step("interleaved", p, m, v).step_us == pytest.approx(ideal * (1 + (p - 1) / (v * m)))


@pytest.mark.parametrize("p", range(2, 17))
def test_bubbles_of_timetables(p: int) -> None:
    """Of 6(p - 1) halves' passes, 50 each: at most a half, and about two thirds, however many micro-batches."""
    for m in (4 * p, 6 * p + 1):
        half, least = ((step(name, p, m, 2).step_us - m * 300) / 50 for name in ("v-half", "v-min"))
        assert half == pytest.approx(4 if p == 2 else 3 * (p - 1) - (p % 2 == 0))
        assert least == pytest.approx(4 * p - (3 if p % 3 == 0 else 5))


def test_micro_batches_that_are_no_multiple_of_the_stages() -> None:
    assert step("interleaved", 4, 7, 2).step_us == pytest.approx(7 * 300 * (1 + 3 / (2 * 7)))
    # 10 = 5 + 5: the second group adds no wait.
    assert step("interleaved", 4, 10, 2).step_us == pytest.approx(10 * 300 * (1 + 3 / (2 * 10)))


def test_a_joint_end_makes_the_second_zero_bubble_schedule_wait() -> None:
    # Stages end (p-1)·F apart; an optimizer that needs all of them waits for the last.
    assert step("zb-h2", 4, 16, joint_end=True).step_us == pytest.approx(16 * 300 + 3 * 100)
    assert step("zb-v", 4, 16, 2, joint_end=True).step_us == pytest.approx(16 * 300 + 3 * 50)  # of half a stage
    assert step("1f1b", 4, 16, joint_end=True).step_us == step("1f1b", 4, 16).step_us


def test_sends() -> None:
    one = work(send_us=10.0)
    # There and back beside work: 2(p-1) sends on the way. Waited for: each stage has one more 10 a micro-batch.
    assert step("1f1b", 2, 1, one=one).step_us == 600 + 2 * 10
    assert step("1f1b", 2, 8, one=one, overlap_sends=False).step_us == pytest.approx((8 + 1) * (300 + 10))
    # Interleaved: v times as many sends, of 10 each.
    four = step("interleaved", 4, 8, 4, work(25, 50, send_us=10.0), overlap_sends=False)
    one_chunk = step("interleaved", 4, 8, 1, work(100, 200, send_us=10.0), overlap_sends=False)
    sent = [t.stage_breakdown_us[1]["exposed:send"] for t in (four, one_chunk)]
    assert sent == [8 * 2 * 4 * 10, 8 * 2 * 10]


def test_a_slow_link_is_a_queue() -> None:
    # Eight sends of 300 one after the other: the last arrives at 100 + 8·300, then its way there and back remains.
    t = step("gpipe", 2, 8, one=work(send_us=300.0))
    assert t.ends[1][7] == 100 + 8 * 300 + 100


def test_a_straggler_sets_the_pace() -> None:
    schedule = build_schedule("1f1b", stages=4, micro_batches=16)
    slow = work(130, 260)
    t = simulate(schedule, [[work()], [work()], [slow], [work()]])
    # m times the slow stage; two forwards before it and two backwards after it; and it waits for the last stage's first
    # backward (300 - 130) and for its last one (300 - 260).
    assert t.step_us == pytest.approx(16 * 390 + 2 * 100 + 2 * 200 + 170 + 40)
    assert min(b["bubble"] for b in t.stage_breakdown_us) == pytest.approx(t.step_us - 16 * 390)


def test_side_by_side() -> None:
    # 10 | 20 waits for it beside 30: 40; then 5 that waits for both.
    listed = (*tasks(10), comm(20, 0), *tasks(30), Task(name="x", kind="norm", us=5, after=(1,)))
    ran = Runner(Overlap()).run(listed)
    assert ran.us == 45
    assert ran.spent == {"compute:matmul": 40, "compute:norm": 5, "hidden:all-reduce": 20}
    # Slow-downs: from 10 on, 20 of communication at 1/1.25 take 25, and of the computation 25/1.5 are done by then.
    ran = Runner(Overlap(compute=1.5, communication=1.25)).run(listed)
    beside = 25.0
    assert ran.us == pytest.approx(10 + beside + (30 - beside / 1.5) + 5)
    assert ran.spent["slow-down"] == pytest.approx(beside - beside / 1.5)
    assert sum(us for what, us in ran.spent.items() if not what.startswith("hidden:")) == pytest.approx(ran.us)


def test_communication_that_is_waited_for_is_exposed() -> None:
    ran = Runner(Overlap(compute=2.0)).run((*tasks(10), comm(20, 0), Task(name="x", kind="norm", us=5, after=(1,))))
    assert (ran.us, ran.spent["exposed:all-reduce"]) == (35, 20)


def test_sections_run_by_themselves_once_each() -> None:
    block = (*tasks(10), comm(4, 0))
    runner = Runner(Overlap())
    ran = runner.run((Section(name="a", tasks=block), *tasks(1), Section(name="b", tasks=block)))
    assert ran.us == 14 + 1 + 14
    assert [s.start_us for s in ran.spans] == [0, 10, 14, 15, 25]
    assert runner.run(block) is runner.run(block)


def test_a_task_that_waits_for_a_later_one() -> None:
    with pytest.raises(ValueError, match="not before it in the list"):
        Runner(Overlap()).run((comm(1, 1), *tasks(1)))
    with pytest.raises(ValueError, match="wanted a finite number"):
        Task(name="x", kind="matmul", us=float("nan"))


def test_gradients_beside_what_is_left_of_the_backward() -> None:
    last = (*tasks(100), comm(90, 0, late=True), *tasks(100), comm(90, 2, late=True))
    t = step("none", 1, 4, one=work(last_backward=last, end=tasks(7, kind="optimizer")))
    # The second reduction starts when the first is done, after 200 of the backward: 90 of it is exposed.
    assert t.step_us == 4 * 300 + 90 + 7
    assert t.breakdown_us == pytest.approx(
        {"compute:matmul": 1200, "exposed:all-reduce": 90, "hidden:all-reduce": 90, "optimizer": 7, "bubble": 0}
    )


def test_each_chunk_synchronises_beside_the_others() -> None:
    one = work(100, 200, sync=(comm(50),))
    # The second chunk's backwards end before the first chunk's 200 · 2 begin.
    beside = step("interleaved", 2, 2, 2, one)
    apart = step("interleaved", 2, 2, 2, one, overlap_sync=False)
    assert apart.step_us - beside.step_us == 50
    assert beside.breakdown_us["hidden:all-reduce"] == beside.breakdown_us["exposed:all-reduce"] == 50


def test_breakdown_adds_up() -> None:
    one = work(send_us=3.0, sync=(comm(50),), end=tasks(9, kind="optimizer"), begin=(comm(11),))
    for name, v in (("1f1b", 1), ("interleaved", 2)):
        t = step(name, 4, 8, v, one, overlap=Overlap(compute=1.1))
        for spent in t.stage_breakdown_us:
            assert sum(us for what, us in spent.items() if not what.startswith("hidden:")) == pytest.approx(t.step_us)


def test_memory_of_stages() -> None:
    one = work(resident_bytes=1000, held_bytes=100, transient_bytes=10)
    for p, m in ((4, 8), (4, 2)):
        t = step("1f1b", p, m, one=one)
        assert [s.peak_bytes for s in t.memory] == [1000 + 10 + 100 * min(p - i, m) for i in range(p)]
    h1 = step("zb-h1", 4, 8, one=replace(one, held_for_weights_bytes=40))
    assert h1.memory[0].peak_bytes == 1000 + 10 + 4 * 100
    assert h1.memory[3].peak_bytes == 1000 + 10 + 100 + 3 * 40
    assert step("none", 1, 2, one=replace(one, end_bytes=500)).memory[0].at == "end of step"


def test_work_that_does_not_fit_the_schedule() -> None:
    with pytest.raises(ValueError, match="2 stages of 1 chunks, the work is for"):
        simulate(build_schedule("1f1b", stages=2, micro_batches=2), [[work()]])
    with pytest.raises(ValueError, match="halves of a backward apart"):
        simulate(build_schedule("zb-h1", stages=1, micro_batches=1), [[StageWork(forward=tasks(1), backward=tasks(1))]])


US = st.floats(0, 1000, allow_nan=False)
NAMES = st.sampled_from(
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved", 2),
        ("zb-h1", 1),
        ("zb-h2", 1),
        ("zb-v", 2),
        ("v-half", 2),
        ("v-min", 2),
    ]
)


@st.composite
def uneven(draw: st.DrawFn) -> tuple[str, int, int, int, list[list[StageWork]]]:
    name, v = draw(NAMES)
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rows = [
        [
            work(
                draw(US), draw(US), send_us=draw(US), sync=(comm(draw(US)),), end=tasks(draw(US)),
                held_bytes=draw(st.integers(0, 99)), resident_bytes=draw(st.integers(0, 99)),
            )
            for _ in range(v)
        ]
        for _ in range(p)
    ]  # fmt: skip
    return name, p, m, v, rows


@settings(max_examples=150, deadline=None)
@given(uneven(), st.data())
def test_more_work_is_never_faster_and_more_bytes_never_less(
    drawn: tuple[str, int, int, int, list[list[StageWork]]], data: st.DataObject
) -> None:
    name, p, m, v, rows = drawn
    schedule = build_schedule(name, stages=p, micro_batches=m, chunks=v)
    s, c = data.draw(st.integers(0, p - 1)), data.draw(st.integers(0, v - 1))
    sends, joint = data.draw(st.booleans()), data.draw(st.booleans())
    one = rows[s][c]
    field = data.draw(
        st.sampled_from(["forward", "backward", "sync", "end", "send_us", "held_bytes", "resident_bytes"])
    )
    more: dict[str, object] = {"send_us": one.send_us + 50, "held_bytes": one.held_bytes + 5}
    more |= {"resident_bytes": one.resident_bytes + 5, "sync": (comm(one.sync[0].us + 50),), "forward": tasks(999.0)}
    more |= {"end": tasks(one.end[0].us + 50), "backward": tasks(one.backward[0].us + 50)}
    if field == "forward":
        more["forward"] = tasks(one.forward[0].us + 50)
    grown = [list(row) for row in rows]
    grown[s][c] = replace(one, **{field: more[field]})  # type: ignore[arg-type]
    before = simulate(schedule, rows, overlap_sends=sends, joint_end=joint)
    after = simulate(schedule, grown, overlap_sends=sends, joint_end=joint)
    assert after.step_us >= before.step_us - 1e-6
    assert all(a.peak_bytes >= b.peak_bytes for a, b in zip(after.memory, before.memory, strict=True))


@settings(max_examples=200, deadline=None)
@given(uneven(), st.booleans(), st.data())
def test_every_time_is_the_slow_replays(
    drawn: tuple[str, int, int, int, list[list[StageWork]]], sends: bool, data: st.DataObject
) -> None:
    """Starts, ends, step and memory, with a first forward and a last backward of their own."""
    name, p, m, v, rows = drawn
    schedule = build_schedule(name, stages=p, micro_batches=m, chunks=v)
    size = st.integers(0, 50)

    def special(one: StageWork) -> StageWork:
        own = {
            "first_forward": tasks(data.draw(US)) if data.draw(st.booleans()) else (),
            "last_backward": tasks(data.draw(US)) if data.draw(st.booleans()) else (),
            "begin": tasks(data.draw(US)) if data.draw(st.booleans()) else (),
            "transient_bytes": data.draw(size), "end_bytes": data.draw(size),
        }  # fmt: skip
        left = data.draw(st.one_of(st.none(), st.integers(0, one.held_bytes)))
        return replace(one, held_for_weights_bytes=left, sync=(), end=(), **own)  # type: ignore[arg-type]

    works = [[special(one) for one in row] for row in rows]
    slow, fast = SlowReplay(schedule, works, sends), simulate(schedule, works, overlap_sends=sends)
    for ours, theirs in ((fast.starts, slow.starts), (fast.ends, slow.ends)):
        assert [list(x) for x in ours] == [pytest.approx(x, rel=1e-9, abs=1e-9) for x in theirs]
    first = [0.0 if any(w.begin for w in row) else times[0] for row, times in zip(works, slow.starts, strict=True)]
    assert fast.step_us == pytest.approx(max(map(float.__sub__, slow.free, first)), rel=1e-9, abs=1e-9)
    assert [s.peak_bytes for s in fast.memory] == [most_held(schedule, s, row) for s, row in enumerate(works)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(US, st.sampled_from(["compute", "comm:tp", "comm:dp", "host"]), st.integers(0, 5)), min_size=1)
)
def test_lists_never_shrink(rows: list[tuple[float, str, int]]) -> None:
    def listed(more: float) -> tuple[Task, ...]:
        return tuple(
            Task(
                name=str(i), kind="copy", us=us + (more if i == len(rows) // 2 else 0.0), stream=stream,
                after=(i - back,) if 0 < back <= i else (),
            )
            for i, (us, stream, back) in enumerate(rows)
        )  # fmt: skip

    before, after = Runner(Overlap()).run(listed(0.0)), Runner(Overlap()).run(listed(25.0))
    assert after.us >= before.us - 1e-6
    assert before.us <= sum(us for us, _, _ in rows) + 1e-6
    assert sum(us for what, us in before.spent.items() if not what.startswith("hidden:")) == pytest.approx(before.us)


def test_spans_are_limited() -> None:
    t = step("1f1b", 4, 8)
    assert len(list(t.spans())) == 4 * 16
    assert len(list(t.spans(limit=16))) == 16
    assert len(list(t.actions(limit=16))) == 16
    assert "step 3300.0 µs, 1f1b, 4 stages" in str(t)
