"""Every field case of the kinds that the compiler answers for is tested by its id, or waits here for a named room.

A test names a row in its function's name (`test_cap08_09_rest`: CAP-08 and CAP-09), or the row's id stands in a text
of the test file: a docstring, a table of cases, a parameter's id ("OP-21"). What is skipped outright names nothing. A
row both tested and waiting fails: take it out of `WAITING` when its test comes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASES = "shared/cases/field-cases.md"
"""The field cases are in a folder beside the repository (`../shared`), or above that, not in it."""
KINDS = ("CAP", "OP", "NUM", "CLU", "MEM", "SOL", "USE", "X", "HNG")

WAITING = {
    "MEM-08": "checkpoint",
    "MEM-10": "offload",
    "MEM-14": "offload",
    "MEM-16": "offload",
    "MEM-17": "offload",
    "MEM-19": "checkpoint",
    "X-04": "checkpoint",
    "HNG-01": "training",
    "HNG-02": "training",
    "HNG-06": "training",
    "HNG-12": "checkpoint",
}
"""Row -> the room that it waits for."""

PARTLY = {
    "CAP-21": ("offload", "the same with offload on"),
    "NUM-06": ("offload", "clipping with offload on"),
    "NUM-24": ("offload", "an overflow in an offloaded gradient"),
    "MEM-01": ("offload", "ZeRO-1 and 2 by micro-batches, and offload on"),
    "MEM-04": ("pipeline", "what the ranks of every stage hold, within the band"),
    "MEM-07": ("checkpoint", "construction without the whole model on each rank"),
    "CLU-05": ("pipeline", "expert parallelism and stages, which are strategies as well"),
    "CLU-11": ("pipeline", "the training of layers on stages"),
    "CLU-12": ("pipeline", "stage sizes that do not sum to the layers"),
    "CLU-14": ("pipeline", "the training of stages that span nodes"),
    "SOL-03": ("offload", "switched on where nothing fits without it"),
}
"""Row -> (the room that a part of it waits for, which part); the rest is tested."""

ROOMS = {
    "pipeline": "issue 6, run every plan",
    "offload": "issue 7, heterogeneous memory",
    "training": "the issue of training: ranks that feed themselves",
    "checkpoint": "the issue of training and checkpoints",
}
"""What is still to be built, and where."""

_TITLE = re.compile(rf"^({'|'.join(k.lower() for k in KINDS)})_?(\d\d)((?:_\d\d)*)(?:_|$)")
_ID = re.compile(rf"\b({'|'.join(KINDS)})-(\d\d)\b")


@lru_cache(maxsize=1)
def rows() -> tuple[str, ...]:
    """Ids in the first column of the tables of the field cases."""
    file = next((p / CASES for p in TESTS.parent.parents if (p / CASES).is_file()), None)
    if file is None:
        pytest.skip(f"the field cases are not beside this checkout (../{CASES})")
    found = re.findall(rf"^\| ((?:{'|'.join(KINDS)})-\d\d) \|", file.read_text(), flags=re.MULTILINE)
    assert len(found) == len(set(found)) > 50
    return tuple(found)


def named_in(source: str) -> set[str]:
    """Ids that a test file names."""
    found: set[str] = set()
    for node in _kept(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            title = _TITLE.match(node.name.removeprefix("test_"))
            if title:
                kind, first, more = title.groups()
                found |= {f"{kind.upper()}-{n}" for n in (first, *more.split("_")) if n}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {f"{kind}-{n}" for kind, n in _ID.findall(node.value)}
    return found


def _kept(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, tests that are skipped outright left out."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        marks = map(ast.unparse, getattr(child, "decorator_list", ()))
        if not any("skip" in mark and "skipif" not in mark for mark in marks):
            yield from _kept(child)


@lru_cache(maxsize=1)
def places() -> dict[str, list[str]]:
    """Row -> the test files that name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path != Path(__file__):
            for row in named_in(path.read_text()):
                found.setdefault(row, []).append(str(path.relative_to(TESTS)))
    return found


def test_every_row_is_tested_or_waits() -> None:
    missing = [row for row in rows() if row not in places() and row not in WAITING]
    assert not missing, f"no test names {', '.join(missing)}, and they do not wait for a room in WAITING"


def test_no_row_waits_that_is_tested() -> None:
    both = {row: places()[row] for row in WAITING if row in places()}
    assert not both, f"tested, so no longer waiting; take them out of WAITING: {both}"


def test_only_rows_wait() -> None:
    waiting = {**WAITING, **{row: room for row, (room, _) in PARTLY.items()}}
    assert len(waiting) == len(WAITING) + len(PARTLY)
    assert set(waiting) <= set(rows()), sorted(set(waiting) - set(rows()))
    assert set(waiting.values()) <= set(ROOMS), sorted(set(waiting.values()) - set(ROOMS))


@pytest.mark.parametrize("row", WAITING)
def test_waiting(row: str) -> None:
    pytest.skip(f"{row} waits for {WAITING[row]} ({ROOMS[WAITING[row]]})")


@pytest.mark.parametrize("row", PARTLY)
def test_waiting_in_part(row: str) -> None:
    room, part = PARTLY[row]
    pytest.skip(f"{row}: {part} waits for {room} ({ROOMS[room]})")


def test_tests_name_rows_that_exist() -> None:
    """A typing error in an id would count for nothing."""
    unknown = {row: where for row, where in places().items() if row not in rows()}
    assert not unknown, unknown


def test_the_search_sees() -> None:
    source = '''
def test_cap08_09_21_unused(): pass
def test_use_05_next(): pass
def test_x06(): pass
def test_num1_too_short(): pass
def test_top01_other(): pass
def helper_op13(): pass
@pytest.mark.parametrize("row", ["OP-21"])
def test_positions():
    """CLU-17, CLU-18: no XOP-33, no CLU-1."""
    # NUM-03: a comment names nothing
@pytest.mark.skip(reason="CLU-11 waits for stages")
def test_clu11_stages():
    """CLU-14"""
@later.skip(reason="under another name")
def test_clu_12_stages(): pass
'''
    wanted = {"CAP-08", "CAP-09", "CAP-21", "USE-05", "X-06", "OP-21", "CLU-17", "CLU-18"}
    assert named_in(source) == wanted
