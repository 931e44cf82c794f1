"""Local forms of ops that aren't simply the op on the pieces. Emitted code calls them with the rank's context `rt`.

`axes` are the mesh axes that cut the dim in question, slowest first. Where pieces aren't equal, `first` is the index in
the whole dim at which this rank's piece starts, and `count` the number of elements of all ranks' pieces together.

Random numbers: element number i (row-major, of the *whole* tensor) of a draw is made of i and of (rt.seed, rt.step,
rt.instance, key). So it doesn't depend on how the tensor is cut: replicas agree, pieces differ, a recomputed op draws
the same again (docs/randomness.md).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import draw
from autopar.runtime.comm import Communicator
from autopar.runtime.expert_ops import collect as collect
from autopar.runtime.expert_ops import grouped_mm as grouped_mm
from autopar.runtime.expert_ops import grouped_outer as grouped_outer
from autopar.runtime.expert_ops import route as route
from autopar.runtime.expert_ops import spread as spread
from autopar.runtime.philox import Space, Stream, log, space
from autopar.runtime.ring import ring_attention as ring_attention
from autopar.runtime.ring import ring_attention_backward as ring_attention_backward

Axes = tuple[str, ...]
Shape = tuple[int, ...]
Cuts = tuple[tuple[str | int, ...], ...]

aten = torch.ops.aten


def _rows(rt: Communicator, index: Tensor, size: int, axes: Axes, first: int | None) -> tuple[Tensor, Tensor]:
    """(index into this rank's `size` rows, 0 where it is another's; whether it is this rank's)."""
    start = rt.index(axes) * size if first is None else first
    own = index - start if axes else index
    inside = (own >= 0) & (own < size)
    return torch.where(inside, own, 0), inside


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)


# Look-ups -------------------------------------------------------------------------------------------------------------


def embedding(rt: Communicator, weight: Tensor, indices: Tensor, axes: Axes, first: int | None = None) -> Tensor:
    """weight: this rank's rows -> their summand of the look-up, 0 where the row is another rank's."""
    if not weight.shape[0]:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    own, inside = _rows(rt, indices, weight.shape[0], axes, first)
    found: Tensor = aten.embedding.default(weight, own)
    return found.masked_fill_(~inside.unsqueeze(-1), 0)


def embedding_backward(
    rt: Communicator, grad: Tensor, indices: Tensor, rows: int, padding: int, axes: Axes, first: int | None = None
) -> Tensor:
    """Gradient of this rank's rows; the row `padding`, counted globally, gets none."""
    own, inside = _rows(rt, indices, rows, axes, first)
    if padding >= 0:
        inside = inside & (indices != padding)
    spare = torch.where(inside, own, rows)
    found: Tensor = aten.embedding_dense_backward.default(grad, spare, rows + 1, -1, False)
    return found[:rows]


def pick(rt: Communicator, x: Tensor, dim: int, index: Tensor, axes: Axes, first: int | None = None) -> Tensor:
    """x at `index` along `dim`, 0 where the index is outside this rank's piece."""
    if not x.shape[dim]:
        return x.new_zeros(index.shape)
    own, inside = _rows(rt, index, x.shape[dim], axes, first)
    return torch.where(inside, x.gather(dim, own.unsqueeze(dim)).squeeze(dim), _zero(x))


def place(
    rt: Communicator, values: Tensor, dim: int, index: Tensor, size: int, axes: Axes, first: int | None = None
) -> Tensor:
    """Adjoint of `pick`: this rank's piece, of `size` along `dim`, of a tensor that is 0 but at `index`."""
    shape = [*values.shape[:dim], size, *values.shape[dim:]]
    if not size:
        return values.new_zeros(shape)
    own, inside = _rows(rt, index, size, axes, first)
    kept = torch.where(inside, values, _zero(values))
    return values.new_zeros(shape).scatter_(dim, own.unsqueeze(dim), kept.unsqueeze(dim))


def gather(rt: Communicator, x: Tensor, dim: int, index: Tensor, axes: Axes, first: int | None = None) -> Tensor:
    """Summand of aten.gather of an x that is cut along `dim`."""
    if not x.shape[dim]:
        return x.new_zeros(index.shape)
    own, inside = _rows(rt, index, x.shape[dim], axes, first)
    return torch.where(inside, x.gather(dim, own), _zero(x))


_SUMS_INTO = {
    "aten.scatter_add.default": aten.scatter_add.default,
    "aten.index_add.default": aten.index_add.default,
    "aten.index_put.default": aten.index_put.default,
}


def sum_into_once(rt: Communicator, op: str, axes: Axes, into: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Summand of an op that adds a cut source to `into`, which one rank of the axes counts."""
    found: Tensor = _SUMS_INTO[op](into if _first(rt, axes) else torch.zeros_like(into), *args, **kwargs)
    return found


def arange(
    rt: Communicator, start: float, step: float, count: int, axes: Axes, first: int | None = None, *,
    dtype: torch.dtype, **_: object,
) -> Tensor:  # fmt: skip
    """This rank's `count` numbers of start, start + step, ..."""
    first = rt.index(axes) * count if first is None else first
    whole = torch.arange(first, first + count, dtype=torch.int64, device=rt.device)
    return (whole * step + start).to(dtype)


# Products whose contraction is cut ------------------------------------------------------------------------------------


def _first(rt: Communicator, axes: Axes) -> bool:
    return int(rt.index(axes)) == 0


def bias_once(
    rt: Communicator, op: str, axes: Axes, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """addmm or baddbmm where one rank of the axes adds the bias."""
    function = aten.addmm.default if "addmm" in op else aten.baddbmm.default
    found: Tensor = function(bias, a, b, beta=beta if _first(rt, axes) else 0, alpha=alpha)
    return found


def linear_bias_once(rt: Communicator, axes: Axes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """linear where one rank of the axes adds the bias."""
    found: Tensor = aten.linear.default(x, weight, bias if _first(rt, axes) else None)
    return found


def convolution_bias_once(
    rt: Communicator, axes: Axes, x: Tensor, weight: Tensor, bias: Tensor, *geometry: Any
) -> Tensor:
    """convolution where one rank of the axes adds the bias."""
    found: Tensor = aten.convolution.default(x, weight, bias if _first(rt, axes) else None, *geometry)
    return found


# Reductions with talk inside ------------------------------------------------------------------------------------------
# In place where what is written to is this function's own: one tensor of the piece's size at a time beside the result,
# as torch's own kernels have it, or none.


def mean(rt: Communicator, op: str, axes: Axes, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Summand of the mean over a cut dim: where pieces are equal, the mean is the mean of the pieces' means."""
    function = aten.mean.default if op == "aten.mean.default" else aten.mean.dim
    piece: Tensor = function(x, *args, **kwargs)
    return piece / rt.size(axes)


def sum_over(rt: Communicator, count: int, x: Tensor, dim: Any, keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Summand of the mean over dims of `count` elements together, one of them cut in unequal pieces."""
    piece = _wide(x.to(dtype)).sum(dim, keepdim=keepdim)
    return (piece / count).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _largest(rt: Communicator, x: Tensor, dim: Any, axes: Axes) -> Tensor:
    """Maximum over cut dims, kept with size 1; an empty piece has none."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    if any(x.shape[d] == 0 for d in dims):
        gone = {d % x.ndim for d in dims}
        shape = [1 if d in gone else n for d, n in enumerate(x.shape)]
        return rt.all_reduce_max(x.new_full(shape, -math.inf), axes)
    return rt.all_reduce_max(x.amax(dim, keepdim=True), axes)


def softmax(rt: Communicator, x: Tensor, dim: int, axes: Axes, dtype: torch.dtype) -> Tensor:
    """softmax over a cut dim: the maximum and the sum of exponentials are taken over the axes."""
    wide = _wide(x)
    exp = (wide - _largest(rt, wide, dim, axes)).exp_()
    return exp.div_(rt.all_reduce(exp.sum(dim, keepdim=True), axes)).to(dtype)


def safe_softmax(rt: Communicator, x: Tensor, dim: int, axes: Axes, dtype: torch.dtype) -> Tensor:
    """softmax over a cut dim that gives 0 where a whole row is -inf."""
    wide = _wide(x.to(dtype))
    largest = _largest(rt, wide, dim, axes)
    exp = (wide - torch.where(largest == -math.inf, _zero(largest), largest)).exp_()
    total = rt.all_reduce(exp.sum(dim, keepdim=True), axes)
    return exp.div_(total).masked_fill_(total == 0, 0).to(dtype)


def log_softmax(rt: Communicator, x: Tensor, dim: int, axes: Axes, dtype: torch.dtype) -> Tensor:
    """log_softmax over a cut dim."""
    wide = _wide(x)
    moved = wide - _largest(rt, wide, dim, axes)
    return moved.sub_(rt.all_reduce(moved.exp().sum(dim, keepdim=True), axes).log()).to(dtype)


def softmax_backward(
    rt: Communicator, grad: Tensor, output: Tensor, dim: int, axes: Axes, dtype: torch.dtype
) -> Tensor:
    """grad · output - output · sum(grad · output)."""
    product = _wide(grad) * _wide(output)
    total = rt.all_reduce(product.sum(dim, keepdim=True), axes)
    return product.sub_(_wide(output) * total).to(dtype)


def log_softmax_backward(
    rt: Communicator, grad: Tensor, output: Tensor, dim: int, axes: Axes, dtype: torch.dtype
) -> Tensor:
    """grad - exp(output) · sum(grad)."""
    wide = _wide(grad)
    total = rt.all_reduce(wide.sum(dim, keepdim=True), axes)
    part = _wide(output).exp().mul_(total)
    return torch.sub(wide, part, out=part).to(dtype)


def logsumexp(rt: Communicator, axes: Axes, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """logsumexp over dims one of which is cut."""
    wide = _wide(x)
    largest = _largest(rt, wide, dim, axes)
    largest = torch.where(largest.isinf(), _zero(largest), largest)
    total = rt.all_reduce((wide - largest).exp_().sum(dim, keepdim=True), axes)
    found = (total.log() + largest).to(x.dtype)
    return found if keepdim else found.squeeze([dim] if isinstance(dim, int) else list(dim))


# Attention ------------------------------------------------------------------------------------------------------------


def attention(rt: Communicator, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
    """Fused attention of a piece that may be empty: (result, logsumexp)."""
    if query.numel():
        return aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, *rest, **more)
    return torch.zeros_like(query), query.new_zeros(query.shape[:3])


def attention_backward(
    rt: Communicator, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
) -> Any:
    """Its gradients of query, key and value."""
    if query.numel():
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(grad, query, key, value, *rest, **more)
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


# Normalisations -------------------------------------------------------------------------------------------------------


def layer_norm_backward(
    rt: Communicator, grad: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, *rest: Any
) -> Any:
    """torch's kernel reads mean and rstd as if they were contiguous: make them so."""
    return aten.native_layer_norm_backward.default(
        grad.contiguous(), x.contiguous(), shape, mean.contiguous(), rstd.contiguous(), *rest
    )


def _channels(x: Tensor) -> tuple[list[int], list[int]]:
    """(dims to sum over, shape that broadcasts a per-channel vector)."""
    return [d for d in range(x.dim()) if d != 1], [x.shape[1] if d == 1 else 1 for d in range(x.dim())]


def _statistics(rt: Communicator, x: Tensor, axes: Axes, count: int | None) -> tuple[Tensor, Tensor, int]:
    """Mean and variance (divided by the count) per channel over the whole batch, and the count."""
    dims, shape = _channels(x)
    wide = _wide(x)
    count = x.numel() // x.shape[1] * rt.size(axes) if count is None else count
    middle = rt.all_reduce(wide.sum(dims), axes) / count
    apart = wide - middle.view(shape)
    return middle, rt.all_reduce(apart.mul_(apart).sum(dims), axes) / count, count


def batch_norm_functional(
    rt: Communicator, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    training: bool, momentum: float, eps: float, axes: Axes, count: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Training with the whole batch's statistics, x cut along the batch."""
    middle, var, count = _statistics(rt, x, axes, count)
    out, rstd = _normalised(x, weight, bias, middle, var, eps)
    unbiased = var * (count / max(count - 1, 1))
    return (
        out, middle, rstd, running_mean.lerp(middle.to(running_mean.dtype), momentum),
        running_var.lerp(unbiased.to(running_var.dtype), momentum),
    )  # fmt: skip


def batch_norm(
    rt: Communicator, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, axes: Axes, count: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `batch_norm_functional`, with running statistics updated in place."""
    middle, var, count = _statistics(rt, x, axes, count)
    out, rstd = _normalised(x, weight, bias, middle, var, eps)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(middle.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
    return out, middle, rstd


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, middle: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    shape = _channels(x)[1]
    rstd = (var + eps).rsqrt()
    out = (_wide(x) - middle.view(shape)).mul_(rstd.view(shape))
    if weight is not None:
        out.mul_(weight.view(shape))
    if bias is not None:
        out.add_(bias.view(shape))
    return out.to(x.dtype), rstd


def batch_norm_backward(
    rt: Communicator, grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, mean: Tensor, rstd: Tensor, training: bool, eps: float, mask: Any, axes: Axes,
    count: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, scale and offset in training; the last two are whole on every rank."""
    dims, shape = _channels(x)
    count = x.numel() // x.shape[1] * rt.size(axes) if count is None else count
    wide = _wide(grad)
    unit = (_wide(x) - mean.view(shape)).mul_(rstd.view(shape))
    of_offset, of_scale = rt.all_reduce(torch.stack([wide.sum(dims), (wide * unit).sum(dims)]), axes).unbind()
    found: Tensor | None = None
    if mask[0]:
        factor = rstd if weight is None else rstd * weight
        rest = unit.mul_(of_scale.view(shape)).add_(of_offset.view(shape)).div_(count)
        found = torch.sub(wide, rest, out=rest).mul_(factor.view(shape)).to(x.dtype)
    kind = x.dtype if weight is None else weight.dtype
    return found, of_scale.to(kind) if mask[1] else None, of_offset.to(kind) if mask[2] else None


# Random ops -----------------------------------------------------------------------------------------------------------
# `key`, `whole`, `axes` name a draw: the node, the whole tensor's shape, and the mesh axes that cut each dim of it,
# with the number of rows that stay together after them where that isn't 1.


def _span(rt: Communicator, size: int, cut: tuple[str | int, ...]) -> tuple[int, int]:
    """(first, how many) of a dim of `size` this rank has."""
    axes = tuple(a for a in cut if isinstance(a, str))
    own = rt.piece(size, axes, next((n for n in cut if isinstance(n, int)), 1))
    return own.start, own.length


def _piece(rt: Communicator, whole: Shape, axes: Cuts) -> Space:
    starts, shape = (
        zip(*(_span(rt, n, a) for n, a in zip(whole, axes, strict=True)), strict=True) if whole else ((), ())
    )
    return space(tuple(whole), starts, shape)  # emitted code has lists


def _stream(rt: Communicator, key: str) -> Stream:
    """The stream of an op. A block's ops are keyed as if the block were written out in its place."""
    path, _, op = key.partition("/")
    return Stream(_digest(f"{rt.seed}|{'.'.join(p for p in (rt.instance, path) if p)}/{op}"), rt.step % 2**64)


@lru_cache(maxsize=4096)
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _device(rt: Communicator, *given: Any) -> torch.device:
    return next((x.device for x in given if isinstance(x, Tensor)), rt.device)


def dropout(rt: Communicator, x: Tensor, p: float, key: str, whole: Shape, axes: Cuts) -> tuple[Tensor, Tensor]:
    """(x · mask / (1 - p), mask)."""
    return draw.dropout(_stream(rt, key), _piece(rt, whole, axes), x, p)


def dropout_backward(rt: Communicator, gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """gradient · mask · scale."""
    return draw.dropout_backward(gradient, mask, scale)


def bernoulli(
    rt: Communicator, like: Tensor | None, p: Any, key: str, whole: Shape, axes: Cuts, dtype: torch.dtype
) -> Tensor:
    """1 with probability p, a number or a tensor, else 0."""
    probability = p if isinstance(p, Tensor) else torch.tensor(p, dtype=torch.float64, device=_device(rt, like))
    return draw.below(_stream(rt, key), _piece(rt, whole, axes), probability).to(dtype)


def uniform(
    rt: Communicator, like: Tensor | None, low: float, high: float, key: str, whole: Shape, axes: Cuts,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Uniform in [low, high)."""
    if dtype.is_complex:
        return _complex(lambda k, w, a, d: uniform(rt, like, low, high, k, w, a, d), key, whole, axes, dtype)
    drawn = draw.uniform(_stream(rt, key), _piece(rt, whole, axes), dtype, _device(rt, like))
    return drawn if (low, high) == (0.0, 1.0) else drawn * (high - low) + low


def normal(
    rt: Communicator, like: Tensor | None, mean: Any, std: Any, key: str, whole: Shape, axes: Cuts, dtype: torch.dtype
) -> Tensor:
    """Normal with a mean and a spread that are numbers or tensors."""
    if dtype.is_complex:
        drawn = _complex(lambda k, w, a, d: normal(rt, like, 0.0, math.sqrt(0.5), k, w, a, d), key, whole, axes, dtype)
    else:
        drawn = draw.normal(_stream(rt, key), _piece(rt, whole, axes), dtype, _device(rt, like, mean, std))
    plain = not isinstance(mean, Tensor) and not isinstance(std, Tensor) and (mean, std) == (0.0, 1.0)
    return drawn if plain else drawn.mul(std).add(mean)


def _complex(parts: Callable[..., Tensor], key: str, whole: Shape, axes: Cuts, dtype: torch.dtype) -> Tensor:
    """Real and imaginary parts drawn as one more dim of 2."""
    return torch.view_as_complex(parts(key, (*whole, 2), (*axes, ()), dtype.to_real()))


def _open(rt: Communicator, like: Tensor | None, key: str, whole: Shape, axes: Cuts) -> Tensor:
    return draw.open_uniform(_stream(rt, key), _piece(rt, whole, axes), _device(rt, like))


def exponential(
    rt: Communicator, like: Tensor, rate: float, key: str, whole: Shape, axes: Cuts, dtype: torch.dtype
) -> Tensor:
    """Exponential, never 0."""
    return (-log(_open(rt, like, key, whole, axes)) / rate).to(dtype)


def geometric(
    rt: Communicator, like: Tensor, p: float, key: str, whole: Shape, axes: Cuts, dtype: torch.dtype
) -> Tensor:
    """Number of trials up to the first success, from 1."""
    if p >= 1:
        return torch.ones_like(_open(rt, like, key, whole, axes), dtype=dtype)
    return (log(_open(rt, like, key, whole, axes)) / math.log1p(-p)).ceil().clamp(min=1).to(dtype)


def cauchy(
    rt: Communicator, like: Tensor, median: float, sigma: float, key: str, whole: Shape, axes: Cuts, dtype: torch.dtype
) -> Tensor:
    """Cauchy."""
    slope: Tensor = ((_open(rt, like, key, whole, axes) - 0.5) * math.pi).tan()
    return (slope * sigma + median).to(dtype)


def log_normal(
    rt: Communicator, like: Tensor, mean: float, std: float, key: str, whole: Shape, axes: Cuts, dtype: torch.dtype
) -> Tensor:
    """exp of a normal number."""
    return normal(rt, like, mean, std, key, whole, axes, torch.float64).exp().to(dtype)


def randint(
    rt: Communicator, like: Tensor | None, low: int, high: Any, key: str, whole: Shape, axes: Cuts, dtype: torch.dtype
) -> Tensor:
    """Integers in low .. high - 1; `high` may be a tensor of one element. Uneven by at most (high - low) / 2**63."""
    drawn = draw.integers(_stream(rt, key), _piece(rt, whole, axes), _device(rt, like))
    return drawn.remainder(high - low).add(low).to(dtype)


def rrelu(
    rt: Communicator, x: Tensor, noise: Tensor, lower: float, upper: float, key: str, whole: Shape, axes: Cuts
) -> tuple[Tensor, Tensor]:
    """(x, times a slope drawn from lower .. upper where it is not above 0; the slopes, 1 elsewhere)."""
    slopes = uniform(rt, x, lower, upper, key, whole, axes, x.dtype)
    slopes = torch.where(x <= 0, slopes, torch.ones((), dtype=x.dtype, device=x.device))
    return x * slopes, slopes


def seeded(rt: Communicator, op: str, key: str, *args: Any, **kwargs: Any) -> Tensor:
    """An op that runs whole on every rank, with torch's own generator seeded alike on all."""
    device = torch.device(kwargs.get("device") or _device(rt, *args))
    stream = _stream(rt, key)
    generator = torch.Generator(device).manual_seed(_digest(f"{stream.key}|{stream.step}") >> 1)
    packet = getattr(aten, op.split(".")[1])
    found: Tensor = packet(*args, **kwargs, generator=generator)
    return found
