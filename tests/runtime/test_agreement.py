"""Ranks that hold different plans, programs or versions end together, with one error that names the line."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.errors import PlanError, RankError
from autopar.ir.options import Options
from autopar.runtime.agreement import agree_through, parts_of
from autopar.runtime.launch import launch
from tests.codegen.hand import chain, named_plan
from tests.models import tiny


def told(parts: list[dict[str, str]], seconds: float = 20.0) -> list[str]:
    """What each rank, a thread, is told; "" where it may go on."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    found = [""] * len(parts)

    def rank_main(rank: int) -> None:
        try:
            agree_through(store, "here", rank, len(parts), parts[rank])
        except PlanError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=rank_main, args=(r,)) for r, p in enumerate(parts) if p]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def parts(kind: str = "dp", **other: str) -> dict[str, str]:
    graph = chain()
    plan = named_plan(graph, kind, 2)
    return {**parts_of(plan, api.emit_captured(graph, plan)), **other}


def test_the_same_everywhere() -> None:
    assert told([parts()] * 3) == ["", "", ""]


def test_a_changed_line() -> None:
    mine = parts()
    wrong = mine["program"].replace('loss_dpR = rt.all_reduce(loss, "dp")', "loss_dpR = loss")
    line = mine["program"].splitlines().index(next(r for r in mine["program"].splitlines() if "loss_dpR = rt" in r)) + 1
    messages = told([mine, mine, {**mine, "program": wrong}, mine])
    assert len(set(messages)) == 1
    assert "rank 2 of 4 would not run what the others run" in messages[0]
    assert f"program line {line}:\n  rank 0: loss_dpR = rt.all_reduce" in messages[0]
    assert "rank 2: loss_dpR = loss" in messages[0]


def test_the_odd_one_may_be_rank_0() -> None:
    messages = told([parts(torch="2.14.0"), parts(), parts()])
    assert set(messages) == {
        f"rank 0 of 3 would not run what the others run; first difference, torch:\n"
        f"  rank 1: {torch.__version__}\n  rank 0: 2.14.0"
    }


def test_another_plan() -> None:
    messages = told([parts("dp"), parts("zero3")])
    assert all("first difference, program line" in m for m in messages), messages
    mine = parts()
    messages = told([mine, {**mine, "plan": mine["plan"].replace('"fp32"', '"bf16"')}])
    assert all("first difference, plan line" in m and '"precision": "bf16"' in m for m in messages), messages


def test_a_rank_that_does_not_come() -> None:
    messages = told([parts(), {}, parts()], seconds=1.0)
    assert any("rank 1 of 3 did not come" in m for m in messages), messages


def test_how_long_the_solver_took_makes_no_difference() -> None:
    import msgspec

    graph = chain()
    plan = named_plan(graph, "dp", 2)
    source = api.emit_captured(graph, plan)
    slower = msgspec.structs.replace(plan, solver=msgspec.structs.replace(plan.solver, time_s=99.0))
    assert parts_of(plan, source) == parts_of(slower, source)


def differing() -> None:
    """A rank of its own mind: it was told another pin."""
    model, batch = tiny("mlp")
    pins = {"dp": 2, "zero": 3 if dist.get_rank() == 1 else 0}
    api.compile(model, load_cluster("rtx3090:2"), example_inputs=batch, options=Options(pins=pins))


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_processes() -> None:
    with pytest.raises(RankError, match=r"would not run what the others run; first difference, program line \d+:\n"):
        launch(differing, 2, timeout_s=120)
