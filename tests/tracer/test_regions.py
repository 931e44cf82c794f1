"""Submodules that cannot be captured become regions: what they compute, how far they widen, what is refused."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import CaptureError, InputError
from autopar.ir.graph import REGION, REGION_BACKWARD, CapturedGraph
from autopar.ir.options import Options
from autopar.tracer import capture, interpret
from tests.tracer.proof import check_equal

D = torch.float64


class Around(nn.Module):
    """linear, a submodule, linear, loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.inner(torch.tanh(self.first(x)))).pow(2).sum()


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)


def x_of(rows: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(rows, 4, dtype=D, generator=torch.Generator().manual_seed(seed))


def regions(captured: CapturedGraph) -> list[str]:
    return [r.key for r in captured.regions]


def checked(model: nn.Module, wanted: list[str], **kwargs: Any) -> CapturedGraph:
    model.double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {n: set(m.__dict__) for n, m in model.named_modules()}
    captured = check_equal(model, {"x": x_of()}, **kwargs)
    assert regions(captured) == wanted
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "the model is as before"
    assert attributes == {n: set(m.__dict__) for n, m in model.named_modules()}
    return captured


class Branches(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.lin(x)
        return -self.lin(x)


class Items(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * x.abs().max().item()


class Loops(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().sum().item()) % 3 + 1):
            x = torch.tanh(self.lin(x))
        return x


class Lists(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        order = sorted(range(x.shape[0]), key=lambda i: x[i, 0].tolist())
        return self.lin(x[order])


class Numpy(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.from_numpy(x.detach().numpy().mean(0))
        return self.lin(x) * scale


class Checkpoints(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:
            return x
        return checkpoint(self.lin, x, use_reentrant=True) + checkpoint(self.lin, x, use_reentrant=False)


class Asserts(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        assert bool(x.isfinite().all())
        return self.lin(x)


@pytest.mark.parametrize("kind", [Branches, Items, Loops, Lists, Numpy, Checkpoints, Asserts])
def test_what_cannot_be_captured_runs_as_it_is(kind: type[Leaf]) -> None:
    captured = checked(Around(kind()), ["inner"])
    (region,) = captured.regions
    assert region.source.startswith("test_regions.py:") or "test_regions.py:" in region.source
    (note,) = [n for n in captured.notes if n[0] == "region"]
    assert note[1] == f"inner {region.source}" and kind.__name__ in note[2] and "whole on every rank" in note[2]
    nodes = [n for n in captured.top.nodes if n.op in (REGION, REGION_BACKWARD)]
    assert [n.op for n in nodes] == [REGION, REGION_BACKWARD]
    assert all(n.source == region.source and n.measured is not None and n.measured.flops > 0 for n in nodes)
    with pytest.raises(CaptureError, match=r"test_regions.py:\d+"):
        capture(Around(kind()).double(), (x_of(),), {}, options=Options(strict=True))


def test_the_branch_is_taken_anew_for_every_batch() -> None:
    torch.manual_seed(2)
    model = Around(Branches()).double()
    captured = check_equal(model, {"x": x_of()})
    signs = set()
    for seed in range(6):
        x = (-1) ** seed * 3 * x_of(seed=seed)
        check_equal(model, {"x": x}, captured=captured)
        signs.add(bool(torch.tanh(model.first(x)).sum() > 0))
    assert signs == {True, False}


def test_a_captured_model_has_no_region() -> None:
    assert regions(check_equal(Around(nn.Linear(4, 4)).double(), {"x": x_of()})) == []


class Deep(nn.Module):
    def __init__(self, kinds: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).sum()


class Plain(nn.Module):
    """A block that is worth folding."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(4, 8), nn.Linear(8, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(x)))
        return x if self.inner is None else self.inner(x)


def test_several_regions_between_folded_blocks() -> None:
    layers = [Plain(), Plain(), Plain(Branches()), Plain(), Plain(Items()), Plain(Branches())]
    captured = checked(Deep(layers), ["layers.2.inner", "layers.4.inner", "layers.5.inner"])
    assert [b.instances for b in captured.blocks] == [("layers.1", "layers.3")], "layer 0's input needs no gradient"
    assert not any(n.op == REGION for b in captured.blocks for n in b.graph.nodes)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()
        self.same = self.inner

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.same(-2 * x + 1)).sum()


def test_a_module_called_twice_under_two_names() -> None:
    checked(Twice(), ["inner", "inner#1"])


class Tied(nn.Module):
    """The region's weight is also used outside, and twice inside under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Branches(), nn.Linear(4, 4)
        self.inner.other = self.out
        self.out.weight = self.inner.lin.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x)).pow(2).sum()


def test_weights_shared_with_the_rest() -> None:
    captured = checked(Tied(), ["inner"])
    assert captured.parameters[0].aliases == ("inner.other.weight", "out.weight")


class Counts(Leaf):
    """Buffers: updated in place, replaced, and left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if x.sum() > 100:
            return x
        return self.norm(self.lin(x)) * self.scale.to(x.dtype)


def test_buffers() -> None:
    captured = checked(Around(Counts()), ["inner"])
    updates = {o.target for o in captured.top.outputs if o.kind.value == "buffer_update"}
    assert updates == {"inner.calls", "inner.mean"} | {
        f"inner.norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    }


class Containers(Leaf):
    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float, mask: Tensor | None = None) -> dict[str, Any]:
        a, b = pair
        if a.sum() > 100:
            a = b
        return {"sum": a + b, "parts": [self.lin(a) * scale, None], "ids": a.argmax(-1), "same": b}


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Containers()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.inner((h, x), scale=3.0)
        assert found["parts"][1] is None
        one = F.one_hot(found["ids"], 4).to(h.dtype)
        return (found["sum"] * found["parts"][0] * one + found["same"]).pow(2).sum()


def test_containers_constants_and_integer_results() -> None:
    checked(Calls(), ["inner"])


class Hooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()
        self.inner.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        self.inner.register_forward_hook(lambda m, args, out: out + 1)
        self.inner.lin.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(x)).pow(2).sum()


def test_hooks_of_a_region_run() -> None:
    checked(Around(Hooks()), ["inner.inner"])


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()
        self.inner.lin.weight.requires_grad_(False)
        self.inner.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_frozen_parameters_in_a_region() -> None:
    captured = capture(Around(Frozen()).double(), (x_of(),), {}, options=Options())
    assert regions(captured) == ["inner.inner"]
    none = {o.target for o in captured.top.outputs if o.kind.value == "gradient" and o.value is None}
    assert none == set(), "whether an unused parameter gets a gradient is known at run time"
    assert not any(o.target == "p_inner_inner_lin_weight" for o in captured.top.outputs)


class Detaches(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:
            return x
        return self.lin(x.detach())


class OnlyDetached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Detaches()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)).pow(2).sum()


def test_an_input_that_gets_no_gradient() -> None:
    captured = checked(OnlyDetached(), ["inner"])
    with pytest.raises(InputError, match="region inner: argument 0 gets a gradient, got none at capture"):
        model = OnlyDetached().double()
        inputs = captured.signature.flatten((100 * x_of().abs() + 100,), {})
        parameters = dict(model.named_parameters()) | {"first.weight": torch.eye(4, dtype=D)}
        interpret(captured, parameters, {}, inputs)


# Widening -------------------------------------------------------------------------------------------------------------


class Number(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, int((x > 0).sum())


class UsesNumber(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.number = Number()

    def forward(self, x: Tensor) -> Tensor:
        y, n = self.number(x)
        return self.lin(y) * n


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


class UsesPicked(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.picks = Picks()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.picks(x).sum(0)


class Writes(nn.Module):
    def forward(self, x: Tensor) -> None:
        if x.sum() < 1000:
            x.mul_(2)


class UsesWritten(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.writes = Writes()

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        self.writes(y)
        return self.lin(y)


class Leaves(Leaf):
    """A router that leaves its loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) if x.sum() < 1000 else x
        self.extra = y.abs().mean()
        return y


class UsesLeft(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.router = Leaves()

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x) + self.router.extra * self.lin(x)


class Appends(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) if x.sum() < 1000 else x
        self.found.append(y.pow(2).sum())
        return y


class UsesAppended(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.router = Appends()

    def forward(self, x: Tensor) -> Tensor:
        self.router.found.clear()
        return self.router(x) + sum(self.router.found) * self.lin(x)


class Registry(nn.Module):
    """Reads a weight of its caller that nobody passes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.held[0](x) if x.sum() < 1000 else x


class UsesRegistry(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Registry()
        self.inner.held.append(self.lin)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


TABLE: dict[str, Tensor] = {}


class FromGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return TABLE["now"] * x if x.sum() < 1000 else x


class UsesGlobal(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.inner = FromGlobal()

    def forward(self, x: Tensor) -> Tensor:
        TABLE["now"] = self.lin(x)
        return self.inner(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (UsesNumber, "inner.number alone won't do: output .1. is a int"),
        (UsesPicked, "inner.picks alone won't do: its output is"),
        (UsesWritten, "inner.writes alone won't do: it changes an argument in place"),
        (UsesLeft, ""),
        (UsesAppended, ""),
        (UsesRegistry, "inner.inner alone won't do"),
        (UsesGlobal, "inner.inner alone won't do: it uses a tensor that needs a gradient"),
    ],
)
def test_the_caller_is_taken_where_the_submodule_won_t_do(kind: type[Leaf], why: str) -> None:
    captured = checked(Around(kind()), ["inner"])
    assert why.replace(".1.", "[1]") in captured.regions[0].message


def test_a_cache_that_only_the_region_reads_does_not_widen() -> None:
    class Caches(Leaf):
        cache: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None and x.sum() < 1000:
                self.cache = torch.ones(4, dtype=x.dtype)
            return self.lin(x) * self.cache

    checked(Around(Caches()), ["inner"])


# Refusals -------------------------------------------------------------------------------------------------------------


def test_the_whole_model_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"x.sum\(\) > 0.*or move it into a submodule"):
        capture(Branches(), (torch.randn(2, 4),), {}, options=Options())
    with pytest.raises(CaptureError, match=r"cannot run as a region either: output \[1\] is a int"):
        capture(UsesNumber(), (torch.randn(2, 4),), {}, options=Options())


@pytest.mark.parametrize("what", ["weights", "inputs"])
def test_meta_tensors_are_refused_with_the_reason(what: str) -> None:
    model, x = Around(Branches()), torch.randn(2, 4)
    if what == "weights":
        model.to("meta")
    else:
        x = x.to("meta")
    with pytest.raises(CaptureError, match=r"inner could run as a region.*meta device"):
        capture(model, (x,), {}, options=Options())


def test_the_users_own_error_is_told_as_it_is() -> None:
    with pytest.raises(CaptureError, match=r"reduction dim.*\[2, 5\] X \[4, 4\]"):
        capture(Around(Branches()), (torch.randn(2, 5),), {}, options=Options())


def test_a_parameter_changed_after_the_failing_line_is_refused() -> None:
    class Clips(Leaf):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() < 1000:
                with torch.no_grad():
                    self.lin.weight.clamp_(-1, 1)
            return self.lin(x)

    model = Around(Clips())
    before = model.inner.lin.weight.clone()
    with pytest.raises(CaptureError, match=r"'inner\.lin\.weight' is changed in place"):
        capture(model, (torch.randn(2, 4),), {}, options=Options())
    assert torch.equal(before, model.inner.lin.weight)


def test_a_lock_cannot_be_copied() -> None:
    import threading

    model = Around(Branches())
    model.inner.lock = threading.Lock()
    with pytest.raises(CaptureError, match="inner cannot be copied"):
        capture(model, (torch.randn(2, 4),), {}, options=Options())


class Sometimes(Leaf):
    """Another number of rows for large inputs only: no probe sees it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if x.sum() < 1000 else self.lin(x)[:1].sum(0)


def test_another_shape_at_run_time_names_the_region() -> None:
    model = Around(Sometimes()).double()
    captured = check_equal(model, {"x": x_of()})
    weights = dict(model.named_parameters()) | {"first.bias": torch.full((4,), 1e3, dtype=D)}
    large = copy.deepcopy(model.inner)
    with pytest.raises(InputError, match=r"region inner: its output is float64\[4\], was float64\[6, 4\] at capture"):
        runner = captured.regions[0].build({})
        runner.forward([torch.full((6, 4), 1e4, dtype=D), *large.parameters()], "")
    assert weights


# Random numbers -------------------------------------------------------------------------------------------------------


class Drops(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1000 or random.random() > 2:
            return x
        return F.dropout(self.lin(x), 0.5) + torch.rand(4, dtype=x.dtype) + random.random()


def test_draws_depend_on_the_salt_alone_and_leave_the_generators_alone() -> None:
    captured = capture(Around(Drops()).double(), (x_of(),), {}, options=Options())
    runner = captured.regions[0].build({})
    tensors = [x_of(), torch.randn(4, 4, dtype=D), torch.randn(4, dtype=D)]
    state = torch.get_rng_state(), random.getstate()
    first = runner.forward(tensors, "a")[0]
    assert torch.equal(first, captured.regions[0].build({}).forward(tensors, "a")[0])
    assert not torch.equal(first, runner.forward(tensors, "b")[0])
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]


def test_capture_leaves_the_generators_alone_and_is_the_same_twice() -> None:
    model = Around(Drops()).double()
    state = torch.get_rng_state(), random.getstate()
    hashes = {capture(model, (x_of(),), {}, options=Options()).hash for _ in range(2)}
    assert len(hashes) == 1
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]


def test_the_hash_does_not_know_the_batch() -> None:
    model = Around(Loops()).double()
    captured = [capture(model, (x_of(seed=s),), {}, options=Options()) for s in range(4)]
    assert len({str([n.measured for n in c.top.nodes]) for c in captured}) > 1
    assert len({c.hash for c in captured}) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_precisions(precision: Any) -> None:
    model, x = Around(Counts()), x_of().float()
    captured = capture(model, (x,), {}, options=Options(precision=precision))
    (region,) = [n for n in captured.top.nodes if n.op == REGION]
    kinds = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
    assert region.outputs[0] is not None and region.outputs[0].meta.dtype == kinds[precision]
    updated = {b.name: b.meta.dtype for b in captured.buffers}
    values = captured.top.values()
    for out in captured.top.outputs:
        if out.kind.value == "buffer_update":
            assert out.value is not None and values[out.value].meta.dtype == updated[out.target]
