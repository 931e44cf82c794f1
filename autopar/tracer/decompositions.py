"""Which ops are taken apart, and how, so that splitting a tensor over ranks is exact.

A mean over N elements becomes sum * (1/N) with the global N as a literal; a loss with ignored labels or weights becomes
a sum and a count; batch statistics become sums over the batch. A rank then adds up its part, and the sum over ranks is
the whole model's value. Everything else (attention, softmax, layer norm, ...) stays one op: fewer and faster kernels.

Sums of half precision are taken in float32 and narrowed at the end, as one kernel does inside: so parts of a sum are
added up in float32 over ranks, too.

    nll:  picked_i = x[i, t_i] (0 if t_i is ignored), w_i = weight[t_i] (1 without; 0 if ignored)
          loss = -sum_i w_i picked_i / sum_i w_i,   dloss/dx = place(-g w_i / sum w, t_i)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import autopar.ops.custom  # noqa: F401 (defines autopar::pick and autopar::place)
from autopar.tracer.torch_private import torch_decompositions

aten = torch.ops.aten
MEAN, SUM = 1, 2
"""Reduction numbers of ATen's losses (0: none)."""
NARROW = (torch.float16, torch.bfloat16)
"""Types that hold no sum of many."""


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [d % x.dim() if x.dim() else 0 for d in dims]


def _count(x: Tensor, dims: list[int]) -> int:
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


def _scaled(x: Tensor, count: float) -> Tensor:
    return x * (1.0 / count) if count else x * float("nan")


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of this type are taken in."""
    return torch.float32 if dtype in NARROW else dtype


def total(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Sum of all elements; of another than half precision the op itself."""
    wanted = dtype or x.dtype
    return aten.sum.default(x, dtype=torch.float32).to(wanted) if wanted in NARROW else NotImplemented


def total_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Sum over dims, as `total`."""
    wanted = dtype or x.dtype
    if wanted not in NARROW:
        return NotImplemented
    return aten.sum.dim_IntList(x, dim, keepdim, dtype=torch.float32).to(wanted)


def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Mean of all elements."""
    wanted = dtype or x.dtype
    return _scaled(aten.sum.default(x, dtype=_wide_dtype(wanted)), x.numel()).to(wanted)


def mean_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Mean over dims."""
    dims, wanted = _dims(x, dim), dtype or x.dtype
    return _scaled(aten.sum.dim_IntList(x, dims, keepdim, dtype=_wide_dtype(wanted)), _count(x, dims)).to(wanted)


def var_mean_correction(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance (divided by N - correction) and mean over dims."""
    dims, wide = _dims(x, dim), x.to(_wide_dtype(x.dtype))
    count = _count(x, dims)
    middle = _scaled(aten.sum.dim_IntList(wide, dims, True), count)
    apart = wide - middle
    divisor = max(count - (1 if correction is None else correction), 0)
    var = _scaled(aten.sum.dim_IntList(apart * apart, dims, keepdim), divisor)
    if not keepdim:
        for d in sorted(dims, reverse=True) if x.dim() else []:
            middle = middle.squeeze(d)
    return var.to(x.dtype), middle.to(x.dtype)


def var_correction(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """Variance over dims."""
    return var_mean_correction(x, dim, correction=correction, keepdim=keepdim)[0]


def std_correction(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """Standard deviation over dims."""
    return var_correction(x, dim, correction=correction, keepdim=keepdim).sqrt()


def std_mean_correction(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean over dims."""
    var, middle = var_mean_correction(x, dim, correction=correction, keepdim=keepdim)
    return var.sqrt(), middle


def _picked_weight(x: Tensor, dim: int, target: Tensor, weight: Tensor) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    picked: Tensor = torch.ops.autopar.pick.default(weight.view(shape).expand(x.shape), dim, target)
    return picked


def nll_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """x: (N, C, ...) log-probabilities or (C,), target: (N, ...) or () -> (loss, sum of weights in the wide type)."""
    dim = 0 if x.dim() == 1 else 1
    ignored = target == ignore_index
    part = -torch.ops.autopar.pick.default(x, dim, target)
    wide = _wide_dtype(x.dtype)
    if weight is None:
        each = torch.logical_not(ignored).to(wide)
    else:
        each = _picked_weight(x, dim, target, weight).masked_fill(ignored, 0.0)
        part = part * each
    part = part.masked_fill(ignored, 0.0)
    if reduction == 0:
        return part, x.new_zeros(())
    loss, total_weight = part.to(wide).sum(), each.to(wide).sum()
    return (loss / total_weight if reduction == MEAN else loss).to(x.dtype), total_weight


def nll_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total: Tensor
) -> Tensor:
    """Gradient of `nll_forward` to x; grad: () or, unreduced, target's shape."""
    dim = 0 if x.dim() == 1 else 1
    value = -(grad / total).to(grad.dtype) if reduction == MEAN else -grad
    value = value.expand(target.shape)
    if weight is not None:
        value = value * _picked_weight(x, dim, target, weight)
    value = value.masked_fill(target == ignore_index, 0.0)
    placed: Tensor = torch.ops.autopar.place.default(value, dim, target, x.shape[dim])
    return placed


def huber_loss(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    """Huber loss: quadratic up to delta, then linear."""
    apart = (x - y).abs()
    each = torch.where(apart < delta, 0.5 * apart * apart, delta * (apart - 0.5 * delta))
    return _reduced(each, reduction)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, inner: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x: (n, c, ...), `inner` elements a channel -> (x's shape, mean (n, groups), reciprocal deviation (n, groups))."""
    parts = x.to(_wide_dtype(x.dtype)).reshape(n, groups, c // groups, inner)
    var, middle = var_mean_correction(parts, [2, 3], correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    out = (parts - middle) * rstd
    if weight is not None:
        out = out * weight.view(1, groups, c // groups, 1)
    if bias is not None:
        out = out + bias.view(1, groups, c // groups, 1)
    saved = middle.squeeze(3).squeeze(2), rstd.squeeze(3).squeeze(2)
    return out.reshape(x.shape).to(x.dtype), saved[0].to(x.dtype), saved[1].to(x.dtype)


def random_from(x: Tensor, low: int, high: int | None = None) -> Tensor:
    """random_: integers from `low` up to what the dtype holds (floats: exactly), or below `high`."""
    if high is None:
        high = 2**63 - 1
        if x.dtype is not torch.int64:
            kind = x.dtype
            high = round(2 / torch.finfo(kind).eps) if kind.is_floating_point else _largest(kind) + 1
    found: Tensor = aten.randint_like.low_dtype(x, low, high)
    return found


def _largest(kind: torch.dtype) -> int:
    return 1 if kind is torch.bool else int(torch.iinfo(kind).max)


def random_to(x: Tensor, high: int) -> Tensor:
    """random_ below `high`."""
    return random_from(x, 0, high)


def random_default(x: Tensor) -> Tensor:
    """random_ without bounds."""
    return random_from(x, 0)


def _reduced(each: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return mean(each)
    return each.sum() if reduction == SUM else each


OWN: dict[Any, Callable[..., Any]] = {
    aten.sum.default: total,
    aten.sum.dim_IntList: total_dim,
    aten.mean.default: mean,
    aten.mean.dim: mean_dim,
    aten.var.correction: var_correction,
    aten.var_mean.correction: var_mean_correction,
    aten.std.correction: std_correction,
    aten.std_mean.correction: std_mean_correction,
    aten.nll_loss_forward.default: nll_forward,
    aten.nll_loss2d_forward.default: nll_forward,
    aten.nll_loss_backward.default: nll_backward,
    aten.nll_loss2d_backward.default: nll_backward,
    aten.huber_loss.default: huber_loss,
    aten.native_group_norm.default: group_norm,
    getattr(aten.random, "from"): random_from,
    aten.random.to: random_to,
    aten.random.default: random_default,
}

TAKEN_FROM_TORCH = (
    "mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss_backward",
    "binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits", "soft_margin_loss",
    "soft_margin_loss_backward", "native_batch_norm",
    "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional", "native_batch_norm_backward", "batch_norm_backward",
    "_batch_norm_with_update", "_batch_norm_with_update_functional", "_batch_norm_no_update",
    "native_group_norm_backward",
)  # fmt: skip
"""torch's own decompositions of these speak in means, variances and sums, which ours above turn into sums."""


@cache
def table() -> dict[Any, Callable[..., Any]]:
    """Overload -> decomposition."""
    return {**torch_decompositions(TAKEN_FROM_TORCH), **OWN}
