"""Each bug of the table is caught by the function behind `autopar verify`, which names a tensor; its twin passes."""

from __future__ import annotations

import pytest

from tests.seeded_bugs.bugs import BUGS, Bug, planted
from tests.seeded_bugs.plans import PLANS, planned

KINDS = {
    "wrong gradient scale", "missing all-reduce", "double all-reduce", "stale gather", "tied weight not synchronised",
    "per-rank seed wrong", "norm over the local shard only", "padding counted in the loss",
    "unequal micro-batch averaging", "wrong optimizer shard", "recompute with other random numbers",
    "off-by-one stage boundary", "swapped send", "master-weight skew",
}  # fmt: skip
CASES = [(bug, plan) for bug in BUGS for plan in bug.plans]


@pytest.mark.parametrize(("bug", "plan"), CASES, ids=[f"{b.kind}: {b.name}-{plan}" for b, plan in CASES])
def test_a_planted_bug_is_caught(bug: Bug, plan: str) -> None:
    made = planned(plan)
    with planted(bug, made) as code:
        report = made.verify(code)
    wrong = [row.name for row in report.rows if not row.ok]
    assert any(name.startswith(bug.seen) for name in wrong), wrong or "nothing differs"
    assert all(f"DIFF {name}" in str(report) for name in wrong[:1])


@pytest.mark.parametrize("plan", PLANS)
def test_without_a_bug_nothing_differs(plan: str) -> None:
    report = planned(plan).verify()
    assert report.ok, report


def test_every_kind_is_planted() -> None:
    assert {bug.kind for bug in BUGS} == KINDS
    assert {plan for bug in BUGS for plan in bug.plans} == set(PLANS)
