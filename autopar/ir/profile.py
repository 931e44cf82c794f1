"""What a machine was measured to do: times over sizes, with the machine they hold for.

A *curve* is the time of one kind of work over its size. Sizes are flops for products, bytes read and written
for all else, and for links the bytes that a device holds on the larger side. Between two points the time is
interpolated on log-log axes; below the first it is the first's (overheads do not shrink), above the last it grows in
proportion. So a bigger size is never faster. Times were taken while all ranks of the machine worked at once.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from autopar.errors import ClusterError

PROFILE_VERSION = 1
LEAST_FACTOR, MOST_FACTOR = 0.25, 4.0
"""A correction from a run is kept between these: further off, something is broken, not slower."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware of one rank's machine.

    Attributes:
        device: processor or GPU name; `kind` "cpu" or "cuda".
        cores: cores that the ranks share; `memory_gib` main memory, rounded; `gpus` of the machine.
    """

    kind: str
    device: str
    cores: int
    memory_gib: int
    gpus: int = 0

    def __str__(self) -> str:
        cards = f", {self.gpus} GPUs" if self.gpus else ""
        return f"{self.device} ({self.cores} cores, {self.memory_gib} GiB{cards})"


class Points(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time over size; µs.

    Attributes:
        sizes: strictly rising; p10, p50, p90: quantiles of the time at each. p50 never falls.
        unstable: sizes at which the time did not settle.
    """

    sizes: tuple[float, ...]
    p10: tuple[float, ...]
    p50: tuple[float, ...]
    p90: tuple[float, ...]
    unstable: tuple[float, ...] = ()


class Curve(Points, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of one kind of work over its size.

    Attributes:
        work: an op class (`op_class`), or "send", "host_to_device", "nvme_read" and the like.
        shape: which shapes of it ("" where there is one kind); `dtype`: "" where it does not matter.
    """

    work: str
    shape: str = ""
    dtype: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells curves apart."""
        return self.work, self.shape, self.dtype


class LinkCurve(Points, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of one collective among `members` inside one link level, all groups of the machine at once."""

    collective: str
    level: str
    members: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells curves apart."""
        return self.collective, self.level, str(self.members)


class Scale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A correction from a real run: times of this class or collective are multiplied by `factor`, whichever curve or
    formula they come from. Raw points stay as they are.

    `what`: an op class or the name of a collective. `bounded`: the run asked for more than is allowed.
    """

    what: str
    factor: float
    date: str
    run: str
    steps: int
    bounded: bool = False


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything measured on one machine (or, under torchrun, cluster).

    Attributes:
        ranks: how many worked at the same time; `threads`: of each.
        overlap: "compute" and "communication": how many times slower each is while both run.
        scales: corrections from runs, the last of each `what` counts.
        notes: what could not be measured or did not settle, one line each.
    """

    version: int = PROFILE_VERSION
    date: str
    torch: str
    ranks: int
    threads: int
    hardware: Fingerprint
    overlap: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    scales: tuple[Scale, ...] = ()
    curves: tuple[Curve, ...] = ()
    links: tuple[LinkCurve, ...] = ()

    def factor(self, what: str) -> float:
        """The correction of an op class or a collective; 1 without one."""
        return next((s.factor for s in reversed(self.scales) if s.what == what), 1.0)

    @property
    def digest(self) -> str:
        """Tells what was measured apart: the same whatever corrections stand beside it."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, scales=()))).hexdigest()[:16]


def interpolate(sizes: tuple[float, ...], times: tuple[float, ...], size: float) -> float:
    """Time at `size`: log-log between points, exact at them; flat below the first, in proportion above the last."""
    at = bisect_left(sizes, size)
    if at == len(sizes):
        return times[-1] * (size / sizes[-1])
    if at == 0 or sizes[at] == size:
        return times[at]
    part = math.log(size / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
    time = math.exp(math.log(times[at - 1]) + part * math.log(times[at] / times[at - 1]))
    return min(max(time, times[at - 1]), times[at])


def never_falling(times: Iterable[float]) -> tuple[float, ...]:
    """The nearest sequence that never falls, in least squares of logarithms (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for time in times:
        pools.append((math.log(time), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return tuple(math.exp(value) for value, count in pools for _ in range(count))


def problems(profile: Profile) -> Iterator[str]:
    """What is wrong with a profile that was read."""
    if profile.version != PROFILE_VERSION:
        yield f"version is {profile.version}; wanted {PROFILE_VERSION}: measure again with `autopar profile`"
    for name in ("ranks", "threads"):
        if getattr(profile, name) < 1:
            yield f"{name} is {getattr(profile, name)}; wanted 1 or more"
    seen: set[tuple[str, str, str, str]] = set()
    kinds: tuple[tuple[str, tuple[Curve | LinkCurve, ...]], ...] = (
        ("curves", profile.curves),
        ("links", profile.links),
    )
    for kind, curves in kinds:
        for i, curve in enumerate(curves):
            where = f"{kind}[{i}] ({' '.join(filter(None, curve.key))})"
            if (kind, *curve.key) in seen:
                yield f"{where}: stands there twice"
            seen.add((kind, *curve.key))
            if isinstance(curve, LinkCurve) and curve.members < 2:
                yield f"{where}: members is {curve.members}; wanted 2 or more"
            yield from _curve_problems(where, curve)
    for scale in profile.scales:
        if not LEAST_FACTOR <= scale.factor <= MOST_FACTOR:
            yield f"scales ({scale.what}): factor {scale.factor:g}; wanted {LEAST_FACTOR:g} to {MOST_FACTOR:g}"
    yield from _overlap_problems(profile.overlap)


def _overlap_problems(overlap: dict[str, float]) -> Iterator[str]:
    unknown = sorted(set(overlap) - {"compute", "communication"})
    if unknown:
        yield f"overlap has {', '.join(unknown)}; wanted compute and communication"
    for what, factor in overlap.items():
        if not 1 <= factor <= 100:
            yield f"overlap.{what} is {factor:g}; wanted 1 to 100"


def _curve_problems(where: str, curve: Curve | LinkCurve) -> Iterator[str]:
    lengths = {len(x) for x in (curve.sizes, curve.p10, curve.p50, curve.p90)}
    if lengths != {len(curve.sizes)} or not curve.sizes:
        yield f"{where}: sizes, p10, p50 and p90 hold {sorted(lengths)} numbers; wanted as many of each, 1 or more"
        return
    for name in ("sizes", "p10", "p50", "p90"):
        wrong = next((x for x in getattr(curve, name) if not 0 < x < math.inf), None)
        if wrong is not None:
            yield f"{where}: {name} has {wrong:g}; wanted numbers above 0"
    for name, strict in (("sizes", True), ("p50", False)):
        numbers = getattr(curve, name)
        for a, b in pairwise(numbers):
            if b < a or (strict and a == b):
                yield f"{where}: {name} goes from {a:g} to {b:g}; wanted to {'rise' if strict else 'never fall'}"
                break


def refuse_foreign(profile: Profile, here: Fingerprint, what: str) -> None:
    """ClusterError if a profile is of other hardware than `here`. `what`: what would use it, for the message."""
    if profile.hardware != here:
        raise ClusterError(
            f"{what}: the profile of {profile.date} was measured on other hardware, {profile.hardware}; "
            f"here is {here}. "
            "Measure here with `autopar profile -o cluster.toml`, or take the cluster without its [profile]"
        )


def merged(old: Profile, new: Profile) -> Profile:
    """Both profiles' curves, the new one's where both have one.

    Raises:
        ClusterError: they are of other hardware, or of other ranks, threads or torch.
    """
    refuse_foreign(old, new.hardware, "merge")
    for name in ("ranks", "threads", "torch"):
        if getattr(old, name) != getattr(new, name):
            raise ClusterError(
                f"merge: one profile has {name} {getattr(old, name)}, the other {getattr(new, name)}: measure again"
            )
    curves = {c.key: c for c in (*old.curves, *new.curves)}
    links = {c.key: c for c in (*old.links, *new.links)}
    return msgspec.structs.replace(
        new,
        curves=tuple(curves.values()),
        links=tuple(links.values()),
        overlap={**old.overlap, **new.overlap},
        scales=old.scales + tuple(s for s in new.scales if s not in old.scales),
        notes=tuple(dict.fromkeys((*old.notes, *new.notes))),
    )


# ---- kinds of work

MATMUL, BATCHED, ATTENTION, ATTENTION_BACKWARD = "matmul", "batched matmul", "attention", "attention backward"
CONVOLUTION, CONVOLUTION_BACKWARD = "convolution", "convolution backward"
NORM, NORM_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD = "norm", "norm backward", "softmax", "softmax backward"
POINTWISE, FUNCTION, COPY, REDUCTION = "pointwise", "function", "copy", "reduction"
EMBEDDING, EMBEDDING_BACKWARD, INDEX = "embedding", "embedding backward", "index"
VIEW, OPTIMIZER, STEP, OPAQUE = "view", "optimizer", "step", "opaque"
BY_FLOPS = frozenset({MATMUL, BATCHED, ATTENTION, ATTENTION_BACKWARD, CONVOLUTION, CONVOLUTION_BACKWARD})
"""Classes whose size is floating point operations; the others' is bytes read and written."""

_OPS = {
    MATMUL: "mm addmm linear linear_bias_once matmul tensordot mv addmv dot bias_once",
    BATCHED: "bmm baddbmm grouped_mm grouped_outer _grouped_mm",
    CONVOLUTION: "convolution convolution_bias_once",
    CONVOLUTION_BACKWARD: "convolution_backward",
    NORM: "native_layer_norm native_group_norm native_batch_norm batch_norm _fused_rms_norm",
    NORM_BACKWARD: "native_layer_norm_backward layer_norm_backward native_group_norm_backward "
    "native_batch_norm_backward batch_norm_backward _fused_rms_norm_backward",
    SOFTMAX: "_softmax _log_softmax softmax safe_softmax log_softmax logsumexp",
    SOFTMAX_BACKWARD: "_softmax_backward_data _log_softmax_backward_data softmax_backward log_softmax_backward",
    FUNCTION: "gelu gelu_backward tanh tanh_backward exp log silu silu_backward sigmoid sigmoid_backward erf cos sin "
    "pow softplus softplus_backward log1p expm1 mish elu elu_backward",
    COPY: "clone _to_copy cat stack copy contiguous constant_pad_nd repeat roll flip slice_backward select_backward",
    REDUCTION: "sum mean amax amin max min argmax argmin prod var std var_mean any all cumsum norm linalg_vector_norm "
    "sum_into_once",
    EMBEDDING: "embedding",
    EMBEDDING_BACKWARD: "embedding_dense_backward embedding_backward",
    INDEX: "index index_select gather scatter scatter_add index_put index_add pick place take_along_dim topk sort "
    "route spread collect",
    VIEW: "view _unsafe_view reshape unsqueeze squeeze alias detach view_of permute transpose t expand slice select "
    "unbind split split_with_sizes unfold as_strided",
    OPAQUE: "region region_backward",
}
_CLASSES = {op: name for name, text in _OPS.items() for op in text.split()}


def op_class(op: str) -> str:
    """The class of an op by its name ("aten.mm.default", "local_ops.embedding"); pointwise where none else fits."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    if "attention" in name:
        return ATTENTION_BACKWARD if "backward" in name else ATTENTION
    return _CLASSES.get(name, POINTWISE)
