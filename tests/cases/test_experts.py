"""Experts under every layout: unequal counts, an expert without rows, and what must be seen to fail.

Rows of experts are in an order that is a rank's own, so their rules can't be tried by cutting and joining one op's
arguments (`tests/sharding/test_truth.py`): here they run in whole programs beside one device.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.errors import CaptureError, RankError
from autopar.ir.graph import CapturedGraph
from autopar.ir.layout import P, R, S
from autopar.ir.mesh import Mesh
from autopar.ir.options import Options
from autopar.ir.plan import AGAIN, Plan
from autopar.ops import TABLE
from autopar.ops.entry import OpEntry, rule
from autopar.runtime import expert_ops, local_ops
from autopar.runtime.groups import communicator
from autopar.runtime.launch import launch
from autopar.runtime.module import ParallelModule
from tests.cases.forced import Function, case, check, grid, line
from tests.cases.run import unequal
from tests.models import tiny

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


@pytest.mark.parametrize("tokens", [6, 12], ids=["of the first rank", "of all ranks"])
def test_hng08_an_expert_that_tokens_of_some_ranks_never_choose(tokens: int) -> None:
    """Every rank takes part in the sum of its gradients, with zeros where it has none."""
    liking = crowded(12)
    liking[:tokens, 3] = -9
    tensors = {
        "x": unequal(12, WIDTH), "up": unequal(EXPERTS, WIDTH, INNER, seed=1),
        "down": unequal(EXPERTS, WIDTH, INNER, seed=2), "score": unequal(12, K, seed=3),
    }  # fmt: skip
    case_ = case(Function(routed, tensors, {"liking": liking}), {"liking": liking}, steps=2)
    assert tags(check(case_, line(2), only=only)) >= {"", "exchange", "own", "experts"}


def elaborate(x: Tensor, up: Tensor, down: Tensor, bias: Tensor, liking: Tensor) -> Tensor:
    """Experts with biases, gates that take every other column, and a norm: ops that name how many rows there are."""
    index = liking.topk(K, -1).indices
    ends, order = torch.ops.autopar.route(index, up.shape[0])
    rows = torch.ops.autopar.spread(x.unsqueeze(-2).expand(*index.shape, x.shape[-1]), ends, order)
    expert = torch.ops.autopar.spread(index.unsqueeze(-1), ends, order).squeeze(-1)
    rows = torch.ops.autopar.grouped_mm(rows, up, ends) + bias[expert]
    rows = rows[..., ::2].sigmoid() * rows[..., 1::2]
    rows = torch.ops.autopar.grouped_mm(rows, down, ends)
    rows = rows * (rows.pow(2).mean(-1, keepdim=True) + 0.1).rsqrt()
    return torch.ops.autopar.collect(rows, ends, order, list(index.shape)).sum(-2)


@pytest.mark.parametrize("mesh", [line(2, "ep"), pytest.param(grid("ep", "tp"), marks=pytest.mark.slow)], ids=str)
def test_what_is_between_the_products(mesh: Mesh) -> None:
    liking = {"liking": crowded(12)}
    tensors = {
        "x": unequal(12, WIDTH), "up": unequal(EXPERTS, WIDTH, 2 * INNER, seed=1),
        "down": unequal(EXPERTS, INNER, WIDTH, seed=2), "bias": unequal(EXPERTS, 2 * INNER, seed=3),
    }  # fmt: skip
    plans = check(case(Function(elaborate, tensors, liking), liking, steps=1), mesh)
    assert tags(plans) >= {"exchange", "experts"}


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


@lru_cache(maxsize=2)
def hugging_face(name: str) -> tuple[Any, Any, CapturedGraph]:
    model, batch = tiny(name)
    model = model.double()
    return model, batch, api.capture(model, batch, options=Options(precision="fp64"), model_name=name)


def planned(name: str, ranks: int, pins: dict[str, Any], **more: Any) -> Plan:
    options = Options(precision="fp64", pins=pins, **more)
    return api.plan_captured(hugging_face(name)[2], load_cluster(f"rtx3090:{ranks}"), options=options)


@pytest.mark.parametrize(
    ("name", "ranks", "pins", "used"),
    [
        ("mixtral", 3, {"dp": 3, "zero": 3}, {"", "local"}),
        ("mixtral", 2, {"ep": 2}, {"exchange", "experts"}),
        ("mixtral", 4, {"dp": 2, "ep": 2, "zero": 3}, {"exchange", "experts"}),
        pytest.param("deepseek_v3", 4, {"dp": 2, "ep": 2}, {"exchange", "experts"}, marks=pytest.mark.slow),
        pytest.param("mixtral", 4, {"ep": 2, "tp": 2}, {"experts"}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 4, {"ep": 4}, {"exchange", "experts"}, marks=pytest.mark.slow),
    ],
)
def test_experts_of_hugging_face(name: str, ranks: int, pins: dict[str, Any], used: set[str]) -> None:
    """Beside the model itself, which runs its experts in its own way."""
    model, batch, graph = hugging_face(name)
    plan = planned(name, ranks, pins)
    assert tags([plan]) >= used - {"local"}
    said = [n.message for n in plan.notes if n.kind == "estimate"]
    assert len(said) == ("exchange" in used or "experts" in used) and all("as many rows for each" in m for m in said)
    experts = [p for n, p in plan.parameters.items() if n.endswith("experts.down_proj")]
    assert all(("experts" in p.role) == ("experts" in used) for p in experts)
    report = api.verify(model, batch, ranks=ranks, plan=plan, captured=graph)
    assert report.ok, str(report)


def test_tokens_are_routed_again_where_memory_binds() -> None:
    """In the backward ranks tell each other once more how many rows there are, and find the same order."""
    model, batch, graph = hugging_face("mixtral")
    plan = planned("mixtral", 2, {"ep": 2}, objective="memory", memory_slack=None)
    again = {key for kept in plan.later.values() for key, how in kept.items() if how == AGAIN and "autopar." in key}
    assert any("autopar.route" in key for key in again), again
    report = api.verify(model, batch, ranks=2, plan=plan, captured=graph)
    assert report.ok, str(report)


def test_a_wrong_line_is_found() -> None:
    """The rows themselves can't be compared; what is made of them can."""
    model, batch, graph = hugging_face("mixtral")
    plan = planned("mixtral", 2, {"ep": 2})
    source = api.emit_captured(graph, plan)
    wrong = re.sub(r"(local_ops\.grouped_outer\([^)]*\))", r"\1.mul(0.5)", source.text, count=1)
    assert wrong != source.text
    report = api.verify_source(graph, plan, replace(source, text=wrong), model, batch, bisect=True)
    assert not report.ok and report.bisection is not None and report.bisection.first is not None
    assert "grouped_outer" in report.bisection.first.op, str(report.bisection)


def test_ranks_that_exchange_apart_are_refused_before_the_run() -> None:
    model, batch, graph = hugging_face("mixtral")
    plan = planned("mixtral", 2, {"ep": 2})
    source = api.emit_captured(graph, plan)
    wrong = re.sub(r'(local_ops\.spread\(.*), \["ep"\]\)', r'\1, ["ep"] if rt.rank else [])', source.text, count=1)
    assert wrong != source.text
    with pytest.raises(RankError, match="do not issue the same collectives"):
        api.verify_source(graph, plan, replace(source, text=wrong), model, batch)


WEIGHT = "model.layers.1.mlp.experts.down_proj"


def trained_beside_others() -> tuple[float, Tensor]:
    """On a real rank: the loss of one step of experts that are spread, and the gradient of their matrices."""
    model, batch, graph = hugging_face("mixtral")
    plan = planned("mixtral", 2, {"ep": 2})
    module = ParallelModule(graph, plan, api.emit_captured(graph, plan), model, communicator(api.mesh_of(plan)))
    loss = module(**batch).loss
    loss.backward()
    gradient: Any = module.get_parameter(WEIGHT).grad
    return float(loss.detach()), gradient.full_tensor()


@pytest.mark.slow
def test_experts_on_real_ranks() -> None:
    model, batch, _ = hugging_face("mixtral")
    expected = model(**batch).loss
    expected.backward()
    loss, gradient = launch(trained_beside_others, ranks=2)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)  # the model's own loss is taken in float32
    torch.testing.assert_close(gradient, model.get_parameter(WEIGHT).grad, rtol=1e-4, atol=1e-6)


def test_rows_of_two_orders_do_not_mix() -> None:
    """On one device equal numbers of rows may be added; nobody can say what that means where tokens are cut."""

    def mixed(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        ends, order = torch.ops.autopar.route(index, 3)
        other_ends, other = torch.ops.autopar.route(index.flip(0), 3)
        rows = torch.ops.autopar.spread(x.unsqueeze(1), ends, order)
        return (rows + torch.ops.autopar.spread(y.unsqueeze(1), other_ends, other)).sum(0)

    inputs = {"index": torch.arange(12).view(12, 1) % 3}
    with pytest.raises(CaptureError, match=r"two calls of autopar\.route"):
        case(Function(mixed, {"x": unequal(12, 4), "y": unequal(12, 4, seed=1)}, inputs), inputs)
