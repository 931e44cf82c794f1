"""Command-line values read and checked, before anything slow starts. Each error names the option."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from autopar.errors import PlanError, UserError
from autopar.ir.options import AXES, DEGREE_NAMES, OFFLOAD, RECOMPUTE, SCHEDULES, STAGES, Options
from autopar.ir.plan import FORMAT, Plan
from autopar.present.words import bytes_words

SIZES = (*AXES, "free", "pp", *DEGREE_NAMES)
"""Names that a pin may give a size to."""

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

VERIFY_BYTES_PER_PARAMETER = 40
"""fp32 weights, gradients and two AdamW states, whole and in pieces, and what compares them."""


def parse_pins(pins: Sequence[str], option: str = "--pin") -> dict[str, str | int]:
    """`tp=2` -> a size; `PATTERN=LAYOUT` -> a layout, checked later against the model's names."""
    found: dict[str, str | int] = {}
    for text in pins:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise UserError(f"{option} {text}: wanted NAME=SIZE or PATTERN=LAYOUT")
        is_number = re.fullmatch(r"[+-]?\d+", value) is not None
        if name == "zero":
            if value not in ("0", "3"):
                raise UserError(f"{option} {text}: zero takes 0 (stored whole on dp) or 3 (stored cut on dp)")
        elif name == STAGES:
            is_number = False
        elif name in SIZES:
            if not is_number or int(value) < 1:
                raise UserError(f"{option} {text}: wanted a whole number of 1 or more for axis {name}")
        elif is_number:
            near = difflib.get_close_matches(name, SIZES, n=1, cutoff=0.3)
            hint = f"closest: {near[0]}; " if near else ""
            raise UserError(f"{option} {text}: unknown axis {name!r}; {hint}wanted one of {', '.join(SIZES)}, zero")
        found[name] = int(value) if is_number else value
    return found


def split_pins(text: str, option: str) -> dict[str, str | int]:
    """`dp=4 tp=2` -> pins. A word without `=` belongs to the layout before it."""
    terms: list[str] = []
    for word in text.split():
        if "=" in word or not terms:
            terms.append(word)
        else:
            terms[-1] += f" {word}"
    if not terms:
        raise UserError(f"{option}: wanted pins, such as 'tp=8', 'dp=4 tp=2', 'zero=3' or 'blocks.*.mlp=tp:S(0)'")
    return parse_pins(terms, option)


def parse_space(space: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`data=1,2,4` -> {"data": (1, 2, 4)}. What is said of schedules is left to `parse_schedules`."""
    found = {}
    for text in space:
        name, _, values = text.partition("=")
        if name == SCHEDULE:
            continue
        if name not in DEGREE_NAMES:
            near = difflib.get_close_matches(name, DEGREE_NAMES, n=1, cutoff=0.3)
            hint = f"closest: {near[0]}; " if near else ""
            raise UserError(
                f"--space {text}: unknown degree {name!r}; {hint}wanted one of {', '.join(DEGREE_NAMES)}, {SCHEDULE}"
            )
        degrees = values.split(",")
        if not all(d.strip().isdigit() and int(d) >= 1 for d in degrees):
            raise UserError(f"--space {text}: wanted whole numbers of 1 or more, such as {name}=1,2,4")
        found[name] = tuple(int(d) for d in degrees)
    return found


SCHEDULE = "schedule"
"""In `--space`: which schedules pipeline stages may have."""


def parse_schedules(space: Sequence[str]) -> tuple[str, ...]:
    """`schedule=1f1b,zb-h1` -> ("1f1b", "zb-h1")."""
    found: list[str] = []
    for text in space:
        name, _, values = text.partition("=")
        if name == SCHEDULE:
            asked = [value.strip() for value in values.split(",")]
            if set(asked) - set(SCHEDULES):
                raise UserError(f"--space {text}: wanted schedules among {', '.join(SCHEDULES)}")
            found += asked
    return tuple(found)


def parse_slack(text: str | None, objective: str) -> float | None:
    """`0.05` -> a part of the fastest step; `any` -> None. Raises UserError where least memory isn't asked for."""
    if text is None:
        return Options().memory_slack
    if objective != "memory":
        raise UserError(f"--slack {text}: goes with --objective memory, this is {objective}")
    if text == "any":
        return None
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part < math.inf:
        raise UserError(f"--slack {text}: wanted a part of the fastest step, such as 0.05, or any")
    return part


def parse_forbidden(forbidden: Sequence[str]) -> tuple[str, ...]:
    """What may be done all the same, as `Options.allow`."""
    for text in forbidden:
        if text == OFFLOAD:
            raise UserError(f"--forbid {text}: this version has no offload, so that nothing is offloaded anyway")
        if text != RECOMPUTE:
            raise UserError(f"--forbid {text}: wanted {RECOMPUTE}")
    return () if forbidden else Options().allow


def parse_bytes(option: str, text: str | None) -> int | None:
    """`40GiB`, `40e9`, `1.5 TB` -> bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9.]+(?:e[+]?\d+)?)\s*([a-z]*)", text.strip().lower())
    try:
        size = float(match[1]) * UNITS[match[2]] if match else 0.0
    except (ValueError, KeyError):
        size = 0.0
    if size < 1:
        raise UserError(f"{option} {text}: wanted a number of bytes above zero, such as 40GiB")
    return int(size)


def check_positive(option: str, value: float | None) -> None:
    """UserError unless None or above zero."""
    if value is not None and not value > 0:
        wanted = "1 or more" if isinstance(value, int) else "more than 0"
        raise UserError(f"{option} {value}: wanted {wanted}")


def check_part(option: str, value: float) -> None:
    """UserError unless 0 or more and below 1."""
    if not 0 <= value < 1:
        raise UserError(f"{option} {value}: wanted 0 or more and below 1")


def check_writable(option: str, path: Path | None) -> None:
    """UserError unless a file can be written there. Writes nothing."""
    if path is None:
        return
    parent = path.parent
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; wanted a file name")
    if not parent.is_dir():
        raise UserError(f"{option} {path}: no folder {parent}")
    if not os.access(parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UserError(f"{option} {path}: cannot be written (no permission)")


def check_folder(option: str, path: Path) -> None:
    """UserError unless a folder is there or can be made there. Writes nothing."""
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(f"{option} {path}: {nearest} is a file; wanted a folder")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{option} {path}: cannot be written (no permission)")


def read_text(option: str, path: Path | None) -> str | None:
    """What a file holds; None without one. UserError where it can't be read."""
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def file_name(name: str) -> str:
    """A model's name as a file name."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "model"


class _Head(msgspec.Struct):
    format: str = ""


def plan_or_none(text: str) -> Plan | None:
    """The plan in a JSON file; None if `text` names a model. Of files, only a Hugging Face config is a model."""
    path = Path(text)
    if not path.is_file():
        return None
    if path.name == "config.json" or b'"model_type"' in path.read_bytes():
        try:
            if msgspec.json.decode(path.read_bytes(), type=_Head).format != FORMAT:
                return None
        except msgspec.MsgspecError:
            return None
    return Plan.load(path)


def check_affordable(plan: Plan) -> None:
    """PlanError if this machine's memory can't hold the plan's whole model beside its pieces."""
    import psutil

    needed, free = plan.model.parameters * VERIFY_BYTES_PER_PARAMETER, psutil.virtual_memory().available
    if needed > free:
        raise PlanError(
            f"plan for {plan.model.name}: to verify it takes about {bytes_words(needed)} of memory here, and "
            f"{bytes_words(free)} are free; `autopar verify {plan.model.name}` takes a tiny config of it"
        )
