"""Do 1F1B, interleaved and zero-bubble steps stand in the order that is predicted?

    PYTHONPATH=. .venv/bin/python benchmarks/schedules.py [--ranks 4] [--micro-batches 4] [--rounds 9]

One decoder, one cut into equal stages, one process and one thread for each; only the schedule differs. Every round runs
one step of each schedule, in turn, so that whatever else the machine does meets all alike. Prints for each the
predicted step (the plan's, and that of its emitted programs by the simulator), the median of the measured ones, and its
ratio to 1F1B in the same round.

What the machine can show: a bubble is seen as far as the core of a waiting rank has nothing else to do. With as many
cores as ranks that is all of it. With fewer, ranks that work run faster while others wait, so that most of a bubble is
filled by other ranks, whatever the schedule; only where fewer ranks than cores have work do schedules differ. So with
4 ranks on 2 cores the ratios are nearer to 1 than predicted for 4 devices; `--cores` prints, from the times of actions
that were measured, what a machine with so many cores would take (ranks at work share them equally).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autopar
from autopar import api
from autopar.ir.account import StagesReport
from autopar.ir.options import Options
from autopar.ir.schedule import Action, ActionKind, Schedule
from autopar.ir.schedules import build_schedule

SCHEDULES = ("1f1b", "interleaved", "zb-h1")
LAYERS_A_STAGE = 2


class Block(nn.Module):
    """Products of weights, as a transformer's block has, with little beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Changes nothing of the shape."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Equal blocks, and next to nothing at the ends."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made(ranks: int, micro_batches: int, width: int, rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, and a batch of so many rows in each micro-batch."""
    torch.manual_seed(0)
    return Deep(width, LAYERS_A_STAGE * ranks), {"x": torch.randn(micro_batches, rows, width)}


def measured(plans: list[bytes], sizes: tuple[int, int, int, int], rounds: int) -> tuple[list[list[float]], list[Any]]:
    """Of each plan the seconds of every round's step, and what its actions take."""
    model, inputs = made(*sizes)
    modules = []
    for data in plans:
        plan = api.decode_plan(data, "", api.records.Plan)
        modules.append(autopar.compile(model, example_inputs=inputs, plan=plan))
    found: list[list[float]] = [[] for _ in modules]
    for turn in range(rounds + 1):
        for module, seconds in zip(modules, found, strict=True):
            everyone = module._autopar.pipeline.everyone
            everyone.barrier()
            start = time.perf_counter()
            module.step(**inputs)
            everyone.barrier()
            if turn:
                seconds.append(time.perf_counter() - start)
    reports = []
    for module in modules:
        module.measure(steps=rounds)
        for _ in range(rounds + 1):
            module.step(**inputs)
        reports.append(module.report())
    return found, reports


@dataclass
class _Running:
    left: float
    action: Action


def shared_step_us(schedule: Schedule, report: StagesReport, cores: int) -> float:
    """µs of the schedule's actions where stages at work share so many cores equally; transfers take nothing.

    Actions take what they were measured to take, as if each had had a core for itself for so long.
    """
    took = {(r.stage, r.what): r.measured_us / r.calls for r in report.rows}
    todo = [list(order) for order in schedule.orders]
    running: dict[int, _Running] = {}
    done: set[tuple[str, int, int]] = set()
    now = 0.0
    while any(todo) or running:
        for stage, order in enumerate(todo):
            if order and stage not in running and _ready(schedule, stage, order[0], done):
                action = order.pop(0)
                running[stage] = _Running(took[stage, f"{action.kind.value}{action.chunk}"], action)
        speed = min(1.0, cores / len(running))
        passed = min(r.left for r in running.values())
        now += passed / speed
        for stage, run in list(running.items()):
            run.left -= passed
            if run.left <= 1e-9:
                done.add((run.action.kind.value, schedule.part(stage, run.action.chunk), run.action.micro_batch))
                del running[stage]
    return now


def _ready(schedule: Schedule, stage: int, action: Action, done: set[tuple[str, int, int]]) -> bool:
    part, j = schedule.part(stage, action.chunk), action.micro_batch
    if action.kind is ActionKind.FORWARD:
        return part == 0 or ("F", part - 1, j) in done
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return ("I", part, j) in done
    return part == schedule.parts - 1 or bool({("B", part + 1, j), ("I", part + 1, j)} & done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("ranks", 4), ("micro-batches", 4), ("rounds", 9), ("width", 384), ("rows", 256)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--cores", type=int, nargs="*", default=[2, 4])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (asked.ranks, asked.micro_batches, asked.width, asked.rows)
    model, inputs = made(*sizes)
    cluster = autopar.ClusterSpec.local(asked.ranks)
    plans = []
    for name in SCHEDULES:
        options = Options(
            pins={"pp": asked.ranks, "dp": 1, "tp": 1}, micro_batches=asked.micro_batches, schedules=(name,), allow=()
        )
        plans.append(api.search(model, cluster, example_inputs=inputs, options=options))
    seconds, reports = autopar.launch(
        measured, ranks=asked.ranks, args=([p.to_json() for p in plans], sizes, asked.rounds)
    )
    rows = []
    for plan, mine, report in zip(plans, seconds, reports, strict=True):
        schedule = plan.schedule
        order = build_schedule(
            schedule.name, stages=asked.ranks, micro_batches=schedule.micro_batches, chunks=schedule.chunks
        )
        ratio = statistics.median(a / b for a, b in zip(mine, seconds[0], strict=True))
        emitted = api.timeline(plan, model, inputs)
        rows.append(
            [
                plan.predicted.step_time_us / 1e3,
                (emitted.step_us - emitted.breakdown_us.get("optimizer", 0.0)) / 1e3,
                1e3 * statistics.median(mine),
                *(shared_step_us(order, report, cores) / 1e3 for cores in asked.cores),
                ratio,
            ]
        )
    heads = ["plan", "emitted", "measured", *(f"{n} cores" for n in asked.cores)]
    print(f"{asked.ranks} ranks, {asked.micro_batches} micro-batches, {os.cpu_count()} cores; ms, and ratios to 1F1B")
    print(f"{'':14}" + "".join(f"{h:>12}{'':>8}" for h in heads))
    for plan, row in zip(plans, rows, strict=True):
        name = plan.schedule.name + (f" × {plan.schedule.chunks}" if plan.schedule.chunks > 1 else "")
        ratios = [a / b for a, b in zip(row[:-1], rows[0][:-1], strict=True)]
        ratios[2] = row[-1]
        print(f"{name:14}" + "".join(f"{ms:12.1f}{r:8.3f}" for ms, r in zip(row[:-1], ratios, strict=True)))


if __name__ == "__main__":
    main()
