"""Philox 4x32-10 in PyTorch, on any device: the same bits as the kernels of native/kernels/philox.cpp.

Words. A stream has a 64-bit key and a 64-bit step. Word q of it is output q % 4 of the block whose counter is (q / 4 as
64 bits, step as 64 bits). Element i (row-major, of the *whole* tensor) of a draw of w words an element has the words
i·w .. i·w + w - 1, so it doesn't matter which piece of the tensor is drawn where.

Numbers. Every step from words to numbers is exact or one correctly rounded sum, product, quotient or root of IEEE
numbers, so it doesn't depend on the library, the device or the place in a vector:
    uniform  float32: 24 bits of one word; float64: 53 bits of two; bfloat16: 8 bits, float16: 11 bits of one
    normal   Box and Muller on 2 · 52 bits of four words, in float64, then rounded to the dtype
    dropout  kept where the word is at least p · 2**32
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

M0, M1, WEYL0, WEYL1, ROUNDS = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 10
LOW = 0xFFFFFFFF
AT_ONCE = {"cpu": 2**15}
"""Blocks computed at a time: on a CPU they stay in its cache."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What a draw reads: `key` and `step`, 0 .. 2**64 - 1."""

    key: int
    step: int


@dataclass(frozen=True, slots=True)
class Space:
    """The elements of a piece as numbers in the whole: element (i0, i1, ...) is base + Σ i_d · strides_d.

    `sizes` has neighbouring dims merged where the whole runs on; its last stride is 1. `shape` is the piece's own.
    """

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return _product(self.shape)


@lru_cache(maxsize=1024)
def space(whole: tuple[int, ...], starts: tuple[int, ...], shape: tuple[int, ...]) -> Space:
    """The piece of `shape` that starts at `starts` of a tensor of shape `whole`."""
    base, stride = 0, 1
    sizes: list[int] = []
    strides: list[int] = []
    for size, start, piece in reversed(list(zip(whole, starts, shape, strict=True))):
        base += start * stride
        if piece != 1:
            if sizes and strides[-1] * sizes[-1] == stride:
                sizes[-1] *= piece
            else:
                sizes.append(piece)
                strides.append(stride)
        stride *= size
    if not strides or strides[0] != 1:
        sizes.insert(0, 1)
        strides.insert(0, 1)
    return Space(base, tuple(reversed(sizes)), tuple(reversed(strides)), shape)


def _product(numbers: Iterable[int]) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


def words(stream: Stream, of: Space, width: int, device: torch.device) -> Tensor:
    """int32 bit patterns, [count · width]: `width` words of each element, in order."""
    if of.count == 0:
        return torch.empty(0, dtype=torch.int32, device=device)
    first = torch.tensor([of.base], dtype=torch.int64, device=device)
    for size, stride in zip(of.sizes[:-1], of.strides[:-1], strict=True):
        steps = torch.arange(size, dtype=torch.int64, device=device) * stride
        first = (first.unsqueeze(1) + steps).flatten()
    first = first * width  # [rows] the word that each run of consecutive elements starts at
    run = of.sizes[-1] * width
    blocks = (run + 6) // 4  # a run starts anywhere in its first block
    counters = (first >> 2).unsqueeze(1) + torch.arange(blocks, dtype=torch.int64, device=device)
    made = _blocks(stream, counters.flatten()).view(len(first), 4 * blocks)
    if len(first) == 1:
        start = of.base * width % 4
        return made[0, start : start + run]
    columns = (first & 3).unsqueeze(1) + torch.arange(run, dtype=torch.int64, device=device)
    return made.gather(1, columns).flatten()


def _blocks(stream: Stream, counters: Tensor) -> Tensor:
    """int64 [n] -> int32 [n, 4]."""
    out = torch.empty((len(counters), 4), dtype=torch.int32, device=counters.device)
    most = AT_ONCE.get(counters.device.type, max(len(counters), 1))
    for first in range(0, len(counters), most):
        for j, word in enumerate(rounds(counters[first : first + most], stream)):
            out[first : first + most, j] = word
    return out


def rounds(counters: Tensor, stream: Stream) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words, as int64 in 0 .. 2**32 - 1, of the blocks `counters`.

    int64 products wrap modulo 2**64, so their bits are the unsigned ones.
    """
    a, b = counters & LOW, (counters >> 32) & LOW
    c, d = torch.full_like(a, stream.step & LOW), torch.full_like(a, stream.step >> 32)
    k, m = stream.key & LOW, stream.key >> 32
    for _ in range(ROUNDS):
        p, q = a * M0, c * M1
        a, b = (q >> 32).bitwise_and_(LOW).bitwise_xor_(b).bitwise_xor_(k), q.bitwise_and_(LOW)
        c, d = (p >> 32).bitwise_and_(LOW).bitwise_xor_(d).bitwise_xor_(m), p.bitwise_and_(LOW)
        k, m = (k + WEYL0) & LOW, (m + WEYL1) & LOW
    return a, b, c, d


def pairs(made: Tensor) -> Tensor:
    """int32 words [2n] -> int64 [n] bit patterns, the first word of two below."""
    low, high = made.view(-1, 2).to(torch.int64).unbind(1)
    return (low & LOW) | (high << 32)


BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of one word that a dtype holds exactly below 1."""


def uniform(made: Tensor, dtype: torch.dtype) -> Tensor:
    """Words (two an element for float64, else one) -> numbers in [0, 1)."""
    if dtype is torch.float64:
        return torch.bitwise_and(pairs(made) >> 11, 2**53 - 1).to(dtype).mul_(2.0**-53)
    bits = BITS[dtype]
    return torch.bitwise_and(made >> (32 - bits), 2**bits - 1).to(dtype).mul_(2.0**-bits)


def unit(bits: Tensor) -> Tensor:
    """int64 patterns -> float64 in [1, 2), from the upper 52 bits."""
    return (((bits >> 12) & (2**52 - 1)) | 0x3FF0000000000000).view(torch.float64)


def open_unit(bits: Tensor) -> Tensor:
    """int64 patterns -> float64 in (0, 1), both ends left out."""
    return (unit(bits) - 1.0) + 2.0**-53


LOG2, ROOT2, TURN = 0.6931471805599453, 1.4142135623730951, 6.283185307179586
LOG = tuple(1.0 / k for k in range(3, 24, 2))
"""1/3, 1/5, ...: log((1 + z) / (1 - z)) = 2 z (1 + z²/3 + z⁴/5 + ...), |z| < 0.172."""
SINE = tuple((-1) ** (k // 2) / float(math.factorial(k)) for k in range(3, 24, 2))
"""-1/3!, 1/5!, ...: the sine's series, for |y| up to π/2."""


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total.mul_(x).add_(c)
    return total


def log(x: Tensor) -> Tensor:
    """Natural logarithm of float64 normal numbers above 0, within 2 units in the last place or 1e-16."""
    bits = x.view(torch.int64)
    exponent = ((bits >> 52) - 1023).to(torch.float64)
    m = ((bits & (2**52 - 1)) | 0x3FF0000000000000).view(torch.float64)
    large = m > ROOT2
    m = torch.where(large, m * 0.5, m)
    exponent = torch.where(large, exponent + 1.0, exponent)
    z = (m - 1.0) / (m + 1.0)
    s, t = z * z, 2.0 * z
    return exponent * LOG2 + (t + t * (s * _polynomial(LOG, s)))


def sqrt(x: Tensor) -> Tensor:
    """Root of float64 numbers above 0, correctly rounded: torch's own is off by one in the last place now and then.

    r + (x - r²) / 2r with r² as an exact sum of two numbers (Dekker's product).
    """
    r = x.sqrt()
    c = r * 134217729.0
    upper = c - (c - r)
    lower = r - upper
    square = r * r
    rest = ((upper * upper - square) + 2.0 * (upper * lower)) + lower * lower
    return r + ((x - square) - rest) / (2.0 * r)


def normal(made: Tensor) -> Tensor:
    """Words, four an element -> float64 standard normal numbers."""
    bits = pairs(made).view(-1, 2)
    radius = sqrt(-2.0 * log(open_unit(bits[:, 0].contiguous())))
    y = (0.25 - (unit(bits[:, 1].contiguous()) - 1.5).abs()) * TURN
    s = y * y
    return radius * (y + y * (s * _polynomial(SINE, s)))


def at_least(made: Tensor, threshold: int) -> Tensor:
    """Where a word, unsigned, is at least `threshold` (0 .. 2**32)."""
    if threshold > LOW:
        return torch.zeros(made.shape, dtype=torch.bool, device=made.device)
    return (made ^ -(2**31)) >= threshold - 2**31
