"""Random draws don't depend on the plan (docs/randomness.md): NUM-15, NUM-16, NUM-18, and what else is of their kind.

One device here is the captured graph on one device; eager PyTorch draws other numbers.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.errors import RankError
from autopar.ir.layout import replicated
from autopar.ir.options import Options
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.groups import ranks_started
from autopar.runtime.launch import launch
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from tests.cases.run import captured, on_ranks, planned, same_everywhere, strategies, unequal
from tests.codegen.hand import mesh


class Dropping(nn.Module):
    """Inputs (12, 12): two layers with dropout between them; returns (loss, what the dropout gave)."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(12, 24), nn.Linear(24, 12), p

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(self.a(x)) + 2, self.p, self.training)
        return self.b(h).pow(2).mean(), h


class Attending(nn.Module):
    """A language model of two folded blocks, dropout on attention weights, residuals and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 24)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = F.dropout(self.embed(ids), 0.1, self.training)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.drop = nn.Dropout(0.2)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (x.view(*h.shape[:2], 12, 2).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        p = 0.3 if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.drop(self.out(a))
        return h + self.drop(self.down(F.gelu(self.up(h))))


def words() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 24, (12, 12), generator=g)
    for row in range(12):
        labels[row, : row % 5] = -100
    return {"ids": torch.randint(0, 24, (12, 12), generator=g), "labels": labels}


def on(ranks: int, pins: dict[str, Any], work: Any, model: nn.Module | None = None) -> list[Any]:
    """`work(module, x)` on in-process ranks."""
    model, x = model or Dropping(), unequal(12, 12)
    graph = captured(model, (x,))
    return on_ranks(graph, planned(graph, ranks, pins), model.double(), lambda m: work(m, x))


def given(module: ParallelModule, x: Tensor) -> Tensor:
    """What the dropout gave in one call, whole."""
    rt = module.communicator
    program = next(iter(module._autopar.programs.values()))
    return rt.convert(module(x)[1].detach(), program.outputs[1], replicated(rt.mesh), program.output_shapes[1])


def same_draws(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x == 0, y == 0) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def weights() -> Dropping:
    torch.manual_seed(0)
    return Dropping()


def test_num15_training_with_dropout_is_the_same_on_1_to_4_ranks(weights: Dropping) -> None:
    """NUM-15: losses, gradients, state under every named strategy."""
    same_everywhere(weights, (unequal(12, 12),), (1, 2, 3), precisions=("fp64",))
    same_everywhere(weights, (unequal(12, 12),), (4,), precisions=("fp32",), only=lambda name: name == "dp2tp2")


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
def test_num15_attention_dropout_in_folded_blocks(ranks: int) -> None:
    torch.manual_seed(1)
    only = ("tp",) if ranks == 3 else tuple(strategies(ranks))
    same_everywhere(Attending(), words(), (ranks,), precisions=("fp64",), only=lambda name: name in only)


def test_num15_batches_of_other_sizes_draw_alike(weights: Dropping) -> None:
    """The last, smaller batch of an epoch among them, on ranks that divide nothing."""
    options = {"precision": "fp64", "differentiable": "all"}

    def losses(rt: Communicator, pins: dict[str, Any]) -> list[float]:
        module = api.compile_on(
            copy.deepcopy(weights).double(), lambda plan, source: rt, load_cluster(f"rtx3090:{rt.mesh.size}"),
            (unequal(12, 12),), {}, options=Options(pins=pins, **options),
        )  # fmt: skip
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        found = []
        for step, rows in enumerate((12, 7, 2, 12)):
            loss = module(unequal(rows, 12, seed=step))[0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    wanted = losses(Alone(mesh(), torch.device("cpu")), {})
    for ranks, pins in ((2, {"tp": 2}), (3, {"dp": 3, "zero": 3}), (4, {"dp": 4})):
        axes = {"tp" if "tp" in pins else "dp": ranks}
        for found in run_threads(mesh(**axes), lambda rt, pins=pins: losses(rt, pins), timeout_s=200.0):
            assert found == pytest.approx(wanted, rel=1e-10)


def test_num15_masks_are_equal_bit_by_bit(weights: Dropping) -> None:
    (wanted,) = on(1, {}, lambda m, x: [given(m, x), given(m, x)], weights)
    assert 0.4 < float((wanted[0] == 0).double().mean()) < 0.6
    for ranks, name in ((2, "tp"), (3, "cp"), (3, "zero3"), (4, "dp2tp2")):
        for found in on(ranks, strategies(ranks)[name], lambda m, x: [given(m, x), given(m, x)], weights):
            assert same_draws(found, wanted)


def test_num16_pieces_draw_otherwise_and_replicas_alike(weights: Dropping) -> None:
    """NUM-16: halves of the mask agree by chance only, replicas exactly, calls differ, seeds come back."""

    def work(m: ParallelModule, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        first = [given(m, x), given(m, x)]
        m.manual_seed(7)
        other = [given(m, x)]
        m.manual_seed(0)
        return first, other, [given(m, x), given(m, x)]

    whole = {"tp": 2, "a": "tp:R", "b": "tp:R"}
    layouts = on(2, whole, lambda m, x: next(iter(m._autopar.programs.values())).outputs[1], weights)
    assert layouts[0].replicated, "two ranks that draw the same"
    cases: Any = ((2, {"dp": 2, "zero": 0}, 0), (2, {"tp": 2}, 1), (4, {"dp": 2, "tp": 2}, 0), (2, whole, 0))
    for ranks, pins, dim in cases:
        all_ranks = on(ranks, pins, work, weights)
        for first, other, again in all_ranks:
            kept = first[0] == 0
            upper, lower = kept.chunk(2, dim)
            assert 0.35 < float((upper == lower).double().mean()) < 0.65
            assert 0.35 < float(((first[1] == 0) == kept).double().mean()) < 0.65, "two calls"
            assert 0.35 < float(((other[0] == 0) == kept).double().mean()) < 0.65, "two seeds"
            assert same_draws(first, again), "the first seed again"
            assert same_draws(first, all_ranks[0][0]), "replicas"


def test_num18_backward_uses_the_mask_of_its_forward(weights: Dropping) -> None:
    """NUM-18: no gradient exactly where the output is zero, other calls in between or not.

    A backward that draws again (the emitted text is changed to do so) draws what its own forward drew.
    """

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(12, 12))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.dropout(self.w * x, 0.5, self.training)
            return h.sum(), h.detach()

    model = Watched().double()
    x = unequal(12, 12)
    graph = captured(model, (x,))
    plan = planned(graph, 1, {})
    source = api.emit_captured(graph, plan)
    drawn = re.search(r"\w+, (\w+) = (local_ops\.dropout\(rt, )\w+(, .*\)).*", source.text)
    used = re.search(r"local_ops\.dropout_backward\(rt, (\w+), (\w+),", source.text)
    assert drawn and used
    redrawn = f"local_ops.dropout_backward(rt, {used[1]}, {drawn[2]}{used[1]}{drawn[3]}[1],"
    text = source.text.replace(used[0], redrawn)
    assert text != source.text

    def work(m: ParallelModule) -> list[Tensor]:
        (one, given), (two, others) = m(x), m(x)
        m(x)
        one.backward()
        first = m.w.grad.clone()
        m.w.grad = None
        two.backward()
        assert same_draws([given, others], [first, m.w.grad]), "the forward's own mask"
        return [first, m.w.grad.clone()]

    (kept,) = on_ranks(graph, plan, model, work)
    (again,) = on_ranks(graph, plan, model, work, source=replace(source, text=text))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert not torch.equal(kept[0] == 0, kept[1] == 0)
    assert torch.equal(kept[0][kept[0] != 0], (2 * x)[kept[0] != 0])


def test_num15_the_state_is_saved_and_loaded(weights: Dropping) -> None:
    """A run that stops goes on as if it had not, on other ranks too; strict loads leave the state alone."""

    def whole(m: ParallelModule, x: Tensor) -> Any:
        draws = [given(m, x) for _ in range(2)]
        state = json.loads(json.dumps(m.get_rng_state()))
        m.load_state_dict(m.state_dict(), strict=True)
        assert m.get_rng_state() == state == {"seed": 0, "step": 2}
        nn.Module.load_state_dict(Dropping().double(), m.full_state_dict(), strict=True)
        with torch.no_grad():
            return state, draws, [given(m, x) for _ in range(2)]

    ((state, _, wanted),) = on(1, {}, whole, weights)

    def goes_on(m: ParallelModule, x: Tensor) -> list[Tensor]:
        m.set_rng_state(state)
        return [given(m, x) for _ in range(2)]

    for found in on(3, {"dp": 3, "zero": 3}, goes_on, weights):
        assert same_draws(found, wanted)


def test_num15_a_copy_counts_on_its_own(weights: Dropping) -> None:
    def work(m: ParallelModule, x: Tensor) -> None:
        other = copy.deepcopy(m)
        first = given(m, x)
        assert m.get_rng_state()["step"] == 1 and other.get_rng_state()["step"] == 0
        assert same_draws([given(other, x)], [first])

    on(2, {"tp": 2}, work, weights)


@pytest.mark.parametrize("bad", [{"seed": 1}, {"seed": 1, "step": 0.5}, {"seed": 2**63, "step": 0}])
def test_num15_what_is_no_state_is_refused(weights: Dropping, bad: dict[str, Any]) -> None:
    with pytest.raises(RankError, match="InputError: an rng state has whole numbers"):
        on(1, {}, lambda m, x: m.set_rng_state(bad), weights)


def test_num15_ranks_of_different_seeds_are_refused(weights: Dropping) -> None:
    with pytest.raises(RankError, match=r"PlanError: rng state.*: ranks differ"):
        on(2, {"dp": 2}, lambda m, x: m.manual_seed(m.communicator.rank), weights)


def test_num15_verify_says_what_it_compared_with(weights: Dropping) -> None:
    report = api.verify(weights.float(), (unequal(12, 12).float(),), ranks=2)
    assert report.ok and "draws random numbers" in str(report)


def _trained(seed: int) -> list[float]:
    """Losses of three steps on real ranks."""
    torch.manual_seed(0)
    x = unequal(12, 12)
    module = api.compile(
        Dropping().double(), load_cluster(f"rtx3090:{ranks_started()}"), example_inputs=(x,),
        options=Options(seed=seed, precision="fp64"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(module.parameters())
    losses = []
    for _ in range(3):
        loss = module(x)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.ranks
def test_num15_processes_under_the_searched_plan() -> None:
    """The same losses again and on three processes; another seed trains otherwise."""
    one = _trained(5)
    assert _trained(5) == one
    assert _trained(6) != pytest.approx(one, rel=1e-3)
    assert launch(_trained, 3, (5,), timeout_s=200) == pytest.approx(one, rel=1e-10)
