"""Decompositions against eager: losses with every reduction, ignored labels, weights, smoothing; means and norms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracer.proof import check_equal

D = torch.float64


class Apply(nn.Module):
    """function(p * x, *others) for a parameter p of x's shape."""

    def __init__(self, function: Callable[..., Tensor], x: Tensor) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.rand_like(x) + 0.5)
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.p * x, y).sum()


def check(function: Callable[..., Tensor], x: Tensor, y: Tensor) -> set[str]:
    captured = check_equal(Apply(function, x), {"x": x, "y": y}, tolerance=1e-12)
    return {n.op for n in captured.top.nodes}


PAIRS = [F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss, F.soft_margin_loss, F.binary_cross_entropy_with_logits]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", PAIRS)
def test_pair_losses(loss: Callable[..., Tensor], reduction: str) -> None:
    torch.manual_seed(0)
    x, y = 2 * torch.randn(6, 5, dtype=D), torch.rand(6, 5, dtype=D)
    ops = check(lambda a, b: loss(a, b, reduction=reduction), x, y)
    assert not any("loss" in op or "mean" in op or "cross_entropy" in op for op in ops)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7, 5), (4, 5, 3, 2)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction: str, shape: tuple[int, ...], weighted: bool, smoothing: float) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(shape, dtype=D), torch.randint(0, 5, (shape[0], *shape[2:]))
    y.view(-1)[::3] = 2
    weight = torch.rand(5, dtype=D) if weighted else None
    ops = check(
        lambda a, b: F.cross_entropy(a, b, weight, ignore_index=2, reduction=reduction, label_smoothing=smoothing), x, y
    )
    assert "autopar.pick.default" in ops and "autopar.place.default" in ops and not any("nll" in op for op in ops)


def test_binary_cross_entropy_and_kl() -> None:
    x, y = torch.rand(6, 5, dtype=D) * 0.6 + 0.01, torch.rand(6, 5, dtype=D)
    check(F.binary_cross_entropy, x, y)
    check(lambda a, b: F.kl_div(a.log_softmax(-1), b, reduction="batchmean"), x, y)


REDUCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.mean(),
    lambda x: x.mean(1, keepdim=True),
    lambda x: x.mean((0, 2)),
    lambda x: x.var(),
    lambda x: x.var((0, -1), correction=0),
    lambda x: x.std(1, keepdim=True),
    lambda x: torch.var_mean(x, 0)[0] * torch.var_mean(x, 0)[1],
    lambda x: torch.std_mean(x, (0, 1), correction=2)[0],
    lambda x: F.group_norm(x, 3, torch.arange(1.0, 7.0, dtype=D)),
    lambda x: F.instance_norm(x).pow(3),
    lambda x: F.batch_norm(x, None, None, training=True).pow(3),
]


@pytest.mark.parametrize("number", range(len(REDUCTIONS)))
def test_reductions(number: int) -> None:
    x = torch.randn(4, 6, 5, dtype=D)
    function = REDUCTIONS[number]
    ops = check(lambda a, b: function(a) * b, x, torch.tensor(1.5, dtype=D))
    assert not any(name in op for op in ops for name in ("mean", "var", "std", "norm"))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_buffers(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(96, 1)).double()
    model.train(training)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).pow(2).mean()

    captured = check_equal(Loss(), {"x": torch.randn(4, 3, 6, 6, dtype=D)})
    updates = [o.target for o in captured.top.outputs if o.kind.value == "buffer_update"]
    assert len(updates) == (3 if training else 0)


def test_pick_and_place_are_zero_outside() -> None:
    x, index = torch.arange(12.0).view(3, 4), torch.tensor([3, -100, 4])
    assert torch.ops.autopar.pick(x, 1, index).tolist() == [3.0, 0.0, 0.0]
    placed = torch.ops.autopar.place(torch.tensor([5.0, 6.0, 7.0]), 1, index, 4)
    assert placed.tolist() == [[0, 0, 0, 5], [0, 0, 0, 0], [0, 0, 0, 0]]
    inf = torch.full((1, 3), float("-inf"))
    assert torch.ops.autopar.pick(inf, 1, torch.tensor([-1])).tolist() == [0.0]
