"""HNG-05, HNG-09, HNG-14 with stages: nothing hangs, and one error names the rank, in threads and in processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import api, staging
from autopar.cost_model.clusters import load_cluster
from autopar.errors import AutoparError, RankError
from autopar.ir.options import Options
from autopar.ir.plan import all_ranks
from autopar.runtime.launch import launch
from autopar.runtime.pipeline_step import Step
from autopar.runtime.threads import run_threads
from tests.runtime.test_launch import _alive
from tests.test_staging import Skip

pytestmark = pytest.mark.timeout(100)
STAGES = {"pp": 3, "dp": 1, "tp": 1}


def skip(rows: int = 12) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model, inputs = Skip().double(), {"x": torch.randn(rows, 8, dtype=torch.float64)}
    return model, {**inputs, "y": torch.randint(0, 5, (rows,))}


def planned(micro_batches: int, model: nn.Module, inputs: Any, **pins: str) -> Any:
    options = Options(precision="fp64", pins={**STAGES, **pins}, micro_batches=micro_batches)
    captured = api.capture(model, inputs, options=options)
    return captured, api.plan_captured(captured, load_cluster("rtx4090:3"), options=options)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_hng05_fewer_micro_batches_than_stages(micro_batches: int) -> None:
    model, inputs = skip()
    captured, plan = planned(micro_batches, model, inputs)
    assert plan.schedule.micro_batches == micro_batches and plan.mesh.pipeline == 3
    report = api.verify(model, inputs, plan=plan, captured=captured, options=Options(precision="fp64"))
    assert report.ok, report


def test_hng05_fewer_rows_than_micro_batches() -> None:
    model, inputs = skip(rows=2)
    with pytest.raises(AutoparError, match=r"\b4 micro-batches.*\b2 rows"):
        planned(4, model, inputs)


def test_hng14_a_stage_where_all_is_frozen() -> None:
    """The norm is asked for by every stage, also by one without a gradient."""
    model, inputs = skip()
    for layer in model.layers[2:4]:
        layer.requires_grad_(False)
    captured, plan = planned(2, model, inputs, stages="2,2,2")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {plan.parameters[name].stage for name in trained} == {0, 2}
    report = api.verify(model, inputs, plan=plan, captured=captured, options=Options(precision="fp64"))
    assert report.ok, report
    assert any(row.name == "norm of the gradients" for row in report.rows)


# One rank fails: threads ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def staged() -> tuple[nn.Module, Any, staging.Staged]:
    model, inputs = skip()
    return model, inputs, staging.staged(*planned(4, model, inputs))


def on_threads(run: Any, timeout_s: float = 30.0) -> Any:
    model, inputs, made = staged()
    return run_threads(
        all_ranks(made.plan), lambda rt: run(made.module(model, rt), inputs, rt.rank), timeout_s=timeout_s
    )


def at(place: str, do: Any) -> Any:
    """`do()` when rank 1, on stage 1, is at the second micro-batch of its second step's forward or backward."""
    real = getattr(Step, f"_{place}")
    seen: list[int] = []

    def method(self: Step, action: Any) -> None:
        if self.pipeline.stage == 1 and action.micro_batch == 1:
            seen.append(1)
            if len(seen) == 2:
                do()
        real(self, action)

    return method


def out_of_memory() -> None:
    raise MemoryError("no memory left")


def two_steps(module: Any, inputs: Any, rank: int) -> None:
    for _ in range(2):
        module.step(**inputs)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_hng09_one_thread_raises(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, f"_{place}", at(place, out_of_memory))
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 3 failed: MemoryError: no memory left"):
        on_threads(two_steps)
    assert time.monotonic() - start < 30


def test_hng09_one_thread_raises_and_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step would meet what others sent in the one before."""
    monkeypatch.setattr(Step, "_forward", at("forward", out_of_memory))

    def run(module: Any, inputs: Any, rank: int) -> None:
        for _ in range(3):
            try:
                module.step(**inputs)
            except MemoryError:
                continue

    with pytest.raises(RankError, match=r"rank 1 of 3 failed in a step before \(MemoryError: no memory left\)"):
        on_threads(run)


def test_hng09_one_thread_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Step, "_backward", at("backward", lambda: go_on.wait(60)))
    with pytest.raises(RankError, match=r"ranks \[1\] of 3 did not end in 5 s; the others waited for them"):
        on_threads(two_steps, timeout_s=5.0)
    go_on.set()


# One rank fails: processes --------------------------------------------------------------------------------------------


def sleep() -> None:
    time.sleep(120)


FORMS = {
    "raises": (out_of_memory, ("rank 1 of 3 failed", "MemoryError: no memory left")),
    "exits": (lambda: os._exit(7), ("rank 1 of 3 exited with code 7",)),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), ("rank 1 of 3 was killed by SIGKILL",)),
    "sleeps": (sleep, ("of 3 did not end in 45 s", "rank 1 is at", "in sleep")),
}


def train(folder: str, place: str, form: str) -> None:
    """Three steps; rank 1 fails in the second one's forward or backward, its optimizer's step, or its saving."""
    rank = int(os.environ["RANK"])
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    model, inputs = skip()
    options = Options(precision="fp64", pins=STAGES, micro_batches=4)
    module = autopar.compile(model, load_cluster("rtx4090:3"), example_inputs=inputs, options=options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if place in ("forward", "backward"):
        setattr(Step, f"_{place}", at(place, FORMS[form][0]))
    for step in range(3):
        module.step(**inputs)
        for where, do in (("optimizer", optimizer.step), ("save", module.full_state_dict)):
            if step == 1 and rank == 1 and place == where:
                FORMS[form][0]()
            do()
        optimizer.zero_grad()


SLOW = pytest.mark.slow
PROCESSES = [("backward", "raises")] + [
    pytest.param(place, form, marks=SLOW)
    for place, form in (
        ("forward", "raises"), ("optimizer", "raises"), ("save", "raises"), ("forward", "exits"), ("save", "exits"),
        ("backward", "is killed"), ("forward", "sleeps"), ("optimizer", "sleeps"),
    )
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(("place", "form"), PROCESSES)
def test_hng09_one_process_fails(place: str, form: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        launch(train, 3, (str(tmp_path), place, form), timeout_s=45)
    for word in FORMS[form][1]:
        assert word in str(caught.value)
    assert _alive(tmp_path) == []
