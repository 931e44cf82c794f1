"""Field cases CAP and X-06, X-07 on ranks: what is captured trains as on one device, or is refused in words.

tests/tracer/test_cases.py has the same rows for the captured graph alone.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import traceback
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.errors import CaptureError, InputError, UserError
from autopar.ir.layout import replicated
from autopar.ir.options import Options
from autopar.ir.plan import mesh_of
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from tests.cases.run import same, unequal
from tests.models import ConvNet


def on_ranks(model: nn.Module, inputs: Any, ranks: int, pins: dict[str, Any]) -> Any:
    """(compile one rank's module, mesh): a float64 model planned for `ranks` ranks."""
    options = Options(pins=pins, precision="fp64")
    graph = api.capture(model, inputs, options=options)
    plan = api.plan_captured(graph, load_cluster(f"rtx3090:{ranks}"), options=options)
    source = api.emit_captured(graph, plan)
    return lambda rt: ParallelModule(graph, plan, source, model, rt), mesh_of(plan)


SLOW = pytest.mark.slow
W4 = (1, 2, 3, pytest.param(4, marks=SLOW))


def every_rank(mesh: Any, fn: Any) -> list[Any]:
    if mesh.size == 1:
        return [fn(Alone(mesh, torch.device("cpu")))]
    return run_threads(mesh, fn, timeout_s=120)


class ConvNorm(nn.Module):
    """Conv, batch norm, ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.bn = nn.BatchNorm2d(12)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 3, H, W) -> ()."""
        return F.relu(self.bn(self.conv(x))).pow(2).mean()


@pytest.mark.parametrize("ranks", W4)
def test_cap15_running_statistics_advance_once_a_step(ranks: int) -> None:
    """Statistics are of the whole batch, on ranks whose parts are of unequal scale; then the plain model evaluates."""
    torch.manual_seed(0)
    model = ConvNorm().double()
    x = unequal(12, 3, 4, 4)
    make, mesh = on_ranks(model, {"x": x}, ranks, {"dp": ranks})
    eager = copy.deepcopy(model)
    for _ in range(3):
        eager(x)

    def rank(rt: Communicator) -> dict[str, Tensor]:
        module = make(rt)
        for _ in range(3):
            module(x=x)
        return module.full_state_dict()

    for state in every_rank(mesh, rank):
        assert int(state["bn.num_batches_tracked"]) == 3
        for name in ("bn.running_mean", "bn.running_var"):
            torch.testing.assert_close(state[name], eager.state_dict()[name], rtol=1e-10, atol=1e-12)
        once = copy.deepcopy(model)
        once(x)
        assert not torch.allclose(state["bn.running_mean"], once.state_dict()["bn.running_mean"], rtol=1e-3)
        plain = copy.deepcopy(model)
        plain.load_state_dict(state)
        torch.testing.assert_close(plain.eval()(x), eager.eval()(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", W4)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_cap25_a_small_resnet(ranks: int, axis: str) -> None:
    torch.manual_seed(0)
    inputs = {"x": unequal(12, 3, 16, 16), "y": torch.randint(0, 12, (12,))}
    same(ConvNet(), inputs, ranks, pins={axis: ranks})


def test_cap15_25_op28_statistics_of_each_part_are_seen() -> None:
    """The usual wrong variant in the emitted code: each rank's own statistics in place of the sums over all."""
    torch.manual_seed(0)
    model, x = ConvNorm().double(), unequal(12, 3, 4, 4)
    options = Options(pins={"dp": 2, "zero": 0}, precision="fp64")
    graph = api.capture(model, {"x": x}, options=options)
    plan = api.plan_captured(graph, load_cluster("rtx3090:2"), options=options)
    source = api.emit_captured(graph, plan)
    forward, backward, rest = source.text.partition("\ndef backward")
    local, whole = re.subn(r'rt\.all_reduce\((\w+), "dp"\)(.*\[1, 12, 1, 1\])', r"\1 * 2\2", forward)
    local, cut = re.subn(r'rt\.reduce_scatter\((\w+), "dp", 1\)', r'rt.slice(\1 * 2, "dp", 1)', local)
    assert whole + cut >= 2, forward
    report = api.verify_source(graph, plan, replace(source, text=local + backward + rest), model, {"x": x})
    wrong = {row.name for row in report.rows if not row.ok}
    assert {"bn.running_mean", "bn.running_var", "gradient of conv.weight"} <= wrong, wrong
    assert api.verify_source(graph, plan, source, model, {"x": x}).ok


# Results and arguments -----------------------------------------------------------------------------------------------

W = (1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
D = torch.float64


@dataclass
class Out:
    loss: Tensor
    logits: Tensor
    extra: Any = None


@dataclass
class Nested:
    out: Out
    parts: tuple[Tensor, None]
    loss: Tensor


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor
    extra: Any


class Attributes(OrderedDict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _nested(loss: Tensor, logits: Tensor) -> Nested:
    return Nested(Out(loss, logits), (logits, None), loss)


RESULTS: dict[type, Any] = {
    Out: Out,
    Nested: _nested,
    Named: lambda loss, logits: Named(loss, logits, None),
    Attributes: lambda loss, logits: Attributes(loss=loss, logits=logits, extra=None),
    dict: lambda loss, logits: {"loss": loss, "logits": logits, "extra": None},
}


class Returns(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.lin, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Any:
        h = self.lin(x)
        return RESULTS[self.kind](h.pow(2).sum(), h)


@pytest.mark.parametrize("ranks", W)
@pytest.mark.parametrize("kind", list(RESULTS))
def test_cap01_result_types(kind: type, ranks: int) -> None:
    torch.manual_seed(0)
    model, x = Returns(kind).double(), unequal(6, 8)
    make, mesh = on_ranks(model, (x,), ranks, {"dp": ranks})
    eager = copy.deepcopy(model)
    wanted = eager(x)
    loss = wanted["loss"] if kind is dict else wanted.loss
    loss.backward()

    def rank(rt: Communicator) -> None:
        module = make(rt)
        found = module(x)
        assert type(found) is kind
        inner = found.out if kind is Nested else found
        extra, logits, mine = (
            (found[k] for k in ("extra", "logits", "loss")) if kind is dict else (inner.extra, inner.logits, inner.loss)
        )
        assert extra is None
        if kind is Nested:
            assert type(found.out) is Out and found.parts[1] is None
        torch.testing.assert_close(mine, loss, rtol=1e-10, atol=0)
        eager_logits = wanted["logits"] if kind is dict else (wanted.out if kind is Nested else wanted).logits
        whole = rt.convert(
            logits,
            next(iter(module._autopar.programs.values())).outputs[1],
            replicated(rt.mesh),
            tuple(eager_logits.shape),
        )
        torch.testing.assert_close(whole, eager_logits, rtol=1e-10, atol=0)
        (found["loss"] if kind is dict else found.loss).backward()
        gradient = rt.convert(
            module.lin.weight.grad,
            module.storage_layouts["lin.weight"],
            replicated(rt.mesh),
            tuple(eager.lin.weight.shape),
        )
        torch.testing.assert_close(
            gradient, eager.lin.weight.grad * (2 if kind is Nested else 1) / (2 if kind is Nested else 1)
        )

    every_rank(mesh, rank)


class Subtracts(nn.Module):
    """Two inputs of one shape, a flag, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, x1: Tensor, /, x2: Tensor, flag: bool = True, mask: Tensor | None = None, *, n: int = 2
    ) -> Tensor:
        h = self.a(x1) - self.b(x2)
        h = h * n if flag else h
        return (h if mask is None else h * mask).pow(2).sum()


class Keywords(Subtracts):
    def forward(self, x1: Tensor, x2: Tensor, flag: bool = True, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x1, x2, flag, mask)


@pytest.mark.parametrize("ranks", W)
def test_cap02_keywords_in_any_order(ranks: int) -> None:
    torch.manual_seed(0)
    model = Keywords().double()
    batch = {"flag": True, "x2": unequal(6, 4, seed=2), "x1": unequal(6, 4, seed=1)}
    make, mesh = on_ranks(model, batch, ranks, {"dp": ranks})
    wanted = float(model(**batch).detach())
    swapped = float(model(**{**batch, "x1": batch["x2"], "x2": batch["x1"]}).detach())
    assert abs(wanted - swapped) > 1

    def rank(rt: Communicator) -> list[float]:
        module = make(rt)
        orders = [module(**{k: batch[k] for k in order}) for order in itertools.permutations(batch)]
        return [float(loss.detach()) for loss in [*orders, module(batch["x1"], batch["x2"])]]

    for found in every_rank(mesh, rank):
        assert found == pytest.approx([wanted] * 7, rel=1e-10)
    same(Keywords(), batch, ranks, pins={"dp": ranks})


@pytest.mark.parametrize("ranks", W)
def test_cap04_plain_arguments_are_kept_and_guarded(ranks: int) -> None:
    torch.manual_seed(0)
    model, x = Subtracts().double(), unequal(6, 4)
    inputs = (x, x.flip(0), True, None)
    make, mesh = on_ranks(model, inputs, ranks, {"dp": ranks})

    def rank(rt: Communicator) -> None:
        module = make(rt)
        assert float(module(*inputs)) == pytest.approx(float(model(*inputs)), rel=1e-10)
        for changed, name in (((*inputs[:2], False, None), "flag"), ((*inputs[:3], x), "mask")):
            with pytest.raises(InputError, match=f"'{name}'"):
                module(*changed)
        with pytest.raises(InputError, match="'n' is 3"):
            module(*inputs, n=3)

    every_rank(mesh, rank)
    same(Subtracts(), inputs, ranks, pins={"dp": ranks})


# Names, shared and unused parameters ----------------------------------------------------------------------------------


class TinyLM(nn.Module):
    """Embedding, one attention-free mixing layer, tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return F.cross_entropy(self.head(h + torch.tanh(self.mix(h)))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ids(rows: int = 6) -> Tensor:
    """Few tokens in the first rows, many in the last."""
    g = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(0, 2 + k, (5,), generator=g) for k in range(rows)])


@pytest.mark.parametrize("ranks", W)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_cap05_tied_weights(axis: str, ranks: int) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    same(model, {"ids": ids()}, ranks, pins={axis: ranks})
    make, mesh = on_ranks(model.double(), {"ids": ids()}, ranks, {axis: ranks})

    def rank(rt: Communicator) -> None:
        module = make(rt)
        assert module.head.weight is module.embed.weight
        assert list(module.state_dict()) == list(model.state_dict())
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]

    every_rank(mesh, rank)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 6)
        self.ema = self.student

    def forward(self, x: Tensor) -> Tensor:
        return self.ema(torch.tanh(self.student(x))).pow(2).sum()


class OneNorm(nn.Module):
    """Three norms that share weight and bias, each followed by its own Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.lins = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for norm in self.norms[1:]:
            norm.weight, norm.bias = self.norms[0].weight, self.norms[0].bias

    def forward(self, x: Tensor) -> Tensor:
        for norm, lin in zip(self.norms, self.lins, strict=True):
            x = lin(norm(x))
        return x.pow(2).sum()


@pytest.mark.parametrize("ranks", W)
@pytest.mark.parametrize("kind", [Shared, OneNorm], ids=["cap07", "cap27"])
def test_cap07_cap27_one_tensor_under_several_names(kind: type[nn.Module], ranks: int) -> None:
    torch.manual_seed(0)
    model = kind()
    same(model, (unequal(6, 6),), ranks, pins={"dp": ranks})
    make, mesh = on_ranks(model.double(), (unequal(6, 6),), ranks, {"dp": ranks})

    def rank(rt: Communicator) -> None:
        module = make(rt)
        assert list(module.state_dict()) == list(model.state_dict())
        if kind is Shared:
            assert module.ema is module.student
        else:
            assert module.norms[2].weight is module.norms[0].weight

    every_rank(mesh, rank)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.evaluation = nn.Parameter(torch.randn(4))
        self.register_buffer("kept", torch.rand(3))
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.used(x)
        return (h if self.training else h * self.evaluation).pow(2).sum()


class Detached(nn.Module):
    """p gets no gradient; of two heads only one is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.head, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.p.detach() * self.q * x
        return self.head(h).sum(), self.other(h).detach()


@pytest.mark.parametrize("ranks", W)
@pytest.mark.parametrize(
    ("kind", "idle"),
    [(Unused, {"unused.weight", "unused.bias", "evaluation"}), (Detached, {"p", "other.weight", "other.bias"})],
    ids=["cap08", "cap09"],
)
def test_cap08_cap09_parameters_without_a_gradient(kind: type[nn.Module], idle: set[str], ranks: int) -> None:
    torch.manual_seed(0)
    model, x = kind(), unequal(6, 4)
    same(model, (x,), ranks, pins={"dp": ranks})
    make, mesh = on_ranks(model.double(), (x,), ranks, {"dp": ranks})

    def rank(rt: Communicator) -> None:
        module = make(rt)
        assert [(k, v.dtype) for k, v in module.state_dict().items()] == [
            (k, v.dtype) for k, v in model.state_dict().items()
        ]
        assert {n for n, _ in module.named_buffers()} == {n for n, _ in model.named_buffers()}
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            result = module(x)
            (result if isinstance(result, Tensor) else result[0]).backward()
            assert {n for n, p in module.named_parameters() if p.grad is None} == idle
            optimizer.step()
        state = module.full_state_dict()
        assert all(torch.equal(state[n], model.state_dict()[n]) for n in idle)
        assert all(n in idle or not torch.equal(state[n], p) for n, p in model.named_parameters())
        copy.deepcopy(model).load_state_dict(state, strict=True)

    every_rank(mesh, rank)


def test_cap08_a_parameter_used_in_evaluation_only() -> None:
    torch.manual_seed(0)
    model, x = Unused().double(), unequal(6, 4)
    module = api.compile(model, load_cluster("rtx3090:1"), example_inputs=(x,), options=Options(precision="fp64"))
    torch.testing.assert_close(module(x), model(x))
    torch.testing.assert_close(module.eval()(x), model.eval()(x))


# Frozen parameters and adapters ---------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Four blocks, 0 and 2 frozen, after a frozen embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(4))
        for k in (0, 2):
            self.blocks[k].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).sum()


def gradient_bytes(plan: Any, graph: Any) -> int:
    """Bytes of parameter gradients that ranks add up."""
    values = {(g.name, n): v.meta for g in graph.graphs for n, v in g.values().items()}
    ends = {(g.name, o.value) for g in graph.graphs for o in g.outputs if o.kind.value == "gradient" and o.value}
    reduced = [c for c in plan.conversions if (c.graph, c.value) in ends and "P" in c.before and "P" not in c.after]
    return sum(values[c.graph, c.value].nbytes * c.count for c in reduced)


@pytest.mark.parametrize("ranks", W)
@pytest.mark.parametrize("zero", [0, 3])
def test_cap21_frozen_blocks(ranks: int, zero: int) -> None:
    """Offload, the row's other half, is not there yet."""
    torch.manual_seed(0)
    model, inputs = Frozen(), {"ids": ids(12) % 7}
    pins = {"dp": ranks, "zero": zero} if ranks > 1 else {"dp": 1}
    plan = same(model, inputs, ranks, pins=pins)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert all((plan.parameters[n].optimizer_bytes_per_device == 0) == (n in frozen) for n in plan.parameters)
    options = Options(pins=pins, precision="fp64")
    graph = api.capture(model.double(), inputs, options=options)
    if ranks > 1:
        trainable = sum(p.numel() * 8 for p in model.parameters() if p.requires_grad)
        assert gradient_bytes(plan, graph) == trainable
    make, mesh = on_ranks(model, inputs, ranks, pins)

    def rank(rt: Communicator) -> None:
        module = make(rt)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
        module(**inputs).backward()
        optimizer.step()
        for name, p in module.named_parameters():
            assert p.requires_grad == (name not in frozen)
            assert (p.grad is None) == (name in frozen) == (p not in optimizer.state)

    every_rank(mesh, rank)


class LoraLinear(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        weight = self.base.weight
        self.a, self.b = nn.Parameter(weight.new_zeros(2, inner)), nn.Parameter(weight.new_zeros(outer, 2))
        nn.init.normal_(self.a)
        nn.init.normal_(self.b, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(F.dropout(x, 0.0), self.a), self.b) * (4 / 2)

    def merged(self) -> Tensor:
        return self.base.weight + 2 * self.b @ self.a


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = LoraLinear(6, 12), LoraLinear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x))).pow(2).mean()


@pytest.mark.parametrize("ranks", W)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_cap23_adapters(axis: str, ranks: int) -> None:
    """Offload, the row's other half, is not there yet."""
    torch.manual_seed(0)
    model, x = Lora(), unequal(6, 6)
    same(model, (x,), ranks, pins={axis: ranks})
    make, mesh = on_ranks(model.double(), (x,), ranks, {axis: ranks})

    def steps(module: nn.Module) -> int:
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
        for _ in range(3):
            module(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(optimizer.state)

    eager = copy.deepcopy(model)
    assert steps(eager) == 4

    def rank(rt: Communicator) -> dict[str, Tensor]:
        module = make(rt)
        assert steps(module) == 4
        state: dict[str, Tensor] = module.full_state_dict()
        return state

    for state in every_rank(mesh, rank):
        plain = Lora().double()
        plain.load_state_dict(state)
        for mine, theirs in ((plain.one, eager.one), (plain.two, eager.two)):
            torch.testing.assert_close(mine.merged(), theirs.merged(), rtol=1e-6, atol=1e-8)
            assert torch.equal(mine.base.weight, theirs.base.weight)


# What cannot be captured ----------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if h.sum() > 0:
            h = -h
        return h


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.last = Branch(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.branch(x)).pow(2).sum()


@pytest.mark.parametrize("ranks", W)
def test_cap11_a_branch_on_a_value(ranks: int) -> None:
    """Refused with its line where it is the model's own; a submodule's becomes a region, right for both branches."""
    place = f"{os.path.basename(__file__)}:{Branch.forward.__code__.co_firstlineno + 2}"
    with pytest.raises(CaptureError, match=place) as caught:
        api.capture(Branch(), (torch.randn(2, 4),))
    assert "h.sum() > 0" in str(caught.value) and "torch.where" in str(caught.value)
    torch.manual_seed(0)
    model, x = Branches().double(), unequal(6, 4)
    with pytest.raises(CaptureError, match=place):
        api.capture(model, (x,), options=Options(strict=True))
    make, mesh = on_ranks(model, (x,), ranks, {"dp": ranks})
    batches = [x, -3 * x, x.flip(0), 0.1 - x]
    assert len({bool(model.branch.lin(b).sum() > 0) for b in batches}) == 2
    _same_on_batches(model, make, mesh, [(b,) for b in batches])


def _same_on_batches(model: nn.Module, make: Any, mesh: Any, batches: list[tuple[Any, ...]]) -> None:
    """Loss, every gradient (None where None) of each batch, and the state after an AdamW step on each."""

    def train(module: nn.Module, whole: Any) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4)
        found = []
        for given in batches:
            loss = module(*given)
            loss.backward()
            gradients = {n: None if p.grad is None else whole(n, p.grad) for n, p in module.named_parameters()}
            found.append((loss.detach(), gradients))
            optimizer.step()
            optimizer.zero_grad()
        state = module.full_state_dict() if isinstance(module, ParallelModule) else module.state_dict()
        return found, {k: v.clone() for k, v in state.items()}

    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}

    def rank(rt: Communicator) -> Any:
        module = make(rt)
        return train(module, lambda n, g: rt.convert(g, module.storage_layouts[n], replicated(rt.mesh), shapes[n]))

    wanted, state = train(copy.deepcopy(model), lambda n, g: g.clone())
    for found, after in every_rank(mesh, rank):
        for (loss, gradients), (eager, expected) in zip(found, wanted, strict=True):
            torch.testing.assert_close(loss, eager, rtol=1e-10, atol=0)
            for name, g in expected.items():
                assert (gradients[name] is None) == (g is None), name
                if g is not None:
                    torch.testing.assert_close(gradients[name], g, rtol=1e-9, atol=1e-10 * float(g.abs().max()) + 1e-14)
        for name, x in state.items():
            torch.testing.assert_close(after[name], x, rtol=1e-9, atol=1e-12)


def test_cap11_no_frames_but_the_users() -> None:
    """What is printed by default: this line, the message, and nothing of how a capture goes about it."""
    x = (torch.randn(2, 4),)
    calls: dict[str, Any] = {
        "capture": lambda: api.capture(Branch(), x),
        "search": lambda: api.search(Branch(), load_cluster("rtx3090:2"), example_inputs=x),
        "compile": lambda: api.compile(Branch(), load_cluster("rtx3090:1"), example_inputs=x),
        "verify": lambda: api.verify(Branch(), x),
        "cluster": lambda: api.compile(Branch(), "rtx3090:1", example_inputs=x),  # type: ignore[arg-type]
    }
    for name, call in calls.items():
        with pytest.raises(UserError) as caught:
            call()
        error = caught.value
        files = [os.path.basename(f.filename) for f in traceback.extract_tb(error.__traceback__)]
        assert files == [os.path.basename(__file__)] * 2 + ["errors.py"], name
        assert error.__suppress_context__ and "\n" not in str(error), name


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, out = scores.argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (best == k).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, k, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(4, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return (h + self.moe(h)).pow(2).sum()


@pytest.mark.parametrize("ranks", W)
def test_cap12_routing_by_nonzero(ranks: int) -> None:
    """Both batches, of which one leaves an expert empty; refused, with the line, under strict."""
    torch.manual_seed(2)
    model = Mixture().double()
    with torch.no_grad():
        model.moe.router.weight.mul_(4)

    def counts(x: Tensor) -> list[int]:
        found: list[int] = model.moe.router(torch.tanh(model.first(x))).argmax(-1).bincount(minlength=3).tolist()
        return found

    drawn = [unequal(8, 4, seed=k) for k in range(40)]
    first = next(x for x in drawn if 0 not in counts(x))
    second = next(x for x in drawn if counts(x).count(0) == 1)
    line = Experts.forward.__code__.co_firstlineno + 4
    with pytest.raises(CaptureError, match=f"test_cap.py:{line}"):
        api.capture(model, (first,), options=Options(strict=True))
    make, mesh = on_ranks(model, (first,), ranks, {"dp": ranks} if 8 % ranks == 0 else {"tp": ranks})
    _same_on_batches(model, make, mesh, [(first,), (second,), (first,)])


class Clips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.9)
        return self.inner(x).sum()


def test_cap17_parameter_changed_in_forward() -> None:
    with pytest.raises(CaptureError, match=r"'inner\.weight' is changed in place"):
        api.compile(Clips(), load_cluster("rtx3090:1"), example_inputs=(torch.randn(2, 4),))


class Recurrent(nn.Module):
    def __init__(self, kind: str, layers: int, both: bool) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(4, 6, layers, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].pow(2).mean()


RECURRENT = [
    pytest.param(kind, layers, both, ranks, marks=() if ranks == 2 or (kind, layers, ranks) == ("LSTM", 1, 3) else SLOW)
    for kind in ("LSTM", "GRU", "RNN") for layers in (1, 2) for both in (False, True) for ranks in (1, 2, 3, 4)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "layers", "both", "ranks"), RECURRENT)
def test_cap18_recurrent_layers(kind: str, layers: int, both: bool, ranks: int) -> None:
    torch.manual_seed(0)
    same(Recurrent(kind, layers, both), (unequal(6, 3, 4),), ranks, pins={"dp": ranks})


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 7 * g


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return Sevenfold.apply(self.p * x).sum()


@pytest.mark.parametrize("ranks", W)
@pytest.mark.parametrize("path", ["train", "eval first", "again"])
def test_cap19_the_users_backward(path: str, ranks: int) -> None:
    model, x = Custom().double(), unequal(6)
    model.train(path != "eval first")
    options = Options(precision="fp64", pins={"dp": ranks})
    for _ in range(2 if path == "again" else 1):
        graph = api.capture(model, (x,), options=options)
    model.train()
    graph = api.capture(model, (x,), options=options) if path == "eval first" else graph
    plan = api.plan_captured(graph, load_cluster(f"rtx3090:{ranks}"), options=options)
    source = api.emit_captured(graph, plan)

    def rank(rt: Communicator) -> None:
        module = ParallelModule(graph, plan, source, model, rt)
        module(x).backward()
        gradient = rt.convert(module.p.grad, module.storage_layouts["p"], replicated(rt.mesh), tuple(model.p.shape))
        assert torch.equal(gradient, 7 * x)

    every_rank(mesh_of(plan), rank)


class PadMask:
    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths


@dataclass
class Padding:
    """The same as a dataclass, whose tensors are seen."""

    lengths: Tensor
    cache: Any = None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor, pad: Any, cache: Any = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.arange(x.shape[1]) < pad.lengths[:, None]
        scores = (q @ k.transpose(1, 2) / 6**0.5).masked_fill(~mask[:, None, :], -1e9)
        return (self.out(scores.softmax(-1) @ v) * mask[..., None]).pow(2).sum()


@pytest.mark.parametrize("ranks", W)
def test_cap24_objects_among_the_arguments(ranks: int) -> None:
    """A class that nothing is known of is refused at capture; a dataclass is taken apart."""
    torch.manual_seed(0)
    x, lengths = unequal(6, 5, 6), torch.tensor([1, 2, 3, 4, 5, 5])
    with pytest.raises(CaptureError, match="'pad' is a PadMask"):
        api.capture(Attention(), (x.float(), PadMask(lengths)))
    inputs = (x, Padding(lengths))
    same(Attention(), inputs, ranks, pins={"dp": ranks})


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.steps = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return (self.lin(x) * self.steps).sum()


class Lazy(nn.Module):
    """Makes a table at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(1, 5, dtype=x.dtype)
        return (self.lin(x) * self.table).pow(2).sum()


def test_x06_an_attribute_changed_in_forward() -> None:
    model = nn.Sequential(Counts())
    with pytest.raises(CaptureError, match=r"'0\.steps'"):
        api.compile(model, load_cluster("rtx3090:1"), example_inputs=(torch.randn(2, 4),))
    assert model[0].steps == 0


@pytest.mark.parametrize("ranks", W)
def test_x06_a_table_made_at_the_first_call(ranks: int) -> None:
    """Not a change that a later step could see: made again in every step."""
    model = Lazy()
    same(model, (unequal(6, 4),), ranks, pins={"dp": ranks})
    assert model.table is None
    same(nn.Sequential(nn.Linear(4, 4), Lazy()), (unequal(6, 4),), ranks, pins={"dp": ranks})


class Registers(nn.Module):
    """Registers a buffer at its first call."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.lin, self.branch = nn.Linear(4, 4), branch

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(1, 5, dtype=x.dtype))
        if self.branch and x.sum() > 0:
            return self.lin(x)
        return self.lin(x) * self.table


@pytest.mark.parametrize("branch", [False, True])
def test_x06_a_buffer_registered_at_the_first_call(branch: bool) -> None:
    """Refused by name; after one call of the model it is a buffer like others."""
    model = Lazy()
    model.lin = Registers(branch)  # type: ignore[assignment]
    keys = list(model.state_dict())
    with pytest.raises(CaptureError, match=r"registers 'lin\.table'"):
        api.capture(model, (unequal(6, 4).float(),))
    assert list(model.state_dict()) == keys and model.table is None
    model.double()(unequal(6, 4))
    same(model, (unequal(6, 4),), 2, pins={"dp": 2})


class Goes(nn.Module):
    """Goes on, in its next call, from what this one left in an attribute that was None or not there."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.lin, self.what = nn.Linear(4, 4), what
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        m = x.detach().mean(0)
        if self.what == "mean":
            self.mean = m if self.mean is None else 0.9 * self.mean + 0.1 * m
            return (self.lin(x) * self.mean).pow(2).sum()
        if self.what == "count":
            self.count = getattr(self, "count", 0) + 1
            return (self.lin(x) * self.count).pow(2).sum()
        self.mean, self.rows = m, x.shape[0]
        return self.lin(x).pow(2).sum()


@pytest.mark.parametrize("what", ["mean", "count"])
def test_x06_what_the_next_call_goes_on_from(what: str) -> None:
    model = nn.Sequential(Goes(what))
    with pytest.raises(CaptureError, match=rf"'0\.{what}'"):
        api.capture(model, (unequal(6, 4).float(),))
    assert model[0].mean is None and not hasattr(model[0], "count")


def test_x06_what_nobody_reads_is_no_matter() -> None:
    same(nn.Sequential(Goes("kept")), (unequal(6, 4),), 2, pins={"dp": 2})


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.g = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.h(x)
        return h.sum(), self.g(h).pow(2).sum()


@pytest.mark.parametrize("ranks", W)
def test_x07_two_losses(ranks: int) -> None:
    torch.manual_seed(0)
    model, x = TwoLosses().double(), unequal(6, 4)
    make, mesh = on_ranks(model, (x,), ranks, {"dp": ranks})
    weights = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.3, 2.0)]

    def rank(rt: Communicator) -> None:
        module = make(rt)
        for a, b in weights:
            eager = copy.deepcopy(model)
            for m in (eager, module):
                first, second = m(x)
                (first if b == 0 else second if a == 0 else a * first + b * second).backward()
            for name, p in eager.named_parameters():
                own = module.get_parameter(name)
                whole = rt.convert(own.grad, module.storage_layouts[name], replicated(rt.mesh), tuple(p.shape))
                torch.testing.assert_close(
                    whole, torch.zeros_like(p) if p.grad is None else p.grad, rtol=1e-10, atol=1e-12
                )
                own.grad = None

    every_rank(mesh, rank)
