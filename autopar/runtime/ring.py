"""Attention whose sequence an axis cuts: blocks of keys and values go round the ranks (`autopar.ops.attention`).

In each round a rank works on the block that it holds while the next one is on its way; results of rounds are joined by
their log-sum-exp, in float32 at least. In the backward the sums of a block's gradients follow it, a round behind, and
come home after the last one. Under a causal mask a rank has nothing to do with a block of later keys, and hands it on.

Blocks travel as pieces of the largest size. `keys` and `unit` say how the keys are cut (`autopar.ir.cuts`); a mask that
is given has this rank's queries and all keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.cuts import Piece, chunk, piece
from autopar.runtime.comm import Communicator

aten = torch.ops.aten
_forward = aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

KEYS = 2
"""The dim of keys in a piece [batch, heads, keys, head size]."""
LOW = 64.0
"""From so far below 0 on, a row's log-sum-exp has lost digits of the sum that it is made of."""


def ring_attention(
    rt: Communicator, axis: str, keys: int, unit: int, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0,
    causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(result, log-sum-exp) of this rank's queries on all ranks' keys."""
    ranks, own = rt.size(axis), rt.index(axis)
    held = _block(key, value, chunk(keys, ranks, unit))
    found, low = _Joined(), attn_mask is not None and _is_low(attn_mask)
    for turn in range(ranks):
        coming = rt.pass_on(held, axis) if turn < ranks - 1 else None
        source = (own - turn) % ranks
        rows = piece(keys, [(ranks, source)], unit)
        if _has_work(query, rows, source > own, causal):
            k, v = held.narrow(KEYS + 1, 0, rows.length)
            mask = _of_keys(attn_mask, rows, keys)
            if low and mask is not None:
                found.add(*_plain(query, k, v, mask, scale))
            else:
                out, top = _forward(query, k, v, 0.0, causal and source == own, attn_mask=mask, scale=scale)
                found.add(out, top if mask is None else top.masked_fill(mask.amax(-1) == -math.inf, -math.inf))
            del k, v
        if coming is not None:
            held, coming = coming(), None
    return found.end(query)


def ring_attention_backward(
    rt: Communicator, axis: str, keys: int, unit: int, grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    out: Tensor, logsumexp: Tensor, dropout: float, causal: bool, *, attn_mask: Tensor | None = None,
    scale: float | None = None,
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
        rows = piece(keys, [(ranks, source)], unit)
        parts: tuple[Tensor, ...] = ()
        if _has_work(query, rows, source > own, causal):
            k, v = held.narrow(KEYS + 1, 0, rows.length)
            parts = _backward(
                grad, query, k, v, out, logsumexp, 0.0, causal and source == own,
                attn_mask=_of_keys(attn_mask, rows, keys), scale=scale,
            )  # fmt: skip
            del k, v
            of_query.add_(parts[0])
            parts = parts[1:]
        if following is not None:
            of_held, following = following(), None
        if parts:
            of_held.narrow(KEYS + 1, 0, rows.length)[0].add_(parts[0])
            of_held.narrow(KEYS + 1, 0, rows.length)[1].add_(parts[1])
        del parts
        following = rt.pass_on(of_held, axis)
        if coming is not None:
            held, coming = coming(), None
    assert following is not None
    of_held = following()
    of_key, of_value = (x.narrow(KEYS, 0, key.shape[KEYS]).to(key.dtype, copy=True) for x in of_held)
    return of_query.to(query.dtype), of_key, of_value


def _block(key: Tensor, value: Tensor, length: int) -> Tensor:
    """Both in one tensor, zeros where this rank's piece is shorter than the largest."""
    made = key.new_empty if length == key.shape[KEYS] else key.new_zeros
    found = made((2, *key.shape[:KEYS], length, key.shape[3]))
    for i, x in enumerate((key, value)):
        found[i].narrow(KEYS, 0, x.shape[KEYS]).copy_(x)
    return found


def _has_work(query: Tensor, rows: Piece, later: bool, causal: bool) -> bool:
    """False where no query sees a key of the block; torch's kernels don't take empty pieces."""
    return query.numel() > 0 and rows.length > 0 and not (causal and later)


def _of_keys(mask: Tensor | None, rows: Piece, keys: int) -> Tensor | None:
    """A mask's columns of some keys."""
    return mask if mask is None or mask.shape[-1] != keys else mask.narrow(-1, rows.start, rows.length)


def _is_low(mask: Tensor) -> bool:
    """True if some row is far below 0 throughout, yet not masked out."""
    if mask.is_meta:
        return False
    most = mask.amax(-1)
    return bool(((most < -LOW) & (most > -math.inf)).any())


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(result, largest score, sum of exponentials above it), scores written out."""
    kind, groups = _sums(query.dtype), query.shape[1] // key.shape[1]
    key, value = (x.to(kind).repeat_interleave(groups, 1) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.to(kind) @ key.transpose(-1, -2)).mul_(factor).add_(mask)
    top = scores.amax(-1)
    weights = scores.sub_(top.masked_fill(top == -math.inf, 0.0).unsqueeze(-1)).exp_()
    total = weights.sum(-1)
    return weights @ value / total.masked_fill(total == 0, 1.0).unsqueeze(-1), top, total


@dataclass(slots=True)
class _Joined:
    """Results on the keys so far: their sum, each times its weight, the largest score (or log-sum-exp) of each query,
    and the sum of weights, which count from there. `end` gives them as the op does: 0 where all keys are masked."""

    out: Tensor | None = None
    top: Tensor | None = None
    total: Tensor | None = None

    def add(self, out: Tensor, top: Tensor, total: Tensor | None = None) -> None:
        """One more: `total` exponentials above `top`, 1 where that is their log-sum-exp. It may be written to."""
        total = torch.ones_like(top) if total is None else total
        out = out.to(top.dtype)
        if self.out is None or self.top is None or self.total is None:
            weight = total.masked_fill(top == -math.inf, 0.0)
            self.out, self.top, self.total = out.mul_(weight.unsqueeze(-1)), top, weight
            return
        most = torch.maximum(self.top, top)
        old, new = _weight(self.top, most), _weight(top, most).mul_(total)
        self.out.mul_(old.unsqueeze(-1)).addcmul_(out, new.unsqueeze(-1))
        self.top, self.total = most, self.total.mul_(old).add_(new)

    def end(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """(result, log-sum-exp)."""
        if self.out is None or self.top is None or self.total is None:
            return torch.zeros_like(query), query.new_zeros(query.shape[: KEYS + 1], dtype=_sums(query.dtype))
        none = self.total == 0
        out = self.out.div_(self.total.masked_fill(none, 1.0).unsqueeze(-1)).to(query.dtype)
        return out, self.top.add_(self.total.log_()).masked_fill_(none, 0.0)


def _weight(part: Tensor, most: Tensor) -> Tensor:
    return (part - most).exp_().masked_fill_(most == -math.inf, 0.0)


def _sums(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
