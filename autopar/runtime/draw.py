"""Random numbers of a piece of a tensor: by our kernels on a CPU, if they are there, else in PyTorch; the same bits."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar import native
from autopar.runtime import philox
from autopar.runtime.philox import Space, Stream

DTYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3}
"""As native/kernel.h numbers them."""


def _kernels(device: torch.device) -> native.Kernels | None:
    return native.kernels() if device.type == "cpu" else None


@lru_cache(maxsize=1024)
def as_argument(of: Space) -> tuple[Any, int]:
    """(the piece as kernels take it, its number of elements)."""
    numbers = (of.base, len(of.sizes), *of.sizes, *of.strides)
    return (ctypes.c_int64 * len(numbers))(*numbers), of.count


def words(stream: Stream, of: Space, width: int, device: torch.device) -> Tensor:
    """int32 bit patterns, [count · width]: `width` (1, 2 or 4) words of each element."""
    kernels = _kernels(device)
    if kernels is None:
        return philox.words(stream, of, width, device)
    out = torch.empty(of.count * width, dtype=torch.int32)
    kernels("words", out.data_ptr(), width, *as_argument(of), stream.key, stream.step, torch.get_num_threads())
    return out


def integers(stream: Stream, of: Space, device: torch.device) -> Tensor:
    """int64 numbers in 0 .. 2**63 - 1, of the piece's shape."""
    return (philox.pairs(words(stream, of, 2, device)) & (2**63 - 1)).view(of.shape)


def uniform(stream: Stream, of: Space, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in [0, 1), of the piece's shape."""
    kernels = _kernels(device)
    if kernels is not None and dtype in (torch.float32, torch.float64):
        return _filled(kernels, "uniform", stream, of, dtype)
    width = 2 if dtype is torch.float64 else 1
    return philox.uniform(words(stream, of, width, device), dtype).view(of.shape)


def normal(stream: Stream, of: Space, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers, of the piece's shape."""
    kernels = _kernels(device)
    if kernels is not None and dtype in (torch.float32, torch.float64):
        return _filled(kernels, "normal", stream, of, dtype)
    return philox.normal(words(stream, of, 4, device)).to(dtype).view(of.shape)


def _filled(kernels: native.Kernels, kernel: str, stream: Stream, of: Space, dtype: torch.dtype) -> Tensor:
    out = torch.empty(of.shape, dtype=dtype)
    kernels(
        kernel, out.data_ptr(), DTYPES[dtype], *as_argument(of), stream.key, stream.step, torch.get_num_threads()
    )  # fmt: skip
    return out


def open_uniform(stream: Stream, of: Space, device: torch.device) -> Tensor:
    """float64 numbers in (0, 1), both ends left out, of the piece's shape."""
    return philox.open_unit(philox.pairs(words(stream, of, 2, device))).view(of.shape)


def below(stream: Stream, of: Space, probability: Tensor) -> Tensor:
    """Where a uniform number of 32 bits is below `probability`, which is of the piece's shape or broadcasts to it."""
    drawn = words(stream, of, 1, probability.device).to(torch.int64) & philox.LOW
    return drawn.view(of.shape).to(torch.float64) * 2.0**-32 < probability.to(torch.float64)


def dropout(stream: Stream, of: Space, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """(x · mask / (1 - p), mask), dropped with probability p; x · 0 where p is 1."""
    threshold, scale = round(p * 2**32), scale_of(p)
    kernels = _kernels(x.device)
    if kernels is None:
        mask = philox.at_least(philox.words(stream, of, 1, x.device), threshold).view(of.shape)
        return x * mask * scale, mask
    x = x.contiguous()
    mask = torch.empty(of.shape, dtype=torch.bool)
    kind = DTYPES.get(x.dtype, 0)
    out = torch.empty_like(x) if kind else None
    kernels(
        "dropout", None if out is None else out.data_ptr(), mask.data_ptr(), x.data_ptr() if kind else None, kind,
        threshold, scale, *as_argument(of), stream.key, stream.step, torch.get_num_threads(),
    )  # fmt: skip
    return (x * mask * scale if out is None else out), mask


def dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """gradient · mask · scale."""
    kernels = _kernels(gradient.device)
    if kernels is None or gradient.dtype not in DTYPES or mask.dtype is not torch.bool:
        return gradient * mask * scale
    gradient, mask = gradient.contiguous(), mask.contiguous()
    out = torch.empty_like(gradient)
    kernels(
        "dropout_backward", out.data_ptr(), gradient.data_ptr(), mask.data_ptr(), DTYPES[gradient.dtype], scale,
        out.numel(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def scale_of(p: float) -> float:
    """What kept elements are multiplied by."""
    return 0.0 if p >= 1 else 1 / (1 - p)
