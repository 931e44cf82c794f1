"""What a user may ask of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
COMPUTE_DTYPE: Mapping[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""What ops on parameters and activations compute in."""
HALF = ("bf16", "fp16")
"""Precisions whose parameters are stored in a wider type, float32 unless the model's own is wider: master weights."""

AXES = ("dp", "cp", "ep", "tp")
"""Mesh axes that this version searches, slowest first. `free` may be pinned too: an axis with no role."""
TOKEN_AXES = ("dp", "cp", "ep")
"""Axes whose ranks have other tokens each; parameters are used whole on them, but for experts on `ep`."""

DEGREE_NAMES = {"data": "dp", "context": "cp", "expert": "ep", "tensor": "tp", "pipeline": "pp"}
OFFLOAD = "offload"
STAGES = "stages"
"""A pin of what every pipeline stage holds."""
SCHEDULES = ("1f1b", "interleaved", "zb-h1")
"""Of pipeline stages, those that are searched."""
RECOMPUTE = "recompute"
"""In `Options.allow`: forward tensors may be made again in the backward instead of waiting for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Constraints and wishes.

    Attributes:
        objective: "time"; "memory": least bytes per device, of plans whose step is `memory_slack` longer than the
            fastest at most; "cost": least device-hours per token, with as many devices of the cluster as that takes.
        memory_slack: a part of the fastest step; None: least bytes however long a step takes.
        memory_limit: bytes per device; None takes the cluster's.
        pins: axis sizes ({"tp": 2}), `"zero": 0|3` (0: stored whole on dp, 3: stored cut on dp), and layouts by
            module or parameter pattern ({"model.layers.*.mlp.up_proj": "tp:S(0)"}), or of inputs ({"input:ids":
            "dp:R"}); `"stages"`: how many blocks each pipeline stage holds ("12,11,11,12"), or the modules that the
            second and later ones start with ("model.layers.12,model.layers.23"). A layout pin that names a part of what
            another one names is an exception of it.
        search_space: allowed degrees by name ("data", "tensor", "context", "expert", "pipeline").
        precision: "fp32", "fp64", or "bf16" or "fp16": compute in these, with parameters, gradients and optimizer state
            in fp32 (docs/precision.md).
        reduce_dtype: of gradients' sums over ranks, in half precision. "stored": that of the parameter; "compute": one
            that is made in half precision may be added up in it, at half the bytes.
        optimizer_bytes_per_parameter: state that the optimizer keeps (AdamW in fp32: 8).
        allow: "recompute": forward tensors may be made again in the backward instead of kept, where memory binds; ()
            forbids that and keeps all.
        stages: search pipeline stages and micro-batches too. So do a pin of `pp`, degrees of "pipeline" above 1,
            `schedules` and `micro_batches`.
        micro_batches: of a step, on every rank; None lets the search choose where it searches stages.
        schedules: of pipeline stages, those that may be; () for "1f1b" and "interleaved". The other one is "zb-h1",
            whose backwards are in halves (docs/pipelines.md).
        seed: of the compiled module's random ops, the same on every rank; torch.manual_seed doesn't reach them
            (docs/randomness.md).
        differentiable: "losses" (scalar outputs if there are any, else all) or "all".
        fold_blocks: capture repeated blocks once.
        strict: refuse a model of which a submodule cannot be captured, instead of running it whole (docs/regions.md).
        gap: how far from proven optimal the plan of one mesh may be, as a part of its step; 0 solves to the end. Where
            memory binds, the last half percent costs most of the time (llama3-70b on 16 × 4: 1.6 s against 5.2 s), and
            the cost model is no nearer to the truth than that. With recomputation it is 2 % at least, with stages 1 %.
        time_limit_s: of the solves together; None: no limit.
        dump_dir: each stage writes NN_name.txt there.
    """

    objective: Literal["time", "memory", "cost"] = "time"
    memory_slack: float | None = 0.05
    memory_limit: int | None = None
    pins: Mapping[str, str | int] = field(default_factory=dict)
    search_space: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stages: bool = False
    micro_batches: int | None = None
    schedules: tuple[str, ...] = ()
    precision: Precision = "fp32"
    reduce_dtype: Literal["stored", "compute"] = "stored"
    optimizer_bytes_per_parameter: int = 8
    differentiable: Literal["losses", "all"] = "losses"
    allow: tuple[str, ...] = (RECOMPUTE,)
    fold_blocks: bool = True
    strict: bool = False
    gap: float = 0.005
    time_limit_s: float | None = None
    seed: int = 0
    dump_dir: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision {self.precision!r}: wanted fp32, bf16, fp16 or fp64")
        if self.reduce_dtype not in ("stored", "compute"):
            raise ValueError(f"reduce_dtype {self.reduce_dtype!r}: wanted stored or compute")
        if self.objective not in ("time", "memory", "cost"):
            raise ValueError(f"objective {self.objective!r}: wanted time, memory or cost")
        if self.memory_slack is not None and not 0 <= self.memory_slack < math.inf:
            raise ValueError(f"memory_slack {self.memory_slack}: wanted a part of the fastest step, 0 or more, or None")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches {self.micro_batches}: wanted a whole number of 1 or more")
        if set(self.allow) - {RECOMPUTE}:
            raise ValueError(f"allow {self.allow}: wanted none or {RECOMPUTE!r}; {OFFLOAD} is not there yet")
        if not 0 <= self.gap < 1:
            raise ValueError(f"gap {self.gap}: wanted a part of the step time, 0 or more and below 1")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed!r}: wanted a whole number of 64 bits")
        if set(self.schedules) - set(SCHEDULES):
            raise ValueError(f"schedules {sorted(self.schedules)}: wanted names among {', '.join(SCHEDULES)}")
        unknown = set(self.search_space) - set(DEGREE_NAMES)
        if unknown:
            raise ValueError(f"search_space {sorted(unknown)}: wanted names among {sorted(DEGREE_NAMES)}")

    @property
    def searches_stages(self) -> bool:
        """True if plans with pipeline stages or micro-batches are looked at."""
        wide = any(n > 1 for n in self.search_space.get("pipeline", ()))
        return (
            self.stages
            or bool(self.schedules)
            or STAGES in self.pins
            or wide
            or (self.micro_batches or 1) > 1
            or str(self.pins.get("pp", 1)) != "1"
        )
