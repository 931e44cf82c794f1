"""Are plans found as good as published ones? python benchmarks/expert_plans.py [--only TEXT…] [--most N] [--why]

For each published configuration (degrees that experts chose for a model on a cluster): the step of the best plan with
these degrees, beside that of the best plan with any, both priced by one cost model, in bf16, with layouts,
recomputation and chunks of the schedule left to the search on both sides. Wanted: the second is never longer by more
than its gap. With `--why` what differs is printed as `autopar diff` says it. A row is left out, with the reason, where
it names what the search has not (context parallelism, TPUs), or where the model can't be written down from it.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from published_steps import PRESETS, cluster_of

import autopar
from autopar import api
from autopar.catalogue.source import load_model
from autopar.errors import InfeasibleError, UserError
from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options

ROWS = Path(__file__).parents[2] / "shared" / "data" / "expert-configs.csv"
NAMED = {
    "DeepSeek-V3": "deepseek-v3", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Llama-2-7B": "llama2-7b", "Llama-2-13B": "llama2-13b", "Llama-2-70B": "llama2-70b", "Llama-3-8B": "llama3-8b",
    "Llama-3-70B": "llama3-70b", "Llama-3.1-405B": "llama3-405b",
}  # fmt: skip
"""Models of the table that are in the catalogue."""
GAP = 0.01


@dataclass(frozen=True)
class Published:
    """One configuration. `pins`: its degrees; `micro_batches`: of every data-parallel rank."""

    model: str
    cluster: str
    devices: int
    seq: int
    global_batch: int
    micro_batches: int
    pins: tuple[tuple[str, int], ...]
    shape: tuple[tuple[str, int], ...] = ()

    @property
    def problem(self) -> tuple[object, ...]:
        """What is searched for it."""
        return self.model, self.cluster, self.devices, self.seq, self.global_batch, self.shape

    def __str__(self) -> str:
        degrees = " ".join(f"{k}={v}" for k, v in self.pins)
        return f"{degrees}, {self.micro_batches} micro-batches"


class LeftOutError(Exception):
    """Why a row is left out."""


def number(row: dict[str, str], name: str, usual: int = 0) -> int:
    """A whole number of a row."""
    text = row[name].strip()
    if not text and not usual:
        raise LeftOutError(f"{name} is not published")
    try:
        return int(text or usual)
    except ValueError:
        raise LeftOutError(f"{name} is {text!r}") from None


def published(row: dict[str, str]) -> Published:
    """A row as a configuration. Raises LeftOutError."""
    if row["gpu_type"] not in PRESETS:
        raise LeftOutError(f"no preset of {row['gpu_type']}")
    if row["cp_or_sp"] != "SP" and number(row, "cp_or_sp", 1) > 1:  # SP: sequence parallel, which is a layout
        raise LeftOutError("context parallelism with stages is not searched")
    devices, tensor, stages = number(row, "gpus"), number(row, "tp", 1), number(row, "pp", 1)
    experts, rows, batch = number(row, "ep", 1), number(row, "micro_batch"), number(row, "global_batch")
    data = devices // (tensor * stages)
    if data * tensor * stages != devices or data % experts:
        raise LeftOutError("degrees don't give the number of devices")
    if batch % (data * rows):
        raise LeftOutError("the batch doesn't divide by ranks and micro-batch")
    pins = {"pp": stages, "dp": data // experts, "tp": tensor, **({"ep": experts} if experts > 1 else {})}
    if row["zero_stage"].strip() == "3":
        pins["zero"] = 3
    shape: dict[str, int] = {}
    if row["model"] not in NAMED:
        if not row["model"].startswith(("GPT-", "GPT3-", "MT-NLG")) or "one layer" in row["model"] or experts > 1:
            raise LeftOutError(f"{row['model'].split('-')[0]}: its blocks are not those of GPT-3, nor in the catalogue")
        shape = {k: number(row, k) for k in ("layers", "hidden", "heads")} | {"vocab": number(row, "vocab", 51200)}
    return Published(
        model=row["model"], cluster=row["gpu_type"], devices=devices, seq=number(row, "seq"), global_batch=batch,
        micro_batches=batch // (data * rows), pins=tuple(pins.items()), shape=tuple(shape.items()),
    )  # fmt: skip


def captured_of(one: Published) -> CapturedGraph:
    """The model at its batch."""
    shape = dict(one.shape)
    with tempfile.TemporaryDirectory() as folder:
        name = NAMED.get(one.model, "")
        if shape:
            path = Path(folder) / "gpt.json"
            path.write_text(json.dumps({
                "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": shape["layers"],
                "n_embd": shape["hidden"], "n_head": shape["heads"], "vocab_size": shape["vocab"],
                "n_positions": one.seq, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
            }))  # fmt: skip
            name = str(path)
        source = load_model(name, seq=one.seq, global_batch=one.global_batch, precision="bf16")
    return api.capture(source.model, source.example_inputs, options=Options(precision="bf16"), model_name=one.model)


def compared(configurations: list[Published], time_limit_s: float | None, *, why: bool) -> Iterator[tuple[bool, str]]:
    """(as good, in words) of every configuration of one problem."""
    first = configurations[0]
    captured = captured_of(first)
    cluster = cluster_of(first.cluster, first.devices, "")
    asked = Options(precision="bf16", stages=True, gap=GAP, time_limit_s=time_limit_s)
    start = time.perf_counter()
    try:
        best: api.Plan | None = api.plan_captured(captured, cluster, options=asked)
        said = f"{_words(best)}, gap {best.solver.gap:.2%}" if best is not None else ""
    except InfeasibleError as error:
        best, said = None, f"nothing found ({error})"
    print(f"\n{first.model}, {first.devices} × {first.cluster}, {first.global_batch} × {first.seq}", flush=True)
    print(f"  found      {said}, {time.perf_counter() - start:.1f} s", flush=True)
    for one in configurations:
        options = Options(precision="bf16", pins=dict(one.pins), micro_batches=one.micro_batches, gap=GAP)
        try:
            theirs = api.plan_captured(captured, cluster, options=options)
        except (InfeasibleError, UserError) as error:
            yield best is not None, f"  published  {one}: {str(error).splitlines()[0][:150]}"
            continue
        ours = best.predicted.step_time_us if best is not None else float("inf")
        ratio = ours / theirs.predicted.step_time_us
        text = f"  published  {one}: {_words(theirs)}; found / published {ratio:.3f}"
        if why and best is not None and not theirs.diff(best).same:
            text += "\n" + "\n".join("    " + line for line in str(theirs.diff(best)).splitlines()[:12])
        yield ratio <= 1 + GAP, text


def _words(plan: autopar.Plan) -> str:
    axes = " ".join(f"{k}={v}" for k, v in plan.mesh.axes.items())
    schedule = plan.schedule
    return (
        f"{plan.predicted.step_time_us / 1e6:.3f} s, pp={plan.mesh.pipeline} {axes}, {schedule.micro_batches} "
        f"micro-batches × {schedule.chunks} chunks"
    )


def main() -> None:
    """Print a block for each model, cluster and batch, then the count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--only", nargs="+", default=[], help="parts of a model's or a device's name, all of them")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds of one search")
    parser.add_argument("--most", type=int, default=None, help="problems")
    parser.add_argument("--why", action="store_true", help="print what differs")
    asked = parser.parse_args()
    problems: dict[tuple[object, ...], list[Published]] = {}
    left: Counter[str] = Counter()
    with asked.rows.open() as file:
        for row in csv.DictReader(file):
            if not all(text.lower() in f"{row['model']} {row['gpu_type']}".lower() for text in asked.only):
                continue
            try:
                one = published(row)
            except LeftOutError as reason:
                left[str(reason)] += 1
                continue
            mine = problems.setdefault(one.problem, [])
            if one not in mine:  # the same for several precisions or sources
                mine.append(one)
    for reason, count in left.most_common():
        print(f"left out: {count} rows: {reason}")
    verdicts: list[bool] = []
    for configurations in list(problems.values())[: asked.most]:
        for good, text in compared(configurations, asked.time_limit, why=asked.why):
            verdicts.append(good)
            print(text, flush=True)
    print(f"\nno slower than published: {sum(verdicts)} of {len(verdicts)} configurations")
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
