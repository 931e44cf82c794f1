"""A profile corrected by a run: for each class of ops and each collective, how far the prediction was off.

The corrections stand beside the raw points, with date, run and steps, and are bounded. The same run gives the same
corrections however often it is applied, since a run says which ones its prediction had in it.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec

from autopar.errors import ClusterError, PlanError
from autopar.ir.account import WITH_COLLECTIVE, RunReport
from autopar.ir.cluster import ClusterSpec
from autopar.ir.profile import LEAST_FACTOR, MOST_FACTOR, Scale, refuse_foreign

LEAST_SHARE = 0.005
"""A row that took less of the measured step says nothing about its class: the clock's own time is in it."""


def refitted(cluster: ClusterSpec, run: RunReport, name: str) -> tuple[ClusterSpec, tuple[Scale, ...]]:
    """The cluster with corrections from `run` (called `name`), and these.

    Raises:
        ClusterError: the cluster has no profile, or the run was on other hardware.
        PlanError: the run was with other ranks or another torch, measured no rows, or was not priced with this profile.
    """
    profile = cluster.profile
    if profile is None:
        raise ClusterError(f"cluster {cluster.name} has no profile to correct: measure one with `autopar profile`")
    if run.hardware is None:
        raise PlanError(f"run {name}: does not say on which hardware it was")
    refuse_foreign(profile, run.hardware, f"refit from {name}")
    if run.ranks != profile.ranks:
        raise PlanError(f"run {name}: was on {run.ranks} ranks, the profile is of {profile.ranks}")
    if run.torch != profile.torch:
        raise PlanError(f"run {name}: was with torch {run.torch}, the profile is of {profile.torch}: measure it again")
    if run.profile != profile.digest:
        raise PlanError(
            f"run {name}: its plan was {'priced with another profile' if run.profile else 'priced without a profile'}, "
            "so that it does not say how far this one is off; search with this cluster, then train again"
        )
    if not run.rows:
        raise PlanError(
            f"run {name}: has no rows; call module.measure(steps=3), train 8 steps, then module.report(path)"
        )
    found = tuple(_scales(run, name))
    if not found:
        raise PlanError(f"run {name}: no class of ops or collective took {LEAST_SHARE:.1%} of a step or more")
    kept = tuple(s for s in profile.scales if s.what not in {f.what for f in found})
    return msgspec.structs.replace(cluster, profile=msgspec.structs.replace(profile, scales=kept + found)), found


def _scales(run: RunReport, name: str) -> list[Scale]:
    predicted: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for row in run.rows:
        if row.kind == "other" or row.what.endswith(WITH_COLLECTIVE):
            continue
        what = row.what.split()[0] if row.kind == "collective" else row.what
        predicted[what] += row.predicted_us
        measured[what] += row.measured_us
    least = LEAST_SHARE * (run.timed_us or run.measured_us)
    found = []
    for what, us in predicted.items():
        if us <= 0 or measured[what] < least:
            continue
        asked = run.factors.get(what, 1.0) * measured[what] / us
        factor = min(MOST_FACTOR, max(LEAST_FACTOR, asked))
        found.append(
            Scale(
                what=what, factor=float(f"{factor:.4g}"), date=run.date, run=Path(name).name,
                steps=run.steps, bounded=factor != asked,
            )
        )  # fmt: skip
    return found


def scales_text(found: tuple[Scale, ...]) -> str:
    """One line a correction."""
    return "\n".join(f"{s.what}: × {s.factor:.3g}{' (bounded)' if s.bounded else ''}" for s in found)
