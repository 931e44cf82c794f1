"""Ops on flattened leading dims are moved before the flattening, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options
from autopar.tracer import capture
from autopar.tracer.unflatten import RESHAPES, flattened
from tests.models import NAMES, tiny
from tests.tracer.proof import check_equal

B, S, D, E, H = 3, 5, 8, 6, 2


class Model(nn.Module):
    """`body(x, ids, model)` -> loss, with a few parameters at hand."""

    def __init__(self, body: Callable[[Tensor, Tensor, Model], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, E))
        self.v = nn.Parameter(torch.randn(E, D))
        self.b = nn.Parameter(torch.randn(E))
        self.table = nn.Parameter(torch.randn(7, D))
        self.body = body

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.body(x * self.table.sum(), ids, self)


def ops_of(captured: CapturedGraph) -> set[str]:
    return {n.op for g in captured.graphs for n in g.nodes}


def check(body: Callable[[Tensor, Tensor, Model], Tensor]) -> set[str]:
    torch.manual_seed(1)
    batch: dict[str, Any] = {"x": torch.randn(B, S, D).double(), "ids": torch.randint(0, E, (B, S))}
    return ops_of(check_equal(Model(body).double(), batch))


def heads(x: Tensor) -> Tensor:
    return x.view(B, S, H, D // H).transpose(1, 2)


BODIES: dict[str, tuple[Callable[[Tensor, Tensor, Model], Tensor], str]] = {
    "linear": (lambda x, ids, m: F.linear(x, m.v, m.b).pow(2).sum(), "aten.linear.default"),
    "linear without bias": (lambda x, ids, m: F.linear(x, m.v).pow(2).sum(), "aten.tensordot.default"),
    "Conv1D": (lambda x, ids, m: torch.addmm(m.b, x.view(-1, D), m.w).view(B, S, E).exp().sum(), "aten.linear.default"),
    "chain in two dims": (
        lambda x, ids, m: (torch.softmax(x.reshape(-1, D) @ m.w, 1) * m.b).amax(0).sum(), "aten.matmul.default"),
    "cross entropy": (lambda x, ids, m: F.cross_entropy((x @ m.w).view(-1, E), ids.view(-1)), "aten.matmul.default"),
    "ignored labels": (
        lambda x, ids, m: F.cross_entropy((x @ m.w).view(-1, E), ids.masked_fill(ids > 2, -100).view(-1)),
        "aten.matmul.default"),
    "mean over rows": (lambda x, ids, m: (x.reshape(B * S, D) @ m.w).mean(0).pow(2).sum(), "aten.matmul.default"),
    "kept dims": (lambda x, ids, m: (x.reshape(-1, D) @ m.w).sum(0, keepdim=True).pow(2).sum(), "aten.matmul.default"),
    "trailing view": (
        lambda x, ids, m: (x.reshape(-1, D) @ m.w).view(B * S, 2, E // 2).transpose(1, 2).amax(-1).pow(2).sum(),
        "aten.matmul.default"),
    "embedding": (lambda x, ids, m: (F.embedding(ids.view(-1), m.table) @ m.w).pow(2).sum(), "aten.matmul.default"),
    "heads": (
        lambda x, ids, m: (torch.softmax(heads(x) @ heads(x * 2).transpose(-1, -2), -1) @ heads(x.sin())).pow(2).sum(),
        "aten.matmul.default"),
    "expanded": (
        lambda x, ids, m: (x.reshape(-1, D) * m.table.sum(0).expand(B * S, D)).pow(2).sum(), "aten.mul.Tensor"),
    "dropped rows": (lambda x, ids, m: (x.reshape(-1, D) @ m.w)[3:].pow(2).sum(), "aten.matmul.default"),
    "rows mixed": (lambda x, ids, m: ((x.reshape(-1, D) @ m.w).t() @ x.reshape(-1, D).cumsum(0)).sum(), ""),
    "sorted rows": (lambda x, ids, m: (x.reshape(-1, D) @ m.w).sort(0)[0][::2].pow(2).sum(), "aten.matmul.default"),
    "another grouping": (
        lambda x, ids, m: ((x.reshape(-1, D) @ m.w).view(S, B, E) * torch.arange(B).view(B, 1)).pow(2).sum(),
        "aten.matmul.default"),
    "one row": (lambda x, ids, m: (x[:1, :1].reshape(-1, D) @ m.w).pow(2).sum(), ""),
    "transposed": (lambda x, ids, m: (x.transpose(0, 1).reshape(-1, D) @ m.w).sin().sum(), "aten.matmul.default"),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_values_are_the_same(case: str) -> None:
    body, expected = BODIES[case]
    found = check(body)
    assert not expected or expected in found, sorted(found)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("mixtral", "deepseek_v3", "swin")])
def test_no_product_of_a_model_is_flat(name: str) -> None:
    """Left out: experts' rows, which are sorted by expert, and windows, which are grouped in two ways."""
    model, batch = tiny(name)
    for graph in capture(model, (), batch, options=Options()).graphs:
        values = graph.values()
        flat = {
            out.name
            for node in graph.nodes
            if node.op in RESHAPES and (out := node.outputs[0]) is not None
            if flattened(values[node.refs[0]].meta.shape, out.meta.shape) and min(values[node.refs[0]].meta.shape) > 1
        }
        for node in graph.nodes:
            if node.op in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default"):
                assert not flat & set(node.refs), f"{node.op} {node.key} {node.source}"


def test_flattened() -> None:
    assert flattened((3, 5, 8), (15, 8)) == 2
    assert flattened((3, 5, 2, 4), (30, 4)) == 3
    assert flattened((3, 5), (15,)) == 2
    assert flattened((3, 5, 8), (3, 40)) == 0
    assert flattened((3, 5, 8), (24, 5)) == 0
    assert flattened((15, 8), (15, 8)) == 0
