"""Emitted text: golden files, loops, tables, line table, literals. AUTOPAR_GOLDEN=1 writes the golden files anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.codegen import check_program, emit, lower
from autopar.codegen.render import literal
from autopar.codegen.roll import Loop, _place_read, roll
from autopar.codegen.tables import _instances, _rows, pattern
from autopar.errors import CompilerError
from autopar.ir.graph import Phase, Ref, TorchConst
from tests.codegen.hand import chain, named_plan

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["whole", "dp", "zero3", "tp"])
def test_golden(name: str) -> None:
    captured = chain()
    plan = named_plan(captured, name, 2)
    program = lower(captured, plan)
    check_program(program, plan)
    text = emit(program).text
    file = GOLDEN / f"chain_{name}.py.txt"
    if os.environ.get("AUTOPAR_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    assert text == emit(lower(chain(), named_plan(chain(), name, 2))).text


def test_long_chains_stay_short() -> None:
    """80 layers: one loop each way, a table of parameters in one line."""
    captured = chain(80)
    sizes = [
        len(emit(lower(c, named_plan(c, "whole", 1))).text.split("PARAMETERS = {")[0]) for c in (chain(4), captured)
    ]
    assert sizes[1] - sizes[0] < 50


def test_loops() -> None:
    captured = chain(5)
    plan = named_plan(captured, "tp", 2)
    forward = lower(captured, plan).function("top", Phase.FORWARD)
    items, renamed = roll(forward.steps, {x.name for x in (*forward.saved, *forward.outputs) if x})
    loops = [x for x in items if isinstance(x, Loop)]
    assert [x.indices for x in loops] == [range(0, 4)]
    assert renamed == {"h4": "h1", "h4_tpR": "h1_tpR"}


def test_no_loop_where_a_turns_value_is_needed_later() -> None:
    captured = chain(5)
    forward = lower(captured, named_plan(captured, "whole", 1)).function("top", Phase.FORWARD)
    items, _ = roll(forward.steps, {"h2", "loss", "y", "x", "h5"})
    assert [x.indices for x in items if isinstance(x, Loop)] == [range(2, 5)]


def test_what_is_carried_is_read_before_it_is_set() -> None:
    """Turn 0 makes a0 then b0, turn 1 a1 then b1; a read at position 1 comes after a is set and before b is."""
    where = [{"a0": 0, "b0": 1}, {"a1": 0, "b1": 1}]
    for names, fits in ((["start", "b0"], True), (["start", "a0"], False), (["a0", "a1"], True), (["x", "x"], True)):
        carried: dict[int, str] = {}
        assert _place_read(names, where, 1, carried) is fits
        assert carried == ({1: "start"} if names == ["start", "b0"] else {})
    assert not _place_read(["other", "b0"], where, 1, {1: "start"})


def test_lines_say_where_they_come_from() -> None:
    captured = chain()
    source = emit(lower(captured, named_plan(captured, "dp", 2)))
    lines = source.text.splitlines()
    for number, place in source.lines.items():
        assert " = " in lines[number - 1], lines[number - 1]
        assert place.source.startswith("hand.py")
    made = {lines[n - 1].strip().split(" = ")[0]: p for n, p in source.lines.items()}
    assert made["relu"].module_path == "act"
    assert made["h1, layer_saved[i]"].module_path == "layers.0"


def test_tables() -> None:
    assert _rows([(1, 2), (4, 5), (7, 8)]) == "[[k + 3 * i for k in [1, 2]] for i in range(3)]"
    assert _rows([(1, 2), (4, 5), (6, 8)]) == "[[1, 2], [4, 5], [6, 8]]"
    assert eval(_rows([(8, 1), (17, 10)])) == [[8, 1], [17, 10]]
    assert pattern(["a.0.b", "a.1.b"]) == "a.*.b" and pattern(["a.b"]) == "a.b"
    assert _instances(["m.0", "m.1"]) == '[f"m.{i}" for i in range(2)]'
    assert _instances(["m.1", "m.3"]) == '["m.1", "m.3"]'


@pytest.mark.parametrize(
    ("arg", "text"),
    [
        (Ref("x"), "y"), (TorchConst("device", "cpu"), "rt.device"), (TorchConst("dtype", "float32"), "torch.float32"),
        (TorchConst("memory_format", "contiguous_format"), "torch.contiguous_format"),
        ((1, (2.5, None)), "[1, [2.5, None]]"),
        (float("-inf"), 'float("-inf")'), (True, "True"), ('a"b', '"a\\"b"'),
    ],
)  # fmt: skip
def test_literals(arg: object, text: str) -> None:
    assert literal(arg, {"x": "y"}) == text


def test_what_has_no_text() -> None:
    with pytest.raises(CompilerError, match="type object cannot be written"):
        literal(object(), {})
