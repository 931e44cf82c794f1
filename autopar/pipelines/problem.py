"""A trial -> its problem in parts, and what these are put on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar import sharding
from autopar.candidates import Task
from autopar.cost_model.build import Priced, build_problem, context_of
from autopar.cost_model.halves import halves_of
from autopar.cost_model.pipeline import block_runs, parted, stages_of
from autopar.cost_model.prices import MeshPrices
from autopar.cost_model.reprice import Repricer
from autopar.ir.graph import CapturedGraph
from autopar.ir.parts import Frame, PartedProblem
from autopar.ir.stages import Halves, cut_in_order
from autopar.ir.strategy import StrategyTable
from autopar.pipelines.trials import Trial
from autopar.sharding import stage_blocks


@dataclass(frozen=True)
class TrialProblem:
    """A trial's problem, as numbers, in parts, and the table that it was made from."""

    captured: CapturedGraph
    priced: Priced
    parted: PartedProblem
    table: StrategyTable

    @cached_property
    def repricer(self) -> Repricer:
        """For problems of trials alike."""
        return Repricer(self.priced)

    @cached_property
    def halves(self) -> Halves:
        """What backwards in halves would be of it."""
        return halves_of(self.captured, self.priced)


def problem_of(
    task: Task, trial: Trial, alike: TrialProblem | None = None, *, joined: bool = False
) -> TrialProblem:  # fmt: skip
    """The trial's problem; from one of a trial `alike`, with as many tensor-parallel ranks and rows, in a third of the
    time. `joined`: as if micro-batches were ranks, which can give each other what they made: more may be chosen.

    Raises PinError for pins that the trial's mesh can't hold.
    """
    prices, once = MeshPrices(task.cluster, trial.mesh, trial.pieces), MeshPrices(task.cluster, trial.mesh)
    load = replace(trial.load, micro_batches=1) if joined else trial.load
    if alike is None:
        table = sharding.build_table(task.captured, trial.pieces, task.options, rules=task.rules)
        priced = build_problem(
            task.captured, task.wiring, table, prices, task.options, 0, load=load, mesh=trial.mesh,
            once_prices=once,
        )  # fmt: skip
    else:
        table = alike.table
        context = context_of(
            task.captured, task.wiring, table, prices, task.options, load=load, mesh=trial.mesh, once_prices=once
        )
        priced = alike.repricer.on(context, load)
    return TrialProblem(task.captured, priced, parted(task.captured, priced, task.ends), table)


def frame_of(task: Task, trial: Trial, problem: TrialProblem) -> Frame:
    """The devices of a trial's stages and the link between them. `problem`: of the trial, or of one of its kind."""
    level = task.cluster.levels[task.cluster.level_of(trial.load.stages, trial.mesh.size)]
    return Frame(
        stages=stages_of(task.cluster, trial.load.stages, task.limit_bytes), micro_batches=trial.load.micro_batches,
        latency_us=level.latency_us, bytes_per_us=level.bytes_per_us, cuts=_cuts(task),
        schedule=trial.schedule, halves=problem.halves if trial.schedule else None,
    )  # fmt: skip


def _cuts(task: Task) -> tuple[tuple[int, ...], ...] | None:
    """[stage][run] of pinned stages, over the runs of `cost_model.pipeline.parted`: an end, runs of blocks, an end."""
    pinned = stage_blocks(task.captured, task.options.pins)
    if pinned is None:
        return None
    held, last = cut_in_order([count for _, count in block_runs(task.captured)], pinned), len(pinned) - 1
    return tuple((int(stage == 0), *blocks, int(stage == last)) for stage, blocks in enumerate(held))
