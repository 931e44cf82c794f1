"""Everything a rank needs and a person wants to know; JSON on disk, keyed by module path and op, never by index."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec

from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import Options, Precision

FORMAT = "autopar-plan"
VERSION = 1
AGAIN = "again"
"""In `Plan.later`: the tensor is made once more in the backward."""


class PlanModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    parameters: int
    graph_hash: str


class PlanCluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`spec` is the whole description that the plan was priced on; plans of before it was kept have none."""

    name: str
    devices: int
    spec: ClusterSpec | None = None


class PlanInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of the global batch."""

    shape: tuple[int, ...]
    dtype: str


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the search was asked, so that it can be asked again.

    `model`, `seq` and `global_batch` are as given in a shell ("" and None where the model came from Python). `inputs`:
    path of an argument -> its tensor in the global batch. `options`: those `Options` that were not left as they are.
    """

    model: str = ""
    seq: int | None = None
    global_batch: int | None = None
    inputs: dict[str, PlanInput] = {}
    options: dict[str, Any] = {}


class PlanMesh(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`axes` in mesh order, slowest first; `levels` the link level that each crosses."""

    pipeline: int
    axes: dict[str, int]
    levels: dict[str, int] = {}


class PlanSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "none"
    micro_batches: int = 1
    chunks: int = 1


class PlanStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of devices and what it runs.

    `columns`: of a plan with stages, how many instances of each block graph it runs in which way: "GRAPH", or "GRAPH#1"
    and so on, which name the layouts, `later` and conversions of that way. `busy_us`: forward and backward of one
    micro-batch.
    """

    index: int
    devices: int
    blocks: list[tuple[str, int]]
    peak_memory_bytes: int
    saved_count: int
    recomputed_count: int = 0
    offloaded_count: int = 0
    columns: dict[str, int] = {}
    busy_us: float = 0.0


class PlanParameter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`layout` prints as `dp:S(0) tp:R`. `role` says it in words: replicated, column, row, ZeRO-3, ... `dtype`: that it
    is stored, and updated, in ("": an older plan doesn't say)."""

    stage: int
    layout: str
    bytes_per_device: int
    optimizer_bytes_per_device: int
    offload: Literal["none", "host", "nvme"] = "none"
    role: str = ""
    dtype: str = ""


class PlanStrategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layouts of one op's tensor arguments and outputs, as text; "" for a None output. `us` is its predicted time."""

    inputs: list[str]
    outputs: list[str]
    tags: list[str]
    us: float
    source: str = ""


class PlanReshard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One priced conversion: `value` in graph `graph` from one layout to another, `count` times a step, `us` each.

    `steps_us`: of each of `steps`. `where` says for people which tensor that is: a parameter, or the module and op that
    make it. `dtype`: that the steps send, and add up, in ("": an older plan doesn't say).
    """

    graph: str
    value: str
    before: str
    after: str
    steps: list[str]
    count: int
    us: float
    where: str = ""
    steps_us: list[float] = []
    dtype: str = ""


class PlanPrediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory is that of the emitted program (`cost_model.live`) at its peak, `memory_at`: by kind, and who holds
    most."""

    step_time_us: float
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: int
    breakdown_us: dict[str, float]
    breakdown_bytes: dict[str, int]
    cost_source: str
    memory_at: str = ""
    memory_largest: dict[str, int] = {}
    device_hours_per_million_tokens: float = 0.0


class PlanSolver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`memory_price` is in µs per byte: what one more byte per device would save. `memory_bytes`: what the search
    counted for this choice, and held against the limit. `within_us`: where least memory was asked for, the longest step
    allowed (None: any)."""

    status: str
    objective_us: float
    bound_us: float
    gap: float
    time_s: float
    memory_price: float
    memory_bytes: int = 0
    within_us: float | None = None


class PlanNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str
    where: str
    message: str


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module's docstring.

    `strategies`: graph name -> node key -> strategy. `inputs` and `outputs`: graph name -> input target or output
    position -> layout. `conversions` are those paid for by the objective. `later`: graph name -> tensor that the
    backward asks for (`ir.graph.tensor_keys`) -> the layout that it is kept in, or `AGAIN`; of a graph that it doesn't
    name, all that the backward reads is kept as the forward made it. `ends`: of a plan with stages, "first" and "last"
    -> by which of its ways the top graph's nodes before the blocks, and the others, run. `held`: of such a plan, graph
    name -> tensor that stays for all micro-batches (a weight as ops read it, the sum of a gradient) -> its layout.
    """

    format: str = FORMAT
    version: int = VERSION
    model: PlanModel
    cluster: PlanCluster
    mesh: PlanMesh
    schedule: PlanSchedule
    stages: list[PlanStage]
    parameters: dict[str, PlanParameter]
    predicted: PlanPrediction
    solver: PlanSolver
    notes: list[PlanNote]
    strategies: dict[str, dict[str, PlanStrategy]]
    inputs: dict[str, dict[str, str]]
    outputs: dict[str, dict[str, str]]
    conversions: list[PlanReshard]
    later: dict[str, dict[str, str]] = {}
    ends: dict[str, str] = {}
    held: dict[str, dict[str, str]] = {}
    pins: dict[str, str] = {}
    precision: Precision = "fp32"
    request: PlanRequest | None = None

    def to_json(self) -> bytes:
        """Indented JSON, the same bytes for the same plan."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        target = Path(path)
        scratch = target.with_name(target.name + ".partial")
        scratch.write_bytes(self.to_json())
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan. Raises PlanError where it is missing, truncated, of another version or has unknown keys."""
        try:
            return decode_plan(Path(path).read_bytes(), str(path), cls)
        except OSError as error:
            raise PlanError(f"plan {path}: cannot be read ({error.strerror})") from None


def device_hours(devices: int, tokens_per_s: float) -> float:
    """Hours of all devices together for a million tokens."""
    return devices * 1e6 / tokens_per_s / 3600 if tokens_per_s else 0.0


def refuse_stages(plan: Plan, does: str) -> None:
    """PlanError for a plan with pipeline stages or micro-batches. `does`: what this version can't do with one."""
    if is_staged(plan):
        raise PlanError(
            f"the plan for {plan.model.name} has {plan.mesh.pipeline} stages and {plan.schedule.micro_batches} "
            f"micro-batches: this version {does} plans of one stage and one micro-batch; search without stages"
        )


def mesh_of(plan: Plan) -> Mesh:
    """The mesh that a plan names."""
    return Mesh(axes=tuple(Axis(name=n, size=s, level=plan.mesh.levels.get(n, 0)) for n, s in plan.mesh.axes.items()))


STAGE = "pp"
"""The axis of pipeline stages in the mesh of all ranks."""


ACCUMULATE = "accumulate"
"""The schedule of micro-batches on one stage; of a plan that was made for other inputs, there may be one."""


def is_staged(plan: Plan) -> bool:
    """True of a plan with pipeline stages or micro-batches."""
    return plan.mesh.pipeline > 1 or plan.schedule.micro_batches > 1 or plan.schedule.name == ACCUMULATE


def all_ranks(plan: Plan) -> Mesh:
    """The mesh of all ranks: of a plan with stages, those of a stage follow one another."""
    mesh = mesh_of(plan)
    return Mesh(axes=(Axis(name=STAGE, size=plan.mesh.pipeline), *mesh.axes)) if is_staged(plan) else mesh


def options_of(plan: Plan) -> Options:
    """The options that a plan was searched with; of an old plan, the pins and precision that it names."""
    if plan.request is None:
        return Options(pins=plan.pins, precision=plan.precision)
    return msgspec.convert(plan.request.options, Options)


def asked_options(options: Options) -> dict[str, Any]:
    """What is not left as it is, as `PlanRequest.options` keeps it. Where stages are dumped is no part of a plan."""
    found = {}
    for field in fields(Options):
        value = getattr(options, field.name)
        usual = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name != "dump_dir" and value != usual:
            found[field.name] = msgspec.to_builtins(value)
    return found


def memory_limit_bytes(plan: Plan) -> int | None:
    """Bytes per device that the plan had to fit; None for a plan that doesn't say."""
    limit = options_of(plan).memory_limit
    if limit is not None:
        return limit
    return plan.cluster.spec.memory_bytes if plan.cluster.spec is not None else None


class _Head(msgspec.Struct):
    format: str = ""
    version: int = -1


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def decode_plan(data: bytes, name: str, kind: type[AnyPlan]) -> AnyPlan:
    """Plan from JSON bytes; `name` is for messages."""
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.DecodeError as error:
        raise PlanError(
            f"plan {name}: not a whole JSON object ({error}); write it again with autopar search -o"
        ) from None
    if head.format != FORMAT:
        raise PlanError(f"plan {name}: format is {head.format!r}, wanted {FORMAT!r}")
    if head.version != VERSION:
        raise PlanError(f"plan {name}: version {head.version}, this autopar reads version {VERSION}; search again")
    try:
        found = msgspec.json.decode(data, type=kind)
        _check_options(found)
    except msgspec.ValidationError as error:
        raise PlanError(f"plan {name}: {error}") from None
    return found


def _check_options(plan: Plan) -> None:
    """msgspec.ValidationError where the request names an option that isn't, or gives it a wrong value."""
    unknown = set(plan.request.options if plan.request else ()) - {f.name for f in fields(Options)}
    if unknown:
        raise msgspec.ValidationError(f"Object contains unknown field `{min(unknown)}` - at `$.request.options`")
    options_of(plan)
