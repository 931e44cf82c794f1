"""torch functions that cannot be captured as they are, whose form without data is wrong, or that would be captured as
many ops where another call of the same gives one.

bincount: as many entries as `minlength` says; a larger value fails in the step that meets it.
gaussian_nll_loss: torch looks whether a variance is negative; here its loss is NaN.
multilabel_margin_loss: torch's form without data counts what stands behind the first -1 as label 0.
scaled_dot_product_attention: with heads of one size for queries and keys and another for values (latent attention), the
fused kernel is not taken and every score lies in memory, several times over; with zeros beside the narrower it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import CaptureError


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each of 0 .. minlength - 1 is in the one-dimensional `input`, or the sum of its weights."""
    if minlength <= 0:
        raise CaptureError(
            "bincount without minlength has as many entries as the data say, unknown at capture: pass "
            "minlength=NUMBER_OF_BINS"
        )
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif not weights.is_floating_point():
        weights = weights.double()
    return torch.zeros(minlength, dtype=weights.dtype, device=input.device).scatter_add(0, input.long(), weights)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Negative log-likelihood of target under a normal distribution; a variance below eps counts as eps."""
    if not isinstance(var, Tensor):
        var = var * torch.ones_like(input)
    elif var.shape == input.shape[:-1] and var.shape != input.shape:
        var = var.unsqueeze(-1)
    least = torch.where(var < 0, math.nan, var.clamp(min=eps))
    var = var + (least - var).detach()
    each = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(each + 0.5 * math.log(2 * math.pi) if full else each, reduction)


def multilabel_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Labels of a sample: those before its first -1. Each is to exceed each class that is none by 1."""
    classes = input.shape[-1]
    real = (target == -1).cumsum(-1) == 0
    label = torch.where(real, target, 0)
    is_label = (real.unsqueeze(-1) & (label.unsqueeze(-1) == torch.arange(classes, device=target.device))).any(-2)
    margin = (1 - input.gather(-1, label).unsqueeze(-1) + input.unsqueeze(-2)).clamp_min(0)
    pair = real.unsqueeze(-1) & ~is_label.unsqueeze(-2)
    return _reduced((margin * pair).sum((-1, -2)) / classes, reduction)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **more: Any
) -> Tensor:
    """[..., queries, e], [..., keys, e], [..., keys, v] -> [..., queries, v], with v = e by zeros that add nothing."""
    size, wanted = query.shape[-1], value.shape[-1]
    if size == wanted or dropout_p or query.dim() != 4:  # no fused kernel takes these
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **more)
    if size < wanted:
        more.setdefault("scale", size**-0.5)  # of the heads as they were
        query, key = F.pad(query, (0, wanted - size)), F.pad(key, (0, wanted - size))
    else:
        value = F.pad(value, (0, size - wanted))
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **more)[..., :wanted]


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return each.mean()
    return each.sum() if reduction == "sum" else each


SUBSTITUTES: Mapping[Any, Callable[..., Tensor]] = {
    torch.bincount: bincount,
    Tensor.bincount: bincount,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
}


class Substitutes(TorchFunctionMode):
    """While entered, calls of the functions above are made of ordinary ops."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {k: v for k, v in (kwargs or {}).items() if v is not None or k not in ("size_average", "reduce")}
        form: Callable[..., Any] = SUBSTITUTES.get(func, func)
        return form(*args, **given)
