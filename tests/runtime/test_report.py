"""Predicted against measured: steps on the clock, rows that add up to the step, the file that a refit reads."""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from autopar import api, codegen
from autopar.cost_model.live import program_memory
from autopar.errors import ClusterError, PlanError, UserError
from autopar.ir.account import BETWEEN, OUTSIDE, TIMER, RunReport
from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options
from autopar.ir.plan import Plan, PlanReshard, decode_plan, mesh_of
from autopar.ir.profile import OPTIMIZER
from autopar.ir.program import Compute, Made, Program, Source
from autopar.runtime.launch import launch
from autopar.runtime.loaded import Executable
from autopar.runtime.module import MEASURE_VARIABLE, ParallelModule
from autopar.runtime.timing import Prices, Ticker, ticking
from autopar.verification import objective
from tests.cost_model.helpers import cluster
from tests.models import tiny

STEPS = 2
ENOUGH = 2 * STEPS + 2
"""Steps after which all is measured: one to warm up, twice STEPS, one with memory watched."""


class Block(torch.nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(12), torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Changes nothing of the shape."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Deep(torch.nn.Module):
    """Blocks enough for a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def made(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Model and batch."""
    return (Deep(), {"x": torch.randn(12, 12, 12)}) if name == "deep" else tiny(name)


def planned(name: str, ranks: int, **pins: Any) -> Plan:
    model, batch = made(name)
    spec = cluster((ranks, 1.0, 100.0)) if ranks > 1 else cluster((1, 1.0, 100.0))
    return api.search(model, spec, example_inputs=batch, options=Options(pins=pins))


def trained(
    name: str, plan: Plan, measured: bool, steps: int = ENOUGH, calls: int = 1
) -> tuple[ParallelModule, list[float]]:
    """(the module, its losses) after some AdamW steps of `calls` calls each."""
    torch.manual_seed(0)
    model, batch = made(name)
    module = api.compile(model, plan=plan, example_inputs=batch)
    assert isinstance(module, ParallelModule)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    if measured:
        module.measure(steps=STEPS)
    for _ in range(steps):
        for _ in range(calls):
            out = module(**batch)
            loss = objective(out)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return module, losses


def on_ranks(name: str, text: bytes, path: str) -> tuple[RunReport, list[float], list[float]]:
    """On each rank: what the report says, losses measured and not."""
    plan = decode_plan(text, "plan", Plan)
    module, losses = trained(name, plan, measured=True)
    found = module.report(path)
    return found, losses, trained(name, plan, measured=False)[1]


def check_rows(found: RunReport, plan: Plan) -> None:
    """What holds of every full report."""
    assert found.steps == STEPS
    assert sum(r.measured_us for r in found.rows) == pytest.approx(found.measured_us, rel=1e-9)
    assert sum(r.predicted_us for r in found.rows) == pytest.approx(plan.predicted.step_time_us, rel=1e-6)
    assert all(r.measured_us >= 0 for r in found.rows if r.what != TIMER)
    assert {OUTSIDE, BETWEEN, TIMER} <= {r.what for r in found.rows if r.kind == "other"}
    assert {r.what for r in found.rows if r.kind == "optimizer"} == {OPTIMIZER}
    assert 0 < found.measured_us <= found.between_us
    collectives = {r.what.split()[0]: 0 for r in found.rows if r.kind == "collective"}
    for row in found.rows:
        if row.kind == "collective":
            collectives[row.what.split()[0]] += row.calls
    asked: dict[str, int] = {}
    for conversion in plan.conversions:
        for step in conversion.steps:
            asked[step.split("(")[0]] = asked.get(step.split("(")[0], 0) + conversion.count
    assert collectives == asked


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("gpt2", 1)
    module, losses = trained("gpt2", plan, measured=True)
    capsys.readouterr()
    found = module.report()
    check_rows(found, plan)
    assert str(found) in capsys.readouterr().out
    assert losses == trained("gpt2", plan, measured=False)[1]
    calls = {r.what: r.calls for r in found.rows if r.kind == "op"}
    assert sum(calls.values()) == computed("gpt2", plan)
    assert found.hardware is not None and found.torch == torch.__version__


def lowered(name: str, plan: Plan) -> tuple[CapturedGraph, Program]:
    model, batch = made(name)
    captured = api.capture(model, batch)
    return captured, codegen.lower(captured, plan, mesh_of(plan))


def computed(name: str, plan: Plan) -> int:
    """Ops of a step, blocks' as often as they run."""
    _, program = lowered(name, plan)
    times = {f.block: len(program.calls[f.block]) if f.block else 1 for f in program.functions}
    return sum(isinstance(step, Compute) * times[f.block] for f in program.functions for step in f.steps)


@pytest.mark.ranks
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("name", "ranks", "pins", "within"),
    [
        ("deep", 2, {"tp": 2, "blocks.*.up.weight": "tp:S(0)"}, 0.08),
        ("gpt2", 3, {"dp": 3, "zero": 3}, 0.03),
        ("llama", 2, {"tp": 2}, 0.015),
    ],
    ids=["tp2", "zero3 on 3", "the loss cut over tp2"],
)
def test_ranks(name: str, ranks: int, pins: dict[str, Any], within: float, tmp_path: Path) -> None:
    """The deep one runs its blocks in a loop. gloo's threads let go of a tensor a little later now and then: one of the
    deep one's is 5 % of its peak."""
    plan = planned(name, ranks, **pins)
    path = tmp_path / "run.json"
    found, losses, plain = launch(on_ranks, ranks, (name, plan.to_json(), str(path)), timeout_s=120)
    check_rows(found, plan)
    assert losses == plain
    assert RunReport.load(path) == found
    assert (found.rank, found.ranks) == (0, ranks)
    said = program_memory(*lowered(name, plan), 8, rounding=64, gpus=False).peak_bytes
    assert found.measured_bytes == pytest.approx(said, rel=within)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_memory_is_the_timelines(name: str) -> None:
    """The peak of live storages beside what the program is said to hold."""
    plan = planned(name, 1)
    module, _ = trained(name, plan, measured=True)
    found = module.report()
    said = program_memory(*lowered(name, plan), 8, rounding=64, gpus=False).peak_bytes
    assert found.measured_bytes == pytest.approx(said, rel=0.03)


def test_gradient_accumulation() -> None:
    """Each call is a step, and the optimizer's is in the last one."""
    plan = planned("mlp", 1)
    module, _ = trained("mlp", plan, measured=True, steps=ENOUGH, calls=2)
    found = module.report()
    assert sum(r.measured_us for r in found.rows) == pytest.approx(found.measured_us)


def test_not_measured_yet(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("mlp", 1)
    module, _ = trained("mlp", plan, measured=False, steps=1)
    with pytest.raises(UserError, match="no step was measured"):
        module.report()
    module, _ = trained("mlp", plan, measured=True, steps=1)
    with pytest.raises(UserError, match="no step was measured"):
        module.report()
    module, _ = trained("mlp", plan, measured=True, steps=2)
    found = module.report()
    assert (found.rows, found.measured_bytes) == ((), 0)
    said = capsys.readouterr().out
    assert "peak memory: not measured yet" in said and "collectives: not measured yet" in said
    with pytest.raises(UserError, match="steps=0"):
        module.measure(steps=0)


def test_measuring_again_and_stopping() -> None:
    """Once all is measured the module runs as emitted, no hook is left, and measuring can begin anew."""
    from torch.optim.optimizer import _global_optimizer_post_hooks

    before = len(_global_optimizer_post_hooks)
    module, _ = trained("mlp", planned("mlp", 1), measured=True, steps=ENOUGH + 1)
    state = module._autopar
    assert state.measuring is not None and not state.measuring.active
    assert len(_global_optimizer_post_hooks) == before
    module.measure(steps=1)
    with pytest.raises(UserError, match="no step was measured"):
        module.report()


def test_the_environment_asks(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    plan = planned("mlp", 1)
    monkeypatch.setenv(MEASURE_VARIABLE, str(STEPS))
    trained("mlp", plan, measured=False, steps=ENOUGH + 1)
    assert "measured/predicted" in capfd.readouterr().err
    monkeypatch.setenv(MEASURE_VARIABLE, "some")
    with pytest.raises(UserError, match="'some'; wanted how many steps"):
        trained("mlp", plan, measured=False, steps=1)


def test_lines_tick_where_they_stand() -> None:
    text = (
        "def forward(rt, x):\n"
        '    """Text."""\n'
        "    a = x + 1  # (2,) ä\n"
        "    for i in range(3):\n"
        "        a = (\n"
        "            a * 2\n"
        "        )  # done\n"
        "    del x\n"
        "    return a\n"
    )
    found = ticking(Source(text=text, lines={}))
    assert len(found.text.splitlines()) == len(text.splitlines())
    ast.parse(found.text)
    ticker = Ticker(torch.device("cpu"))
    space: dict[str, Any] = {}
    exec(compile(found.text, "ticking", "exec"), space)  # our own text
    rt = type("Rt", (), {"tick": ticker})()
    ticker.restart()
    assert space["forward"](rt, 1) == 16
    assert dict(ticker.runs) == {3: 1, 7: 3, 8: 1}
    own = Ticker.tried(torch.device("cpu"))
    assert own.own_s > 0 and not own.runs


def test_a_line_in_a_loop_costs_each_turn_once() -> None:
    """Three turns, each a conversion of its own price, of two steps each."""
    names = ("a", "b", "c")
    conversions = [
        PlanReshard(
            graph="top", value=name, before="x:P", after="x:R", steps=["reduce_scatter(x, 0)", "all_gather(x, 0)"],
            count=1, us=30.0 * n, steps_us=[10.0 * n, 20.0 * n],
        )
        for n, name in enumerate(names, 1)
    ]  # fmt: skip
    plan = msgspec.structs.replace(planned("mlp", 1), conversions=conversions)
    line = Made(
        function="forward", op="all_gather(x, 0)", reads=("a",), names=("a",), turns=(), graph="top", part=1,
        converts=tuple((name, "x:P", "x:R") for name in names),
    )  # fmt: skip
    assert Prices(plan).of(line, runs=3) == ("collective", "all_gather x", 20.0 * (1 + 2 + 3))


def test_a_ticking_program_is_a_program() -> None:
    model, batch = tiny("gpt2")
    captured = api.capture(model, batch)
    plan = planned("gpt2", 1)
    source = api.emit_captured(captured, plan)
    assert Executable(ticking(source), "gpt2").parameters == Executable(source, "gpt2").parameters


REPORT = RunReport(
    model="m", cluster="c", ranks=2, rank=0, date="2026-01-02", torch="2.13", steps=3, predicted_us=1.0,
    measured_us=2.0, timed_us=2.0, between_us=0.0, predicted_bytes=1, measured_bytes=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "cannot be read"),
        (b"", "is not what module.report(path) writes"),
        (b"\xff\xfe", "is not what module.report(path) writes"),
        (msgspec.json.encode(REPORT)[:-9], "is not what module.report(path) writes"),
        (msgspec.json.encode({**msgspec.to_builtins(REPORT), "colour": 1}), "colour"),
        (msgspec.json.encode({**msgspec.to_builtins(REPORT), "version": 9}), "autopar-run 9; wanted autopar-run 1"),
    ],
)
def test_files_that_are_no_report(data: bytes | None, words: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(PlanError) as caught:
            RunReport.load(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_report_files_come_back(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "run.json")
    assert RunReport.load(tmp_path / "run.json") == REPORT
    with pytest.raises(UserError, match="cannot be written"):
        REPORT.save(tmp_path / "no" / "run.json")


def test_verify_refuses_a_foreign_profile() -> None:
    from tests.cost_model.test_measured import FULL

    model, batch = tiny("mlp")
    one = msgspec.structs.replace(cluster((1, 1.0, 100.0)), profile=FULL.profile)
    with pytest.raises(ClusterError, match="verify on round: the profile"):
        api.verify(model, batch, cluster=one)
    plan = api.search(model, one, example_inputs=batch)
    with pytest.raises(ClusterError, match="verify on round: the profile"):
        api.verify(model, batch, plan=plan)
