"""Lowering: what is converted, saved and freed; and that the check after it sees what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from autopar.codegen import check_program, lower
from autopar.errors import CompilerError, PlanError
from autopar.ir.graph import CapturedGraph, Phase
from autopar.ir.options import Options
from autopar.ir.plan import Plan, PlanStrategy
from autopar.ir.program import CallBlock, Compute, Convert, Free, Function, Program
from autopar.sharding import build_table
from autopar.tracer import capture
from tests.codegen.hand import chain, mesh, named_plan
from tests.codegen.table_plan import random_plan
from tests.models import tiny


def _lowered(name: str, n: int = 2) -> tuple[CapturedGraph, Plan, Program]:
    captured = chain()
    plan = named_plan(captured, name, n)
    return captured, plan, lower(captured, plan)


def _converts(function: Function) -> list[str]:
    return [f"{c.before.value}: {c.before.layout} -> {c.after.layout}" for c in function.converts()]


def test_parameters_are_gathered_once_in_each_phase() -> None:
    _, _, program = _lowered("zero3")
    assert _converts(program.function("layer", Phase.FORWARD)) == ["weight: dp:S(0) -> dp:R"]
    assert _converts(program.function("layer", Phase.BACKWARD)) == [
        "dweight: dp:P -> dp:S(0)",
        "weight: dp:S(0) -> dp:R",
    ]
    assert _converts(program.function("top", Phase.FORWARD)) == ["first: dp:S(0) -> dp:R", "loss: dp:P -> dp:R"]


def test_a_gradient_is_reduced_as_soon_as_it_is_made() -> None:
    _, _, program = _lowered("zero3")
    steps = program.function("layer", Phase.BACKWARD).steps
    at = next(
        i for i, s in enumerate(steps) if isinstance(s, Compute) and s.outputs[0] and s.outputs[0].name == "dweight"
    )
    rest = [s for s in steps[at + 1 :] if not isinstance(s, Free)]
    assert isinstance(rest[0], Convert) and rest[0].before.name == "dweight"


def test_saved_is_what_the_backward_reads() -> None:
    _, _, program = _lowered("tp")
    assert [s.name for s in program.function("top", Phase.FORWARD).saved] == ["y", "h4_tpR", "x"]
    assert [s.name for s in program.function("layer", Phase.FORWARD).saved] == ["relu", "h"]


def test_a_version_that_only_the_backward_wants_is_converted_there() -> None:
    captured = chain()
    plan = named_plan(captured, "dp", 2)
    key = next(n.key for n in captured.block("layer").graph.nodes if n.name == "ht")
    plan.strategies["layer"][key] = PlanStrategy(inputs=["dp:R"], outputs=["dp:R"], tags=[""], us=1)
    key = next(n.key for n in captured.block("layer").graph.nodes if n.name == "dweight")
    plan.strategies["layer"][key] = PlanStrategy(inputs=["dp:R", "dp:R"], outputs=["dp:R"], tags=[""], us=1)
    program = lower(captured, plan)
    assert _converts(program.function("layer", Phase.FORWARD)) == []
    assert _converts(program.function("layer", Phase.BACKWARD)) == [
        "h: dp:S(0) -> dp:R",
        "dmm: dp:S(0) -> dp:R",
    ]
    with pytest.raises(CompilerError, match=r"layer: h from dp:S\(0\) to dp:R: priced 0 times, emitted 4 times"):
        check_program(program, plan)


def test_every_name_is_freed_after_its_last_read() -> None:
    _, _, program = _lowered("tp")
    for function in program.functions:
        kept = {x.name for x in (*function.outputs, *function.updates, *function.gradients) if x}
        kept |= {s.name for s in function.saved} if function.phase is Phase.FORWARD else set()
        freed = [n for s in function.steps if isinstance(s, Free) for n in s.names]
        made = [o.name for s in function.steps if isinstance(s, Compute) for o in s.outputs if o]
        assert len(freed) == len(set(freed))
        assert set(made) <= set(freed) | kept


def test_a_program_prints() -> None:
    text = str(_lowered("dp")[2])
    assert "program chain on dp=2" in text and "function layer_backward" in text
    assert "dweight_dpR: float64[12, 12] dp:R = all_reduce(dp) dweight" in text


def _edit(plan: Plan, change: str) -> Plan:
    first = plan.conversions[0]
    if change == "missing":
        return msgspec.structs.replace(plan, conversions=plan.conversions[1:])
    if change == "twice":
        return msgspec.structs.replace(plan, conversions=[first, *plan.conversions])
    if change == "other steps":
        return msgspec.structs.replace(
            plan,
            conversions=[
                msgspec.structs.replace(first, steps=["all_gather(dp, 0)", "slice(dp, 0)"]),
                *plan.conversions[1:],
            ],
        )
    raise AssertionError(change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", "priced 0 times, emitted"),
        ("twice", "what is priced is not what is emitted"),
        ("other steps", "priced as .*slice.*emitted as"),
    ],
)
def test_what_is_priced_is_what_is_emitted(change: str, words: str) -> None:
    _, plan, program = _lowered("dp")
    check_program(program, plan)
    with pytest.raises(CompilerError, match=words):
        check_program(program, _edit(plan, change))


def _swap(program: Program, function: Function, **changes: Any) -> Program:
    new = replace(function, **changes)
    return replace(program, functions=tuple(new if f is function else f for f in program.functions))


def test_the_check_sees_a_wrong_layout_a_lost_step_and_a_wrong_save() -> None:
    _, plan, program = _lowered("tp")
    forward = program.function("top", Phase.FORWARD)
    steps = list(forward.steps)
    at = next(i for i, s in enumerate(steps) if isinstance(s, Compute) and s.place.key.endswith("#y"))
    step = steps[at]
    assert isinstance(step, Compute)
    wrong = replace(step, wants=(program.parameters["layers.0.linear.weight"], *step.wants[1:]))
    with pytest.raises(CompilerError, match=r"forward: .*#y: h4_tpR: .* where the strategy wants tp:S\(1\)"):
        check_program(_swap(program, forward, steps=(*steps[:at], wrong, *steps[at + 1 :])), plan)
    with pytest.raises(CompilerError, match=r"forward: .*reads ft.*at hand is None"):
        lost = [s for s in steps if not (isinstance(s, Compute) and s.place.key.endswith("#ft"))]
        check_program(_swap(program, forward, steps=tuple(lost)), plan)
    with pytest.raises(CompilerError, match=r"backward: the forward saves \['y', 'h4_tpR'\]"):
        check_program(_swap(program, forward, saved=forward.saved[:-1]), plan)
    with pytest.raises(CompilerError, match="wrong piece"):
        bad = replace(forward.inputs[0], meta=replace(forward.inputs[0].meta, shape=(6, 12)))
        check_program(_swap(program, forward, inputs=(bad,)), plan)


def test_the_check_sees_what_blocks_and_parameters_get() -> None:
    _, plan, program = _lowered("tp")
    forward = program.function("top", Phase.FORWARD)
    calls = [s for s in forward.steps if isinstance(s, CallBlock)]
    cut = calls[0].outputs[0]
    assert cut is not None
    wrong_call = replace(calls[1], inputs=(cut,), wants=(cut.layout,))
    steps = tuple(wrong_call if s is calls[1] else s for s in forward.steps if not isinstance(s, Free))
    with pytest.raises(CompilerError, match=r"passes h1: .* tp:S\(1\), the block takes h: .* tp:R"):
        check_program(_swap(program, forward, steps=steps), plan)
    backward = program.function("layer", Phase.BACKWARD)
    dmm = next(s for s in backward.steps if isinstance(s, Compute)).outputs[0]
    assert dmm is not None
    last = [s for s in backward.steps if not isinstance(s, Free)]
    wrong = replace(
        dmm, name="dweight", value="dweight", layout=program.inputs["x"], meta=program.metas["layer"]["weight"]
    )
    steps = tuple(
        replace(s, outputs=(wrong,))
        if isinstance(s, Compute) and s.outputs[0] and s.outputs[0].name == "dweight"
        else s
        for s in last
    )
    with pytest.raises(CompilerError, match=r"layer_backward: gradient dweight: .* is not as stored"):
        check_program(_swap(program, backward, gradients=(wrong,), steps=steps), plan)


def test_plans_that_do_not_fit() -> None:
    captured = chain()
    plan = named_plan(captured, "dp", 2)
    key = next(iter(plan.strategies["layer"]))
    with pytest.raises(PlanError, match=r"no strategy for linear/aten.mm.default/forward#mm of graph layer"):
        lower(captured, msgspec.structs.replace(plan, strategies={**plan.strategies, "layer": {}}))
    short = msgspec.structs.replace(plan.strategies["layer"][key], inputs=["dp:R"])
    with pytest.raises(PlanError, match="has 1 inputs and 1 outputs, the op has 2 and 1"):
        lower(captured, msgspec.structs.replace(plan, strategies={**plan.strategies, "layer": {key: short}}))
    with pytest.raises(PlanError, match=r"layout term 'pp:S\(0\)': the mesh has axes dp"):
        wrong = msgspec.structs.replace(plan.parameters["first"], layout="pp:S(0)")
        lower(captured, msgspec.structs.replace(plan, parameters={**plan.parameters, "first": wrong}))
    with pytest.raises(CompilerError, match=r"cannot be cut as dp:S\(7\)"):
        missing = msgspec.structs.replace(plan.parameters["first"], layout="dp:S(7)")
        lower(captured, msgspec.structs.replace(plan, parameters={**plan.parameters, "first": missing}))
    with pytest.raises(CompilerError, match=r"nothing turns dp:R into dp:P"):
        row = msgspec.structs.replace(plan.strategies["top"][_key(captured, "df1")], inputs=["dp:P"], outputs=["dp:P"])
        dft = PlanStrategy(inputs=["dp:R", "dp:R"], outputs=["dp:R"], tags=[""], us=1)
        rows = {**plan.strategies["top"], _key(captured, "df1"): row, _key(captured, "dft"): dft}
        lower(captured, msgspec.structs.replace(plan, strategies={**plan.strategies, "top": rows}))


def _key(captured: CapturedGraph, name: str) -> str:
    return next(n.key for n in captured.top.nodes if n.name == name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}, {"free": 2}])
def test_any_plan_of_the_table_passes_the_check(axes: dict[str, int], seed: int) -> None:
    model, batch = tiny("tower")
    captured = capture(model, (), batch, options=Options(), model_name="tower")
    on = mesh(**axes)
    plan = random_plan(captured, on, build_table(captured, on, Options()), seed)
    check_program(lower(captured, plan), plan)
