"""Every way to spread a step over stages, a mesh of each and micro-batches, within pins and search space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.candidates import Task
from autopar.cost_model.pipeline import block_runs
from autopar.cost_model.search_space import (
    allowed_degrees,
    axis_pins,
    check_axes,
    check_pins,
    divisors,
    expert_degrees,
    stage_mesh,
    within_sizes,
)
from autopar.errors import UserError
from autopar.ir.graph import InputKind
from autopar.ir.load import Load
from autopar.ir.mesh import Mesh
from autopar.ir.options import STAGES, Options
from autopar.ir.schedules import in_halves
from autopar.sharding import expert_count, followed_sizes, stage_blocks

LARGEST_MICRO_BATCH = 16
"""Rows of one micro-batch on one rank: more gain nothing on matrices of 2 048 tokens a row."""
FEW_DEVICES = 64
"""Up to so many, tensor parallelism is tried over any links; beyond, over the innermost, unless it is pinned."""
MOST_CHUNKS = 12
"""Parts of the model on one stage at most."""


Ranks = tuple[int, int, int]
"""Tensor-, expert- and context-parallel ranks of a stage."""
KindKey = tuple[Ranks, int, bool]
"""(ranks, rows, whether micro-batches are there one after the other)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to spread the step. `mesh`: of a stage; `rows`: of one micro-batch on one rank; `schedule`: one with
    backwards in halves, "" for 1F1B and its interleaved form."""

    load: Load
    mesh: Mesh
    rows: int
    schedule: str = ""

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self._along("dp")

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return self._along("tp")

    @property
    def ranks(self) -> Ranks:
        """All that aren't data-parallel."""
        return self.tensor, self._along("ep"), self._along("cp")

    def _along(self, axis: str) -> int:
        return next((a.size for a in self.mesh.axes if a.name == axis), 1)

    @property
    def pieces(self) -> Mesh:
        """The mesh that cuts a tensor as small as a rank's piece of one micro-batch."""
        times = self.load.micro_batches
        return Mesh(axes=tuple(replace(a, size=a.size * times) if a.name == "dp" else a for a in self.mesh.axes))

    @property
    def kind(self) -> KindKey:
        """Trials of one kind choose from the same."""
        return self.ranks, self.rows, self.load.micro_batches > 1

    @property
    def order(self) -> tuple[int, ...]:
        """Of two that are as good, the simpler first."""
        return (self.load.stages, *self.ranks, self.rows)

    def __str__(self) -> str:
        return f"{self.load}, {self.mesh}" + (f", {self.schedule}" if self.schedule else "")


Pins = Mapping[str, int]
Allowed = Mapping[str, tuple[int, ...]]


def batch_size(task: Task) -> int:
    """Rows of the global batch: of the model's inputs, the first dim of the largest."""
    metas = [i.value.meta for i in task.captured.top.inputs if i.kind is InputKind.INPUT]
    return max((m.shape[0] for m in metas if m.shape), default=1)


def trials(task: Task) -> tuple[Trial, ...]:
    """Every way within pins and search space; tensor parallel ranks on the innermost links, unless pinned."""
    pins, allowed = axis_pins(task.options), allowed_degrees(task.options)
    if pins.get("free", 1) != 1:
        raise UserError("axis free is not searched with pipeline stages or micro-batches: leave it out")
    check_pins(pins, allowed, task.cluster)
    allowed = within_sizes(pins, allowed, {"cp": followed_sizes(task.captured).get("cp", 0)})
    _check_stages(task, pins, allowed)
    every = (t for p in _stage_counts(task, pins, allowed) for t in _of_stages(task, p, pins, allowed))
    found = tuple(t for t in every if chunks_of(task, t))
    if not found:
        raise UserError(_no_trial(task))
    check_axes((t.mesh for t in found), task.options, task.cluster)
    return found


def _check_stages(task: Task, pins: Pins, allowed: Allowed) -> None:
    """UserError where pinned stages contradict another pin, the search space or the number of devices."""
    pinned = stage_blocks(task.captured, task.options.pins)
    if pinned is None:
        return
    stages, said, cluster = (
        len(pinned),
        f"pin {STAGES}={task.options.pins[STAGES]} makes {len(pinned)} stages",
        task.cluster,
    )
    if pins.get("pp", stages) != stages:
        raise UserError(f"{said}, which contradicts pin pp={pins['pp']}")
    if stages not in allowed.get("pp", (stages,)):
        raise UserError(f"{said}, which contradicts search_space pipeline={list(allowed['pp'])}")
    if cluster.devices % stages:
        raise UserError(f"{said}, but cluster {cluster.name} has {cluster.devices} devices: no multiple of {stages}")


def _no_trial(task: Task) -> str:
    options = task.options
    asked = [f"{k}={v}" for k, v in options.pins.items()]
    asked += [f"{name} in {list(sizes)}" for name, sizes in options.search_space.items()]
    asked += [f"{options.micro_batches} micro-batches"] if options.micro_batches else []
    asked += [f"schedule {' or '.join(options.schedules)}"] if options.schedules else []
    blocks = sum(count for _, count in block_runs(task.captured))
    return (
        f"{', '.join(asked) or 'no limits'}: no stages × data × tensor on {task.cluster.devices} devices of "
        f"{task.cluster.name} cut {batch_size(task)} rows and {blocks} blocks so"
    )


def _may(degree: str, size: int, pins: Pins, allowed: Allowed) -> bool:
    return size == pins.get(degree, size) and size in allowed.get(degree, (size,))


def _stage_counts(task: Task, pins: Pins, allowed: Allowed) -> Iterator[int]:
    blocks = sum(count for _, count in block_runs(task.captured))
    pinned = stage_blocks(task.captured, task.options.pins)
    for stages in divisors(task.cluster.devices):
        if pinned is not None and stages != len(pinned):
            continue
        if stages <= max(1, blocks) and _may("pp", stages, pins, allowed):
            yield stages


def _of_stages(task: Task, stages: int, pins: Pins, allowed: Allowed) -> Iterator[Trial]:
    devices, batch = task.cluster.devices // stages, batch_size(task)
    near = task.cluster.levels[0].size if task.cluster.levels else 1
    asked = "tp" in pins or "tp" in allowed
    for tensor in divisors(devices):
        if not _may("tp", tensor, pins, allowed) or (tensor > near and not asked and devices_are_many(task)):
            continue
        for context in _context_degrees(devices // tensor, pins, allowed):
            left = devices // tensor // context
            for experts in _expert_degrees(task, left, tensor, pins, allowed):
                data = left // experts
                if not _may("dp", data, pins, allowed) or batch % (data * experts):
                    continue
                mesh, share = stage_mesh(data, tensor, task.cluster, experts, context), batch // data // experts
                for rows in _micro_batch_rows(task.options, share, whole=stages == 1):
                    load = Load(stages=stages, micro_batches=-(-share // rows))
                    for schedule in _schedules(task.options, stages):
                        yield Trial(load=load, mesh=mesh, rows=rows, schedule=schedule)


def _context_degrees(ranks: int, pins: Pins, allowed: Allowed) -> Iterator[int]:
    """Of `ranks`, over how many sequences may be cut: over one, unless it is asked for."""
    for size in divisors(ranks) if {"cp"} & (set(pins) | set(allowed)) else (1,):
        if _may("cp", size, pins, allowed):
            yield size


def _schedules(options: Options, stages: int) -> Iterator[str]:
    """Of trials: those with backwards in halves are trials of their own, where they are asked for."""
    if not options.schedules or stages == 1 or {"1f1b", "interleaved"} & set(options.schedules):
        yield ""
    if stages > 1:
        yield from (name for name in options.schedules if in_halves(name))


def _expert_degrees(task: Task, ranks: int, tensor: int, pins: Pins, allowed: Allowed) -> tuple[int, ...]:
    """Of `ranks`, how many experts may be spread over. On many devices, none, or whole nodes in powers of 4."""
    found = expert_degrees(expert_count(task.captured), ranks)
    if "ep" in pins or "ep" in allowed:
        return tuple(n for n in found if _may("ep", n, pins, allowed))
    if not devices_are_many(task):
        return found
    near = task.cluster.levels[0].size
    return tuple(n for n in found if n == 1 or (n * tensor) in {near * 4**k for k in range(len(found))})


def devices_are_many(task: Task) -> bool:
    """True if tensor parallelism beyond the innermost links isn't looked at."""
    near = task.cluster.levels[0].size if task.cluster.levels else 1
    return task.cluster.devices > max(FEW_DEVICES, near)


def _micro_batch_rows(options: Options, rows: int, *, whole: bool) -> Iterator[int]:
    """Sizes of a rank's micro-batch: powers of two that divide its rows, or what the options ask; `whole`: all too."""
    if options.micro_batches is not None:
        size = -(-rows // options.micro_batches)
        if -(-rows // size) == options.micro_batches:  # the last one may be smaller
            yield size
        return
    size = 1
    while size <= min(rows, LARGEST_MICRO_BATCH):
        if rows % size == 0:
            yield size
        size *= 2
    if whole and (rows > LARGEST_MICRO_BATCH or rows & (rows - 1)):
        yield rows


def chunks_of(task: Task, trial: Trial) -> tuple[int, ...]:
    """Parts of the model that its stages may hold: of equally many blocks, and with as many micro-batches as stages.

    One where it is pinned what each holds, and where the schedule is not interleaved; none where it must be and can't.
    """
    asked = task.options.schedules
    if trial.schedule or trial.load.stages == 1 or (asked and "interleaved" not in asked):
        return (1,)
    most = _most_chunks(task, trial)
    return tuple(v for v in most if v > 1) if asked and "1f1b" not in asked else most


def _most_chunks(task: Task, trial: Trial) -> tuple[int, ...]:
    blocks, stages = sum(count for _, count in block_runs(task.captured)), trial.load.stages
    if STAGES in task.options.pins or stages == 1 or blocks % stages or trial.load.micro_batches < stages:
        return (1,)
    return tuple(v for v in divisors(blocks // stages) if v <= MOST_CHUNKS)
