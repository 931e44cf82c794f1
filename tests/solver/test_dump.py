"""Problems as text: there and back, other versions and unknown keys refused, and readable by other solvers."""

from __future__ import annotations

from pathlib import Path

import pulp
import pytest

from autopar.errors import UserError
from autopar.solver import dump_problem, load_problem, solve, write_lp, write_mps
from tests.solver.problems import hard_problem, random_problem

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pulp.*")


@pytest.mark.parametrize("seed", range(20))
def test_there_and_back(seed: int) -> None:
    problem = random_problem(seed)
    assert load_problem(dump_problem(problem)) == problem


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('{"version":1', '{"version":2', "has version 2, this autopar reads version 1"),
        ('{"version":1', '{"colour":1,"version":1', "unknown field `colour`"),
        ('"groups":0', '"groups":"many"', "Expected `int`, got `str`"),
        ('"producer":0', '"producer":99', "problem file hard 4"),
        ('{"version":1', "version", "not a problem file"),
    ],
)
def test_what_is_wrong_is_said(old: str, new: str, words: str) -> None:
    text = dump_problem(hard_problem(nodes=4))
    assert old in text
    with pytest.raises(UserError, match=words):
        load_problem(text.replace(old, new, 1))


def test_written_files_hold_the_problem(tmp_path: Path) -> None:
    problem = hard_problem(nodes=8)
    write_mps(problem, tmp_path / "p.mps")
    _, program = pulp.LpProblem.fromMPS(str(tmp_path / "p.mps"))
    program.solve(pulp.PULP_CBC_CMD(msg=False))
    assert pulp.value(program.objective) == pytest.approx(solve(problem).objective_us)
    write_lp(problem, tmp_path / "p.lp")
    assert "x_0_0" in (tmp_path / "p.lp").read_text()
