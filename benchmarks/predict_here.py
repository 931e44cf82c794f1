"""How good are predictions on this machine? python benchmarks/predict_here.py [--seconds 60] [--steps 7] [--ranks 1 2]

For 1, 2 and 4 ranks: measures a profile, prices plans of four models under pinned layouts, trains each plan for a few
steps, and prints predicted against measured step time and peak memory. A probe, a few fixed ops on all ranks, is timed
with the profile and again beside every step: where something else runs on the machine meanwhile, "at pace" says what
the step would have taken had the machine been as fast as while the profile was measured. Steps and probes take turns,
and the median of their ratio counts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.cost_model.clusters import load_cluster
from autopar.ir.options import Options
from autopar.profiling.run import profile_here

PINS: dict[int, tuple[dict[str, int], ...]] = {
    1: ({},),
    2: ({"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}),
    4: ({"dp": 4}, {"dp": 2, "tp": 2}),
}
WARM_UP = 2


class Wide(nn.Module):
    """Few samples, wide layers: weights and their gradients outweigh activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))
        self.head = nn.Linear(1024, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared error."""
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return ((self.head(x) - y) ** 2).mean()


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and its global batch."""
    import transformers

    torch.manual_seed(0)
    tokens = torch.randint(0, 2048, (8, 128))
    both = {"input_ids": tokens, "labels": tokens.clone()}
    if name == "wide":
        return Wide(), {"x": torch.randn(256, 1024), "y": torch.randn(256, 16)}
    if name == "gpt":
        config = transformers.GPT2Config(
            vocab_size=2048, n_positions=128, n_embd=512, n_layer=2, n_head=8, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config), both
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=8, max_position_embeddings=128, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config), both
    config = transformers.BertConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), both


MODELS = ("gpt", "llama", "bert", "wide")


def probe_ms() -> float:
    """Fixed products, sums and all-reduces on all ranks: the median of a few rounds."""
    a = torch.ones(192, 192)
    b = torch.ones(2**19)
    many = dist.is_initialized() and dist.get_world_size() > 1
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(6):
            a @ a
            b + b
        if many:
            for _ in range(3):
                dist.all_reduce(b)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def probe_rank() -> float:
    """The probe alone."""
    torch.set_num_threads(1)
    return probe_ms()


def run_plan(name: str, plan_file: str, steps: int, run_file: str) -> dict[str, float]:
    """One rank: train, measure."""
    torch.set_num_threads(1)
    model, batch = build(name)
    module = autopar.compile(model, plan=autopar.Plan.load(plan_file), example_inputs=batch)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        out = module(**batch)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    ratios, times = [], []
    beside = probe_ms()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
        before, beside = beside, probe_ms()
        ratios.append(times[-1] / ((before + beside) / 2))
    module.measure(steps=1)
    for _ in range(4):
        step()
    with contextlib.redirect_stdout(io.StringIO()):
        report = module.report(run_file)
    return {
        "measured_us": statistics.median(times), "measured_bytes": report.measured_bytes,
        "probes": statistics.median(ratios),
    }  # fmt: skip


def tau(pairs: list[tuple[float, float]]) -> float:
    """Kendall's: pairs in order minus pairs out of order, over all."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / max(1, len(signs))


def main() -> None:
    """Print one line a plan, then the summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0, help="of each profile")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--profiles", type=Path, help="folder: profiles are kept there, and taken from there")
    parser.add_argument("--out", type=Path, help="write what was found there as JSON")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        f"{'model':8}{'ranks':>6}  {'pins':22}{'predicted':>12}{'measured':>12}{'pace':>7}{'at pace':>9}{'memory':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for ranks in asked.ranks:
            rows += of_ranks(ranks, asked, Path(folder))
    summary(rows)
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1))


def of_ranks(ranks: int, asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All plans at one number of ranks."""
    kept = (asked.profiles or folder) / f"profile-{ranks}.toml"
    kept.parent.mkdir(parents=True, exist_ok=True)
    before = autopar.launch(probe_rank, ranks)
    if not kept.exists():
        profile_here(ranks, kept, asked.seconds)
    pace = statistics.mean([before, autopar.launch(probe_rank, ranks)])
    cluster = load_cluster(str(kept))
    rows = []
    for name in asked.models:
        for pins in PINS[ranks]:
            model, batch = build(name)
            plan = autopar.search(model, cluster, example_inputs=batch, options=Options(pins=dict(pins)))
            where = folder / "plan.json"
            plan.save(where)
            pinned = "-".join(f"{k}{v}" for k, v in pins.items()) or "one"
            run = (asked.profiles or folder) / f"run-{name}-{pinned}-{ranks}.json"
            found = autopar.launch(run_plan, ranks, (name, str(where), asked.steps, str(run)), timeout_s=400)
            row = {
                "model": name, "ranks": ranks, "pins": pins, "predicted_us": plan.predicted.step_time_us,
                "predicted_bytes": plan.predicted.peak_memory_bytes, **found,
            }  # fmt: skip
            row["paced_us"] = row["probes"] * pace
            row["pace"] = row["measured_us"] / row["paced_us"]
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Ratios are predicted over measured."""
    pins = " ".join(f"{k}={v}" for k, v in row["pins"].items()) or "-"
    memory = row["predicted_bytes"] / row["measured_bytes"] if row["measured_bytes"] else 0.0
    return (
        f"{row['model']:8}{row['ranks']:>6}  {pins:22}"
        f"{row['predicted_us'] / 1e3:>9.1f} ms{row['measured_us'] / 1e3:>9.1f} ms"
        f"{row['pace']:>7.2f}{row['predicted_us'] / row['paced_us']:>9.2f}{memory:>9.2f}"
    )


def _groups(rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], object]) -> list[list[dict[str, Any]]]:
    """Rows of the same key, at least two."""
    found: dict[object, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return [mine for mine in found.values() if len(mine) > 1]


def summary(rows: list[dict[str, Any]]) -> None:
    """The figures that a prediction is judged by."""
    for name, key in (("as measured", "measured_us"), ("at the profile's pace", "paced_us")):
        errors = [abs(r["predicted_us"] / r[key] - 1) for r in rows]
        models = _groups(rows, lambda r: r["model"])
        layouts = _groups(rows, lambda r: (r["model"], r["ranks"]))
        losses = [0.0]
        for mine in models:
            best = min(mine, key=lambda r: r["predicted_us"])
            losses.append(best[key] / min(r[key] for r in mine) - 1)
        within = [
            statistics.mean([tau([(r["predicted_us"], r[key]) for r in mine]) for mine in groups] or [1.0])
            for groups in (models, layouts)
        ]
        print(
            f"{name}: median |error| {statistics.median(errors):.1%}, worst {max(errors):.1%}, mean τ within a model "
            f"{within[0]:.2f}, of its layouts on as many ranks {within[1]:.2f}, best predicted over best measured "
            f"at most {max(losses):.1%} slower"
        )
    memory = [abs(r["predicted_bytes"] / r["measured_bytes"] - 1) for r in rows if r["measured_bytes"]]
    if memory:
        print(f"peak memory: median |error| {statistics.median(memory):.1%}, worst {max(memory):.1%}")


if __name__ == "__main__":
    main()
