"""The ops that are timed: for each class, how to make one of a given size.

Each gives a function of the call's number, which goes round several sets of inputs, so that caches hold no more of them
than in a training step. Variants that a step mixes (forms of a product's transposes, sums over rows and over columns)
take turns within one curve. Sizes are counted as `ops.flops` and `ops.moved_bytes` count them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir import profile as kinds

aten = torch.ops.aten
RING_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
"""Inputs of one point together: about what caches hold beside the other ranks'."""
MOST_SETS = 64

Call = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Sized:
    """One thing to time. `size` in the class's unit; `out_bytes`: what a call makes."""

    size: float
    call: Call
    out_bytes: int


@dataclass(frozen=True, slots=True)
class WorkSpec:
    """One curve: its key and, for each of `scales`, how to make the work."""

    work: str
    shape: str
    dtype: str
    scales: tuple[int, ...]
    make: Callable[[int, torch.dtype, torch.device], Sized]

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells curves apart."""
        return self.work, self.shape, self.dtype


def _bytes(*tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))


def _sets(one: Callable[[], tuple[Tensor, ...]], device: torch.device) -> list[tuple[Tensor, ...]]:
    first = one()
    count = max(1, min(MOST_SETS, RING_BYTES[device.type] // max(1, _bytes(*first))))
    return [first, *(one() for _ in range(count - 1))]


def _ring(
    one: Callable[[], tuple[Tensor, ...]],
    forms: tuple[Callable[..., Any], ...],
    device: torch.device,
    size: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], float] | float,
) -> Sized:
    """Sets of inputs and forms that take turns. `size`: given, or of (inputs, outputs) of the first form."""
    sets = _sets(one, device)
    n, k = len(sets), len(forms)
    made = forms[0](*sets[0])
    outs: tuple[Tensor, ...] = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    found = size if isinstance(size, (int, float)) else size(sets[0], outs)

    def call(i: int) -> Any:
        return forms[i % k](*sets[i % n])

    return Sized(float(found), call, _bytes(*outs))


def _moved(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> float:
    return float(_bytes(*inputs) + _bytes(*outputs))


def _rows(elements: int) -> tuple[int, int]:
    """(rows, columns) of a matrix of about so many elements, as activations have them."""
    columns = 32 if elements < 2**14 else 128 if elements < 2**18 else 512
    return max(1, elements // columns), columns


def _product(sides: Callable[[int], tuple[int, int, int]]) -> Callable[[int, torch.dtype, torch.device], Sized]:
    """Products of a step: forward (a·bᵀ), gradient of the input (a·b), gradient of the weight (aᵀ·b) in turn."""

    def make(scale: int, dtype: torch.dtype, device: torch.device) -> Sized:
        m, n, k = sides(scale)

        def one() -> tuple[Tensor, ...]:
            return (
                torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype),
                torch.randn(k, n, device=device, dtype=dtype), torch.randn(k, m, device=device, dtype=dtype),
            )  # fmt: skip

        forms = (
            lambda a, bt, b, at: aten.mm.default(a, bt.t()),
            lambda a, bt, b, at: aten.mm.default(a, b),
            lambda a, bt, b, at: aten.mm.default(at.t(), b),
        )
        return _ring(one, forms, device, 2.0 * m * n * k)

    return make


def _batched(scale: int, dtype: torch.dtype, device: torch.device) -> Sized:
    batch, size = 16, 32

    def one() -> tuple[Tensor, ...]:
        return (
            torch.randn(batch, scale, size, device=device, dtype=dtype),
            torch.randn(batch, size, scale, device=device, dtype=dtype),
            torch.randn(batch, scale, scale, device=device, dtype=dtype),
        )

    forms = (lambda q, k, s: torch.bmm(q, k), lambda q, k, s: torch.bmm(s, q))
    return _ring(one, forms, device, 2.0 * batch * scale * scale * size)


def _heads(scale: int, dtype: torch.dtype, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """query, key, value: 4 sequences of `scale`, 4 heads of 64."""
    shape = (4, 4, scale, 64)
    return lambda: tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))


def _attention_product(query: Tensor) -> float:
    batch, heads, length, size = query.shape
    return 2.0 * batch * heads * length * length * size


def _flash(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    if query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, 0.0, True)
        return found[0], found[1]
    return tuple(aten._scaled_dot_product_efficient_attention.default(query, key, value, None, True, 0.0, True))


def _attention(scale: int, dtype: torch.dtype, device: torch.device) -> Sized:
    return _ring(
        _heads(scale, dtype, device), (_flash,), device, lambda ins, outs: 2 * _attention_product(ins[0])
    )  # fmt: skip


def _attention_backward(scale: int, dtype: torch.dtype, device: torch.device) -> Sized:
    heads = _heads(scale, dtype, device)

    def one() -> tuple[Tensor, ...]:
        q, k, v = heads()
        return (torch.ones_like(q), q, k, v, *_flash(q, k, v))

    def form(*given: Tensor) -> Any:
        if device.type == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*given[:6], 0.0, True)
        grad, q, k, v, out, lse, seed, offset = given[:8]
        return aten._scaled_dot_product_efficient_attention_backward.default(
            grad, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], True
        )

    return _ring(one, (form,), device, lambda ins, outs: 5 * _attention_product(ins[1]))


def _convolved(scale: int, dtype: torch.dtype, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """x, weight, gradient of the output: 3×3, 32 channels, `scale` × `scale` places, 4 images."""
    x, w = (4, 32, scale, scale), (32, 32, 3, 3)
    return lambda: tuple(torch.randn(s, device=device, dtype=dtype) for s in (x, w, x))


def _convolution_flops(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> float:
    x, w = inputs[:2]
    return 2.0 * w.numel() * x.shape[0] * x.shape[2] * x.shape[3]


def _convolution(scale: int, dtype: torch.dtype, device: torch.device) -> Sized:
    def form(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # type: ignore[no-any-return]

    return _ring(_convolved(scale, dtype, device), (form,), device, _convolution_flops)


def _convolution_backward(scale: int, dtype: torch.dtype, device: torch.device) -> Sized:
    def form(x: Tensor, w: Tensor, g: Tensor) -> Any:
        mask = [True, True, False]
        found = aten.convolution_backward.default(g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return found[0], found[1]

    return _ring(
        _convolved(scale, dtype, device), (form,), device, lambda ins, outs: 2 * _convolution_flops(ins, outs)
    )  # fmt: skip


def _randn(
    *shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], tuple[Tensor, ...]]:  # fmt: skip
    return lambda: tuple(torch.randn(s, device=device, dtype=dtype) for s in shapes)


def _norm(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    rows, columns = _rows(elements)

    def form(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return aten.native_layer_norm.default(x, [columns], w, b, 1e-5)

    return _ring(_randn((rows, columns), (columns,), (columns,), dtype=dtype, device=device), (form,), device, _moved)


def _norm_backward(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    rows, columns = _rows(elements)

    def one() -> tuple[Tensor, ...]:
        x, g = (torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(2))
        w, b = (torch.ones(columns, device=device, dtype=dtype) for _ in range(2))
        _, mean, rstd = aten.native_layer_norm.default(x, [columns], w, b, 1e-5)
        return g, x, mean, rstd, w, b

    def form(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor) -> Any:
        return aten.native_layer_norm_backward.default(g, x, [columns], mean, rstd, w, b, [True, True, True])

    return _ring(one, (form,), device, _moved)


def _softmax(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    forms = (lambda x: aten._softmax.default(x, -1, False), lambda x: aten._log_softmax.default(x, -1, False))
    return _ring(_randn(_rows(elements), dtype=dtype, device=device), forms, device, _moved)


def _softmax_backward(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    forms = (
        lambda g, y: aten._softmax_backward_data.default(g, y, -1, dtype),
        lambda g, y: aten._log_softmax_backward_data.default(g, y, -1, dtype),
    )
    shape = _rows(elements)
    return _ring(_randn(shape, shape, dtype=dtype, device=device), forms, device, _moved)


def _pointwise(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    shape = _rows(elements)
    forms = (lambda a, b: aten.add.Tensor(a, b), lambda a, b: aten.mul.Tensor(a, b))
    return _ring(_randn(shape, shape, dtype=dtype, device=device), forms, device, _moved)


def _function(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    shape = _rows(elements)
    forms = (
        lambda g, x: aten.gelu_backward.default(g, x), lambda g, x: aten.silu_backward.default(g, x),
        lambda g, x: aten.gelu_backward.default(x, g), lambda g, x: aten.tanh_backward.default(g, x),
    )  # fmt: skip
    return _ring(_randn(shape, shape, dtype=dtype, device=device), forms, device, _moved)


def _copy(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    rows, columns = _rows(elements)
    forms = (lambda x: x.clone(), lambda x: x.t().contiguous())
    return _ring(_randn((rows, columns), dtype=dtype, device=device), forms, device, _moved)


def _reduction(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    forms = (lambda x: aten.sum.dim_IntList(x, [0]), lambda x: aten.sum.dim_IntList(x, [1]))
    return _ring(_randn(_rows(elements), dtype=dtype, device=device), forms, device, _moved)


def _table(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(table of 4096 rows, indices, gradient of what is looked up)."""
    rows, columns = _rows(elements)
    table = torch.randn(4096, columns, device=device, dtype=dtype)
    return table, torch.randint(0, 4096, (rows,), device=device), torch.randn(rows, columns, device=device, dtype=dtype)


def _embedding(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    def looked_up(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> float:
        return float(_bytes(inputs[1]) + 2 * _bytes(*outputs))

    forms = (lambda table, at, g: aten.embedding.default(table, at),)
    return _ring(lambda: _table(elements, dtype, device), forms, device, looked_up)


def _embedding_backward(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    forms = (lambda at, g: aten.embedding_dense_backward.default(g, at, 4096, -1, False),)
    return _ring(lambda: _table(elements, dtype, device)[1:], forms, device, _moved)


def _index(elements: int, dtype: torch.dtype, device: torch.device) -> Sized:
    rows, columns = _rows(elements)

    def one() -> tuple[Tensor, ...]:
        at = torch.randint(0, columns, (rows, columns), device=device)
        return torch.randn(rows, columns, device=device, dtype=dtype), at

    def moved(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> float:
        return float(_bytes(inputs[1]) + 2 * _bytes(*outputs))

    return _ring(one, (lambda x, at: aten.gather.default(x, 1, at),), device, moved)


def _view(scale: int, dtype: torch.dtype, device: torch.device) -> Sized:
    """One view, of any size."""
    forms = (
        lambda x: aten.view.default(x, [16, 4, 16]), lambda x: aten.transpose.int(x, 0, 1),
        lambda x: aten.unsqueeze.default(x, 1),
    )  # fmt: skip
    return _ring(_randn((16, 64), dtype=dtype, device=device), forms, device, 1.0)


CUBES = {"cpu": (16, 32, 64, 128, 256, 512), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
ROWS = {"cpu": (32, 128, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
SLIM = {"cpu": (64, 128, 256, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
ODD = {"cpu": (17, 67, 259), "cuda": (257, 513, 1025, 2049, 4097)}
LENGTHS = {"cpu": (16, 64, 128, 256), "cuda": (128, 512, 2048, 8192)}
PLACES = {"cpu": (4, 8, 16, 32), "cuda": (16, 32, 64, 128, 256)}
ELEMENTS = {"cpu": (2**10, 2**13, 2**16, 2**19, 2**21), "cuda": tuple(8**n for n in range(4, 10))}
"""Elements of a tensor: 1 Ki to 2 Mi on CPUs."""


def work_specs(kind: str) -> list[WorkSpec]:
    """The curves that are measured on a CPU or a GPU, the most used first."""
    full = "float32"
    found: list[WorkSpec] = []

    def add(work: str, shape: str, scales: tuple[int, ...], make: Any, dtypes: tuple[str, ...] = (full,)) -> None:
        for dtype in dtypes:  # every other size, ends included, where all that differs is the dtype
            few = scales if dtype == full else tuple(dict.fromkeys((*scales[:-1:2], scales[-1])))
            found.append(WorkSpec(work, shape, dtype, few, make))

    halves = ("bfloat16",) if kind == "cpu" else ("bfloat16", "float16")
    every = (full, *halves, "float64")
    mixed = (full,) if kind == "cpu" else (full, *halves)
    both = (full, *halves)
    add(kinds.MATMUL, "square", CUBES[kind], _product(lambda n: (n, n, n)), every)
    add(kinds.MATMUL, "few rows", ROWS[kind], _product(lambda n: (8, n, n)), mixed)
    add(kinds.MATMUL, "narrow", SLIM[kind], _product(lambda n: (n, 48, n)), mixed)
    add(kinds.MATMUL, "misaligned", ODD[kind], _product(lambda n: (n, n, n)), mixed)
    add(kinds.BATCHED, "square", LENGTHS[kind], _batched, mixed)
    add(kinds.POINTWISE, "", ELEMENTS[kind], _pointwise, every)
    for work, make in (
        (kinds.FUNCTION, _function), (kinds.COPY, _copy), (kinds.REDUCTION, _reduction), (kinds.NORM, _norm),
        (kinds.NORM_BACKWARD, _norm_backward), (kinds.SOFTMAX, _softmax), (kinds.SOFTMAX_BACKWARD, _softmax_backward),
        (kinds.EMBEDDING, _embedding), (kinds.EMBEDDING_BACKWARD, _embedding_backward), (kinds.INDEX, _index),
    ):  # fmt: skip
        add(work, "", ELEMENTS[kind], make, both if work in (kinds.NORM, kinds.NORM_BACKWARD) else mixed)
    add(kinds.ATTENTION, "", LENGTHS[kind], _attention, both)
    add(kinds.ATTENTION_BACKWARD, "", LENGTHS[kind], _attention_backward, both)
    add(kinds.CONVOLUTION, "", PLACES[kind], _convolution, mixed)
    add(kinds.CONVOLUTION_BACKWARD, "", PLACES[kind], _convolution_backward, mixed)
    found.append(WorkSpec(kinds.VIEW, "", "", (1,), _view))
    return found
