"""The arithmetic of the optimizers: by our kernels on a CPU, if they are there, else in PyTorch; the same bits.

In float32, or float64 for float64 parameters, rounded when stored; t counts steps from 1:

    AdamW   g = factor · gradient
            m = m + (1 - β₁)(g - m)                 v = β₂ v + (1 - β₂) g²
            p = (1 - lr · decay) p - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
    SGD     g = factor · gradient + decay · p
            m = momentum · m + (1 - dampening) g;   m = g at first
            p = p - lr · m;   p - lr · (g + momentum · m) by Nesterov

Stochastic rounding to bfloat16 goes up with the probability that keeps the mean: element i of the whole tensor has word
i of its stream (runtime/philox.py), of which the parameter and v add the lower 16 bits below their last place, m the
upper 16. So the parameter's rounding depends on no layout, and v's is not independent of the parameter's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar import native
from autopar.native import OptimizerItem, OptimizerRule
from autopar.runtime import draw, philox
from autopar.runtime.philox import Space, Stream


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter with what goes with it, all of one shape and in the same order of memory without gaps.

    Attributes:
        first, second: AdamW's moments; SGD's momentum and None.
        copy: gets the new parameter in its own dtype, or None.
        rate: AdamW: lr / (1 - β₁ᵗ). SGD: lr.
        root: AdamW: 1 / √(1 - β₂ᵗ). SGD: 0 where `first` holds nothing yet, else 1.
        noise: for stochastic rounding, or None.
    """

    parameter: Tensor
    gradient: Tensor
    first: Tensor | None
    second: Tensor | None
    copy: Tensor | None
    rate: float
    root: float
    noise: tuple[Stream, Space] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What is the same for all parameters of a group.

    AdamW: keep = 1 - lr · decay, a = 1 - β₁, b = β₂, c = 1 - β₂, eps. SGD: keep = decay, a = 1 - dampening,
    b = momentum, c = 1 by Nesterov else 0. `factor` is what gradients are multiplied by.
    """

    factor: float
    keep: float
    a: float
    b: float
    c: float
    eps: float = 0.0


def adamw(items: Sequence[Item], rule: Rule) -> None:
    """Update in place."""
    _update("adamw", items, rule, _adamw)


def sgd(items: Sequence[Item], rule: Rule) -> None:
    """Update in place."""
    _update("sgd", items, rule, _sgd)


def _kernels() -> native.Kernels | None:
    return native.kernels()


def _update(kernel: str, items: Sequence[Item], rule: Rule, plain: Callable[[Item, Rule], None]) -> None:
    """Items of the same dtypes in one call of the kernel, the rest one by one in PyTorch."""
    kernels = _kernels()
    together: dict[tuple[int, int], list[Item]] = {}
    for item in items:
        dtypes = _known(item) if kernels is not None else None
        if dtypes is None:
            plain(item, rule)
        else:
            together.setdefault(dtypes, []).append(item)
    for (parameter, state), alike in together.items():
        assert kernels is not None
        spaces = [None if i.noise is None else draw.as_argument(i.noise[1])[0] for i in alike]
        table = (OptimizerItem * len(alike))(*map(_row, alike, spaces))
        numbers = OptimizerRule(rule.factor, rule.keep, rule.a, rule.b, rule.c, rule.eps)
        kernels(
            kernel, ctypes.addressof(table), len(alike), ctypes.addressof(numbers), parameter, state,
            torch.get_num_threads(),
        )  # fmt: skip
        torch.autograd.graph.increment_version([i.parameter for i in alike])


PAIRS = {
    (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
}  # fmt: skip
"""Dtypes of parameter and state that the kernels know."""


def _known(item: Item) -> tuple[int, int] | None:
    """Numbers of the dtypes of parameter and state, None where the kernels have nothing for the item."""
    p = item.parameter
    state = item.first.dtype if item.first is not None else p.dtype
    if p.device.type != "cpu" or (p.dtype, state) not in PAIRS or item.gradient.dtype is not p.dtype:
        return None
    if item.second is not None and item.second.dtype is not state:
        return None
    if item.copy is not None and (p.dtype, item.copy.dtype) != (torch.float32, torch.bfloat16):
        return None
    return draw.DTYPES[p.dtype], draw.DTYPES[state]


def _row(item: Item, space: Any) -> OptimizerItem:
    stream = item.noise[0] if item.noise is not None else Stream(0, 0)
    at = None if space is None else ctypes.addressof(space)
    return OptimizerItem(
        item.parameter.data_ptr(), item.gradient.data_ptr(), _pointer(item.first), _pointer(item.second),
        _pointer(item.copy), item.parameter.numel(), item.rate, item.root, at, stream.key, stream.step,
    )  # fmt: skip


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _adamw(item: Item, rule: Rule) -> None:
    wide, noise = _wide(item.parameter), _noise(item)
    assert item.first is not None and item.second is not None
    gradient = item.gradient.to(wide) * rule.factor
    first = item.first.to(wide)
    first = first + (gradient - first) * rule.a
    second = item.second.to(wide) * rule.b + gradient * gradient * rule.c
    step = first / (_root(second) * item.root + rule.eps)
    _put(item.parameter, item.parameter.to(wide) * rule.keep - step * item.rate, noise)
    _put(item.first, first, noise >> 16 if noise is not None else None)
    _put(item.second, second, noise)
    if item.copy is not None:
        item.copy.copy_(item.parameter)


def _sgd(item: Item, rule: Rule) -> None:
    wide, noise = _wide(item.parameter), _noise(item)
    step = gradient = item.gradient.to(wide) * rule.factor + item.parameter.to(wide) * rule.keep
    if item.first is not None:
        momentum = item.first.to(wide) * rule.b + gradient * rule.a if item.root else gradient
        step = gradient + momentum * rule.b if rule.c else momentum
        _put(item.first, momentum, noise >> 16 if noise is not None else None)
    _put(item.parameter, item.parameter.to(wide) - step * item.rate, noise)
    if item.copy is not None:
        item.copy.copy_(item.parameter)


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32


def _root(x: Tensor) -> Tensor:
    """Correctly rounded, which torch's own root is not always: of float32 by way of float64."""
    if x.dtype is torch.float32:
        return x.double().sqrt().float()
    return torch.where((x > 0) & x.isfinite(), philox.sqrt(x), x.sqrt())


def _noise(item: Item) -> Tensor | None:
    """int32 words, of the parameter's shape."""
    if item.noise is None:
        return None
    return draw.words(item.noise[0], item.noise[1], 1, item.parameter.device).view(item.parameter.shape)


def _put(to: Tensor, x: Tensor, noise: Tensor | None) -> None:
    if noise is None or to.dtype is not torch.bfloat16:
        to.copy_(x)
        return
    bits = (x.view(torch.int32) + (noise & 0xFFFF)) & -0x10000
    to.copy_(torch.where(x.isfinite(), bits.view(torch.float32), x))
