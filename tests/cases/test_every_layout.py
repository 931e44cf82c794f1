"""Functions of many kinds under every layout that the planner may pick: see `tests.cases.forced`."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from autopar.errors import CaptureError
from autopar.ir.layout import P, S
from autopar.ir.mesh import Mesh
from autopar.ir.strategy import Rule
from autopar.ops import TABLE
from autopar.ops.entry import OpEntry
from tests.cases.forced import Function, case, check, grid, line
from tests.cases.functions import FUNCTIONS, LONG, ints, one
from tests.cases.run import unequal


def checked(name: str, *meshes: Mesh) -> None:
    """A function of the list."""
    fn, parameters, inputs = FUNCTIONS[name]
    check(case(Function(fn, parameters, inputs), inputs, steps=1), *meshes)


QUICK = [n for n in FUNCTIONS if n not in LONG]


@pytest.mark.parametrize("name", QUICK[::5])
def test_every_layout(name: str) -> None:
    """On 3 ranks, where a factor of the number of ranks and a halving cannot cancel; the others and more ranks are
    run by hand, since all of them take ten minutes."""
    checked(name, line(3))


@pytest.mark.parametrize("name", QUICK[1::6])
def test_every_layout_of_unequal_pieces(name: str) -> None:
    """On 5 ranks 12 rows are 3 3 3 3 0, and 6 rows 2 2 2 0 0."""
    checked(name, line(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [line(2), line(3), line(4), line(5), grid(), grid("dp", "tp"), grid("free", "tp", (2, 3))], ids=str
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_layout_on_more_meshes(name: str, mesh: Mesh) -> None:
    checked(name, mesh)


WRONG: dict[str, tuple[str, Any, Rule]] = {
    "a function of each summand": ("aten.relu.default", lambda x: x.relu(), Rule((P,), (P,))),
    "sums along the cut": ("aten.cumsum.default", lambda x: x.cumsum(1), Rule((S(1),), (S(1),))),
    "softmax of pieces": ("aten._softmax.default", lambda x: x.softmax(1), Rule((S(1),), (S(1),))),
    "argmax of pieces": ("aten.argmax.default", lambda x: (x.argmax(1), x * 2), Rule((P,), (S(1),))),
    "regrouped rows": ("aten.view.default", lambda x: x.view(6, 12).sin(), Rule((S(1),), (S(1),))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that never fails proves nothing: the usual wrong rule beside the right ones."""
    op, fn, wrong = WRONG[name]
    monkeypatch.setitem(TABLE, op, OpEntry(rules=lambda node, metas: (wrong,)))  # type: ignore[arg-type]
    made = one(fn, 12, 6)
    with pytest.raises(AssertionError, match=op):
        check(case(Function(*made), made[2], steps=1), line(2))


def test_a_loss_whose_shapes_depend_on_data_is_refused_with_its_line() -> None:
    t, lengths = ints(6, 3, low=1, high=6), (2, 3, 1, 2, 2, 3)
    made = one(lambda x: F.ctc_loss(x.log_softmax(-1), t, (6, 6, 5, 6, 4, 6), lengths), 6, 6, 6)
    with pytest.raises(CaptureError, match=r"test_every_layout.py:\d+: `.*ctc_loss.*needs the value of a tensor"):
        case(Function(*made), made[2])


def test_what_is_out_of_reach_is_left_out() -> None:
    """Only sums can be taken as sums: a product of inputs that are cut or whole has nothing else."""
    x = {"x": unequal(6, 6)}
    plans = check(case(Function(lambda x, y: x @ y, x, {"y": unequal(6, 6)}), {"y": unequal(6, 6)}), line(2))
    made = {s.inputs[0] for plan in plans for key, s in plan.strategies["top"].items() if "mm.default/forward" in key}
    assert made == {"free:R", "free:S(0)", "free:S(1)", "free:P"}
