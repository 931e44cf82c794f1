"""What devices achieve in training, as fractions of their peaks: the table `rates.toml`, and the formulas it feeds.

A matrix product of m × k by k × n costs, at a fraction e of the dtype's dense peak F,

    us = 2·m·n·k / (F·e · waves(m, n)^w · k/(k + k₀))

`waves`: tiles of 128 × 256 are dealt to the device's processors in rounds, and the last round is not full
(NVIDIA, "Matrix Multiplication Background", wave quantisation); w says how much of that shows, since libraries choose
other tiles where it helps. k/(k + k₀): a tile's first loads and last stores. Fused attention costs 2·flops of the used
half of the scores at its own fraction; one that keeps scores computes both halves, and with head sizes that tensor
cores can't take (not multiples of 8) products of scores fall to a small fraction. Everything else costs its bytes over
achieved memory bandwidth.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass
from importlib import resources

import msgspec

from autopar.ir.cluster import Device
from autopar.ir.configuration import LATEST_SOFTWARE, Configuration, Precision

TILE_ROWS, TILE_COLUMNS = 128, 256
HEAD_MULTIPLE, FULL_HEAD = 8, 128
FLOPS_PER_S = 1e6
"""One flop per µs, in flops per second."""
DTYPES: dict[Precision, str] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
    "nvfp4": "float8_e4m3fn",
}
NVFP4_OVER_FP8 = 2.0
"""Dense peaks of 4-bit over 8-bit floats (NVIDIA Blackwell: 9 or 10 over 4.5 or 5 PFLOP/s)."""
SIXTEEN = ("bfloat16", "float16")
LOW = ("fp8", "mxfp8", "nvfp4")
"""Precisions in which only the layers' matrices run; attention, the head and everything else stay in bf16."""


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of one architecture. Fractions of dense peaks; see the module for `wave` and `contraction`.

    `attention_backward` is relative to `attention`; `small_head` the power of head size / 128 below 128. `cast`: passes
    over a low-precision matrix's inputs to scale, convert and transpose them, by precision. `attention_before`: part of
    `attention` that kernels achieved before `attention_since`, written for the architecture before.
    """

    matmul: dict[str, float]
    attention: float
    attention_backward: float
    attention_before: float
    attention_since: float
    small_head: float
    misaligned_head: float
    memory: float
    wave: float
    contraction: float
    cast: dict[str, float]


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: its family, its processors, how its products compare with the family's, the kind of its host."""

    family: str
    processors: int
    matmul: float = 1.0
    host: str = "x86"


class Exposed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a communication that computation waits for although they could overlap, by what it is for."""

    tensor: float
    tensor_before_overlap: float
    overlap_since: float
    experts: float
    data: float


class ExpertRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routed layers.

    Attributes:
        matmul: products of many small groups of tokens over plain ones.
        passes: over what is dispatched, in memory: routing, permuting and unpermuting.
        host_us: least time of one layer's forward, spent on launching kernels and on waiting for token counts, by host.
        slower_before: how much slower (a part of) routed layers ran before `matured - maturing`; less until `matured`.
    """

    matmul: float
    passes: float
    host_us: dict[str, float]
    slower_before: float
    matured: float
    maturing: float


class Beside(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device's monitor shows beside tensors.

    `allocator`: as a part of tensors, rounding and holes between blocks of different lives. `fixed_bytes`: context,
    communicators. `bytes_per_hidden`: workspaces, buckets and unfused temporaries, for each of a model's hidden units.
    """

    allocator: float
    fixed_bytes: float
    bytes_per_hidden: float = 0.0


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table.

    Attributes:
        yearly: how much faster products and attention get with each year of software, from `since`.
        pointwise: bytes of norms, residuals, rotary embeddings and activations over those of one ideal pass each;
            `pointwise_before` times that before `pointwise_since`, when fewer of them were fused.
        score_passes: passes over scores kept in memory, forward.
        accumulate_bytes: moved per parameter to add a micro-batch's gradient to the sum.
        gradient_bytes: of one element as it is reduced, below fp32.
        optimizer_bytes: moved per parameter of the update.
        layer_us: launching one layer's forward, where it isn't hidden.
        recompute_us: of older software (`memory_since`), once for each layer that is computed again: saving and
            restoring the states of random generators waits for the device.
        step_us: once a step: data, norms, logging, the optimizer's launches.
        overlapped_compute: how much slower computation is while communication runs.
        link, fabric: achieved over described bandwidth inside nodes, and between.
        memory: "newer" and "older" software's, told apart by `memory_since`.
    """

    source: str
    families: dict[str, Family]
    devices: dict[str, DeviceRates]
    exposed: Exposed
    experts: ExpertRates
    yearly: float
    since: float
    pointwise: float
    pointwise_before: float
    pointwise_since: float
    score_passes: float
    accumulate_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    layer_us: float
    recompute_us: float
    step_us: float
    overlapped_compute: float
    link: float
    fabric: float
    memory: dict[str, Beside]
    memory_since: float


@functools.cache
def read_rates() -> Rates:
    """The table that comes with autopar."""
    text = (resources.files("autopar.prediction") / "rates.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), Rates)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one device is under one configuration."""

    rates: Rates
    device: Device
    own: DeviceRates
    family: Family
    config: Configuration
    known: bool

    @property
    def progress(self) -> float:
        """Software of then over that of `Rates.since`."""
        return 1 + self.rates.yearly * (min(self.config.software, LATEST_SOFTWARE) - self.rates.since)

    @property
    def newer(self) -> bool:
        """True for software that sums gradients in place and keeps holes between blocks small."""
        return self.config.software >= self.rates.memory_since

    @property
    def beside(self) -> Beside:
        """What stands beside tensors."""
        return self.rates.memory["newer" if self.newer else "older"]

    @property
    def maturity(self) -> float:
        """Of routed layers' software: 0 before, 1 after."""
        experts = self.rates.experts
        return max(0.0, min(1.0, 1 + (self.config.software - experts.matured) / experts.maturing))

    def peak(self, precision: Precision) -> float:
        """Dense flops per µs."""
        peaks = self.device.peak_flops
        listed = next((peaks[d] for d in (DTYPES[precision], *SIXTEEN) if d in peaks), max(peaks.values()))
        return listed * (NVFP4_OVER_FP8 if precision == "nvfp4" else 1.0) / FLOPS_PER_S

    def matmul_us(self, m: float, n: float, k: float, *, low: bool, count: float = 1.0) -> float:
        """`count` products of m × k by k × n; `low`: in the configuration's precision, else in 16 bits or more."""
        precision = self.config.precision
        if precision in LOW and not low:
            precision = "bf16"
        part = self.family.matmul.get(precision, self.family.matmul["bf16"]) * self.own.matmul * self.progress
        part *= float(self._waves(m, n) ** self.family.wave)
        saturation = self.family.contraction * (2 if precision in LOW else 1)
        part *= k / (k + saturation)
        return count * 2 * m * n * k / (self.peak(precision) * part)

    def _waves(self, m: float, n: float) -> float:
        tiles = math.ceil(m / TILE_ROWS) * math.ceil(n / TILE_COLUMNS)
        rounds = math.ceil(tiles / self.own.processors)
        return tiles / (rounds * self.own.processors)

    def attention_us(self, used: float, whole: float, scores: float, head: float) -> tuple[float, float]:
        """(forward, backward) of the core of attention.

        Args:
            used, whole: forward flops of the scores that count, which a fused kernel computes, and of all.
            scores: how many there are: what a kernel that keeps them moves.
            head: head size.
        """
        peak = self.peak("bf16" if self.config.precision in LOW else self.config.precision)
        if self.config.attention == "flash":
            family = self.family
            part = family.attention * min(1.0, head / FULL_HEAD) ** family.small_head * self.progress
            part *= family.attention_before if self.config.software < family.attention_since else 1.0
            forward = used / (peak * part)
            return forward, 2.5 * forward / self.family.attention_backward
        plain = 0.6 * self.family.matmul["bf16"] * self.own.matmul
        part = self.family.misaligned_head if head % HEAD_MULTIPLE else plain
        forward = whole / (peak * part) + self.memory_us(self.rates.score_passes * 2 * scores)
        return forward, 2 * forward

    def memory_us(self, nbytes: float) -> float:
        """Moving so many bytes in device memory."""
        return nbytes / (self.device.memory_bytes_per_us * self.family.memory)

    def pointwise_us(self, nbytes: float) -> float:
        """Norms, residuals and activations that ideally move so many bytes."""
        rates = self.rates
        unfused = rates.pointwise_before if self.config.software < rates.pointwise_since else 1.0
        return self.memory_us(nbytes) * rates.pointwise * unfused

    def cast_bytes(self, elements: float) -> float:
        """Moved to bring the input of a low-precision matrix into its format: read 2 bytes, write 1, so many times."""
        passes = self.family.cast.get(self.config.precision, 0.0)
        return 3 * passes * elements


FALLBACK = "hopper"
"""Family of a device that the table doesn't name: an estimate, and labelled one."""


def speed_of(device: Device, config: Configuration, rates: Rates | None = None) -> Speed:
    """How fast `device` is; `known` is False where the table lacks it and its own plateau stands in."""
    rates = rates or read_rates()
    own = rates.devices.get(device.name)
    if own is not None:
        return Speed(rates, device, own, rates.families[own.family], config, True)
    family = rates.families[FALLBACK]
    measured = DeviceRates(family=FALLBACK, processors=108, matmul=device.matmul_efficiency / 0.803)
    return Speed(rates, device, measured, family, config, False)
