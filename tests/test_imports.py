"""Rooms import `ir`, themselves, and what the table of docs/architecture.md allows; nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autopar"

FRONT = {"cli", "__main__"}
EVERY = {"errors"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "ir": set(),
    "ops": {"ir"},
    "tracer": {"ir"},
    "sharding": {"ir", "ops"},
    "cost_model": {"ir", "ops"},
    "prediction": {"ir", "cost_model"},
    "native": set(),
    "solver": {"ir", "native"},
    "codegen": {"ir", "ops"},
    "runtime": {"ir", "native"},
    "optim": {"native", "runtime"},
    "training": {"ir", "runtime", "api"},
    "profiling": {"ir", "cost_model", "runtime"},
    "verification": {"ir", "tracer"},
    "candidates": {"ir", "sharding", "cost_model", "solver", "codegen"},
    "meshes": {"ir", "sharding", "solver", "candidates"},
    "pipelines": {"ir", "sharding", "cost_model", "solver", "candidates"},
    "objectives": {"ir", "cost_model", "candidates"},
    "questions": {"ir", "sharding", "cost_model", "solver", "candidates", "present"},
    "staging": {"ir", "sharding", "codegen", "runtime"},
    "timelines": {"ir", "cost_model", "codegen", "candidates", "staging"},
    "proofs": {"ir", "ops", "tracer", "codegen", "runtime", "verification", "staging"},
    "catalogue": {"ir"},
    "present": {"ir"},
    # Listing presets and measuring ranks goes straight to where it is: through `api` it would import torch first.
    "cli": {"api", "catalogue", "present", "ir", "cost_model", "prediction", "runtime", "profiling", "native"},
    "__main__": {"cli"},
}
"""Room -> rooms that it may import, besides `errors` and itself. `api` and the package's face: all but the front."""

MODULES = {
    ("tracer", "autopar.ops.custom"),
    ("tracer", "autopar.ops.units"),
    ("tracer", "autopar.ops.unordered"),
    ("tracer", "autopar.ops.expert_dims"),
    ("runtime", "autopar.ops.custom"),
}
"""(room, single module of another room that it may import): our own operators are defined once, beside their rules;
which rows stay together, and which are in no order or count experts, follows from the rules."""


def room_of(path: Path) -> str:
    """The room of a file: the folder or file directly under autopar/."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(source: str, inside: tuple[str, ...]) -> list[tuple[int, str]]:
    """(line, module) of each import of autopar in a module whose package is `inside`, at any depth of the file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(inside[: len(inside) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module or "") if p)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "autopar" else [module]
        else:
            continue
        found += [(node.lineno, n) for n in names if n.startswith("autopar.")]
    return found


def forbidden(room: str, module: str) -> bool:
    """True if a file of `room` may not import `module`."""
    target = module.split(".")[1]
    if target in EVERY or target == room or (room, module) in MODULES:
        return False
    if room in ("api", "__init__"):
        return target in FRONT
    return target not in ALLOWED[room]


FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or any(p.glob("*.py"))}


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_no_import_against_the_flow(path: Path) -> None:
    package = ("autopar", *path.relative_to(PACKAGE).parts[:-1])
    wrong = [
        f"{path}:{line}: {room_of(path)} imports {module}"
        for line, module in imported_modules(path.read_text(), package)
        # A name taken from the package itself (`from autopar import search`) is no room.
        if module.split(".")[1] in ROOMS and forbidden(room_of(path), module)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_row() -> None:
    rooms = {room_of(p) for p in FILES} - {"api", "__init__"}
    assert rooms <= set(ALLOWED), f"add a row for {sorted(rooms - set(ALLOWED))}, here and in docs/architecture.md"


@pytest.mark.parametrize(
    ("line", "room", "wrong"),
    [
        ("from autopar.solver import solve", "tracer", True),
        ("from autopar import solver", "tracer", True),
        ("import autopar.api", "ir", True),
        ("from ..api import search", "tracer", True),
        ("def f():\n    from autopar.runtime import groups", "codegen", True),
        ("from autopar.ops.table import TABLE", "tracer", True),
        ("from autopar.ops.custom import LIBRARY", "tracer", False),
        ("from autopar.ir.mesh import Mesh", "solver", False),
        ("from .model import Row", "solver", False),
        ("from autopar.errors import PlanError", "ir", False),
        ("from autopar.cli import main", "api", True),
    ],
)
def test_the_walk_sees(line: str, room: str, wrong: bool) -> None:
    modules = imported_modules(line, ("autopar", room))
    assert len(modules) == 1
    assert forbidden(room, modules[0][1]) is wrong
