"""The step of plans with stages over time: predicted as it is emitted, and measured beside that."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

import autopar
from autopar import api, staging
from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.stage_work import stage_works
from autopar.errors import PlanError, UserError
from autopar.ir.account import StagesReport
from autopar.ir.options import Options
from autopar.ir.plan import PlanCluster, PlanSchedule
from autopar.ir.schedule import ActionKind
from autopar.ir.work import Section, Tasks
from autopar.present.trace import trace_events
from tests.models import tiny
from tests.test_staging import SMALL, planned, short


def us_of(tasks: Tasks) -> float:
    return sum(us_of(t.tasks) if isinstance(t, Section) else t.us for t in tasks)


@pytest.mark.parametrize(
    ("name", "pins", "micro_batches", "schedules"),
    [
        ("skip", {"pp": 3, "dp": 1, "tp": 1}, 4, ("1f1b",)),
        ("tied", {"pp": 2, "dp": 2, "tp": 1, "*weight": "dp:S(0)"}, 3, ("zb-h1",)),
        ("tied", {"pp": 1, "dp": 2, "tp": 1}, 3, ()),
        ("tied", SMALL, 4, ("interleaved",)),
    ],
)
def test_the_emitted_step_takes_what_was_priced(name, pins, micro_batches, schedules):
    """Within a tenth, and a fifth where stages have several parts: each makes the masks that it reads, which are priced
    once, and what waits for the end of a step is priced in every micro-batch."""
    captured, plan = planned(name, pins, micro_batches, schedules=schedules)
    timeline = api.timeline_captured(captured, plan)
    assert timeline.schedule.name == {"accumulate": "none"}.get(plan.schedule.name, plan.schedule.name)
    assert timeline.step_us == pytest.approx(plan.predicted.step_time_us, rel=0.2 if plan.schedule.chunks > 1 else 0.1)
    exposed = {kind for kind in timeline.breakdown_us if kind.startswith("exposed:")}
    several = max(plan.mesh.axes.values()) > 1
    gathers = several and any("all_gather" in step for c in plan.conversions for step in c.steps)
    assert ("exposed:send" in exposed) is (pins["pp"] > 1) and ("exposed:all-gather" in exposed) is gathers
    spans = [e for e in trace_events(timeline)["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == set(range(pins["pp"]))
    forwards = [e for e in spans if e["cat"] == ActionKind.FORWARD.name.lower()]
    assert len(forwards) == pins["pp"] * plan.schedule.chunks * micro_batches


def test_halves_add_up_to_the_whole():
    """A backward in halves runs the ops of the whole one, each once."""
    captured, plan = planned("skip", SMALL, 4, schedules=("1f1b",))
    assert plan.cluster.spec is not None
    halved = replace(plan, schedule=PlanSchedule(name="zb-h1", micro_batches=4))
    rows = [
        stage_works(captured, staging.staged(captured, p).program, p, plan.cluster.spec, 8) for p in (plan, halved)
    ]  # fmt: skip
    for (whole,), (halves,) in zip(*rows, strict=True):
        assert us_of(halves.forward) == us_of(whole.forward)
        assert us_of(halves.backward_input) + us_of(halves.backward_weight) == pytest.approx(us_of(whole.backward))
        assert 0 < us_of(halves.backward_weight) < us_of(whole.backward)
    assert whole.send_us == 0 and rows[0][0][0].send_us > 0


def test_a_plan_without_its_cluster_has_no_timeline():
    captured, plan = planned("skip", SMALL, 4)
    with pytest.raises(PlanError, match="search again"):
        api.timeline_captured(captured, replace(plan, cluster=PlanCluster(name="x", devices=2)))


def reported(folder: str) -> tuple[str, StagesReport]:
    model, inputs = tiny("llama")
    options = Options(pins=SMALL, micro_batches=4, schedules=("zb-h1",))
    module = autopar.compile(model, load_cluster("rtx4090:2"), example_inputs=inputs, options=options)
    with pytest.raises(UserError, match="no step was measured"):
        module.report()
    module.measure(steps=2)
    for given in (inputs, inputs, short(inputs, 3), inputs):  # the short one is not measured
        module.step(**given)
    return str(module.report(f"{folder}/stages.json")), module.report()


@pytest.mark.ranks
def test_what_the_actions_of_all_stages_take(tmp_path):
    text, report = autopar.launch(reported, ranks=2, args=(str(tmp_path),))
    assert msgspec.json.decode((tmp_path / "stages.json").read_bytes(), type=StagesReport).rows
    assert report.steps == 2 and (report.rank, report.ranks) == (0, 2)
    assert report.schedule == "zb-h1: 2 stages × 1 chunks, 4 micro-batches"
    assert [(r.stage, r.what) for r in report.rows] == [
        (s, what) for s in range(2) for what in ("F0", "I0", "W0", "before", "after", "waits", "step")
    ]
    for stage in range(2):
        rows = {r.what: r for r in report.rows if r.stage == stage}
        assert all(rows[a].calls == 4 and rows[a].predicted_us > 0 < rows[a].measured_us for a in ("F0", "I0", "W0"))
        inside = sum(us.measured_us for what, us in rows.items() if what != "step")
        assert inside <= rows["step"].measured_us * 1.01  # of two steps the median is the mean
        priced = sum(us.predicted_us for what, us in rows.items() if what != "step")
        assert priced == pytest.approx(rows["step"].predicted_us)
        assert rows["waits"].measured_us > 0
    assert "stage 1 W0" in text and "measured/predicted" in text
