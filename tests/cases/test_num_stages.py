"""NUM rows of the field cases on plans with pipeline stages and micro-batches: the numbers are those of one process."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import api, staging
from autopar.cost_model.clusters import load_cluster
from autopar.errors import UserError
from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options
from autopar.ir.plan import Plan, all_ranks
from autopar.runtime.comm import View
from autopar.runtime.staged import StagedModule
from autopar.runtime.threads import run_threads
from autopar.verification import VerifyReport
from tests.cases.lm import TinyLM, text


def lm(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return TinyLM(**more).double()


def planned(model: nn.Module, batch: dict[str, Tensor], pins: dict[str, Any], micro: int) -> tuple[CapturedGraph, Plan]:
    options = Options(precision="fp64", pins=pins, micro_batches=micro)
    graph = api.capture(model, batch, options=options)
    devices = math.prod(pins.get(axis, 1) for axis in ("pp", "dp", "tp"))
    return graph, api.plan_captured(graph, load_cluster(f"rtx4090:{devices}"), options=options)


def compared(model: nn.Module, batch: dict[str, Tensor], pins: dict[str, Any], micro: int) -> VerifyReport:
    graph, plan = planned(model, batch, pins, micro)
    assert plan.schedule.micro_batches == micro
    return api.verify(model, batch, plan=plan, captured=graph, options=Options(precision="fp64"))


def on_ranks(model: nn.Module, batch: dict[str, Tensor], pins: dict[str, Any], micro: int, work: Any) -> list[Any]:
    """`work(module)` on every rank."""
    graph, plan = planned(model, batch, pins, micro)
    made = staging.staged(graph, plan)
    return run_threads(all_ranks(plan), lambda rt: work(made.module(model, rt)))


STAGES = {"pp": 2, "dp": 1, "tp": 1}
ALONE = {"pp": 1, "dp": 1, "tp": 1}


def labelled(*counts: int) -> dict[str, Tensor]:
    """12 rows; so many labels count in each of equally large micro-batches."""
    batch = text()
    labels = torch.full((12, 12), -100)
    for part, count in zip(labels.view(len(counts), -1), counts, strict=True):
        part[:count] = torch.arange(count) % 24
    return {**batch, "labels": labels}


@pytest.mark.parametrize("pins", [STAGES, ALONE], ids=["stages", "alone"])
def test_num01_micro_batches_weigh_tokens_alike(pins: dict[str, Any]) -> None:
    """7 and 2 valid labels. An average of averages is off by more than a half (asserted)."""
    model, batch = lm(layers=2), labelled(7, 2)
    report = compared(model, batch, pins, 2)
    assert report.ok, report
    plain = copy.deepcopy(model)
    loss = plain(**batch)
    halves = [plain(**{k: v[rows] for k, v in batch.items()}) for rows in (slice(0, 6), slice(6, 12))]
    whole, wrong = (
        torch.autograd.grad(x, plain.head.weight)[0] for x in (loss, (halves[0] + halves[1]) / 2)
    )  # fmt: skip
    assert float((wrong - whole).abs().max() / whole.abs().max()) > 0.5


@pytest.mark.parametrize(
    ("pins", "counts"),
    [
        ({"pp": 2, "dp": 2, "tp": 1}, (0, 9, 5)),
        *(pytest.param(p, (4, 0, 7), marks=pytest.mark.slow) for p in (STAGES, ALONE)),
    ],
)
def test_num03_a_micro_batch_without_labels(pins: dict[str, Any], counts: tuple[int, ...]) -> None:
    report = compared(lm(layers=2), labelled(*counts), pins, 3)
    assert report.ok, report


def test_num03_a_whole_batch_without_labels_is_as_eager() -> None:
    """A loss of NaN on every rank, and gradients that are so where eager's are."""
    model, batch = lm(layers=2), labelled(0, 0, 0)
    eager = copy.deepcopy(model)
    eager(**batch).backward()
    wanted = {n: p.grad.isnan() for n, p in eager.named_parameters() if p.grad is not None}

    def once(module: StagedModule) -> bool:
        assert module.step(**batch).isnan()
        grads = {n: p.grad for n, p in module.named_parameters()}
        return all(g is not None and torch.equal(g.isnan(), wanted[n]) for n, g in grads.items())

    assert all(on_ranks(model, batch, STAGES, 3, once))


def test_num07_the_norm_is_that_of_all_stages() -> None:
    """Stages whose gradients have norms 3 and 5: sqrt(34) on every rank."""
    model, batch = lm(layers=2), text()

    def once(module: StagedModule) -> tuple[float, float, dict[str, Tensor]]:
        module.step(**batch)
        own = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
        with torch.no_grad():
            for p in module.parameters():
                p.grad.mul_((3.0, 5.0)[module.stage] / own)
        before = {n: p.grad.clone() for n, p in module.named_parameters()}
        norm = module.clip_grad_norm_(1.0)
        for name, p in module.named_parameters():
            assert torch.allclose(p.grad, before[name] / math.sqrt(34), rtol=1e-5)
        return float(norm), float(own), before

    found = on_ranks(model, batch, STAGES, 3, once)
    assert [norm for norm, _, _ in found] == pytest.approx([math.sqrt(34)] * 2, rel=1e-12)


def test_num10_13_tied_layers_on_two_stages() -> None:
    """Split between the blocks, 4 micro-batches, 3 AdamW steps: the sum of both gradients, copies alike bit for bit.

    Its norm counts once (NUM-10).
    """
    model, batch = lm(layers=2, tie=True), text()
    report = compared(model, batch, {**STAGES, "stages": "1,1"}, 4)
    assert report.ok, report

    def train(module: StagedModule) -> list[tuple[Tensor, float]]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        found = []
        for _ in range(3):
            module.step(**batch)
            norm = float(module.clip_grad_norm_(1e9))
            optimizer.step()
            optimizer.zero_grad()
            found.append((module.embed.weight.detach().clone(), norm))
        return found

    first, last = on_ranks(model, batch, {**STAGES, "stages": "1,1"}, 4, train)
    assert all(torch.equal(a, b) and m == n for (a, m), (b, n) in zip(first, last, strict=True))
    plain = copy.deepcopy(model)
    plain(**batch).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert first[0][1] == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("pins", [STAGES, pytest.param(ALONE, marks=pytest.mark.slow)], ids=["stages", "alone"])
def test_num26_a_mask_is_cut_with_its_micro_batch(pins: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents end elsewhere in each of 4 rows; 4 micro-batches; the mask is a keyword."""
    batch = text(rows=4)
    documents = torch.stack([(torch.arange(12) >= end).long() for end in (3, 5, 8, 10)])
    mask = (documents[:, :, None] == documents[:, None, :]) & torch.ones(12, 12).tril().bool()
    model = lm(layers=2)
    report = compared(model, {**batch, "mask": mask}, pins, 4)
    assert report.ok, report
    real = View.narrow

    def first_mask(self: View, x: Tensor, axis: Any, dim: int, *unit: int) -> Tensor:
        piece = real(self, x, axis, dim, *unit)
        return x.narrow(dim, 0, piece.shape[dim]) if x.dtype == torch.bool and x.dim() == 3 else piece

    monkeypatch.setattr(View, "slice", first_mask)
    monkeypatch.setattr(View, "narrow", first_mask)
    assert not compared(model, {**batch, "mask": mask}, pins, 4).ok


@pytest.mark.parametrize(
    ("rows", "pins", "micro"),
    [
        (7, STAGES, 4), (7, {**STAGES, "pp": 3}, 4),
        *(
            pytest.param(rows, pins, micro, marks=pytest.mark.slow)
            for rows, pins, micro in (
                (8, {**STAGES, "pp": 3}, 3), (7, ALONE, 4), (7, {"pp": 2, "dp": 1, "tp": 2}, 2),
            )
        ),
    ],
)  # fmt: skip
def test_num28_micro_batches_of_unequal_size(rows: int, pins: dict[str, Any], micro: int) -> None:
    """7 rows as 2 2 2 1: weighed by what they hold."""
    report = compared(lm(layers=3), text(rows=rows), pins, micro)
    assert report.ok, report


def test_num28_micro_batches_of_nothing_are_refused() -> None:
    """9 rows in 4 would be 3 3 3 0."""
    with pytest.raises(UserError, match=r"4 micro-batches: .* cut 9 rows"):
        planned(lm(layers=2), text(rows=9), STAGES, 4)
