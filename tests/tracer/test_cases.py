"""Rows CAP-* and X-* of the field cases: what must be captured right, and what must be refused with the user's line."""

from __future__ import annotations

import copy
import itertools
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import CaptureError, InputError
from autopar.ir.graph import CapturedGraph, OutputKind
from autopar.ir.options import Options
from autopar.tracer import capture, interpret
from tests.models import tiny
from tests.tracer.proof import check_equal

D = torch.float64


def gradients(
    captured: CapturedGraph, model: nn.Module, args: tuple[Any, ...] = (), **kwargs: Any
) -> dict[str, Tensor | None]:
    """All gradients by the parameter's first name."""
    inputs = captured.signature.flatten(args, kwargs)
    return interpret(captured, dict(model.named_parameters()), dict(model.named_buffers()), inputs).gradients


@dataclass
class Out:
    loss: Tensor
    logits: Tensor
    extra: Any = None


class Attributes(OrderedDict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Returns(nn.Module):
    """Linear and a squared loss, in whatever container `make` builds."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        h = self.lin(x)
        return self.make(h.pow(2).sum(), h)


@pytest.mark.parametrize("kind", [Out, Attributes, dict, tuple, list])
def test_cap01_result_types(kind: type) -> None:
    def make(loss: Tensor, logits: Tensor) -> Any:
        if kind in (tuple, list):
            return kind([loss, logits, None])
        return Out(loss, logits) if kind is Out else kind(loss=loss, logits=logits, extra=None)

    model, x = Returns(make).double(), torch.randn(4, 8, dtype=D)
    captured = capture(model, (x,), {}, options=Options())
    result = interpret(captured, dict(model.named_parameters()), {}, captured.signature.flatten((x,), {}))
    rebuilt, eager = captured.signature.rebuild(result.outputs), model(x)
    assert type(rebuilt) is type(eager)
    if kind is Out or kind is Attributes:
        assert rebuilt.extra is None and torch.equal(rebuilt.logits, eager.logits)
    else:
        at = (2, 1) if kind in (tuple, list) else ("extra", "logits")
        assert rebuilt[at[0]] is None and torch.equal(rebuilt[at[1]], eager[at[1]])


class Named(nn.Module):
    """Two inputs of one shape, a flag, an optional mask and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x1: Tensor, x2: Tensor, flag: bool = True, mask: Tensor | None = None, n: int = 2) -> Tensor:
        h = self.a(x1) - self.b(x2)
        return (h * n if flag else h).pow(2).sum()


def test_cap02_keywords_in_any_order() -> None:
    model = Named().double()
    batch = {"x1": torch.randn(3, 4, dtype=D), "x2": torch.randn(3, 4, dtype=D), "flag": True}
    captured = capture(model, (), dict(reversed(batch.items())), options=Options())
    for order in itertools.permutations(batch):
        check_equal(model, {k: batch[k] for k in order}, captured=captured)
    positional = captured.signature.flatten((batch["x1"], batch["x2"]), {})
    assert positional[0] is batch["x1"] and positional[1] is batch["x2"]


def test_cap04_constants_are_guarded_and_inputs_are_checked() -> None:
    model, x = Named().double(), torch.randn(3, 4, dtype=D)
    flatten = capture(model, (x, x, True, None, 2), {}, options=Options()).signature.flatten
    flatten((x, x, True, None, 2), {})
    with pytest.raises(InputError, match="'flag' is False, captured as True"):
        flatten((x, x, False), {})
    with pytest.raises(InputError, match="'n' is 3"):
        flatten((x, x), {"n": 3})
    with pytest.raises(InputError, match="'mask' is a tensor"):
        flatten((x, x), {"mask": x})
    with pytest.raises(InputError, match=r"'x2' is float64\[2, 4\], captured as float64\[3, 4\]"):
        flatten((x, x[:2]), {})
    with pytest.raises(InputError, match="x2"):
        flatten((x,), {})


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


def test_cap05_tied_weights_are_one_parameter_with_the_summed_gradient() -> None:
    captured = check_equal(TinyLM().double(), {"ids": torch.randint(0, 11, (3, 5))})
    assert [(p.name, p.aliases) for p in captured.parameters] == [("embed.weight", ("head.weight",))]
    gradient = next(o for o in captured.top.outputs if o.kind is OutputKind.GRADIENT)
    assert next(n for n in captured.top.nodes if n.outputs[0].name == gradient.value).op == "aten.add.Tensor"


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 6)
        self.ema = self.student

    def forward(self, x: Tensor) -> Tensor:
        return (self.ema(torch.tanh(self.student(x)))).pow(2).sum()


def test_cap07_one_module_under_two_names() -> None:
    captured = check_equal(Shared().double(), {"x": torch.randn(3, 6, dtype=D)})
    assert captured.parameters[0].aliases == ("ema.weight",)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.p = nn.Parameter(torch.randn(4))
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.used.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.used(x) * self.p.detach()).sum()


def test_cap08_09_21_unused_detached_and_frozen() -> None:
    captured = check_equal(Unused().double(), {"x": torch.randn(3, 4, dtype=D)})
    assert {p.name for p in captured.parameters} == {n for n, _ in Unused().named_parameters()}
    assert [(b.name, b.persistent) for b in captured.buffers] == [("kept", True), ("scratch", False)]
    none = {o.target for o in captured.top.outputs if o.kind is OutputKind.GRADIENT and o.value is None}
    assert none == {"p_p", "p_unused_weight", "p_unused_bias"}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if h.sum() > 0:
            h = -h
        return h.sum()


def test_cap11_data_dependent_branch_names_the_line() -> None:
    line = Branch.forward.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError) as caught:
        capture(Branch(), (torch.randn(2, 4),), {}, options=Options())
    message = str(caught.value)
    assert f"{os.path.basename(__file__)}:{line}" in message and "h.sum() > 0" in message and "torch.where" in message
    assert caught.value.__suppress_context__


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
        return out.sum()


def test_cap12_data_dependent_routing_of_the_whole_model_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"nonzero\(\).*needs the value of a tensor"):
        capture(Experts(), (torch.randn(8, 4),), {}, options=Options())


@pytest.mark.parametrize("kind", ["eager", "grouped_mm", "batched_mm"])
def test_cap12_hugging_face_experts(kind: str) -> None:
    """However the model would run them: the same graph, of our own operators; afterwards the model runs them so."""
    model, batch = tiny("mixtral")
    model.set_experts_implementation(kind)
    captured = check_equal(model, batch, tolerance=1e-5)
    assert not captured.regions and model.config._experts_implementation == kind
    ops = {n.op for g in captured.graphs for n in g.nodes}
    assert {"autopar.route.default", "autopar.spread.default", "autopar.collect.default"} <= ops
    assert not any("sort" in op or "histc" in op for op in ops)
    capture(model, (), batch, options=Options(strict=True))


class Clips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.9)
        return self.inner(x).sum()


def test_cap17_parameter_changed_in_forward() -> None:
    model = Clips()
    with pytest.raises(CaptureError, match=r"test_cases.py:.*'inner.weight' is changed in place"):
        capture(model, (torch.randn(2, 4),), {}, options=Options())


class Recurrent(nn.Module):
    def __init__(self, kind: str, layers: int, both: bool) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(4, 6, layers, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].pow(2).mean()


@pytest.mark.parametrize(
    ("kind", "layers", "both"), [("LSTM", 1, False), ("LSTM", 2, True), ("GRU", 2, True), ("RNN", 1, True)]
)
def test_cap18_recurrent_layers(kind: str, layers: int, both: bool) -> None:
    check_equal(Recurrent(kind, layers, both).double(), {"x": torch.randn(3, 4, 4, dtype=D)})


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
        self.p = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Sevenfold.apply(self.p * x).sum()


def test_cap19_the_users_backward() -> None:
    model, x = Custom(), torch.randn(4)
    got = gradients(capture(model, (x,), {}, options=Options()), model, (x,))
    assert torch.equal(got["p"], 7 * x)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.a, self.b = nn.Parameter(self.weight.new_ones(2, 4)), nn.Parameter(self.weight.new_ones(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (F.linear(x, self.weight) + 2 * F.linear(F.linear(x, self.a), self.b)).pow(2).sum()


def test_cap23_adapters() -> None:
    captured = check_equal(Lora().double(), {"x": torch.randn(3, 4, dtype=D)})
    assert [p.requires_grad for p in captured.parameters] == [False, True, True]


class PadMask:
    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, pad: PadMask) -> Tensor:
        return self.lin(x).sum()


def test_cap24_unknown_argument_type_is_refused() -> None:
    with pytest.raises(CaptureError, match="'pad' is a PadMask"):
        capture(Masked(), (torch.randn(2, 4), PadMask(torch.ones(2))), {}, options=Options())


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


def test_cap27_shared_parameters() -> None:
    captured = check_equal(OneNorm().double(), {"x": torch.randn(3, 6, dtype=D)})
    assert captured.parameters[0].aliases == ("norms.1.weight", "norms.2.weight")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.steps = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return (self.lin(x) * self.steps).sum()


def test_x06_attribute_changed_in_forward() -> None:
    model = nn.Sequential(Counts())
    with pytest.raises(CaptureError, match=r"'0.steps'"):
        capture(model, (torch.randn(2, 4),), {}, options=Options())
    assert model[0].steps == 0


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.g = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.h(x)
        return h.sum(), self.g(h).pow(2).sum(), h


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.3, 2.0)])
def test_x07_two_losses(weights: tuple[float, float]) -> None:
    model, x = TwoLosses().double(), torch.randn(3, 4, dtype=D)
    captured = capture(model, (x,), {}, options=Options())
    assert captured.signature.differentiable == (True, True, False)
    assert captured.notes == (("detached", "[2]", captured.notes[0][2]),)
    parameters = dict(model.named_parameters())
    tangents = [torch.tensor(w, dtype=D) for w in weights]
    got = interpret(captured, parameters, {}, captured.signature.flatten((x,), {}), tangents)
    eager = copy.deepcopy(model)
    first, second, _ = eager(x)
    (weights[0] * first + weights[1] * second).backward()
    for name, p in eager.named_parameters():
        assert torch.allclose(got.gradients[name], p.grad if p.grad is not None else torch.zeros_like(p))


def test_all_outputs_differentiable() -> None:
    captured = capture(TwoLosses(), (torch.randn(3, 4),), {}, options=Options(differentiable="all"))
    assert captured.signature.differentiable == (True, True, True)


def test_no_loss_is_refused() -> None:
    with pytest.raises(CaptureError, match="no output of the model needs a gradient"):
        capture(nn.Linear(4, 4).requires_grad_(False), (torch.randn(2, 4),), {}, options=Options())


def test_cache_in_the_result_is_refused() -> None:
    model, batch = tiny("llama")
    with pytest.raises(CaptureError, match=r"'cache' is a DynamicCache.*use_cache=False"):
        capture(model, (), {**batch, "use_cache": True}, options=Options())


def test_other_errors_name_the_line() -> None:
    with pytest.raises(CaptureError, match=r"test_cases.py:"):
        capture(Branch(), (torch.randn(2, 5),), {}, options=Options())
