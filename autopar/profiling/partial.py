"""What was measured so far, on disk beside the profile to be: a run that was stopped goes on from there."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from autopar.errors import ClusterError
from autopar.ir.profile import Curve, Fingerprint, LinkCurve, never_falling
from autopar.profiling.clock import Timed

FORMAT: Final = "autopar-profile-points"


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timed size. `kind`: "work" or "link"; `scale`: what was asked for, `size` what it came to."""

    kind: Literal["work", "link"]
    key: tuple[str, str, str]
    scale: int
    size: float
    p10: float
    p50: float
    p90: float
    stable: bool

    def __post_init__(self) -> None:
        if not 0 < self.p10 <= self.p50 <= self.p90 < math.inf or not 0 < self.size < math.inf:
            raise ValueError(
                f"point {self.key}: size {self.size:g} took {self.p10:g}, {self.p50:g}, {self.p90:g} µs: "
                "wanted numbers above 0 that rise"
            )
        if self.kind == "link" and not self.key[2].isdecimal():
            raise ValueError(f"point {self.key}: {self.key[2]!r} members: wanted a whole number")

    @classmethod
    def of(
        cls, kind: Literal["work", "link"], key: tuple[str, str, str], scale: int, size: float, timed: Timed
    ) -> Point:
        """With four digits of each time."""
        p10, p50, p90 = (float(f"{x:.4g}") for x in (timed.p10, timed.p50, timed.p90))
        return cls(kind=kind, key=key, scale=scale, size=size, p10=p10, p50=p50, p90=p90, stable=timed.stable)

    @property
    def name(self) -> tuple[str, tuple[str, str, str], int]:
        """What tells points apart."""
        return self.kind, self.key, self.scale


class Partial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The points of a run and the machine they hold for."""

    format: Literal["autopar-profile-points"] = FORMAT
    hardware: Fingerprint
    torch: str
    ranks: int
    threads: int
    points: tuple[Point, ...] = ()
    notes: tuple[str, ...] = ()


def path_of(output: Path) -> Path:
    """Where the points are kept until the profile is written."""
    return output.with_name(output.name + ".partial")


def read_partial(path: Path, like: Partial) -> tuple[Partial, str]:
    """(what was kept there, a word about it); `like`, with no points, where there is nothing to go on from.

    Raises:
        ClusterError: it was measured on other hardware, or with other ranks, threads or torch.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return like, ""
    except OSError as error:
        raise ClusterError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        found = msgspec.json.decode(data, type=Partial)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return like, f"{path} holds no points that can be read ({' '.join(str(error).split())}): measuring all of them"
    for name in ("hardware", "ranks", "threads", "torch"):
        was, now = getattr(found, name), getattr(like, name)
        if was != now:
            raise ClusterError(
                f"{path}: was measured with {name} {was}, here it is {now}: points of two machines don't mix. "
                "Delete the file, or write elsewhere with -o"
            )
    return found, f"going on from {path}: {len(found.points)} points are there"


def write_partial(path: Path, partial: Partial) -> None:
    """Keep the points, whole or not at all."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_bytes(msgspec.json.encode(partial))
    scratch.replace(path)


def curves_of(points: Iterable[Point]) -> tuple[tuple[Curve, ...], tuple[LinkCurve, ...]]:
    """Curves through the points: sizes in order, medians made never to fall."""
    works: dict[tuple[str, str, str], list[Point]] = {}
    links: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        (works if point.kind == "work" else links).setdefault(point.key, []).append(point)
    curves = tuple(Curve(work=k[0], shape=k[1], dtype=k[2], **_columns(p)) for k, p in works.items())  # type: ignore[arg-type]
    spans = tuple(
        LinkCurve(collective=k[0], level=k[1], members=int(k[2]), **_columns(p))  # type: ignore[arg-type]
        for k, p in links.items()
    )
    return curves, spans


def _columns(points: list[Point]) -> dict[str, tuple[float, ...]]:
    one = {p.size: p for p in points}
    rows = [one[size] for size in sorted(one)]
    return {
        "sizes": tuple(p.size for p in rows),
        "p10": tuple(p.p10 for p in rows),
        "p50": tuple(float(f"{x:.6g}") for x in never_falling(p.p50 for p in rows)),
        "p90": tuple(p.p90 for p in rows),
        "unstable": tuple(p.size for p in rows if not p.stable),
    }
