"""How good are predictions on published training steps? python benchmarks/published_steps.py [--rows FILE] [--each]

Prices every usable row of a table of published steps (architecture, cluster, layout, batch -> step time, sometimes peak
memory) and prints the error by source, the order inside sweeps (Kendall's tau), and memory. A row is left out, with the
reason, where a figure that decides its cost isn't published, where it isn't a transformer of equal layers, or where it
uses what a configuration can't say. Nothing is known here of single rows: what a row says goes into a `Transformer`, a
`Configuration` and a `ClusterSpec`, through the same `predict` as on the command line.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import math
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import autopar

ROWS = Path(__file__).parents[2] / "shared" / "data" / "published-steps.csv"
JUDGED = {
    "Megatron-Bridge": "Megatron-Bridge",
    "dgxc-benchmarking": "dgxc",
    "llm-foundry": "llm-foundry",
    "NVIDIA/NeMo@": "NeMo",
    "NeMo-Framework-Launcher": "NeMo",
    "BLOOM": "BLOOM",
}
PRESETS = {
    "A100-40-SXM": "dgx-a100-40g", "A100-80-SXM": "dgx-a100-80g", "A100-80": "dgx-a100-80g",
    "A100-40/80": "dgx-a100-80g", "A800-80-SXM": "a800", "H100-80-SXM": "dgx-h100", "H200-141-SXM": "h200",
    "B200-180": "b200", "B300-288": "b300",
    "GB200-186": "gb200", "GB300-288": "gb300", "V100-32-SXM2": "dgx-v100", "V100-16-SXM2": "v100-16g", "L4-24": "l4",
    "RTX4090-24": "rtx4090", "A6000-48": "rtx-a6000",
}  # fmt: skip
NETWORKS = {  # GB/s of a node
    "4x100Gb_OmniPath_per_node": 50, "4x100Gb_RoCE_per_node": 50, "4x100Gb_IB_per_node": 50,
    "1x100Gb_IB_per_node": 12.5, "400Gbps_per_node": 50, "800Gbps_per_node": 100, "200Gbps_per_node": 25,
    "8xHDR200_per_node": 200,
    "RoCE1600Gbps_per_node": 200,
}  # fmt: skip
PRECISIONS = {"fp8-alt": "mxfp8", "fp16/bf16": "fp16"}
WITHIN = 0.02
"""Steps closer than this are not ordered: repeats of one configuration differ by 0.1 to 3 %."""
LEAST_IN_SWEEP = 3
MENDED = (("bigscience", "2022-02-25"),)
"""(source, day). bigscience's chronicles-prequel.md, "GBS Variations": PCI-Express and NUMA were improved that day, all
figures changed by 1 to 5 %, "do not compare today's numbers to yesterday's"."""
LATENT = autopar.Latent(query_rank=1536, key_value_rank=512, rope=64, plain=128, value=128)
LATENT_HEADS = 128
"""Of the latent attention that the table's models have (arXiv 2412.19437)."""
UNSAID = {
    "offload=": "offload",
    "bf16 states": "optimizer state in 16 bits",
    "8-bit Adam": "8-bit optimizer state",
    "Liger": "a fused loss",
    "QLoRA": "quantised base",
    "chunked cross-entropy": "a chunked loss",
    "optimizer in backward": "the update inside the backward",
    "pp,cp unstated": "degrees not published",
    "tp unstated": "degrees not published",
    "layout+batch": "layout and batch not published",
    "hybrid": "not a transformer of equal layers",
    "layout unstated": "degrees not published",
    "known cuDNN regression": "a release with a known fault",
    "stage_gpus=[": "stages of unequal device groups",
    "HF-Trainer": "an eager trainer's adapters",
    "torchtitan default config": "every second product computed again, all else but attention too",
}
"""What a note says -> why a configuration can't say it."""
TUNED: dict[str, dict[str, Any]] = {"recompute": "full", "trains": "adapters-everywhere"}
RECIPES: dict[tuple[str, str, str], dict[str, Any]] = {
    ("Automodel", "GPT-OSS-20B", "pretrain"): {"ep": 8},
    ("Automodel", "GPT-OSS-120B", "pretrain"): {"ep": 64},
    ("Automodel", "Llama-3-70B", "pretrain"): {"recompute": "full"},
    ("Automodel", "Llama-3-8B", "LoRA"): {"trains": "adapters-everywhere"},
    ("Automodel", "Llama-3-70B", "LoRA"): TUNED,
    ("Automodel", "Qwen2.5-32B", "LoRA"): {**TUNED, "sequence_parallel": False},
}
"""(source, model, task) -> what the recipes say that the source's table links to and the table itself doesn't.

NVIDIA-NeMo/Automodel, examples/llm_benchmark: gpt_oss/gptoss_{20b,120b}_te_deepep.yaml, llama3_3/custom_llama3_1_70b_
pretrain_benchmark_8nodes.yaml, llama3_1/llama3_1_8b_peft_benchmark.yaml, llama3_3/custom_llama3_3_70b_instruct_peft_
benchmark{,_2nodes}.yaml, qwen/custom_qwen2_5_32b_peft_benchmark{,_2nodes}.yaml: ep_size, activation_checkpointing,
sequence_parallel, target_modules '*_proj' (an adapter beside every product, where NeMo's own runs have one at queries,
keys and values)."""


@dataclass(frozen=True)
class Row:
    """One published step that can be priced."""

    id: str
    source: str
    judged: str
    trust: str
    tags: dict[str, str]
    model: autopar.Transformer
    configuration: autopar.Configuration
    cluster: autopar.ClusterSpec
    step_s: float | None
    memory_bytes: float | None
    out_of_memory: bool


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--each", action="store_true", help="print every row")
    args = parser.parse_args()
    rows, left_out = read(args.rows)
    start = time.perf_counter()
    found = []
    for i, row in enumerate(rows):
        try:
            found.append((row, autopar.predict(row.model, row.configuration, row.cluster)))
        except autopar.UserError as error:
            left_out[re.sub(r"\d+", "N", str(error))].append(row.id)
        if sys.stderr.isatty():
            print(f"\r{i + 1} of {len(rows)}", end="", file=sys.stderr)
    print(f"{len(found)} rows priced in {time.perf_counter() - start:.0f} s; left out:")
    for reason, ids in sorted(left_out.items(), key=lambda x: -len(x[1])):
        print(f"  {len(ids):4d}  {reason}   ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''})")
    median, worst = print_times(found, args.each)
    order = print_order(found)
    memory, called_fitting = print_memory(found, args.each)
    print("\nasked for")
    for met, what in (
        (median <= 0.10, f"step time {median:.1%} (10 %) off in the median over trust A of the first five sources"),
        (worst[0] <= 0.20, f"no source over 20 %: at most {worst[0]:.1%}, {worst[1]}"),
        (order >= 0.8, f"order inside sweeps {order:+.2f} (0.80)"),
        (memory <= 0.07, f"peak memory {memory:.1%} (7 %) off in the median"),
        (
            not called_fitting,
            f"nothing that ran out of memory called fitting: {', '.join(called_fitting) or 'nothing'}",
        ),
    ):
        print(f"  {'met    ' if met else 'NOT MET'}  {what}")


def print_times(found: list[tuple[Row, Any]], each: bool) -> tuple[float, tuple[float, str]]:
    """Errors of step time by source. Returns the judged sources' median, and the largest of any, with its name."""
    groups: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    judged = []
    for row, p in found:
        if row.step_s is None or row.trust not in "AB":
            continue
        error = p.step_time_us / 1e6 / row.step_s - 1
        groups[row.judged or row.source, row.trust].append(error)
        if row.judged and row.trust == "A":
            judged.append(abs(error))
        if each:
            print(
                f"  {row.id:16s} {row.step_s:9.3f} s published, {p.step_time_us / 1e6:9.3f} s predicted, {error:+.1%}"
            )
    print("\nstep time: median absolute error (median error, rows) by source and trust")
    for (source, trust), errors in sorted(groups.items(), key=lambda x: (x[0][0] not in JUDGED.values(), x[0])):
        absolute = statistics.median(map(abs, errors))
        print(f"  {absolute:6.1%}  ({statistics.median(errors):+6.1%}, {len(errors):3d})  {trust}  {source}")
    median = statistics.median(judged)
    print(f"  {median:6.1%}  of all {len(judged)} rows of trust A from the first five together")
    return median, max((statistics.median(map(abs, e)), f"{s} ({t})") for (s, t), e in groups.items())


def print_order(found: list[tuple[Row, Any]]) -> float:
    """Kendall's tau of predicted against published time per sequence, inside sweeps of the layout; returns its mean."""
    sweeps: dict[Any, list[tuple[Row, float, float]]] = collections.defaultdict(list)
    for row, p in found:
        if row.step_s is None or row.trust not in "AB":
            continue
        c, m = row.configuration, row.model
        machine = (row.cluster.name, mended(row))
        key = (row.source, m.name, m.layers, m.hidden, m.heads, machine, c.seq, c.precision, c.software)
        batch = c.global_batch
        sweeps[key].append((row, p.step_time_us / batch, row.step_s / batch))
    taus = []
    print("\norder inside sweeps (same model and cluster, layout varied): tau, pairs")
    for key, members in sweeps.items():
        layouts = {layout(row) for row, _, _ in members}
        if len(layouts) < LEAST_IN_SWEEP:
            continue
        right = total = 0
        for i, (row, x, y) in enumerate(members):
            for other, u, v in members[:i]:
                if abs(y / v - 1) >= WITHIN and row.configuration != other.configuration:
                    total += 1
                    right += 1 if (x - u) * (y - v) > 0 else -1
        if total:
            taus.append(right / total)
            print(f"  {right / total:+.2f}  {total:4d}  {key[1]} on {key[5][0]} ({key[0]}){key[5][1]}")
    mean = statistics.mean(taus) if taus else 0.0
    print(f"  {mean:+.2f}  on average over {len(taus)} sweeps")
    return mean


def mended(row: Row) -> str:
    """Which state of the machine, where its log says that days before and after are not to be compared."""
    return next((f", since {d}" for part, d in MENDED if part in row.source and row.tags.get("date", "") >= d), "")


def layout(row: Row) -> tuple[Any, ...]:
    """What a sweep varies."""
    c = row.configuration
    return c.tp, c.pp, c.dp, c.cp, c.ep, c.zero, c.shard_group, c.chunks, c.micro_batch, c.recompute


def print_memory(found: list[tuple[Row, Any]], each: bool) -> tuple[float, list[str]]:
    """Errors of peak memory, and the runs that ran out of it. Returns the median, and which runs are called fitting."""
    groups: dict[str, list[float]] = collections.defaultdict(list)
    print("\npeak memory: median absolute error (median error, rows) by source")
    impossible = 0
    for row, p in found:
        if row.memory_bytes is None or row.out_of_memory or row.trust not in "AB":
            continue
        state = sum(p.memory_bytes[k] for k in ("parameters", "gradients", "optimizer state"))
        if state > row.memory_bytes:
            impossible += 1
            continue
        error = p.peak_memory_bytes / row.memory_bytes - 1
        groups[row.source].append(error)
        if each:
            print(f"  {row.id:16s} {row.memory_bytes / 2**30:7.1f} GiB, {p.peak_memory_bytes / 2**30:7.1f} predicted")
    for source, errors in groups.items():
        middle = statistics.median(errors)
        print(f"  {statistics.median(map(abs, errors)):6.1%}  ({middle:+6.1%}, {len(errors):3d})  {source}")
    every = [abs(e) for errors in groups.values() for e in errors]
    print(f"  {statistics.median(every):6.1%}  of all {len(every)}")
    print(f"  {impossible} left out: the state of the layout as published is more than the published memory")
    for row, p in sorted(found, key=lambda x: x[0].id):
        if row.out_of_memory:
            verdict = "called fitting" if p.fits else "called too large"
            print(f"  {row.id} ran out of memory: {verdict} ({p.peak_memory_bytes / 2**30:.1f} GiB)")
    return statistics.median(every), [row.id for row, p in found if row.out_of_memory and p.fits]


def read(path: Path) -> tuple[list[Row], dict[str, list[str]]]:
    """The rows that can be priced, and reason -> ids of the others."""
    rows, left_out = [], collections.defaultdict(list)
    with path.open(newline="") as file:
        for raw in csv.DictReader(file):
            row = row_of(raw)
            if isinstance(row, str):
                left_out[row].append(raw["id"])
            else:
                rows.append(row)
    return rows, left_out


def row_of(raw: dict[str, str]) -> Row | str:
    """A row, or why it can't be priced."""
    tags = dict(t.partition("=")[::2] for t in raw["note"].split(";"))
    for said, why in UNSAID.items():
        if said in raw["note"]:
            return why
    if raw["from_memory"] not in ("", "no"):
        return "figures from memory"
    if "chart_read=yes" in raw["note"]:
        return "read off a chart"
    needed = ("layers", "hidden", "seq", "gpus", "micro_batch")
    if any(not raw[k] for k in needed):
        return "architecture, sequence or micro-batch not published"
    if raw["gpu_type"] not in PRESETS:
        return "a device that is not in the tables"
    ran_out = "OOM" in tags.get("status", "")
    step, memory = number(raw["step_time_s"]), number(raw["peak_mem_gb"])
    if step is None and memory is None and not ran_out:
        return "neither step time nor memory published"
    year = software(raw["source"], tags)
    configuration = configuration_of(raw, tags, year)
    if configuration is None:
        return "batch not published"
    judged = next((short for part, short in JUDGED.items() if part in raw["source"]), "")
    if "bigscience-workshop" in raw["source"]:  # BLOOM's own row is the paper's
        judged = ""
    unit = 2**30 if "GiB" in raw["note"] or "nvidia-smi" in raw["note"] or "bigscience" in raw["source"] else 1e9
    return Row(
        id=raw["id"],
        source=raw["source"].split("@")[0].split(" ")[0],
        judged=judged,
        trust=tags.get("trust", "?"),
        tags=tags,
        model=model_of(raw, tags),
        configuration=configuration,
        cluster=cluster_of(raw["gpu_type"], int(float(raw["gpus"])), tags.get("net", "")),
        step_s=step,
        memory_bytes=memory * unit if memory is not None else None,
        out_of_memory=ran_out,
    )


def number(text: str) -> float | None:
    """A number, or None where there is none."""
    try:
        return float(text)
    except ValueError:
        return None


def software(source: str, tags: dict[str, str]) -> float:
    """Year of the software: of the release where the source names one, else of the publication."""
    release = re.search(r"(2\d)\.(\d\d)", tags.get("release", "")) or re.search(r"@v(2\d)\.(\d\d)", source)
    release = release or re.search(r" (2\d)\.(\d\d)\b", source)
    if release:
        return 2000 + int(release[1]) + (int(release[2]) - 1) / 12
    dated = re.search(r"(20\d\d)-(\d\d)", tags.get("date", "") + source)
    if dated:
        return int(dated[1]) + (int(dated[2]) - 1) / 12
    for part, year in YEARS.items():
        if part in source:
            return year
    return 2024.0


YEARS = {
    "bigscience": 2022.2, "BLOOM": 2022.2, "llm-foundry": 2023.8, "NeMo-Framework-Launcher": 2024.2,
    "NVIDIA/NeMo@8": 2024.9, "NVIDIA/NeMo@": 2024.5, "InternEvo": 2023.5, "Mist": 2024.4, "DeepSpeed": 2022.5,
    "fms-fsdp": 2024.3,
    "torchtune": 2025.0, "torchtitan": 2024.9, "Megatron-Bridge": 2026.2, "Automodel": 2026.0, "ml-engineering": 2025.5,
    "Megatron-LM": 2024.5,
}  # fmt: skip
"""When a source without a release was published."""


def model_of(raw: dict[str, str], tags: dict[str, str]) -> autopar.Transformer:
    """The architecture. A gated feed-forward is told from the number of parameters."""
    layers, hidden = int(float(raw["layers"])), int(float(raw["hidden"]))
    latent = LATENT if tags.get("attn") == "MLA" else None
    heads = LATENT_HEADS if latent else int(number(raw["heads"]) or hidden // 128)
    count, width = int(tags.get("experts") or 0), int(tags.get("moe_ffn") or 0)
    dense = int(tags.get("dense_ffn") or 0)
    plain = int(number(raw["ffn"]) or dense or 4 * hidden)
    experts = None
    if count:
        own = width or plain
        experts = autopar.Experts(
            count=count,
            top_k=int(tags["topk"]),
            width=own,
            shared_width=own if latent else 0,
            dense_layers=3 if dense and layers > 3 else 0,
        )
    shape = {
        "name": raw["model"],
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "key_value_heads": heads if latent else int(number(raw["kv_heads"]) or heads),
        "head_size": 128 if latent else hidden // heads,
        "width": dense or plain,
        "vocabulary": int(number(raw["vocab"]) or 50257),
        "experts": experts,
        "latent": latent,
    }
    candidates = [autopar.Transformer(gated=gated, **shape) for gated in (True, False)]
    published = number(raw["params_b"])
    if experts is not None or published is None:
        return candidates[0 if experts is not None else 1]
    return min(candidates, key=lambda m: abs(m.parameters / 1e9 - published))


def configuration_of(raw: dict[str, str], tags: dict[str, str], year: float) -> autopar.Configuration | None:
    """The layout; None where the batch is missing and can't be derived."""
    degree = {k: int(number(raw[k]) or 1) for k in ("tp", "pp", "vpp", "ep")}
    context = int(number(raw["cp_or_sp"]) or 1)
    devices = int(float(raw["gpus"]))
    dp = devices // (degree["tp"] * degree["pp"] * context)
    micro = int(float(raw["micro_batch"]))
    batch = number(raw["global_batch"])
    if batch is None and number(raw["step_time_s"]) is not None:
        return None
    shards = re.match(r"\d+", tags.get("zero1_shard_range", ""))
    zero = number(raw["zero_stage"])
    precision = PRECISIONS.get(raw["precision"], raw["precision"])
    found = autopar.Configuration(
        tp=degree["tp"],
        pp=degree["pp"],
        dp=dp,
        cp=context,
        ep=degree["ep"],
        zero=int(zero) if zero is not None else 1,
        shard_group=int(shards[0]) if shards else 0,
        chunks=degree["vpp"] if degree["pp"] > 1 else 1,
        micro_batch=micro,
        global_batch=int(batch) if batch is not None else dp * micro * max(4, degree["pp"]),
        seq=int(float(raw["seq"])),
        precision=precision,
        recompute=raw["recompute"] if raw["recompute"] in ("selective", "full") else "none",
        sequence_parallel=raw["cp_or_sp"] == "SP" or year > 2023,
        attention="plain" if "no flash" in raw["note"] or year < 2022.6 else "flash",
        trains="adapters" if tags.get("task", "").startswith("LoRA") else "all",
        software=year,
    )
    return dataclasses.replace(found, **recipe(raw, tags))


def recipe(raw: dict[str, str], tags: dict[str, str]) -> dict[str, Any]:
    """What the source's own recipe adds to a row, if it has one."""
    for (source, model, task), more in RECIPES.items():
        if source in raw["source"] and model == raw["model"] and task == tags.get("task"):
            return more
    return {}


def cluster_of(device: str, devices: int, network: str) -> autopar.ClusterSpec:
    """So many devices of a preset, the network replaced where the row names it."""
    preset = PRESETS[device]
    spec = autopar.ClusterSpec.load(f"{preset}:{1 if preset not in CARDS else min(devices, 8)}")
    inside, per_node = spec.levels[0], spec.levels[0].size
    if preset in RACKS:
        per_node = math.gcd(devices, RACK)
    reached = math.gcd(devices, per_node) if devices > per_node else devices
    levels = [msgspec.structs.replace(inside, size=reached)]
    if devices > reached:
        between = autopar.ClusterSpec.load(f"{preset}:{8 * 2 if preset in CARDS else 2 * RACK}").levels[-1]
        rate = NETWORKS[network] * 1000 / spec.levels[0].size if network in NETWORKS else between.bytes_per_us
        levels.append(msgspec.structs.replace(between, size=devices // reached, bytes_per_us=rate))
    groups = (msgspec.structs.replace(spec.groups[0], count=devices),)
    return msgspec.structs.replace(spec, name=f"{devices} {device}", groups=groups, levels=tuple(levels))


RACK = 64
"""GPUs of an NVLink rack that published jobs use."""
RACKS = ("gb200", "gb300")
CARDS = ("rtx4090", "rtx-a6000", "l4")

if __name__ == "__main__":
    main()
