"""Times read off a cluster's profile: which curve an op or a collective is read from, and how sure that is.

What has a curve of its own class, shape and dtype is "measured". A neighbour's curve (another shape of the same class,
another dtype of the same bytes, another group size) or a curve corrected from a run gives a "calibrated" time. None:
there is no curve that says anything, and the roofline or α-β formula is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from autopar import ops
from autopar.ir.graph import Node, TensorMeta
from autopar.ir.profile import (
    BATCHED,
    BY_FLOPS,
    MATMUL,
    OPTIMIZER,
    POINTWISE,
    VIEW,
    Profile,
    interpolate,
    op_class,
)

FEW_ROWS, NARROW = 16, 64
"""Products with a side up to these have curves of their own."""
ALIGNED = 8
"""Products with a side that is no multiple of this have a curve of their own."""
SQUARE, ROWS, SLIM, ODD = "square", "few rows", "narrow", "misaligned"
Metas = tuple[TensorMeta, ...]
OutMetas = tuple[TensorMeta | None, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What of an op its time depends on. `size`: flops for the classes of `BY_FLOPS`, else bytes."""

    name: str
    shape: str
    dtype: str
    size: float
    bytes: float


def work_of(node: Node, inputs: Metas, outputs: OutMetas, flops: float, moved: float, dtype: str) -> Work:
    """The class, shape and size of an op on local metas."""
    if ops.is_view(node.op):
        return Work(VIEW, "", "", 1.0, 0.0)
    name, shape = op_class(node.op), ""
    if name in (MATMUL, BATCHED):
        name, shape = _product(node, inputs, outputs, flops)
    return Work(name, shape, dtype, flops if name in BY_FLOPS else moved, moved)


def _product(node: Node, inputs: Metas, outputs: OutMetas, flops: float) -> tuple[str, str]:
    """(class, shape) of a product, from its sides: of output m·n with 2mnk flops, operands are m·k and k·n."""
    out = outputs[0].numel if outputs and outputs[0] is not None else 0
    a, b = inputs[1:3] if "add" in node.op and len(inputs) > 2 else inputs[:2]
    if not (out and flops and a.numel and b.numel):
        return MATMUL, SQUARE
    k = flops / (2 * out)
    batch = max(1.0, a.numel * b.numel / (k * k * out))
    m, n = a.numel / k / batch, b.numel / k / batch
    return (BATCHED if batch > 1 else MATMUL), product_shape(m, n, k)


def product_shape(m: float, n: float, k: float) -> str:
    """Which curve a product of these sides belongs to."""
    least = min(m, n, k)
    if least <= FEW_ROWS:
        return ROWS
    if any(side % ALIGNED for side in (m, n, k)):
        return ODD
    return SLIM if least <= NARROW else SQUARE


@final
class Measured:
    """A profile's curves by what they are of. Corrections are applied by class, whichever curve a time is read from."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._curves = {c.key: (c.sizes, c.p50) for c in profile.curves}
        self._links = {(c.collective, c.level, c.members): (c.sizes, c.p50) for c in profile.links}

    def op_us(self, work: Work) -> tuple[float, str] | None:
        """(µs, source) of an op, or None without any curve for it."""
        found = self._curve(work)
        if found is None:
            return None
        (sizes, times), source = found
        us = interpolate(sizes, times, work.size)
        if work.name in BY_FLOPS:
            us = max(us, self._stream_us(work))
        factor = self.profile.factor(work.name)
        return us * factor, source if factor == 1 else "calibrated"

    def optimizer_us(self, moved: float) -> float | None:
        """µs of the update of one parameter whose update moves so many bytes; None without a curve."""
        found = self._curves.get((OPTIMIZER, "", "float32"))
        return interpolate(*found, moved) * self.profile.factor(OPTIMIZER) if found is not None else None

    def collective_us(self, collective: str, level: str, members: int, nbytes: float) -> float | None:
        """µs of one collective inside a level, uncorrected; from the nearest group size where this one has no curve."""
        found = self._links.get((collective, level, members))
        if found is not None:
            return interpolate(*found, nbytes)
        near = [n for c, at, n in self._links if c == collective and at == level]
        if not near:
            return None
        n = min(near, key=lambda n: (max(n, members) / min(n, members), n))
        sizes, times = self._links[collective, level, n]
        # Latency grows with n - 1 and volume with (n - 1)/n: a small time is all latency.
        small, large = (members - 1) / (n - 1), (members - 1) / members * n / (n - 1)
        floor = times[0]
        return floor * small + max(0.0, interpolate(sizes, times, nbytes) - floor) * large

    def _curve(self, work: Work) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], str] | None:
        own = self._curves.get((work.name, work.shape, work.dtype))
        if own is not None:
            return own, "measured"
        near = self._curves.get((work.name, SQUARE, work.dtype)) or self._curves.get((work.name, "", work.dtype))
        if near is None and work.name not in BY_FLOPS:
            near = self._curves.get((work.name, "", "float32")) or self._curves.get((POINTWISE, "", "float32"))
        return (near, "calibrated") if near is not None else None

    def _stream_us(self, work: Work) -> float:
        found = self._curves.get((POINTWISE, "", work.dtype)) or self._curves.get((POINTWISE, "", "float32"))
        return interpolate(*found, work.bytes) if found is not None else 0.0


_KEPT: dict[int, Measured] = {}
MOST_KEPT = 16


def measured_of(profile: Profile | None) -> Measured | None:
    """The curves of a profile, indexed once."""
    if profile is None:
        return None
    found = _KEPT.get(id(profile))
    if found is None or found.profile is not profile:
        if len(_KEPT) >= MOST_KEPT:
            _KEPT.clear()
        found = _KEPT[id(profile)] = Measured(profile)
    return found
