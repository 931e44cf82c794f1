"""Attention whose sequence an axis cuts: blocks of keys and values go round the ranks (`autopar.ops.attention`).

In each round a rank works on the block that it holds while the next one is on its way; results of rounds are joined by
their log-sum-exp, in float32 at least. In the backward the sums of a block's gradients follow it, a round behind, and
come home after the last one. Under a causal mask a rank has nothing to do with a block of later keys, and hands it on.

Blocks travel as pieces of the largest size. `keys` and `unit` say how the keys are cut (`autopar.ir.cuts`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ir.cuts import chunk, piece
from autopar.runtime.comm import Communicator

aten = torch.ops.aten
_forward = aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ROWS = 3
"""The dim of a block [key and value, batch, heads, keys, head size] that is cut."""


def ring_attention(
    rt: Communicator, axis: str, keys: int, unit: int, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None, **_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(result, log-sum-exp) of this rank's queries on all ranks' keys."""
    ranks, own = rt.size(axis), rt.index(axis)
    held = _block(key, value, chunk(keys, ranks, unit))
    found: tuple[Tensor, Tensor] | None = None
    for turn in range(ranks):
        coming = rt.pass_on(held, axis) if turn < ranks - 1 else None
        source = (own - turn) % ranks
        length = piece(keys, [(ranks, source)], unit).length
        if _has_work(query, length, source > own, causal):
            part = _forward(query, *held.narrow(ROWS, 0, length), 0.0, causal and source == own, scale=scale)
            found = _joined(found, *part)
            del part
        if coming is not None:
            held, coming = coming(), None
    if found is None:
        return torch.zeros_like(query), query.new_zeros(query.shape[:3], dtype=_sums(query.dtype))
    return found[0].to(query.dtype), found[1]


def ring_attention_backward(
    rt: Communicator, axis: str, keys: int, unit: int, grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    out: Tensor, logsumexp: Tensor, dropout: float, causal: bool, *, scale: float | None = None, **_: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's query, key and value."""
    ranks, own = rt.size(axis), rt.index(axis)
    held = _block(key, value, chunk(keys, ranks, unit))
    of_query = torch.zeros_like(query, dtype=_sums(query.dtype))
    of_held = torch.zeros_like(held, dtype=of_query.dtype)
    following = None
    for turn in range(ranks):
        coming = rt.pass_on(held, axis) if turn < ranks - 1 else None
        source = (own - turn) % ranks
        length = piece(keys, [(ranks, source)], unit).length
        parts: tuple[Tensor, ...] = ()
        if _has_work(query, length, source > own, causal):
            block = held.narrow(ROWS, 0, length)
            parts = _backward(
                grad, query, *block, out, logsumexp, 0.0, causal and source == own, scale=scale
            )  # fmt: skip
            del block
            of_query.add_(parts[0])
        if following is not None:
            of_held, following = following(), None
        for total, part in zip(of_held, parts[1:], strict=False):
            total.narrow(ROWS - 1, 0, length).add_(part)
        following = rt.pass_on(of_held, axis)
        if coming is not None:
            held, coming = coming(), None
    assert following is not None
    of_held = following()
    of_key, of_value = (x.narrow(ROWS - 1, 0, key.shape[ROWS - 1]).to(key.dtype, copy=True) for x in of_held)
    return of_query.to(query.dtype), of_key, of_value


def _block(key: Tensor, value: Tensor, length: int) -> Tensor:
    """Both in one tensor, zeros where this rank's piece is shorter than the largest."""
    shape = (2, *key.shape[:2], length, key.shape[3])
    made = key.new_empty if length == key.shape[2] else key.new_zeros
    found = made(shape)
    for i, x in enumerate((key, value)):
        found[i].narrow(ROWS - 1, 0, x.shape[2]).copy_(x)
    return found


def _has_work(query: Tensor, keys: int, later: bool, causal: bool) -> bool:
    """False where no query sees a key of the block; torch's kernels don't take empty pieces."""
    return query.numel() > 0 and keys > 0 and not (causal and later)


def _joined(found: tuple[Tensor, Tensor] | None, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Results on some keys and on others -> on all of them. `found` is written to."""
    if found is None:
        return out.to(logsumexp.dtype), logsumexp
    total, before = found
    both = torch.logaddexp(before, logsumexp)
    total.mul_(_weight(before, both)).addcmul_(out.to(total.dtype), _weight(logsumexp, both))
    return total, both


def _weight(part: Tensor, whole: Tensor) -> Tensor:
    return (part - whole).exp_().unsqueeze(-1)


def _sums(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
