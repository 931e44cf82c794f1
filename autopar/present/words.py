"""Quantities and names as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def bytes_words(count: float) -> str:
    """12.3 GiB, 512 B."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"


def time_words(us: float) -> str:
    """3.2 µs, 41.0 ms, 1.25 s, 2.1 min."""
    if us < 1e3:
        return f"{us:.1f} µs"
    if us < 1e6:
        return f"{us / 1e3:.2f} ms" if us < 1e4 else f"{us / 1e3:.1f} ms"
    return f"{us / 1e6:.2f} s" if us < 6e7 else f"{us / 6e7:.1f} min"


def count_words(count: float) -> str:
    """124 M, 8.03 B, 950."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def bar(part: float, width: int) -> str:
    """`part` (0 to 1) of `width` characters, in eighths of a character; something for anything above zero."""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    if part > 0 and eighths == 0:
        eighths = 1
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def pattern_of(name: str) -> str:
    """`model.layers.12.mlp.up_proj.weight` -> `model.layers.*.mlp.up_proj.weight`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _indices(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def group_name(names: Iterable[str], *, alone: bool) -> str:
    """One name for parameters of one pattern: with `*` if it is `alone` in that, else with ranges, `{0-3,7}`."""
    members = list(names)
    pattern = pattern_of(members[0])
    if len(members) == 1:
        return members[0]
    if alone:
        return pattern
    return pattern.replace("*", "{" + ranges(i[0] for i in map(_indices, members)) + "}", 1)


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,7` of 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def shorten(text: str, most: int) -> str:
    """`text`, cut at a word to at most `most` characters, the cut marked."""
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0].rstrip(" ;,") + " …"


def change_words(amount: float, say: Callable[[float], str]) -> str:
    """`+3.2 ms`, `-1.00 GiB`, `nothing`."""
    return "nothing" if amount == 0 else f"{'+' if amount > 0 else '-'}{say(abs(amount))}"
