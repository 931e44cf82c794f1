"""Field cases of kind OP (and X-01, X-03): operators under every layout that the planner may pick.

Unless a row needs more, it is a function of parameters under `forced.check`: every strategy of every op in it, forward
and backward, run on in-process ranks beside one device: loss, outputs (integers exactly), all gradients, and state
after AdamW steps to 1e-10; outputs and state bit for bit the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import api, codegen
from autopar.errors import RankError
from autopar.ir.graph import Phase
from autopar.ir.plan import Plan
from autopar.ir.reshard import Collective
from autopar.runtime.module import ParallelModule
from autopar.runtime.threads import run_threads
from tests.cases.forced import Case, Function, case, check, grid, line, unpriced
from tests.cases.functions import ints, labels
from tests.cases.run import captured, compared, same, unequal

SLOW = pytest.mark.slow
_on_all = False


@pytest.fixture(autouse=True)
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether `forced` takes 2, 3, 4 and 2 × 2 ranks in place of those that a row names."""
    monkeypatch.setattr(f"{__name__}._on_all", getattr(request, "param", False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test that forces layouts twice: on the ranks that it names, and by hand on all."""
    if "forced" in metafunc.function.__code__.co_names:
        more = pytest.param(True, marks=pytest.mark.slow, id="all ranks")
        metafunc.parametrize("everywhere", [pytest.param(False, id="quick"), more], indirect=True)


def forced(
    fn: Callable[..., Any], parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor] | None = None, *,
    on: tuple[Any, ...], steps: int = 1, differs_from: Callable[..., Any] | None = None,
) -> tuple[Case, list[Plan]]:  # fmt: skip
    """Check a function on meshes (a number: that many ranks). `differs_from`: the usual wrong variant, which must fail
    against the right one's expected values."""
    inputs = dict(inputs or {})
    made = case(Function(fn, parameters, inputs), inputs, steps=steps)
    on = (*on, *(x for x in (2, 3, 4, grid()) if x not in on)) if _on_all else on
    plans = check(made, *(line(n) if isinstance(n, int) else n for n in on))
    if differs_from is not None:
        other = case(Function(differs_from, parameters, inputs), inputs, steps=1)
        pairs = zip(made.expected.gradients.values(), other.expected.gradients.values(), strict=True)
        apart = [float((a - b).abs().max() / a.abs().max()) for a, b in pairs if a is not None and b is not None]
        assert max(apart, default=0.0) > 1e-4 or made.expected.losses[0] != other.expected.losses[0]
    return made, plans


def used(plans: Iterable[Plan], op: str) -> set[str]:
    """ "inputs -> outputs" of an op's strategies in plans."""
    return {
        f"{', '.join(s.inputs)} -> {', '.join(s.outputs)}"
        for plan in plans for graph in plan.strategies.values() for key, s in graph.items() if f"/{op}/" in key
    }  # fmt: skip


def test_op01_a_view_of_a_cut_dim_regroups() -> None:
    _, plans = forced(
        lambda x, w: x.view(-1, 6) @ w, {"x": unequal(12, 8), "w": unequal(6, 3, seed=1)}, on=(2, 3, 4)
    )  # fmt: skip
    assert "free:S(0) -> free:S(0)" in used(plans, "aten.view.default")
    assert "free:S(1) -> free:S(1)" not in used(plans, "aten.view.default")
    forced(lambda x: x.view(8, 8).sin(), {"x": unequal(4, 4, 4)}, on=(2, 4))


NONLINEAR = {
    "relu": torch.relu,
    "max": lambda y: (y.max(), *y.max(1)),
    "norm": lambda y: (y.norm(), y.norm(dim=0)),
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "square": lambda y: y * y,
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_op05_sums_are_reduced_before_what_is_not_linear(name: str) -> None:
    """The usual wrong variant is a rule of `test_every_layout.WRONG`."""
    _, plans = forced(
        lambda x, w: NONLINEAR[name](x @ w), {"x": unequal(12, 12), "w": unequal(12, 6, seed=1)}, on=(2, 3)
    )
    assert "free:S(1), free:S(0) -> free:P" in used(plans, "aten.mm.default")


WEIGHTS = torch.tensor([1.0, 10.0, 0.1, 3.0, 0.5], dtype=torch.float64)
UNBALANCED = torch.tensor([1, 1, 1, 1, 2, 0, 2, 4])


def _mean_of_means(t: Tensor, **options: Any) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        halves = zip(x.chunk(2), t.chunk(2), strict=True)
        return torch.stack([F.cross_entropy(a, b, **options) for a, b in halves]).mean()

    return loss


LOSS_ROWS: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "weights": (UNBALANCED, {"weight": WEIGHTS}),
    "ignored": (torch.tensor([-100, -100, -100, 3, 1, 0, 2, 4]), {}),
    "smoothing": (torch.tensor([-100, 1, -100, 3, 1, 0, 2, 4]), {"label_smoothing": 0.2}),
    "all": (torch.tensor([-100, 1, -100, 1, 1, 0, 2, 4]), {"label_smoothing": 0.2, "weight": WEIGHTS}),
}


@pytest.mark.parametrize("name", LOSS_ROWS)
def test_op06_losses_have_a_global_denominator(name: str) -> None:
    t, options = LOSS_ROWS[name]
    each = torch.ones(8).double() if "weight" not in options else WEIGHTS[t.clamp(min=0)]
    each = each.masked_fill(t == -100, 0.0)
    assert each[:4].sum() != each[4:].sum()
    wrong = _mean_of_means(t, **options)
    forced(lambda x: F.cross_entropy(x, t, **options), {"x": unequal(8, 5)}, on=(2, 4), differs_from=wrong)


def test_op06_plain_nll() -> None:
    forced(lambda x: F.nll_loss(x.log_softmax(1), UNBALANCED, WEIGHTS), {"x": unequal(8, 5)}, on=(2, 4))


def test_op08_smoothing_over_cut_classes() -> None:
    """Losses are compared bit for bit between ranks. The wrong variant smooths over each half of the classes."""
    t = torch.tensor([3, 7, -100, 0, 4, 5])

    def local(x: Tensor) -> Tensor:
        log = x.log_softmax(1)
        nll = F.nll_loss(log, t)
        smooth = -(log.chunk(2, 1)[0].mean(1) * (t >= 0)).sum() / (t >= 0).sum()
        return 0.9 * nll + 0.1 * smooth

    _, plans = forced(
        lambda x: F.cross_entropy(x, t, label_smoothing=0.1), {"x": unequal(6, 8)}, on=(2, 4), differs_from=local
    )
    assert "free:S(1) -> free:S(1)" in used(plans, "aten._log_softmax.default")


@pytest.mark.parametrize("rows", [12, 11])
def test_op11_two_tables_of_one_vocabulary(rows: int) -> None:
    ids = ints(6, 3, high=rows)
    forced(
        lambda x, y: F.embedding(ids, x).pow(2).sum() + F.embedding(ids, y).pow(2).sum(),
        {"x": unequal(rows, 4), "y": unequal(rows, 6, seed=1)}, on=(2, 3),
    )  # fmt: skip


@pytest.mark.parametrize("padding", [8, 1])
@pytest.mark.parametrize("rows", [10, 12])
def test_op12_the_padding_row_is_counted_globally(rows: int, padding: int) -> None:
    """Aliases of 8: row 3 of 5 and row 0 of 4 on other ranks; of 1: rows 6 and 5, 9."""
    ids = torch.tensor([[8, 3, 1, 0], [1, 6, 8, 9], [4, 5, 7, 2]])
    weights = unequal(3, 4, 6)
    made, _ = forced(
        lambda x: (F.embedding(ids, x, padding_idx=padding) * weights).sum(), {"x": unequal(rows, 6)},
        on=(2,) if rows == 10 else (2, 3), differs_from=lambda x: (F.embedding(ids, x, padding_idx=3) * weights).sum(),
    )  # fmt: skip
    gradient = made.expected.gradients["x"]
    assert gradient is not None
    assert gradient[:, padding].abs().max() == 0
    assert all(gradient[:, row].abs().max() > 0 for row in range(10) if row != padding)


class Attention(nn.Module):
    """Causal, with fewer key-value heads."""

    def __init__(self, width: int, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, width // heads
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) -> same."""
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k, v = (f(x).view(b, s, self.kv, self.size).transpose(1, 2) for f in (self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv < self.heads)
        return self.out(h.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x), with RMS norms."""

    def __init__(self, width: int, heads: int, kv: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) -> same."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """(loss, logits) of ids and labels (B, S)."""

    def __init__(self, width: int = 12, heads: int = 6, kv: int = 6, layers: int = 1, vocab: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads, kv) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def text(rows: int = 4, seq: int = 6, vocab: int = 12) -> dict[str, Tensor]:
    """Unequally many labels ignored."""
    return {"ids": ints(rows, seq, high=vocab), "labels": labels(rows * seq, vocab).view(rows, seq)}


@pytest.mark.parametrize(("heads", "width", "ranks"), [(4, 8, 3), (5, 10, 2), pytest.param(5, 10, 4, marks=SLOW)])
def test_op13_heads_that_do_not_divide(heads: int, width: int, ranks: int) -> None:
    torch.manual_seed(0)
    plan = same(Decoder(width, heads, heads), text(6), ranks, pins={"tp": ranks})
    told = " ".join(n.message for n in plan.notes)
    assert f"size {heads} " in told and f"{ranks} ways on tp" in told


@pytest.mark.parametrize(
    ("heads", "kv", "width", "ranks"),
    [(4, 2, 8, 4), (6, 2, 12, 3), (6, 2, 12, 2), *(pytest.param(4, 2, 8, n, marks=SLOW) for n in (1, 2, 3))],
)
def test_op15_each_query_head_meets_its_own_key_head(heads: int, kv: int, width: int, ranks: int) -> None:
    torch.manual_seed(0)
    check(case(Decoder(width, heads, kv), text(), fold_blocks=False), line(ranks, "tp"))


@pytest.mark.parametrize("accumulate", [False, True])
def test_op18_indexed_writes_are_at_global_places(accumulate: bool) -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    places = order // 2 * 2 if accumulate else order

    def write(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        flat = torch.zeros(16, dtype=y.dtype).index_put((places,), y, accumulate)
        table = torch.zeros(2, 4, dtype=y.dtype).index_put((places // 4, places % 4), y, accumulate)
        return flat, table, x.index_put((places,), y[:, None].expand(8, 3), accumulate)

    def local(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        flat = torch.zeros(16, dtype=y.dtype).index_put((places % 4,), y, accumulate)
        return flat, write(x, y)[1], write(x, y)[2]

    forced(write, {"x": unequal(8, 3), "y": unequal(8, seed=1)}, on=(2, 4, grid()), differs_from=local)


def _multi_query(x: Tensor, w: Tensor) -> Tensor:
    """4 query heads, one key head and one value head out of one projection; the two are picked by lists."""
    qkv = (x @ w).unflatten(-1, (6, 2))
    q, k, v = qkv[..., :-2, :], qkv[..., [-2], :], qkv[..., [-1], :]
    score = torch.einsum("bqhd,bkd->bhqk", q, k.squeeze(-2)).softmax(-1)
    return torch.einsum("bhqk,bkd->bqhd", score, v.squeeze(-2))


def test_op19_every_priced_conversion_is_there() -> None:
    made, plans = forced(
        _multi_query, {"x": unequal(4, 4, 6), "w": unequal(6, 12, seed=1)}, on=(grid("dp", "tp"), line(2))
    )
    assert [wrong for plan in plans for wrong in unpriced(made, plan)] == []
    told = next(p for p in plans if p.conversions)
    less = told.__class__(**{**{n: getattr(told, n) for n in told.__struct_fields__}, "conversions": []})
    assert unpriced(made, less)


def test_op21_positions_are_global() -> None:
    def greedy(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = x.argmax(-1)
        return x.logsumexp(1), F.embedding(first, w), first, F.embedding(first, w).argmax(-1)

    forced(
        lambda x: (x.argmax(1), x.argmax(), *x.max(1), *x.topk(2, 1), *x.sort(1), x.cumsum(1), x.logsumexp(1)),
        {"x": unequal(4, 6)}, on=(2, 3, 4),
    )  # fmt: skip
    forced(greedy, {"x": unequal(4, 6), "w": unequal(6, 6, seed=1)}, on=(2, 3))


def test_op22_convolutions_cut_along_the_width() -> None:
    """Either with the neighbours' columns or not at all: `sharding/test_truth.py` shows what happens without."""
    x, bias = unequal(2, 3, 8, 8), unequal(4, seed=3)
    forced(
        lambda x, w, b: F.conv2d(x, w, b, stride=4), {"x": x, "w": unequal(4, 3, 4, 4, seed=1), "b": bias},
        on=(2, 4),
    )  # fmt: skip
    forced(
        lambda x, w, b: F.conv2d(x, w, b, padding=1), {"x": x, "w": unequal(4, 3, 3, 3, seed=1), "b": bias},
        on=(2, 4),
    )  # fmt: skip


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 7, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).pow(2).mean((1, 2, 3)).sum()


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(3, marks=SLOW)])
def test_op23_a_stem_cut_along_the_batch_talks_to_nobody(ranks: int) -> None:
    """No collective in the forward but the sum of the loss's parts; the check fails where the batch is gathered."""
    torch.manual_seed(0)
    model, inputs = Stem(), (unequal(5 if ranks == 3 else 4, 3, 16, 16),)
    plan = same(model, inputs, ranks, pins={"dp": ranks, "zero": 0})
    captured = api.capture(model.double(), inputs, options=api.Options(precision="fp64"))
    forward = codegen.lower(captured, plan).function("top", Phase.FORWARD)
    steps = [s for c in forward.converts() for s in c.steps if s.step.collective is not Collective.SLICE]
    assert [(s.step.collective, s.after.meta.shape) for s in steps] == [(Collective.ALL_REDUCE, ())]
    assert used([plan], "aten.convolution.default") == {"dp:S(0), dp:R, dp:R -> dp:S(0)"}


def _penalty(h: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(h(x, w).pow(2).sum(), x, create_graph=True)
        return g.pow(2).sum()

    return loss


PENALTIES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "convolution": (lambda x, w: F.conv2d(x, w), (4, 1, 3, 3), (1, 1, 1, 1)),
    "padded": (lambda x, w: F.conv2d(x, w, padding=1), (6, 2, 4, 4), (2, 2, 3, 3)),
    "linear": (lambda x, w: torch.tanh(F.linear(x, w)), (6, 6), (6, 6)),
    "softmax": (lambda x, w: (x @ w).softmax(-1), (6, 6), (6, 6)),
    "layer norm": (lambda x, w: F.layer_norm(x, (6,), w), (6, 6), (6,)),
    "pool": (lambda x, w: F.max_pool2d(x, 2) * w, (6, 2, 4, 4), (2, 2)),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_op25_a_gradient_penalty_in_the_forward(name: str) -> None:
    h, x, w = PENALTIES[name]
    forced(_penalty(h), {"x": unequal(*x) * 0.3, "w": unequal(*w, seed=1)}, on=(2, 3))


def test_op25_a_second_derivative_through_the_compiled_module_is_refused() -> None:
    """A part of it would come out finite and wrong: parameters are there, what the forward saved is not."""
    torch.manual_seed(0)
    model, inputs = Stem().double(), (unequal(4, 3, 16, 16),)
    captured = api.capture(model, inputs, options=api.Options(precision="fp64"))
    plan = same(model, inputs, 2)
    source = api.emit_captured(captured, plan)

    def rank(rt: Any) -> None:
        module = ParallelModule(captured, plan, source, model, rt)
        (g,) = torch.autograd.grad(module(*inputs), module.conv.weight, create_graph=True)
        g.pow(2).sum().backward()

    with pytest.raises(RankError, match="InputError: backward with create_graph=True"):
        run_threads(api.mesh_of(plan), rank)


@pytest.mark.parametrize("affine", [True, False])
def test_op26_group_norm(affine: bool) -> None:
    scale = {"w": unequal(6, seed=1), "b": unequal(6, seed=2)} if affine else {}
    _, plans = forced(lambda x, w=None, b=None: F.group_norm(x, 2, w, b), {"x": unequal(4, 6, 5), **scale}, on=(2, 3))
    assert plans


class TinyConv(nn.Module):
    """7 × 7 stem, batch norm, in-place ReLU, pool, a residual block, adaptive pool, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4)
        self.conv, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = F.max_pool2d(self.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = self.relu(x + self.norm2(self.conv(x)))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), t)


@pytest.mark.parametrize("ranks", [2, 4, *(pytest.param(n, marks=SLOW) for n in (1, 3))])
def test_op28_batch_statistics_are_of_the_whole_batch(ranks: int) -> None:
    """State, running statistics among it, is compared with one device's after three steps, and bit for bit by rank."""
    torch.manual_seed(0)
    model = TinyConv()
    x = unequal(8, 3, 16, 16) * 3
    made = case(model, {"x": x, "t": ints(8, high=3)})
    check(made, line(ranks, "dp"), only=lambda op: "sum" in op or "convolution" in op)
    half = nn.BatchNorm2d(4).double()
    half(model.stem(x[:4]))
    assert (half.running_var * 3 - made.expected.state["norm.running_var"]).abs().max() > 1


@pytest.mark.parametrize("axes", [("dp", "cp"), ("dp", "tp")])
def test_op29_a_frozen_norm_on_two_axes(axes: tuple[str, str]) -> None:
    torch.manual_seed(0)
    model = Decoder()
    for block in model.blocks:
        block.norm1.weight.requires_grad_(False)
    made = case(model, text(), fold_blocks=False, steps=1)
    assert made.expected.gradients["blocks.0.norm1.weight"] is None
    assert made.expected.gradients["blocks.0.norm2.weight"] is not None
    check(made, grid(*axes), only=lambda op: "norm" in op or "sum" in op or "mm" in op)


class Product(nn.Module):
    """Integers in float64: exact whatever the order of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(16.0).view(4, 4) - 5)
        self.b = nn.Parameter((torch.arange(16.0) ** 2 % 11).view(4, 4))

    def forward(self, c: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a @ self.b
        return (y * c).sum(), y.detach().long()


WEIGHING = (torch.arange(16.0) ** 2 % 7).view(4, 4)
"""Rows paired wrongly change the sum of the product weighed so."""


def test_op31_a_contraction_cut_by_two_axes_in_one_order() -> None:
    """Cut dims are cut by the first axis first, of both operands; a swapped order would pair wrong rows."""
    plans = check(case(Product(), {"c": WEIGHING}), grid("free", "tp"), grid("dp", "free"))
    assert "free:S(1) tp:S(1), free:S(0) tp:S(0) -> free:P tp:P" in used(plans, "aten.mm.default")


def test_op32_complex_rotation() -> None:
    """A random upstream gradient; the wrong variant has real and imaginary parts swapped."""
    f = unequal(3, 1, 2, seed=4)

    def rotate(x: Tensor, swap: bool = False) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2))
        whole = torch.view_as_complex(pairs.flip(-1).contiguous() if swap else pairs.contiguous())
        made = torch.view_as_real(whole * torch.polar(torch.ones_like(f), f))
        return (made.flip(-1) if swap else made).flatten(-2)

    forced(rotate, {"x": unequal(2, 3, 4, 4)}, on=(3, grid()), differs_from=lambda x: rotate(x, True))


def _routed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """8 tokens to the 2 best of 3 experts, which take no more tokens than the fullest has less one."""
    score, expert = x.softmax(-1).topk(2, -1)
    chosen = F.one_hot(expert, 3)
    counts = torch.bincount(expert.flatten(), minlength=3)
    by_histogram = expert.double().histc(3, 0, 2)
    by_adding = torch.zeros(3, dtype=torch.int64).index_add(0, expert.flatten(), torch.ones(16, dtype=torch.int64))
    place = (chosen.sum(1).cumsum(0) * chosen.sum(1)).gather(1, expert)
    kept = place <= counts.max() - 1
    load = torch.zeros(3, dtype=x.dtype).index_add(0, expert.flatten(), (score * kept).flatten())
    share = counts / counts.sum()
    return (w[expert] * (score * kept)[..., None]).sum(1), load * share, counts, by_histogram, by_adding, chosen.sum(0)


def test_op34_tokens_are_counted_globally() -> None:
    made, _ = forced(_routed, {"x": unequal(8, 3), "w": unequal(3, 4, seed=1)}, on=(2, 4))
    counts = made.outputs[3]
    assert counts.sum() == 16 and torch.equal(made.outputs[5], counts)


def test_op34_a_bin_beyond_the_last_is_no_silent_loss() -> None:
    """eager bincount grows; a compiled one cannot, and says so."""
    model = Function(lambda x, t: (x, torch.bincount(t, minlength=3)), {"x": unequal(4)}, {"t": torch.tensor([0, 2])})
    captured = api.capture(model, {"t": torch.tensor([0, 2])}, options=api.Options(precision="fp64"))
    plan = same(model, {"t": torch.tensor([0, 2])}, 2)
    source = api.emit_captured(captured, plan)
    with pytest.raises(RankError, match="out of bounds"):
        run_threads(
            api.mesh_of(plan), lambda rt: ParallelModule(captured, plan, source, model, rt)(t=torch.tensor([0, 3]))
        )


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=SLOW) for n in (3, 4))])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)], ids=str)
def test_op35_layers_frozen_apart_are_decided_apart(frozen: tuple[int, ...], ranks: int) -> None:
    torch.manual_seed(0)
    model = Decoder(layers=2)
    for i in frozen:
        model.blocks[i].attention.requires_grad_(False)
    made = case(model, text(), steps=1)
    none = {n for n, g in made.expected.gradients.items() if g is None}
    assert none == {n for n, _ in model.named_parameters() if any(f"blocks.{i}.attention" in n for i in frozen)}
    check(made, line(ranks, "tp"), only=lambda op: "attention" in op)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=SLOW) for n in (1, 3, 4))])
@pytest.mark.parametrize("frozen", [(0,), (2,)], ids=str)
def test_op35_three_layers(frozen: tuple[int, ...], ranks: int) -> None:
    torch.manual_seed(0)
    model = Decoder(layers=3)
    for i in frozen:
        model.blocks[i].attention.requires_grad_(False)
    graph = captured(model, text())
    for pins in ({"tp": ranks}, {"dp": ranks}):
        _, report = compared(model, text(), ranks, pins=pins, graph=graph)
        assert report.ok, str(report)


MOVES: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "pad": (lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 1, 2))), {"x": unequal(12, 12)}),
    "causal convolution": (
        lambda x, w: F.conv1d(F.pad(x, (2, 0)), w), {"x": unequal(4, 4, 12), "w": unequal(4, 4, 3, seed=1)},
    ),
    "expand": (lambda x: x.expand(-1, 12, -1), {"x": unequal(12, 1, 4)}),
    "roll": (lambda x: (x.roll(1, 0), x.roll(-2, 1)), {"x": unequal(12, 4)}),
    "flip": (lambda x: (x.flip(0), x.flip(1)), {"x": unequal(12, 4)}),
    "difference": (lambda x: x[1:] - x[:-1], {"x": unequal(12, 4)}),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_op38_moved_and_padded(name: str) -> None:
    fn, parameters = MOVES[name]
    forced(fn, parameters, on=(2, 4) if name != "pad" else (2, 3, 4))


def test_op40_a_norm_after_a_permutation() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x.permute(1, 2, 0), (6,), w, b).view(2, 4, 3, 2).view(8, 6) * 2

    parameters = {"x": unequal(6, 2, 4), "w": unequal(6, seed=1), "b": unequal(6, seed=2)}
    forced(fn, parameters, on=(2, 3, 4))


MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": lambda x, y: F.mse_loss(x, y),
    "huber": lambda x, y: F.huber_loss(x, y),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y),
    "l1": lambda x, y: F.l1_loss(x, y),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
}


@pytest.mark.parametrize("name", MEANS)
def test_x01_gradients_of_means_are_not_counted_once_a_rank(name: str) -> None:
    x = {"x": unequal(12, 5), "y": unequal(12, 5, seed=1)}
    forced(MEANS[name], x, on=(2, 3, 4), differs_from=lambda x, y: 2 * MEANS[name](x, y))


@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
def test_heads_of_unequal_sizes_take_the_fused_kernel(sizes: tuple[int, int]) -> None:
    """Of queries and keys the first, of values the second; no score lies in memory."""
    shapes = {"x": (4, 4, 6, sizes[0]), "y": (4, 2, 6, sizes[0]), "z": (4, 2, 6, sizes[1])}
    _, plans = forced(
        lambda x, y, z: F.scaled_dot_product_attention(x, y, z, is_causal=True, enable_gqa=True),
        {n: unequal(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}, on=(2,),
    )  # fmt: skip
    assert used(plans, "aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert not used(plans, "aten._softmax.default") and not used(plans, "aten._safe_softmax.default")


@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_x03_attention_cut_along_batch_heads_and_queries(causal: bool, kv: int) -> None:
    """Queries are cut where no causal mask counts from the piece's own first row."""
    shapes = {"x": (4, 4, 6, 2), "y": (4, kv, 6, 2), "z": (4, kv, 6, 2)}
    _, plans = forced(
        lambda x, y, z: F.scaled_dot_product_attention(x, y, z, is_causal=causal, enable_gqa=kv < 4),
        {n: unequal(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}, on=(2, 3, 4),
    )  # fmt: skip
    cuts = {
        s.split(" -> ")[0].split(",")[0]
        for s in used(plans, "aten._scaled_dot_product_flash_attention_for_cpu.default")
    }
    assert {"free:S(0)", "free:S(1)"} <= cuts
