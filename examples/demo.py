"""Search a plan for SmolLM2 on this machine's cores, train it on two ranks, and train the same on one device beside it.

Run by `make demo`. Exits 1 if the two loss curves differ by more than 1e-4 anywhere. `--layers 30` takes the whole
model, which takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import smollm2
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

TOLERANCE = 1e-4
LEARNING_RATE, EPSILON = 1e-4, 1e-6
"""AdamW divides by the size of past gradients: with its usual 1e-8, rounding near zero grows until it shows."""
HELD_OUT = 2
"""Batches for validation."""
ROWS = 12
"""Rows of the printed loss table."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one training did."""

    losses: list[float]
    before: float
    after: float
    step_s: list[float]


def train(model: nn.Module, batches: list[Tensor], held_out: list[Tensor], label: str) -> Run:
    """An ordinary PyTorch loop: nothing in it knows of ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    before = validate(model, held_out)
    losses, step_s = [], []
    for step, ids in enumerate(batches, start=1):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s.append(time.perf_counter() - start)
        losses.append(loss.item())
        if label and (step % 6 == 0 or step == len(batches)):
            print(f"  {label}: step {step} of {len(batches)}, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return Run(losses, before, validate(model, held_out), step_s)


def validate(model: nn.Module, held_out: list[Tensor]) -> float:
    """Mean loss on files that training never sees (there is no dropout: training mode computes the same)."""
    with torch.no_grad():
        return statistics.mean(model(input_ids=ids, labels=ids).loss.item() for ids in held_out)


def train_rank(folder: Path, plan: autopar.Plan, batches: list[Tensor], held_out: list[Tensor]) -> Run:
    """One rank's part of the same training."""
    example = {"input_ids": batches[0], "labels": batches[0]}
    module = autopar.compile(smollm2.load(folder), plan=plan, example_inputs=example)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return train(module, batches, held_out, f"{plan.cluster.devices} ranks" if rank == 0 else "")


def compare(one: Run, many: Run, ranks: int, console: Console) -> float:
    """Both curves side by side; the largest relative difference."""
    differences = [abs(a - b) / abs(a) for a, b in zip(one.losses, many.losses, strict=True)]
    table = Table("step", "one device", f"{ranks} ranks", "difference", "", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[:4]:
        column.justify = "right"
    every = max(1, len(one.losses) // ROWS)
    for i in sorted({*range(0, len(one.losses), every), len(one.losses) - 1}):
        bar = "▇" * round(30 * one.losses[i] / max(one.losses))
        table.add_row(
            str(i + 1), f"{one.losses[i]:.5f}", f"{many.losses[i]:.5f}", f"{differences[i]:.1e}", f"[cyan]{bar}"
        )
    console.print(table)
    return max(*differences, abs(one.after - many.after) / one.after)


def main() -> None:
    """The demo, start to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of SmolLM2's 30: the first and the last half of these")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step over all ranks")
    parser.add_argument("--seq", type=int, default=48, help="tokens per sequence")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console, start = Console(highlight=False), time.perf_counter()

    def say(text: str) -> None:
        console.print(f"\n[bold]{text}[/] [dim]({time.perf_counter() - start:.0f} s)")

    say(f"SmolLM2-135M, {given.layers} of its 30 layers" + (", to be done in minutes" if given.layers < 30 else ""))
    folder = smollm2.prepare(given.layers)
    model = smollm2.load(folder)
    batches, held_out = smollm2.batches(folder, train=given.steps, held_out=HELD_OUT, batch=given.batch, seq=given.seq)
    console.print(f"{given.steps} steps of {given.batch} × {given.seq} tokens of Python's standard library")

    say(f"Search: the fastest plan for {given.ranks} ranks on this machine")
    example = {"input_ids": batches[0], "labels": batches[0]}
    cluster = autopar.ClusterSpec.local(given.ranks)
    plan = autopar.search(model, cluster, example_inputs=example, model_name=f"smollm2-{given.layers}-layers")
    print(plan)

    say(f"Train on {given.ranks} ranks under this plan")
    many = autopar.launch(train_rank, given.ranks, (folder, plan, batches, held_out), timeout_s=1200)

    say("Train on one device")
    one = train(model, batches, held_out, "one device")

    say("Loss, side by side")
    worst = compare(one, many, given.ranks, console)
    console.print(
        f"held-out files: {one.before:.4f} before, {one.after:.4f} after; {given.ranks} ranks {many.after:.4f}"
    )
    times = [statistics.median(run.step_s[1:] or run.step_s) for run in (one, many)]
    console.print(
        f"step time: one device (one thread) {times[0]:.2f} s, {given.ranks} ranks (one thread each) {times[1]:.2f} s, "
        f"predicted {plan.predicted.step_time_us / 1e6:.2f} s"
    )
    same = worst <= TOLERANCE
    console.print(
        f"largest relative difference {worst:.1e}: {'the same training' if same else 'NOT the same training'}"
    )
    console.print(f"[dim]{time.perf_counter() - start:.0f} s in all")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
