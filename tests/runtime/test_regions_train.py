"""Models with regions on 1 to 4 ranks beside one device: losses, gradients (None included), AdamW steps, buffers."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.errors import CaptureError, InputError, RankError
from autopar.ir.options import Options
from autopar.ir.plan import Plan, mesh_of
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.launch import launch
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from tests.cases.run import RANKS, same, unequal

D = torch.float64


class Experts(nn.Module):
    """Runs only experts that some token goes to: the others get no gradient at all."""

    def __init__(self, dim: int = 4, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(count))
        self.register_buffer("routed", torch.zeros(count, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        scores = self.router(flat).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(flat)
        if self.training:
            self.routed += best.bincount(minlength=len(self.experts))
        for k in best.unique().tolist():
            rows = (best == k).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.experts[k](flat[rows]) * scores[rows, k, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.moe = Experts() if moe else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.moe(x)


class Model(nn.Module):
    def __init__(self, moe: tuple[bool, ...] = (False, True, False, True)) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.blocks = nn.Linear(4, 4), nn.ModuleList(Block(m) for m in moe)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def batch(seed: int = 0, rows: int = 12) -> dict[str, Tensor]:
    return {"x": unequal(rows, 5, 4, seed=seed), "y": unequal(rows, 5, 4, seed=seed + 100)}


def emptied() -> Model:
    """No token goes to expert 1 of either layer."""
    model = Model()
    with torch.no_grad():
        for k in (1, 3):
            model.blocks[k].moe.router.bias[1] = -1e4
    return model


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("make", [Model, emptied])
def test_same_training(ranks: int, make: Any) -> None:
    plan = same(make(), batch(), ranks, pins={"dp": ranks})
    notes = [n for n in plan.notes if n.kind == "region"]
    assert [n.where.split()[0] for n in notes] == ["blocks.1.moe", "blocks.3.moe"]
    assert all("unique()" in n.message or "bincount" in n.message for n in notes)
    assert not any("autopar.region" in n.message for n in plan.notes), "one note each"


@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}, {"free": 2}])
def test_same_training_under_other_layouts(pins: dict[str, int]) -> None:
    ranks = 1
    for name, n in pins.items():
        ranks *= n if name != "zero" else 1
    plan = same(emptied(), batch(), ranks, pins=pins)
    if "zero" in pins:
        assert plan.parameters["blocks.1.moe.router.bias"].layout in ("dp:R", "dp:S(0)")
        assert plan.parameters["blocks.1.moe.experts.0.weight"].layout == "dp:S(0)", (
            "stored cut, gathered for the region"
        )


def built(model: nn.Module, inputs: Any, ranks: int) -> tuple[Any, Plan, Any]:
    options = Options(precision="fp64", pins={"dp": ranks})
    captured = api.capture(model, inputs, options=options)
    plan = api.plan_captured(captured, load_cluster(f"rtx3090:{ranks}"), options=options)
    return captured, plan, api.emit_captured(captured, plan)


def test_routing_changes_from_batch_to_batch() -> None:
    """Each step another batch: other counts, other experts left out. Gradient None exactly where eager's is."""
    model = emptied().double()
    captured, plan, source = built(model, batch(), 2)
    steps = [batch(seed=s) for s in range(4)]

    def train(module: nn.Module) -> tuple[list[float], list[set[str]], dict[str, Tensor]]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        losses, none = [], []
        for k, given in enumerate(steps):
            if k == 2:  # open the closed expert, close another
                with torch.no_grad():
                    for layer in (1, 3):
                        module.get_parameter(f"blocks.{layer}.moe.router.bias").copy_(torch.tensor([0.0, 9.0, -1e4]))
            loss = module(**given)
            loss.backward()
            losses.append(float(loss.detach()))
            none.append({n for n, p in module.named_parameters() if p.grad is None})
            optimizer.step()
            optimizer.zero_grad()
        state = module.full_state_dict() if isinstance(module, ParallelModule) else dict(module.state_dict())
        return losses, none, state

    def rank(rt: Communicator) -> Any:
        if any(p.layout != "dp:R" and "router.bias" in n for n, p in plan.parameters.items()):
            pytest.skip("the test writes whole router biases")
        return train(ParallelModule(captured, plan, source, model, rt))

    found = run_threads(mesh_of(plan), rank)
    losses, none, state = train(copy.deepcopy(model))
    assert none[0] >= {"blocks.1.moe.experts.1.weight"} and none[2] >= {"blocks.1.moe.experts.2.weight"}
    assert none[0] != none[2]
    for mine in found:
        assert mine[1] == none
        assert mine[0] == pytest.approx(losses, rel=1e-10)
        for name, value in state.items():
            assert torch.allclose(mine[2][name].double(), value.double(), rtol=1e-9, atol=1e-12), name


def alone(model: nn.Module, inputs: Any, **more: Any) -> ParallelModule:
    captured, plan, source = built(model, inputs, 1)
    return ParallelModule(captured, plan, source, model, Alone(mesh_of(plan), torch.device("cpu")), **more)


def test_emitted_text() -> None:
    model = Model((True,)).double()
    module = alone(model, batch())
    assert 'rt.region("blocks.0.moe", ' in module.source
    assert 'rt.region_backward("blocks.0.moe", region_kept, ' in module.source


def test_retain_graph_and_accumulation() -> None:
    module = alone(emptied().double(), batch())
    loss = module(**batch())
    loss.backward(retain_graph=True)
    name = "blocks.1.moe.router.weight"
    once = module.get_parameter(name).grad.clone()
    loss.backward()
    assert torch.allclose(module.get_parameter(name).grad, 2 * once)
    module(**batch()).backward()
    assert torch.allclose(module.get_parameter(name).grad, 3 * once)
    assert module.get_parameter("blocks.1.moe.experts.1.weight").grad is None


class Cuts(nn.Module):
    """Another shape for large inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) if x.abs().max() > 1e6 else x * 2


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.cuts = nn.Linear(4, 4), Cuts()

    def forward(self, x: Tensor) -> Tensor:
        return self.cuts(self.lin(x)).pow(2).sum()


def test_another_shape_ends_all_ranks_with_the_regions_name() -> None:
    model, x = Cut().double(), unequal(6, 4)
    captured, plan, source = built(model, (x,), 2)

    def rank(rt: Communicator) -> None:
        ParallelModule(captured, plan, source, model, rt)(1e9 * x)

    with pytest.raises(RankError, match=r"region cuts: its output is float64\[4\], was float64\[6, 4\]") as caught:
        run_threads(mesh_of(plan), rank)
    assert isinstance(caught.value.__cause__, InputError)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) if x.sum() < 1e9 else x


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.first = Noise(), Noise(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(self.first(x)) - self.b(self.first(x))
        return h.pow(2).sum(), h.detach()


def test_random_regions_draw_alike_on_all_ranks_and_anew_each_step() -> None:
    model, x = Noisy().double(), unequal(12, 4)
    seen = {}
    for ranks in (1, 2, 3):
        captured, plan, source = built(model, (x,), ranks)

        def rank(rt: Communicator, captured: Any = captured, plan: Plan = plan, source: Any = source) -> Any:
            module = ParallelModule(captured, plan, source, model, rt)
            losses = []
            for _ in range(3):
                loss, _ = module(x)
                loss.backward()
                losses.append(float(loss.detach()))
            return losses

        found = run_threads(mesh_of(plan), rank)
        assert all(f == found[0] for f in found)
        seen[ranks] = found[0]
    assert len(set(seen[1])) == 3 and 0.0 not in seen[1], "steps and regions draw apart"
    assert seen[2] == pytest.approx(seen[1], rel=1e-12) and seen[3] == pytest.approx(seen[1], rel=1e-12)


def test_evaluation_and_training_modes() -> None:
    model, inputs = Model((True,)).double(), batch()
    options = Options(precision="fp64")
    module = api.compile(model, load_cluster("rtx3090:1"), example_inputs=inputs, options=options)
    eager = copy.deepcopy(model)
    for training in (True, False, True):
        module.train(training), eager.train(training)
        assert torch.allclose(module(**inputs), eager(**inputs))
        assert torch.equal(module.get_buffer("blocks.0.moe.routed"), eager.blocks[0].moe.routed)


def test_search_says_so_up_front_and_strict_refuses(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = Model((True,)), {k: v.float() for k, v in batch().items()}
    with caplog.at_level(logging.WARNING, logger="autopar"):
        plan = api.search(model, load_cluster("rtx3090:2"), example_inputs=inputs)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "autopar"]
    assert "region blocks.0.moe" in said and "test_regions_train.py" in said and "whole on every rank" in said
    assert "region" in str(plan).split("Notes")[1].split("\n")[1]
    with pytest.raises(CaptureError, match=r"test_regions_train\.py"):
        api.search(model, load_cluster("rtx3090:2"), example_inputs=inputs, options=Options(strict=True))


def test_a_plan_made_with_one_batch_runs_with_another() -> None:
    model = Model((True,)).double()
    options = Options(precision="fp64")
    plan = api.search(model, load_cluster("rtx3090:1"), example_inputs=batch(), options=options)
    other = Model((True,)).double()
    nn.init.normal_(other.blocks[0].moe.router.weight)
    api.compile(other, plan=plan, example_inputs=batch(seed=9), options=options)


def test_a_region_is_priced() -> None:
    """Its time is in the plan: a region of large matrices costs more than one of small ones."""

    class Heavy(nn.Module):
        def __init__(self, repeat: int) -> None:
            super().__init__()
            self.w, self.repeat = nn.Parameter(torch.randn(64, 64)), repeat

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.repeat if x.sum() < 1e9 else 1):
                x = torch.tanh(x @ self.w)
            return x

    class Whole(nn.Module):
        def __init__(self, repeat: int) -> None:
            super().__init__()
            self.lin, self.heavy = nn.Linear(64, 64), Heavy(repeat)

        def forward(self, x: Tensor) -> Tensor:
            return self.heavy(self.lin(x)).sum()

    costs = []
    for repeat in (1, 50):
        captured = api.capture(Whole(repeat), (torch.randn(64, 64),))
        (node,) = [n for n in captured.top.nodes if n.op == "autopar.region.default"]
        assert node.measured is not None and node.measured.flops >= repeat * 2 * 64**3
        assert node.outputs[-1] is not None and node.outputs[-1].meta.nbytes >= repeat * 64 * 64 * 4
        plan = api.plan_captured(captured, load_cluster("rtx3090:1"), options=Options())
        costs.append(sum(s.us for key, s in plan.strategies["top"].items() if "autopar.region" in key))
    assert costs[1] > costs[0] > 0


def test_bisect_runs_regions_as_the_ranks_do() -> None:
    model = Model((False, True)).double()
    captured, plan, source = built(model, batch(), 2)
    report = api.verify_source(captured, plan, source, model, batch(), steps=1, bisect=True)
    assert report.ok and report.bisection is not None and report.bisection.first is None
    text = source.text.replace('rt.slice(region_0, "dp", 0)', '2 * rt.slice(region_0, "dp", 0)')
    assert text != source.text
    report = api.verify_source(captured, plan, replace(source, text=text), model, batch(), steps=1, bisect=True)
    assert not report.ok and report.bisection is not None and report.bisection.first is not None
    assert "region_0" in report.bisection.first.text


class Gate(nn.Module):
    """Another branch for each layer and batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) if self.lin.bias.sum() + x.sum() > 0 else -x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        layers = [[nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), Gate()] for _ in range(4)]
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(m for pair in layers for m in pair)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


@pytest.mark.parametrize("ranks", (2, 3))
def test_regions_between_calls_of_one_block(ranks: int) -> None:
    """The calls of a folded block are written as a loop; regions between them are not all the same one."""
    model, x = Stack().double(), unequal(6, 4)
    captured, plan, source = built(model, (x,), ranks)
    assert len(captured.blocks) == 1 and len(captured.regions) == 4
    assert all(f'rt.region("layers.{k}", ' in source.text for k in (1, 3, 5, 7))
    report = api.verify_source(captured, plan, source, model, (x,))
    assert report.ok, str(report)


def on_processes() -> None:
    """One rank of two, with parameters stored cut."""
    model, inputs = emptied().double(), batch()
    options = Options(precision="fp64", pins={"dp": 2, "zero": 3})
    module = api.compile(model, load_cluster("rtx3090:2"), example_inputs=inputs, options=options)
    eager = copy.deepcopy(model)
    for m in (module, eager):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            m(**inputs).backward()
            optimizer.step()
    closed = module.get_parameter("blocks.1.moe.experts.1.weight")
    assert isinstance(closed, DTensor) and closed.to_local().shape == (2, 4) and closed.grad is None
    state = module.full_state_dict()
    for name, value in eager.state_dict().items():
        assert torch.allclose(state[name].double(), value.double(), rtol=1e-9, atol=1e-12), name


@pytest.mark.ranks
@pytest.mark.timeout(100)
def test_real_processes() -> None:
    launch(on_processes, ranks=2)
