"""Cluster descriptions as text: presets ("dgx-h100:4"), this machine ("local:2"), TOML files; and back to TOML.

Nothing here looks at the machine it runs on, but for "local".
"""

from __future__ import annotations

import difflib
import json
import math
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from autopar.cost_model.catalogue import Preset, expand, list_presets, preset_names, read_preset
from autopar.errors import ClusterError
from autopar.ir.cluster import ClusterSpec, Device, Host
from autopar.ir.graph import ITEM_BYTES
from autopar.ir.profile import problems as profile_problems

__all__ = ["Preset", "dump_cluster", "list_presets", "load_cluster", "parse_cluster", "read_cluster"]

MOST_UNITS = 1_000_000
"""More nodes or devices than this is a slip of the keyboard."""
LONGEST_NAME = 200
"""Most characters of a name, and of what a message repeats of a text."""


def load_cluster(text: str) -> ClusterSpec:
    """The cluster that `text` names: "preset:N", "local:N", or the path of a TOML file. Raises ClusterError."""
    text = text.strip()
    if text.endswith(".toml") or os.sep in text or _is_file(text):
        return read_cluster(Path(text))
    name, _, count = text.partition(":")
    known = preset_names()
    if name != "local" and name not in known:
        raise ClusterError(_unknown(name, known))
    units = _units(text, count)
    if name == "local":
        # Imported here, since it imports torch: every other description is read, and refused, without.
        from autopar.cost_model.local import local_cluster

        return local_cluster(units)
    return expand(read_preset(name), units)


def _is_file(text: str) -> bool:
    """True if a file has this name; a text that can't be a name, too long or with a NUL in it, isn't one's."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"closest: {', '.join(near)}" if near else f"wanted one of {', '.join(known)}"
    return f"cluster {_short(name)!r}: no such preset; {hint}; or local:N, or the path of a TOML file"


def _units(text: str, count: str) -> int:
    """The number after the colon; 1 without one."""
    if not count and ":" not in text:
        return 1
    where = f"cluster {_short(text)!r}"
    digits = count.lstrip("0")
    if not (count.isascii() and count.isdigit() and digits):
        raise ClusterError(f"{where}: {_short(count)!r} is not a count; wanted a whole number of 1 or more after ':'")
    if len(digits) > len(str(MOST_UNITS)) or int(digits) > MOST_UNITS:
        raise ClusterError(f"{where}: {_short(digits)} is absurd; wanted at most {MOST_UNITS}")
    return int(digits)


def _short(text: str) -> str:
    """For a message: the start of a long text."""
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"


def read_cluster(path: Path) -> ClusterSpec:
    """A cluster from a TOML file. Raises ClusterError naming the file and the line or key."""
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ClusterError(f"cluster {_short(str(path))}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        if not isinstance(error, UnicodeDecodeError):
            raise ClusterError(f"cluster {_short(str(path))!r}: cannot be read ({error})") from None
        raise ClusterError(f"cluster {path}: is not UTF-8 text (byte {error.start})") from None
    return parse_cluster(text, str(path))


def parse_cluster(text: str, name: str) -> ClusterSpec:
    """A cluster from TOML text; `name` is for messages."""
    try:
        spec = msgspec.convert(tomllib.loads(text), ClusterSpec)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"cluster {name}: malformed TOML: {_one_line(error)}") from None
    except msgspec.ValidationError as error:
        raise ClusterError(f"cluster {name}: {_one_line(error)}") from None
    except RecursionError:
        raise ClusterError(f"cluster {name}: malformed TOML: brackets inside brackets without end") from None
    for problem in _problems(spec):
        raise ClusterError(f"cluster {name}: {problem}")
    return spec


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _problems(spec: ClusterSpec) -> Iterator[str]:
    """What is wrong with a description, worst first."""
    yield from _bad_name("name", spec.name)
    if not spec.groups or not spec.levels:
        yield "groups and levels: wanted at least one of each"
    for i, group in enumerate(spec.groups):
        yield from _outside(f"groups[{i}].count", group.count, 1, MOST_UNITS, "devices")
        yield from _device_problems(f"groups[{i}].device", group.device)
    for i, level in enumerate(spec.levels):
        yield from _bad_name(f"levels[{i}].name", level.name)
        same = next((j for j, other in enumerate(spec.levels[:i]) if other.name == level.name), None)
        if same is not None:
            yield f"levels[{i}].name is {level.name!r}, as levels[{same}]'s; wanted names that tell levels apart"
        yield from _outside(f"levels[{i}].size", level.size, 1, MOST_UNITS, "units")
        yield from _outside(f"levels[{i}].latency_us", level.latency_us, 0, 1e7, "µs")
        yield from _outside(f"levels[{i}].bytes_per_us", level.bytes_per_us, 1e-2, 1e9, "bytes per µs (1 GB/s is 1000)")
        yield from _outside(f"levels[{i}].switch_bytes_per_us", level.switch_bytes_per_us, 0, 1e9, "bytes per µs")
    product = math.prod(level.size for level in spec.levels)
    if product != spec.devices:
        sizes = " × ".join(str(level.size) for level in spec.levels)
        yield f"level sizes {sizes} multiply to {product}, but groups hold {spec.devices} devices"
    yield from _host_problems(spec.host)
    if spec.profile is not None:
        yield from (f"profile.{problem}" for problem in profile_problems(spec.profile))
    if spec.backend not in ("nccl", "gloo"):
        yield f"backend is {spec.backend!r}; wanted 'nccl' or 'gloo'"


def _bad_name(where: str, name: str) -> Iterator[str]:
    """One problem if a name would not read well on one line of a table."""
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        yield f"{where} is {_short(name)!r}; wanted 1 to {LONGEST_NAME} printable characters"


def _device_problems(where: str, device: Device) -> Iterator[str]:
    yield from _bad_name(f"{where}.name", device.name)
    yield from _outside(f"{where}.memory_bytes", device.memory_bytes, 2**20, 2**44, "bytes")
    yield from _outside(f"{where}.memory_bytes_per_us", device.memory_bytes_per_us, 1, 1e9, "bytes per µs")
    yield from _outside(f"{where}.kernel_floor_us", device.kernel_floor_us, 0, 1e6, "µs")
    yield from _outside(f"{where}.matmul_efficiency", device.matmul_efficiency, 1e-3, 1, "parts of the peak")
    yield from _outside(f"{where}.memory_efficiency", device.memory_efficiency, 1e-3, 1, "parts of the peak")
    if not device.peak_flops:
        yield f"{where}.peak_flops is empty; wanted at least one dtype"
    for dtype, peak in device.peak_flops.items():
        if dtype not in ITEM_BYTES:
            yield f"{where}.peak_flops.{dtype}: no such dtype; wanted names such as float32, bfloat16, float16, float64"
        yield from _outside(f"{where}.peak_flops.{dtype}", peak, 1e6, 1e19, "flops per second")


def _host_problems(host: Host) -> Iterator[str]:
    yield from _outside("host.memory_bytes", host.memory_bytes, 0, 2**50, "bytes")
    yield from _outside("host.link_bytes_per_us", host.link_bytes_per_us, 0, 1e9, "bytes per µs")
    yield from _outside("host.nvme_bytes_per_us", host.nvme_bytes_per_us, 0, 1e9, "bytes per µs")


def _outside(where: str, value: float, least: float, most: float, unit: str) -> Iterator[str]:
    """One problem if `value` is not from `least` to `most` (nan never is)."""
    if not least <= value <= most:
        yield f"{where} is {value:g}; wanted {least:g} to {most:g} {unit}"


def dump_cluster(spec: ClusterSpec) -> str:
    """The cluster as TOML that `read_cluster` reads back to an equal one."""
    data = msgspec.to_builtins(spec)
    if spec.profile is None:
        del data["profile"]
    return "\n".join(_emit(data, "")).lstrip("\n") + "\n"


def _emit(table: dict[str, Any], path: str) -> Iterator[str]:
    """Lines of a TOML table: plain values and lists of them first, then tables and arrays of tables."""
    for key, value in table.items():
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], dict):
            yield f"{_key(key)} = [{', '.join(map(_scalar, value))}]"
        elif not isinstance(value, (dict, list, tuple)):
            yield f"{_key(key)} = {_scalar(value)}"
    for key, value in table.items():
        if isinstance(value, (list, tuple)) and not (value and isinstance(value[0], dict)):
            continue
        inner = f"{path}{_key(key)}"
        if isinstance(value, dict):
            yield from ("", f"[{inner}]", *_emit(value, inner + "."))
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from ("", f"[[{inner}]]", *_emit(item, inner + "."))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _scalar(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _string(value) if isinstance(value, str) else repr(value)


def _string(text: str) -> str:
    """A TOML basic string: JSON's escapes are TOML's, and DEL must be escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
