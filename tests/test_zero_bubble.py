"""Backwards in halves: zero-bubble schedules have one device's numbers, and are priced as they run."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from autopar import api, staging
from autopar.codegen.stages import lower as stages
from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.simulate import simulate
from autopar.errors import CompilerError, UserError
from autopar.ir.graph import Phase
from autopar.ir.halves import late_nodes
from autopar.ir.options import Options
from autopar.ir.plan import PlanSchedule, all_ranks
from autopar.ir.schedules import build_schedule
from autopar.ir.stages import Halves, in_flight, ramp_of
from autopar.ir.work import StageWork, Task
from autopar.present import arguments
from autopar.runtime.pipeline_step import Step
from autopar.runtime.threads import run_threads
from tests.test_staging import SMALL, made, planned


def in_halves(name: str, pins: dict, micro_batches: int, schedule: str):
    """A 1F1B plan whose backwards are in halves."""
    captured, plan = planned(name, pins, micro_batches, schedules=("1f1b",))
    return captured, replace(plan, schedule=PlanSchedule(name=schedule, micro_batches=micro_batches))


@pytest.mark.parametrize(
    ("name", "pins", "micro_batches", "schedule"),
    [
        ("tied", {"pp": 2, "dp": 2, "tp": 1, "*weight": "dp:S(0)"}, 3, "zb-h1"),
        ("tied", {"pp": 4, "dp": 1, "tp": 2}, 6, "zb-h2"),
        ("skip", {"pp": 3, "dp": 1, "tp": 1}, 2, "zb-h1"),  # fewer micro-batches than stages
        ("t5", SMALL, 4, "zb-h2"),
        ("gpt2", SMALL, 3, "zb-h1"),
    ],
)
def test_all_numbers_equal_one_devices(name, pins, micro_batches, schedule):
    captured, plan = in_halves(name, pins, micro_batches, schedule)
    model, inputs = made(name)
    report = api.verify(model, inputs, plan=plan, captured=captured, options=Options(precision="fp64"), steps=2)
    assert report.ok, report


def test_what_is_made_again_is_made_again_in_halves_too():
    """With little memory tensors are made again in the half that reads them first, and handed on."""
    model, inputs = made("tied")
    options = Options(precision="fp64", pins=SMALL, micro_batches=4, schedules=("zb-h1",), memory_limit=920_000)
    captured = api.capture(model, inputs, options=options)
    plan = api.plan_captured(captured, load_cluster("rtx4090:2"), options=options)
    assert plan.schedule.name == "zb-h1" and sum(s.recomputed_count for s in plan.stages)
    assert api.verify(model, inputs, plan=plan, captured=captured, options=options, steps=2).ok


def test_the_search_takes_the_schedules_that_are_asked_for():
    model, inputs = made("tied")
    steps = {}
    for names in (("1f1b",), ("interleaved",), ("zb-h1",), ("1f1b", "zb-h1")):
        options = Options(precision="fp64", pins=SMALL, micro_batches=4, schedules=names)
        plan = api.search(model, load_cluster("rtx4090:2"), example_inputs=inputs, options=options)
        assert plan.schedule.name == names[-1]
        steps[names] = plan.predicted.step_time_us
    assert steps["zb-h1",] == pytest.approx(steps["1f1b", "zb-h1"], rel=1e-4)
    assert steps["zb-h1",] < steps["1f1b",]
    few = Options(precision="fp64", pins=SMALL, micro_batches=1, schedules=("interleaved",))
    with pytest.raises(UserError, match="schedule interleaved: no stages"):
        api.search(model, load_cluster("rtx4090:2"), example_inputs=inputs, options=few)


@pytest.mark.parametrize(("forward", "first", "second"), [(100, 100, 100), (100, 150, 50), (90, 120, 60)])
@pytest.mark.parametrize("stages", [2, 4, 7])
def test_the_ramp_is_that_of_the_simulated_step(forward, first, second, stages):
    """Equal stages: m·T + (p - 1)·(F + I - W)."""
    count, whole = 2 * stages + 3, forward + first + second
    tasks = [(Task(name="t", kind="t", us=us),) for us in (forward, first + second, first, second)]
    work = StageWork(forward=tasks[0], backward=tasks[1], backward_input=tasks[2], backward_weight=tasks[3])
    found = simulate(build_schedule("zb-h1", stages=stages, micro_batches=count), [[work]] * stages)
    ramp = ramp_of(Halves(second / whole, 1.0))
    assert found.step_us == pytest.approx((count - ramp) * whole + ramp * stages * whole)


def test_what_is_in_flight():
    """Stage s of p has p - s micro-batches before their first half, and s between the halves."""
    assert in_flight("zb-h1", stages=4, micro_batches=8, waiting=0.5) == (4.0, 3.5, 3.0, 2.5)
    assert in_flight("zb-h1", stages=4, micro_batches=2, waiting=0.5) == (2.0, 2.0, 2.0, 1.5)
    assert in_flight("zb-h2", stages=3, micro_batches=9, waiting=1.0) == (5.0, 5.0, 5.0)
    assert in_flight("zb-h1", stages=3, micro_batches=9) == (3.0, 3.0, 3.0)


def test_shares_of_the_halves():
    """Of a block's 21 products with weights the 7 that give the gradients of these are of the second half."""
    captured = planned("tied", SMALL, 4)[0]
    block = captured.blocks[0].graph
    late = [n for n in block.nodes if n.name in late_nodes(block)]
    products = [n for n in block.nodes if n.op in ("aten.matmul.default", "aten.tensordot.default")]
    assert len(products) == 21
    assert [n for n in products if n in late] == [n for n in late if n.op == "aten.tensordot.default"]
    assert sum(n in late for n in products) == 7 and all(n.phase is Phase.BACKWARD for n in late)


def test_memory_between_the_halves(monkeypatch):
    """What waits is there once for each micro-batch between its halves, and no stage keeps anything at the end."""
    captured, plan = in_halves("skip", {"pp": 3, "dp": 1, "tp": 1}, 6, "zb-h1")
    made_of = staging.staged(captured, plan)
    model, inputs = made("skip")
    most = [0, 0, 0]
    real = Step._backward

    def watched(self, action):
        real(self, action)
        stage = self.pipeline.stage
        most[stage] = max(most[stage], len(self.waiting))

    monkeypatch.setattr(Step, "_backward", watched)
    run_threads(all_ranks(plan), lambda rt: made_of.module(model, rt)(**inputs).backward())
    assert most == [1, 2, 3]


WEIGHTS = Step._weights_half


def last_one_left_out(self, action):
    if action.micro_batch < self.pipeline.program.micro_batches - 1:
        WEIGHTS(self, action)


def zeros_for_what_waits(self, action):
    key = self.pipeline.parts[action.chunk].index, action.micro_batch
    waits = self.waiting[key]
    self.waiting[key] = [torch.zeros_like(x) if torch.is_tensor(x) else x for x in waits]
    WEIGHTS(self, action)


@pytest.mark.parametrize("wrong", [last_one_left_out, zeros_for_what_waits])
def test_a_wrong_second_half_is_seen(monkeypatch, wrong):
    captured, plan = in_halves("tied", SMALL, 4, "zb-h1")
    model, inputs = made("tied")
    monkeypatch.setattr(Step, "_weights_half", wrong)
    report = api.verify(model, inputs, plan=plan, captured=captured, options=Options(precision="fp64"), steps=1)
    assert not report.ok
    assert report.first_difference is not None and report.first_difference.name.startswith("gradient of ")


def test_a_first_half_that_needs_the_second_is_not_lowered(monkeypatch):
    captured, plan = in_halves("skip", SMALL, 4, "zb-h1")
    monkeypatch.setattr(
        stages, "late_nodes", lambda g: frozenset(n.name for n in g.nodes if n.phase is Phase.BACKWARD and not n.block)
    )
    with pytest.raises(CompilerError, match="before it is made"):
        staging.staged(captured, plan)


def test_schedules_in_a_shell():
    assert arguments.parse_schedules(["tensor=1,2", "schedule=1f1b,zb-h1"]) == ("1f1b", "zb-h1")
    assert arguments.parse_space(["tensor=1,2", "schedule=zb-h1"]) == {"tensor": (1, 2)}
    with pytest.raises(UserError, match="wanted schedules among 1f1b, interleaved, zb-h1"):
        arguments.parse_schedules(["schedule=zb-9"])
    with pytest.raises(ValueError, match="wanted names among 1f1b, interleaved, zb-h1"):
        Options(schedules=("gpipe",))
    assert Options(schedules=("zb-h1",)).searches_stages
