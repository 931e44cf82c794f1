"""Plans of a hand-made graph, run with threads as ranks, train as the plain model does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopar import api
from autopar.codegen import check_program, emit, lower
from autopar.ir.graph import CapturedGraph
from autopar.ir.plan import Plan
from autopar.ir.program import Source
from tests.codegen.hand import HID, Chain, chain, named_plan


def built(captured: CapturedGraph, plan: Plan) -> Source:
    program = lower(captured, plan)
    check_program(program, plan)
    return emit(program)


@pytest.fixture(scope="module")
def trained() -> tuple[Chain, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Chain(), {"x": torch.randn(HID, dtype=torch.float64)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["whole", "dp", "zero3", "tp"])
def test_same_training(name: str, ranks: int, trained: tuple[Chain, dict[str, torch.Tensor]]) -> None:
    model, batch = trained
    captured = chain()
    plan = named_plan(captured, name, ranks)
    report = api.verify_source(captured, plan, built(captured, plan), model, batch, timeout_s=60)
    assert report.ok, str(report)
    assert report.ranks == ranks and len(report.rows) == 3 + 5 + 1 + 5 + 10


def test_a_wrong_program_is_seen(trained: tuple[Chain, dict[str, torch.Tensor]]) -> None:
    """A gradient that is not reduced: the report names it."""
    model, batch = trained
    captured = chain()
    plan = named_plan(captured, "dp", 2)
    source = built(captured, plan)
    broken = source.text.replace('dweight_dpR = rt.all_reduce(dweight, "dp")', "dweight_dpR = dweight.clone()")
    assert broken != source.text
    report = api.verify_source(captured, plan, dataclasses.replace(source, text=broken), model, batch, timeout_s=60)
    wrong = {row.name for row in report.rows if not row.ok}
    assert "gradient of layers.0.linear.weight" in wrong
    assert "gradient of first" not in wrong
    assert report.first_difference is not None and "of 24 tensors differ" in str(report)
