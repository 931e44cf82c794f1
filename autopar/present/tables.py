"""Catalogues, verification reports and the doctor's findings as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rich.table import Table

from autopar.ir.profile import BY_FLOPS, Profile
from autopar.present.words import bytes_words, count_words

ROWS_SHOWN = 12


def plain_table(*columns: str, right: Sequence[str] = (), folds: str = "") -> Table:
    """A table without lines; the columns named in `right` are numbers. `folds`, or the last, takes what is left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        last = name == (folds or columns[-1])
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=not last,
            overflow="fold" if last else "ellipsis",
        )
    return table


def models_table(rows: Iterable[dict[str, Any]], *, wide: bool) -> Table:
    """Rows with name, parameters, class, seq, global_batch, source (shown where it is `wide`)."""
    source = ("source",) if wide else ()
    table = plain_table("name", "parameters", "seq", "batch", "class", *source, right=("parameters", "seq", "batch"))
    for row in rows:
        seq = str(row["seq"]) if row["seq"] else "-"
        size = count_words(row["parameters"])
        cells = (row["name"], size, seq, str(row["global_batch"]), row["class"], row["source"])
        table.add_row(*cells[: len(table.columns)])
    return table


def preset_row(preset: Any) -> dict[str, Any]:
    """What `autopar clusters` shows of a cost_model Preset."""
    memory = preset.device.memory
    return {
        "name": preset.name,
        "unit": preset.unit,
        "devices": preset.devices_per_node,
        "device": preset.device.name,
        "memory_bytes": memory.total_bytes - memory.held_back_bytes,
        "bf16_flops": preset.device.peak_flops.get("bfloat16", 0.0),
        "inside": preset.inside.name,
        "between": preset.between.name,
        "date": preset.date,
    }


def clusters_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Rows with name, unit, devices, device, memory_bytes, bf16_flops, inside, between, date."""
    flops = "bf16 TFLOP/s"
    table = plain_table("preset", "one of it is", "memory", flops, "inside", "between", right=("memory", flops))
    for row in rows:
        devices = row["devices"] if row["unit"] == "node" else 1
        memory, peak = bytes_words(row["memory_bytes"]), f"{row['bf16_flops'] / 1e12:.0f}"
        table.add_row(row["name"], f"{devices} × {row['device']}", memory, peak, row["inside"], row["between"])
    return table


def profile_table(profile: Profile) -> Table:
    """One row a curve: its least time, its largest rate and where it did not settle."""
    table = plain_table("measured", "dtype", "least µs", "most per µs", "unstable", right=("least µs", "most per µs"))
    for curve in profile.curves:
        unit = "flops" if curve.work in BY_FLOPS else "bytes"
        rate = max(size / time for size, time in zip(curve.sizes, curve.p50, strict=True))
        shaky = f"{len(curve.unstable)} of {len(curve.sizes)}" if curve.unstable else ""
        name = " ".join(filter(None, (curve.work, curve.shape)))
        per = f"{count_words(rate)} {unit}" if len(curve.sizes) > 1 else ""
        table.add_row(name, curve.dtype, f"{curve.p50[0]:.1f}", per, shaky)
    for link in profile.links:
        rate = max(size / time for size, time in zip(link.sizes, link.p50, strict=True))
        shaky = f"{len(link.unstable)} of {len(link.sizes)}" if link.unstable else ""
        name = f"{link.collective} of {link.members}, {link.level}"
        table.add_row(name, "", f"{link.p50[0]:.1f}", f"{count_words(rate)} bytes", shaky)
    for what, factor in profile.overlap.items():
        table.add_row(f"{what} while both run", "", "", f"{factor:.2f} times slower", "")
    return table


class VerifyRow(Protocol):
    """One compared tensor: largest error relative to the tensor's largest entry, and what is allowed."""

    @property
    def name(self) -> str:
        """Of the tensor."""

    @property
    def layout(self) -> str:
        """As planned."""

    @property
    def error(self) -> float:
        """nan where a side is missing or not a number."""

    @property
    def tolerance(self) -> float:
        """Most that is allowed."""


def verify_table(rows: Sequence[VerifyRow], every: bool = False) -> Table:
    """Every row in the model's order; or all that fail, worst first, and up to ROWS_SHOWN those closest to failing."""

    def badness(row: VerifyRow) -> float:
        if math.isnan(row.error) or (row.tolerance == 0 and row.error > 0):
            return math.inf
        return row.error / row.tolerance if row.tolerance else 0.0

    table = plain_table("", "error", "allowed", "tensor", "layout", right=("error", "allowed"), folds="tensor")
    failing = sum(badness(row) > 1 for row in rows)
    worst = sorted(rows, key=badness, reverse=True)[: max(failing, ROWS_SHOWN)]
    for row in rows if every else worst:
        mark = "[green]ok" if badness(row) <= 1 else "[red]differs"
        table.add_row(mark, f"{row.error:.1e}", f"{row.tolerance:.0e}", row.name, row.layout)
    return table


def facts_table(facts: Iterable[tuple[str, bool | None, str]]) -> Table:
    """(what, fine or not or neither, detail) rows."""
    table = plain_table("", "", "")
    table.show_header = False
    marks = {True: "[green]ok", False: "[red]missing", None: "-"}
    for what, fine, detail in facts:
        table.add_row(marks[fine], what, detail)
    return table
