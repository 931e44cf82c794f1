"""SOL rows of the field cases: what the search answers, how sure it is, and what it says where it has no answer."""

from __future__ import annotations

import math
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import Options, api
from autopar.errors import InfeasibleError, SolverError
from autopar.ir.graph import CapturedGraph
from autopar.ir.problem import evaluate
from autopar.ir.solution import Status
from autopar.solver import highs, solve
from autopar.solver.linear import LinearAnswer
from tests.cases.lm import TinyLM, text
from tests.cases.run import captured
from tests.cost_model.helpers import cluster
from tests.solver.problems import hard_problem, random_problem

# ---- SOL-02: the linear solver dies, answers garbage, is absent, or has no time

PLAIN = (r"HiGHS|CBC", r"\d+\.\d s|pip install")
"""What every message about a solver has: which, and after how long, or what to install."""


class _Bindings:
    """highspy with one part replaced."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __getattr__(self, name: str) -> Any:
        import highspy

        return self.parts[name] if name in self.parts else getattr(highspy, name)


def broken(kind: str) -> Any:
    """highspy as it is after this mishap."""
    import highspy

    class Broken(highspy.Highs):  # type: ignore[misc]
        def run(self) -> Any:
            if kind == "raises":
                raise RuntimeError("std::bad_alloc")
            if kind == "error":
                return highspy.HighsStatus.kError
            return super().run()

        def getSolution(self) -> Any:  # noqa: N802 (HiGHS names it)
            solution = super().getSolution()
            if kind == "nan":
                solution.col_value = [math.nan] * len(solution.col_value)
            if kind == "short":
                solution.col_value = solution.col_value[1:]
            return solution

        def getModelStatus(self) -> Any:  # noqa: N802
            return highspy.HighsModelStatus.kUnknown if kind == "unknown" else super().getModelStatus()

    return _Bindings(Highs=Broken)


MISHAPS = ("raises", "error", "unknown", "nan", "short", "absent")


def plant(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on HiGHS does this."""
    highs._library_class.cache_clear()
    if kind == "absent":
        monkeypatch.setitem(sys.modules, "highspy", None)
    else:
        library = broken(kind)
        monkeypatch.setattr(highs, "_library", lambda: library)


@pytest.fixture
def _mended():
    yield
    highs._library_class.cache_clear()


def small() -> CapturedGraph:
    torch.manual_seed(0)
    return captured(TinyLM(), text())


@pytest.mark.usefixtures("_mended")
@pytest.mark.parametrize("kind", MISHAPS)
def test_sol02_a_broken_solver_leaves_a_valid_plan_and_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local search's plan is right, has a bound, and a note. Seen to fail: the library's own exception."""
    graph = small()
    right = api.plan_captured(graph, cluster((2, 1.0, 100.0)), options=Options(precision="fp64", gap=0.0))
    plant(kind, monkeypatch)
    plan = api.plan_captured(graph, cluster((2, 1.0, 100.0)), options=Options(precision="fp64"))
    said = [n.message for n in plan.notes if n.kind == "solver"]
    assert len(said) == 1 and all(re.search(words, said[0]) for words in PLAIN)
    assert plan.solver.status == "feasible"
    assert plan.solver.bound_us <= right.solver.objective_us <= plan.solver.objective_us * (1 + 1e-9)
    torch.manual_seed(0)
    options = Options(precision="fp64")
    assert api.verify(TinyLM().double(), text(), options=options, plan=plan, captured=graph, steps=1).ok


@pytest.mark.usefixtures("_mended")
@pytest.mark.parametrize("kind", MISHAPS)
def test_sol02_where_nothing_is_found_without_it_that_is_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory, and a search over stages, which has no way around the solver."""
    graph = small()
    plant(kind, monkeypatch)
    for options in (Options(precision="fp64", memory_limit=1000), Options(precision="fp64", stages=True)):
        with pytest.raises(SolverError) as caught:
            api.plan_captured(graph, cluster((2, 1.0, 100.0)), options=options)
        assert all(re.search(words, str(caught.value)) for words in PLAIN) and "\n" not in str(caught.value)


PROGRAMS = {
    "exits 1": "exit 1",
    "is killed": "kill -9 $$",
    "writes garbage": 'for a in "$@"; do case "$a" in *.sol) echo "]]garbage" > "$a";; esac; done',
    "writes nothing": "exit 0",
    "is absent": None,
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_sol02_a_solver_program_that_dies(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same for a solver that is a program beside us."""
    import pulp

    program = tmp_path / "cbc"
    if (body := PROGRAMS[kind]) is not None:
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(program))
    problem = hard_problem(nodes=12)
    right = solve(problem)
    found = solve(problem, backend="pulp-cbc")
    assert all(re.search(words, found.failure) for words in PLAIN), found.failure
    assert found.status is Status.FEASIBLE and evaluate(problem, found.choice).feasible
    assert found.bound_us <= right.objective_us <= found.objective_us


def test_sol02_a_bound_and_a_choice_without_a_solver_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many problems: the bound is one, and what is called a choice fits; where the mixed-integer part alone fails,
    the relaxation's bound stays."""
    problems = [random_problem(seed) for seed in range(60)]
    right = [solve(p) for p in problems]

    def fails(model: Any, **_: Any) -> LinearAnswer:
        raise SolverError("HiGHS ended after 0.1 s")

    for parts in (("solve_mip",), ("solve_lp", "solve_mip")):
        for part in parts:
            monkeypatch.setattr(highs, part, fails)
        found = [solve(p, explain=False) for p in problems]
        assert any(f.failure for f in found)
        for problem, best, other in zip(problems, right, found, strict=True):
            if other.choice:
                assert evaluate(problem, other.choice).feasible
                assert other.bound_us <= best.objective_us * (1 + 1e-9)
                assert best.objective_us <= other.objective_us * (1 + 1e-9)
            else:
                assert other.status in (Status.FAILED, Status.INFEASIBLE)
                assert other.status is Status.FAILED or best.status is Status.INFEASIBLE
        monkeypatch.undo()


def test_sol02_a_millisecond_gives_a_plan_or_says_how_long_it_had() -> None:
    graph = small()
    for more in ({}, {"memory_limit": 60_000}, {"stages": True}):
        options = Options(precision="fp64", time_limit_s=1e-3, **more)
        try:
            plan = api.plan_captured(graph, cluster((2, 1.0, 100.0)), options=options)
        except InfeasibleError as error:
            assert more and "in 0.001 s" in str(error) and "--time-limit" in str(error)
            continue
        assert plan.solver.bound_us <= plan.solver.objective_us < math.inf
        assert api.verify(TinyLM().double(), text(), options=options, plan=plan, captured=graph, steps=1).ok
