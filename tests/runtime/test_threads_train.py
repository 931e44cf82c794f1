"""Plans of a hand-made graph, run with threads as ranks, train as the plain model does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopar.codegen import check_program, emit, lower
from autopar.ir.graph import CapturedGraph
from autopar.ir.plan import Plan
from autopar.ir.program import Source
from autopar.runtime.verify import compare, first_difference, run_in_threads, run_reference
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
    run = run_in_threads(captured, plan, built(captured, plan), model, batch, timeout_s=60)
    differences = compare(run_reference(model, batch), run)
    assert first_difference(differences) is None, "\n".join(map(str, differences))
    assert len(differences) == 3 * ranks + 5 + 15 + 5


def test_a_wrong_program_is_seen(trained: tuple[Chain, dict[str, torch.Tensor]]) -> None:
    """A gradient that is not reduced: the comparison names it, and says that replicas differ."""
    model, batch = trained
    captured = chain()
    plan = named_plan(captured, "dp", 2)
    source = built(captured, plan)
    broken = source.text.replace('dweight_dpR = rt.all_reduce(dweight, "dp")', "dweight_dpR = dweight.clone()")
    assert broken != source.text
    run = run_in_threads(captured, plan, dataclasses.replace(source, text=broken), model, batch, timeout_s=60)
    found = first_difference(compare(run_reference(model, batch), run))
    assert found is not None and found.name == "gradient layers.0.linear.weight"
    wrong = [d.name for d in compare(run_reference(model, batch), run) if not d.equal]
    assert "gradient layers.0.linear.weight" in wrong and "replicas of gradients layers.0.linear.weight" in wrong
    assert "gradient first" not in wrong
