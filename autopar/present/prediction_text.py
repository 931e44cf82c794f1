"""A prediction as a table, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.prediction import Prediction
from autopar.present.tables import plain_table
from autopar.present.words import bytes_words, count_words, time_words

FLOPS_COUNTED = "model flops, forward and backward; causal attention counts the half of the scores that is used"


def prediction_json(found: Prediction) -> dict[str, Any]:
    """The fields that scripts rely on; `breakdown_us` of the busiest stage sums to the step but for what is hidden."""
    config = found.configuration
    sizes = {name: getattr(config, name) for name in ("tp", "pp", "dp", "cp", "ep", "zero", "chunks")}
    return {
        "model": found.model,
        "cluster": found.cluster,
        "devices": config.devices,
        "configuration": {
            **sizes,
            "schedule": config.schedule_name,
            "micro_batch": config.micro_batch,
            "global_batch": config.global_batch,
            "micro_batches": config.micro_batches,
            "seq": config.seq,
            "precision": config.precision,
            "recompute": config.recompute,
            "attention": config.attention,
            "trains": config.trains,
            "software": config.software,
        },
        "step_time_us": found.step_time_us,
        "step_time_s": found.step_time_us / 1e6,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_device": found.tokens_per_s / config.devices,
        "flops_per_s_per_device": found.flops_per_s,
        "mfu": found.mfu,
        "mfu_full_attention": found.mfu_full,
        "flops_counted": FLOPS_COUNTED,
        "peak_memory_bytes": found.peak_memory_bytes,
        "memory_limit_bytes": found.limit_bytes,
        "fits": found.fits,
        "breakdown_us": dict(found.breakdown_us),
        "breakdown_bytes": dict(found.memory_bytes),
        "cost_source": found.cost_source,
        "notes": list(found.notes),
    }


def prediction_view(found: Prediction) -> RenderableType:
    """What a person reads."""
    config = found.configuration
    sizes = " × ".join(f"{n}={getattr(config, n)}" for n in ("tp", "pp", "dp", "cp") if getattr(config, n) > 1)
    more = [f"ep={config.ep}"] * (config.ep > 1) + [f"ZeRO-{config.zero}"] * (config.zero > 0)
    head = Text.assemble(
        (found.model, "bold"),
        f" on {found.cluster} ({config.devices} devices): ",
        ", ".join([sizes or "one device", *more]),
    )
    batch = (
        f"{config.micro_batches} micro-batches of {config.micro_batch} × {config.seq} tokens on each data-parallel "
        f"rank, {config.precision}, schedule {config.schedule_name}"
        + (f" of {config.chunks} chunks" if config.chunks > 1 else "")
        + (f", recompute {config.recompute}" if config.recompute != "none" else "")
    )
    facts = plain_table("", "")
    facts.show_header = False
    verdict = "[green]fits" if found.fits else "[red]does not fit"
    per_device = found.tokens_per_s / config.devices
    facts.add_row("step time", time_words(found.step_time_us))
    facts.add_row("throughput", f"{count_words(found.tokens_per_s)} tokens/s; {per_device:,.0f} a device")
    facts.add_row("flops", f"{found.flops_per_s / 1e12:.0f} TFLOP/s a device: MFU {100 * found.mfu:.1f} %")
    facts.add_row("", f"({FLOPS_COUNTED}; with all scores {100 * found.mfu_full:.1f} %)")
    memory = f"{bytes_words(found.peak_memory_bytes)} of {bytes_words(found.limit_bytes)}"
    facts.add_row("peak memory", f"{memory}: {verdict}")
    times = plain_table("time of the busiest stage", "", "part", right=("", "part"))
    for what, us in sorted(found.breakdown_us.items(), key=lambda x: -x[1]):
        times.add_row(_words(what), time_words(us), f"{100 * us / found.step_time_us:.1f} %")
    held = plain_table("memory of the fullest device", "", right=("",))
    for what, size in found.memory_bytes.items():
        held.add_row(what, bytes_words(size))
    notes = [Text(f"note: {note}") for note in found.notes]
    source = Text(f"costs: {found.cost_source} (docs/predictions.md)", style="dim")
    return Group(head, Text(batch), Text(), facts, Text(), times, Text(), held, Text(), *notes, source)


def _words(what: str) -> str:
    kind, colon, name = what.partition(":")
    if not colon:
        return what
    return {"compute": name, "exposed": f"{name}, waited for", "hidden": f"{name}, beside computation (not counted)"}[
        kind
    ]
