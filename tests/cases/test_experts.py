"""Experts under every layout: unequal counts, an expert without rows, and what must be seen to fail.

Rows of experts are in an order that is a rank's own, so their rules can't be tried by cutting and joining one op's
arguments (`tests/sharding/test_truth.py`): here they run in whole programs beside one device.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.layout import P, R, S
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ops import TABLE
from autopar.ops.entry import OpEntry, rule
from autopar.runtime import expert_ops, local_ops
from tests.cases.forced import Function, case, check, grid, line
from tests.cases.run import unequal

EXPERTS, K, WIDTH, INNER = 6, 2, 6, 6
OPS = ("route", "spread", "collect", "grouped_mm", "grouped_outer")


def routed(x: Tensor, up: Tensor, down: Tensor, score: Tensor, liking: Tensor) -> Tensor:
    """Tokens [..., width] through the k experts that each likes best."""
    index = liking.topk(K, -1).indices
    ends, order = torch.ops.autopar.route(index, up.shape[0])
    slots = x.unsqueeze(-2).expand(*x.shape[:-1], index.shape[-1], x.shape[-1])
    rows = torch.ops.autopar.spread(slots, ends, order)
    rows = torch.ops.autopar.grouped_mm(rows, up, ends).tanh()
    rows = torch.ops.autopar.grouped_mm(rows, down.transpose(1, 2), ends)
    return (torch.ops.autopar.collect(rows, ends, order, list(index.shape)) * score.unsqueeze(-1)).sum(-2)


def crowded(*shape: int, without: int = 4) -> Tensor:
    """How tokens like experts: one of them has most, `without` none; the first tokens' are not like the last ones'."""
    g = torch.Generator().manual_seed(11)
    found = torch.rand((*shape, EXPERTS), generator=g) + torch.linspace(1, 0, EXPERTS)
    found.view(-1, EXPERTS)[: found[..., 0].numel() // 3, 0] -= 2
    found[..., without] = -9
    return found


def made(*shape: int) -> tuple[Function, dict[str, Tensor]]:
    liking = crowded(*shape)
    counts = liking.topk(K, -1).indices.flatten().bincount(minlength=EXPERTS)
    assert counts[4] == 0 and len(set(counts.tolist())) > 3
    tensors = {
        "x": unequal(*shape, WIDTH), "up": unequal(EXPERTS, WIDTH, INNER, seed=1),
        "down": unequal(EXPERTS, WIDTH, INNER, seed=2), "score": unequal(*shape, K, seed=3),
    }  # fmt: skip
    return Function(routed, tensors, {"liking": liking}), {"liking": liking}


def only(op: str) -> bool:
    return any(f"autopar.{name}." in op for name in OPS)


def tags(plans: list[Plan]) -> set[str]:
    """What the ops of some plans use."""
    return {t for p in plans for nodes in p.strategies.values() for k, s in nodes.items() if only(k) for t in s.tags}


@pytest.mark.parametrize("mesh", [line(2), line(3)], ids=str)
def test_every_layout_of_experts(mesh: Mesh) -> None:
    function, inputs = made(12)
    plans = check(case(function, inputs, steps=2), mesh, only=only)
    assert tags(plans) >= {"", "exchange", "own", "experts"}


@pytest.mark.slow
def test_experts_cut_on_two_axes() -> None:
    """Rows exchanged on one axis, those of own experts taken on the other; tokens cut on both."""
    function, inputs = made(6, 2)
    plans = check(case(function, inputs, steps=1), grid(), only=only)
    both = [s.tags for p in plans for k, s in p.strategies["top"].items() if "autopar.spread" in k]
    assert ["exchange", ""] in both and ["own", ""] in both, both


WRONG = {
    "sums of weights not joined": ("grouped_outer", lambda rt, rows, grads, ends: _outer(rows, grads, ends) / 2),
    "order not undone": ("collect", lambda rt, rows, ends, order, size, exchange: rows.view(*size, rows.shape[1])),
    "experts counted from the first": ("route", lambda rt, index, *rest: _route(rt, index % 3, *rest)),
}


def _outer(rows: Tensor, grads: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.autopar.grouped_outer.default(rows, grads, ends)


def _route(rt: Any, index: Tensor, *rest: Any) -> Any:
    return expert_ops.route(rt, index, *rest)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_local_form_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, wrong = WRONG[name]
    function, inputs = made(12)
    monkeypatch.setattr(local_ops, op, wrong)
    with pytest.raises(AssertionError):
        check(case(function, inputs, steps=1), line(2), only=only)


def test_a_wrong_rule_of_experts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of matrices that are whole on each rank are sums over all ranks' rows."""
    name = "autopar.grouped_outer.default"
    wrong = OpEntry(rules=lambda node, metas: (rule((S(0), S(0), P), R),), local=TABLE[name].local)
    monkeypatch.setitem(TABLE, name, wrong)  # type: ignore[arg-type]
    function, inputs = made(12)
    with pytest.raises(AssertionError):
        check(case(function, inputs, steps=1), line(2), only=only)


def test_rows_in_no_order_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the marks rows of one rank are joined with another's as if their order were the same."""
    monkeypatch.setattr(importlib.import_module("autopar.tracer.capture"), "with_unordered", lambda captured: captured)
    function, inputs = made(12)
    with pytest.raises(AssertionError):
        check(case(function, inputs, steps=1), line(2), only=only)


@pytest.mark.parametrize(
    "mesh", [line(2, "ep"), line(3, "ep"), grid("ep", "tp"), grid("dp", "ep"), grid("cp", "ep")], ids=str
)
def test_experts_cut_by_axes_with_roles(mesh: Mesh) -> None:
    """`ep` cuts the batch and experts too; tensor parallelism cuts experts or their matrices."""
    function, inputs = made(12, 2)
    plans = check(case(function, inputs, steps=1), mesh, only=only)
    assert tags(plans) >= {"exchange", "experts"} | ({"own"} if "tp" in mesh.names else set())
