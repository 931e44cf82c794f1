"""Dims that don't divide, cut all the same: pieces of unequal size, some of them empty.

Rows OP-02, OP-03, OP-16, OP-37 and X-02 of the field cases, and CLU-08 and CAP-14 where the number of ranks divides
nothing: EQ, and the plan cuts what it is asked to cut, so that no rank does another's work.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.layout import Layout, P, R, S
from autopar.ir.plan import mesh_of
from autopar.runtime.comm import Communicator
from autopar.runtime.module import ParallelModule
from autopar.runtime.parameters import unwrap
from autopar.runtime.threads import run_threads
from tests.cases.lm import TinyLM, text
from tests.cases.run import agree, captured, compared, gradients, on_ranks, planned, same, strategies, unequal
from tests.cases.test_calls import made, state
from tests.cases.test_calls import on_ranks as with_calls
from tests.codegen.hand import mesh

UNEVEN = {2: (7,), 3: (7, 4), 4: (7, 6)}
"""Ranks -> numbers of rows that they don't divide; 4 rows on 3 ranks and 6 on 4 leave a rank with nothing."""


def cut_on(plan: Any, axis: str, dim: int = 0) -> bool:
    """True if every input of the model that has the dim is fed cut along it."""
    layouts = [v for k, v in plan.inputs["top"].items() if k.startswith("input:")]
    return bool(layouts) and all(f"{axis}:S({dim})" in text for text in layouts)


class Flat(nn.Module):
    """OP-02: the rows of a cut tensor as one row."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 16) -> loss ()."""
        return (x * self.gain).view(-1).pow(2).sum()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_op02_flattening(ranks: int) -> None:
    """6 rows on 4 ranks: 2 2 2 0, flat 32 32 32 0; on 5: 2 2 2 0 0."""
    torch.manual_seed(0)
    for rows in (6, 7):
        plan = same(Flat(), {"x": unequal(rows, 16)}, ranks, pins={"dp": ranks})
        assert cut_on(plan, "dp")


class Means(nn.Module):
    """OP-03: statistics over the cut dim."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 4) -> loss ()."""
        x = x * self.gain
        if self.kind == "mean":
            return x.mean()
        if self.kind == "square mean":
            return x.pow(2).mean(0).sum()
        if self.kind == "var":
            return x.var(0).sum()
        return x.std() + x.std(0).sum()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["mean", "square mean", "var", "std"])
def test_op03_means_over_unequal_pieces(kind: str, ranks: int) -> None:
    """Weighted by true counts; the mean of means is off by a tenth and more here."""
    torch.manual_seed(0)
    for x in (torch.arange(12.0).view(3, 4), unequal(5, 4), unequal(7, 4)):
        if len(x) >= ranks:
            assert cut_on(same(Means(kind), {"x": x}, ranks, pins={"dp": ranks}), "dp")
    if kind in ("mean", "square mean"):
        same(Means(kind), {"x": unequal(1, 4)}, ranks)  # one row, which a pin of dp can not cut: finite and equal


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_op16_a_sequence_of_seven(ranks: int) -> None:
    """Norms run on pieces of the sequence, 7 rows together."""
    torch.manual_seed(0)
    model, batch = TinyLM(seq=7), text(5, 7)
    graph = captured(model, batch)
    plan, report = compared(model, batch, ranks, pins={"dp": 1, "cp": ranks, "tp": 1}, graph=graph)
    assert report.ok, str(report)
    assert cut_on(plan, "cp", 1)
    keys = {
        g.name: [n.key for n in g.nodes if n.op == "aten.rsqrt.default" or "layer_norm" in n.op] for g in graph.graphs
    }
    norms = [plan.strategies[g][k] for g, found in keys.items() for k in found if k in plan.strategies.get(g, {})]
    assert norms and all("cp:S(1)" in s.inputs[0] for s in norms)
    lengths = run_threads(mesh_of(plan), lambda rt: rt.piece(7, "cp").length)
    assert sum(lengths) == 7


@pytest.mark.parametrize("heads", [5])
@pytest.mark.parametrize("ranks", [2, 3])
def test_op16_heads_and_widths_that_do_not_divide(ranks: int, heads: int) -> None:
    """Tensor parallelism of 5 heads of 3, a hidden layer of 30 and 25 words."""
    torch.manual_seed(0)
    model, batch = TinyLM(vocab=25, width=15, heads=heads, seq=7), text(7, 7, 25)
    graph = captured(model, batch)
    for pins in ({"tp": ranks}, {"dp": ranks, "zero": 3}, {"dp": ranks, "zero": 0}):
        _, report = compared(model, batch, ranks, pins=pins, graph=graph)
        assert report.ok, f"{pins}: {report}"


def _pieces(whole: Tensor, layout: Layout, rt: Communicator) -> Tensor:
    for axis, place in zip(layout.axes, layout.placements, strict=True):
        if place.dim >= 0:
            own = rt.piece(whole.shape[place.dim], axis)
            whole = whole.narrow(place.dim, own.start, own.length)
        elif place == P:
            whole = whole if rt.index(axis) == rt.size(axis) - 1 else torch.zeros_like(whole)
    return whole


def _round_trips(rt: Communicator) -> int:
    """Whole to cut and back, and from cut to cut, of every size, dim and dtype: bit for bit."""
    count, names = 0, rt.mesh.names
    whole_layout = Layout(names, (R,) * len(names))
    layouts = [Layout(names, p) for p in itertools.product((R, S(0), S(1)), repeat=len(names))]
    sums = Layout(names, (P,) * len(names))
    for size, name in itertools.product(range(1, 10), ("bool", "int64", "bfloat16")):
        for shape in ((size, 3), (2, size)):
            whole = (torch.arange(shape[0] * shape[1]).view(shape) * 5 % 7 - 3).to(getattr(torch, name))
            for before, after in itertools.product((*layouts, sums), layouts):
                if len(names) > 1 and whole_layout not in (before, after):
                    continue
                if name == "bool" and before.partial:
                    continue
                got = rt.convert(_pieces(whole, before, rt), before, after, shape)
                wanted = _pieces(whole, after, rt)
                assert got.shape == wanted.shape and torch.equal(got, wanted), (size, name, str(before), str(after))
                count += 1
    return count


@pytest.mark.parametrize("axes", [*({"dp": n} for n in range(2, 8)), {"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}], ids=str)
def test_op37_round_trips(axes: dict[str, int]) -> None:
    assert min(run_threads(mesh(**axes), _round_trips, timeout_s=120)) > 200


class Losses(nn.Module):
    """X-02: means of a loss over the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (B, 6), y: (B,) classes -> loss ()."""
        h = self.net(x)
        if self.kind == "mse":
            return F.mse_loss(h, F.one_hot(y.clamp(min=0), 4).to(h.dtype))
        if self.kind == "bce":
            return F.binary_cross_entropy_with_logits(h, F.one_hot(y.clamp(min=0), 4).to(h.dtype))
        return F.cross_entropy(h, y)


@pytest.mark.parametrize("kind", ["mse", "bce", "ce"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_x02_means_of_losses_over_an_uneven_batch(kind: str, ranks: int) -> None:
    torch.manual_seed(0)
    for rows in UNEVEN[ranks]:
        y = torch.randint(0, 4, (rows,), generator=torch.Generator().manual_seed(rows))
        y[0] = -100 if kind == "ce" else y[0]
        for pins in ({"dp": ranks, "zero": 0}, {"dp": ranks, "zero": 3}):
            plan = same(Losses(kind), {"x": unequal(rows, 6), "y": y}, ranks, pins=pins)
            assert cut_on(plan, "dp")


class Small(nn.Module):
    """CLU-08: parameters with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 2), nn.LayerNorm(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 4) -> loss ()."""
        return self.down(self.norm(self.up(x))).pow(2).mean()


@pytest.mark.parametrize("ranks", [4, 7])
def test_clu08_empty_shards(ranks: int) -> None:
    """A bias of 3 on 4 and 7 ranks is cut, some ranks hold nothing of it, and the optimizer steps there too."""
    torch.manual_seed(0)
    model, batch = Small(), {"x": unequal(9, 4)}
    graph = captured(model, batch)
    plan, report = compared(model, batch, ranks, pins=strategies(ranks)["zero3"], graph=graph)
    assert report.ok, str(report)
    assert plan.parameters["down.bias"].layout == "dp:S(0)"
    plan = planned(graph, ranks, strategies(ranks)["zero3"])

    def rank(module: Any) -> tuple[int, bool]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        module(**{"x": unequal(9, 4)}).backward()
        optimizer.step()
        state = {k: v.clone() for k, v in module.full_state_dict().items()}
        module.load_full_state_dict({k: torch.zeros_like(v) for k, v in state.items()})
        module.load_full_state_dict(state)
        held = unwrap(module.down.bias.detach()).numel()
        return held, all(torch.equal(v, state[k]) for k, v in module.full_state_dict().items())

    found = on_ranks(graph, plan, model, rank)
    assert [held for held, _ in found] == [1, 1, 1, *[0] * (ranks - 3)]
    assert all(equal for _, equal in found)


def test_cap14_the_last_batch_of_an_epoch_is_cut_too() -> None:
    """Batches of 8, 7 and 4 on 3 ranks: each program cuts its own, 4 as 2 2 0."""

    def body(compile_: Any) -> dict[str, Tensor]:
        module = compile_(made(TinyLM), **text(8))
        losses = {}
        for step, rows in enumerate((8, 7, 4)):
            loss = module(**text(rows, seed=step + 20))
            loss.backward()
            losses[f"loss {step}"] = loss.detach()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        if isinstance(module, ParallelModule):
            assert len(module.plans) == 3 and all(cut_on(p.plan, "dp") for p in module.plans)
        return losses | state(module)

    with_calls(3, {"dp": 3}, body)


class Dropped(nn.Module):
    """Draws in a tensor whose rows stay together seven by seven: the mask is that of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 7, 4) -> loss ()."""
        h = F.dropout(self.linear(x).flatten(0, 1).sin(), 0.4)
        return (h + torch.rand_like(h)).pow(2).mean()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_draws_in_unequal_pieces_are_one_devices(ranks: int) -> None:
    torch.manual_seed(0)
    model, batch = Dropped().double(), {"x": unequal(7, 7, 4)}
    graph = captured(model, batch)

    def loss_and_gradients(module: Any) -> dict[str, Tensor]:
        loss = module(**batch)
        loss.backward()
        return {"loss": loss.detach(), **gradients(module)}

    (wanted,) = on_ranks(graph, planned(graph, 1, {}), model, loss_and_gradients)
    plan = planned(graph, ranks, {"dp": ranks})
    assert cut_on(plan, "dp")
    for found in on_ranks(graph, plan, model, loss_and_gradients):
        agree(found, wanted)
