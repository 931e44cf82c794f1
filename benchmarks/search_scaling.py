"""How long do whole searches take, and how near are they? python benchmarks/search_scaling.py [--only NAME…]

Each line is one `autopar search MODEL -c CLUSTER` in a process of its own, from its start to its end, with what it
found and how far that may be from the best (wanted: 10 s and 1 % for the first four, with `--stages`). Then how that
grows: four times the layers, sixteen times the devices (wanted: 1.2 and 2 times as long), and a model of 5 000 distinct
ops on 64 devices (wanted: 60 s). Seconds are of this machine at this time, beside them those of its cores that the
command used, and its peak memory; run it on an idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
SEARCHES = {
    "gpt3-175b": ("gpt3-175b", "dgx-a100-80g:128", ("--stages", "--global-batch", "1536")),
    "llama3-405b": ("llama3-405b", "dgx-h100:2048", ("--stages",)),
    "mixtral-8x7b": ("mixtral-8x7b", "dgx-h100:8", ("--stages",)),
    "deepseek-v3": ("deepseek-v3", "dgx-h100:256", ("--stages",)),
    "one-stage-8b": ("llama3-8b", "dgx-h100:1", ()),
    "one-stage-70b": ("llama3-70b", "dgx-h100:8", ()),
}
LAYERS, MORE_LAYERS = 24, 96
FEW, MANY = 8, 128
"""Nodes."""
LIMIT_S = 900


class Distinct(nn.Module):
    """Linear layers of widths that all differ, so that no two are one block."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        widths = [512 + 8 * i for i in range(layers + 1)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 512] -> the mean square of the last layer's outputs."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def distinct(layers: int = 630) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """About 8 ops a layer, forward and backward."""
    with torch.device("meta"):
        return Distinct(layers), {"x": torch.zeros(4096, 512)}


def gpt(layers: int, folder: Path) -> str:
    """A config file of a GPT-3 with so many layers."""
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": layers, "n_embd": 12288, "n_head": 96,
        "vocab_size": 51200, "n_positions": 2048, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip
    path = folder / f"gpt-{layers}.json"
    path.write_text(json.dumps(config))
    return str(path)


@dataclass(frozen=True)
class Timed:
    """Seconds of the whole command, of cores that it used, its peak memory, and what it found in words."""

    wall_s: float
    core_s: float
    peak_gib: float
    found: str

    def __str__(self) -> str:
        return f"{self.wall_s:.1f} s ({self.core_s:.1f} s of cores, {self.peak_gib:.2f} GiB): {self.found}"


def timed(model: str, cluster: str, more: tuple[str, ...]) -> Timed:
    """Runs the command."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "plan.json", Path(folder) / "log"
        command = [sys.executable, "-m", "autopar", "search", model, "-c", cluster, *more, "-o", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        start = time.perf_counter()
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=ROOT)
        stop = threading.Timer(LIMIT_S, process.kill)
        stop.start()
        _, status, used = os.wait4(process.pid, 0)
        stop.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        spent = seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
        if process.returncode:
            said = log.read_text().strip().splitlines()
            return Timed(*spent, said[-1][-160:] if said and seconds < LIMIT_S else "not done")
        plan = json.loads(path.read_text())
    mesh = plan["mesh"]
    axes = " × ".join(f"{axis}={size}" for axis, size in mesh["axes"].items())
    schedule = plan.get("schedule") or {}
    words = (
        f"{plan['predicted']['step_time_us'] / 1e6:.3f} s a step, gap {plan['solver']['gap']:.2%}, "
        f"pp={mesh.get('pipeline', 1)} {axes}, {schedule.get('micro_batches', 1)} micro-batches"
    )
    return Timed(*spent, words)


def main() -> None:
    """Print a line a search."""
    parser = argparse.ArgumentParser()
    names = (*SEARCHES, "layers", "devices", "distinct")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    only = parser.parse_args().only
    for name, (model, cluster, more) in SEARCHES.items():
        if name in only:
            print(f"{name} on {cluster}: {timed(model, cluster, more)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        batch = ("--stages", "--global-batch", "1536", "--seq", "2048")
        if "layers" in only:
            few, many = (timed(gpt(n, Path(folder)), f"dgx-a100-80g:{MANY}", batch) for n in (LAYERS, MORE_LAYERS))
            print(f"{LAYERS} layers {few}, {MORE_LAYERS} layers {many}")
            print(f"layers × {MORE_LAYERS // LAYERS}: {many.core_s / few.core_s:.2f} times as long", flush=True)
        if "devices" in only:
            model = gpt(LAYERS, Path(folder))
            few, many = (timed(model, f"dgx-a100-80g:{n}", batch) for n in (FEW, MANY))
            print(f"{FEW} nodes {few}, {MANY} nodes {many}")
            print(f"devices × {MANY // FEW}: {many.core_s / few.core_s:.2f} times as long", flush=True)
    if "distinct" in only:
        print(f"distinct ops: {timed('benchmarks.search_scaling:distinct', 'dgx-h100:8', ())}", flush=True)


if __name__ == "__main__":
    main()
