"""A profile corrected by a run: towards what was measured, within bounds, the same however often; refused elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import autopar
from autopar import cli
from autopar.cost_model.clusters import dump_cluster, load_cluster
from autopar.cost_model.collectives import collective_us
from autopar.cost_model.measured import SQUARE, Measured, Work
from autopar.cost_model.op_cost import op_cost, optimizer_us
from autopar.errors import ClusterError, PlanError
from autopar.ir import profile as kinds
from autopar.ir.account import BETWEEN, WITH_COLLECTIVE, Row, RunReport
from autopar.ir.graph import TensorMeta
from autopar.ir.profile import LEAST_FACTOR, MOST_FACTOR, Scale
from autopar.ir.reshard import Collective
from autopar.profiling.refit import refitted
from autopar.profiling.run import profile_here
from tests.cost_model.helpers import mesh, node
from tests.cost_model.test_measured import HERE, curve, link, profile, profiled
from tests.models import tiny

SPEC = profiled(profile(curve(kinds.MATMUL, SQUARE), curve(kinds.POINTWISE), link("all_reduce", "level0", 2)))
DIGEST = SPEC.profile.digest if SPEC.profile else ""


def row(kind: str, what: str, predicted: float, measured: float) -> Row:
    return Row(kind=kind, what=what, calls=1, predicted_us=predicted, measured_us=measured)


def run(*rows: Row, **changes: Any) -> RunReport:
    """Of 1000 µs."""
    given = {
        "model": "m", "cluster": "round", "ranks": 2, "rank": 0, "date": "2026-02-03", "torch": "2.13.0",
        "hardware": HERE, "profile": DIGEST, "steps": 3, "predicted_us": 1000.0, "measured_us": 1000.0,
        "timed_us": 1000.0, "between_us": 0.0, "predicted_bytes": 1, "measured_bytes": 1, "rows": rows,
    }  # fmt: skip
    return RunReport(**{**given, **changes})


def factors(found: tuple[Scale, ...]) -> dict[str, float]:
    return {s.what: s.factor for s in found}


def test_each_class_is_brought_to_what_was_measured() -> None:
    report = run(
        row("op", kinds.MATMUL, 100.0, 150.0),
        row("op", f"{kinds.MATMUL}, {WITH_COLLECTIVE}", 100.0, 900.0),
        row("op", kinds.NORM, 100.0, 50.0),
        row("op", kinds.SOFTMAX, 1.0, 4.0),
        row("op", kinds.COPY, 0.0, 50.0),
        row("collective", "all_reduce dp", 10.0, 40.0),
        row("collective", "all_reduce tp", 30.0, 20.0),
        row("collective", "slice tp", 20.0, 40.0),
        row("optimizer", kinds.OPTIMIZER, 20.0, 30.0),
        row("other", BETWEEN, 0.0, 100.0),
    )
    spec, found = refitted(SPEC, report, "some/run.json")
    # Too small a share of the step, and what was predicted to take no time, say nothing; two axes count together.
    assert factors(found) == {kinds.MATMUL: 1.5, kinds.NORM: 0.5, "all_reduce": 1.5, "slice": 2.0, kinds.OPTIMIZER: 1.5}
    assert {(s.date, s.run, s.steps, s.bounded) for s in found} == {("2026-02-03", "run.json", 3, False)}
    assert spec.profile is not None and SPEC.profile is not None
    measured = Measured(spec.profile)
    assert measured.op_us(Work(kinds.MATMUL, SQUARE, "float32", 1e5, 0.0)) == (30.0, "calibrated")
    # A class that is read from a neighbour's curve has its own correction, not the neighbour's.
    assert measured.op_us(Work(kinds.NORM, "", "float32", 1e5, 1e5)) == (10.0, "calibrated")
    assert measured.op_us(Work(kinds.POINTWISE, "", "float32", 1e5, 1e5)) == (20.0, "measured")
    on = mesh(SPEC, x=2)
    for collective, factor in ((Collective.ALL_REDUCE, 1.5), (Collective.SLICE, 2.0), (Collective.ALL_GATHER, 1.0)):
        before, after = (collective_us(collective, 1e5, "x", on, s) for s in (SPEC, spec))
        assert after == pytest.approx(before * factor), collective
    assert optimizer_us(100, "float32", 8, spec) == pytest.approx(1.5 * optimizer_us(100, "float32", 8, SPEC))
    scale = Scale(what=kinds.OPTIMIZER, factor=2.0, date="2026-02-03", run="run", steps=3)
    assert optimizer_us(1, "float32", 8, profiled(profile(curve(kinds.OPTIMIZER), scales=(scale,)))) == 20.0
    bare = msgspec.structs.replace(spec, profile=msgspec.structs.replace(spec.profile, curves=()))
    a = TensorMeta((64, 64), "float32")
    corrected, plain = (op_cost(node("aten.mm.default"), (a, a), (a,), s) for s in (bare, profiled(profile())))
    assert (corrected.us, corrected.source) == (pytest.approx(1.5 * plain.us), "calibrated")
    assert spec.profile.curves == SPEC.profile.curves and spec.profile.digest == SPEC.profile.digest


def test_again_changes_nothing() -> None:
    report = run(row("op", kinds.MATMUL, 100.0, 150.0))
    once, found = refitted(SPEC, report, "run")
    assert refitted(once, report, "run") == (once, found)
    # A run that was priced with the corrections, and took what they say, keeps them.
    later = run(row("op", kinds.MATMUL, 150.0, 150.0), factors=factors(found), date="2026-02-04")
    twice, again = refitted(once, later, "later")
    assert factors(again) == factors(found)
    assert twice.profile is not None and [s.run for s in twice.profile.scales] == ["later"]


@pytest.mark.parametrize(("measured", "factor"), [(900.0, MOST_FACTOR), (10.0, LEAST_FACTOR)])
def test_bounds(measured: float, factor: float) -> None:
    _, (found,) = refitted(SPEC, run(row("op", kinds.MATMUL, 100.0, measured)), "run")
    assert (found.factor, found.bounded) == (factor, True)


ONE = row("op", kinds.MATMUL, 100.0, 150.0)


@pytest.mark.parametrize(
    ("report", "kind", "words"),
    [
        (run(ONE, hardware=None), PlanError, "does not say on which hardware"),
        (run(ONE, hardware=msgspec.structs.replace(HERE, cores=64)), ClusterError, "other hardware"),
        (run(ONE, ranks=4), PlanError, "was on 4 ranks, the profile is of 2"),
        (run(ONE, torch="2.12.0"), PlanError, "was with torch 2.12.0"),
        (run(ONE, profile=""), PlanError, "priced without a profile"),
        (run(ONE, profile="0123"), PlanError, "priced with another profile"),
        (run(), PlanError, "has no rows"),
        (run(row("op", kinds.MATMUL, 100.0, 1.0)), PlanError, "no class of ops"),
    ],
)
def test_refused(report: RunReport, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        refitted(SPEC, report, "run.json")
    assert "run.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_cluster_without_a_profile_is_refused() -> None:
    with pytest.raises(ClusterError, match="no profile to correct"):
        refitted(msgspec.structs.replace(SPEC, profile=None), run(ONE), "run")


def _cli(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return ended.value.code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Profile, search, train, report, refit, search again: what is predicted is what was measured, class by class."""
    cluster, report = tmp_path / "here.toml", tmp_path / "run.json"
    profile_here(1, cluster, 0.5)
    model, batch = tiny("gpt2")
    plan = autopar.search(model, load_cluster(str(cluster)), example_inputs=batch)
    module = autopar.compile(model, plan=plan, example_inputs=batch)
    optimizer = torch.optim.AdamW(module.parameters())
    module.measure(steps=2)  # type: ignore[operator]
    for _ in range(6):
        module(**batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    found = module.report(report)  # type: ignore[operator]
    capsys.readouterr()
    assert not _cli("profile", "--refit", str(report), "-o", str(cluster), "--json")
    said = json.loads(capsys.readouterr().out)
    scales = {s["what"]: s["factor"] for s in said["scales"]}
    wanted = sum(r.predicted_us * scales.get(r.what, 1.0) for r in found.rows)
    after = autopar.search(model, load_cluster(str(cluster)), example_inputs=batch).predicted.step_time_us
    assert after == pytest.approx(wanted, rel=1e-3)
    text = cluster.read_text()
    assert not _cli("profile", "--refit", str(report), "-o", str(cluster))
    assert "matmul: ×" in capsys.readouterr().out
    assert cluster.read_text() == text
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["here.toml", "run.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cluster, report: report.unlink(), "cannot be read"),
        (lambda cluster, report: report.write_text("{"), "is not what module.report(path) writes"),
        (lambda cluster, report: cluster.unlink(), "here.toml"),
        (lambda cluster, report: cluster.write_text("name = 1"), "here.toml"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path, Path], object], words: str
) -> None:
    cluster, report = tmp_path / "here.toml", tmp_path / "run.json"
    cluster.write_text(dump_cluster(SPEC))
    run(ONE).save(report)
    change(cluster, report)
    assert _cli("profile", "--refit", str(report), "-o", str(cluster))
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
