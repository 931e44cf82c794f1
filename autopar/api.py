"""What the user calls. `search` is the compiler's line, read top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from autopar import codegen, sharding, tracer
from autopar.cost_model.answer import make_plan
from autopar.cost_model.build import Priced, build_problem
from autopar.cost_model.prices import MeshPrices, model_flops
from autopar.cost_model.search_space import mesh_candidates
from autopar.cost_model.wiring import Wiring, wire
from autopar.errors import InfeasibleError, PlanError, UserError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.solution import Solution, Status
from autopar.ir.strategy import Note, StrategyTable
from autopar.solver import largest_terms, lower_bound_us, minimise_memory, solve

Progress = Callable[[str, float], None]
"""Called with (what is being done, part done 0..1)."""


def _quiet(what: str, part: float) -> None:
    """No progress."""


def search(
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    options: Options | None = None,
    progress: Progress | None = None,
    model_name: str | None = None,
) -> Plan:
    """The fastest plan that fits. Needs no process group and no weights (a model on the meta device will do).

    Args:
        example_inputs: the global batch, as keyword arguments (a mapping) or positional ones (a tuple).

    Raises:
        CaptureError: the model cannot be captured; names the line.
        InfeasibleError: no plan fits the memory; says what would.
        UserError: a pin or another option that cannot hold.
    """
    options = options or Options()
    progress = progress or _quiet
    progress("capture", 0.0)
    captured = capture(model, example_inputs, options=options, model_name=model_name)
    return plan_captured(captured, cluster, options=options, progress=progress)


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    options: Options | None = None,
    model_name: str | None = None,
) -> CapturedGraph:
    """The joint graph of a model called with these inputs."""
    args, kwargs = _call(example_inputs)
    return tracer.capture(model, args, kwargs, options=options or Options(), model_name=model_name)


def _call(example_inputs: Mapping[str, Any] | tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    return (example_inputs,), {}


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One mesh with its problem and answer."""

    mesh: Mesh
    table: StrategyTable
    priced: Priced
    solution: Solution


def plan_captured(
    captured: CapturedGraph, cluster: ClusterSpec, *, options: Options, progress: Progress = _quiet
) -> Plan:
    """Search over mesh shapes: the best plan of the best mesh. A mesh whose lower bound is no better is not solved."""
    dump = _Dump(options.dump_dir)
    dump("captured", captured)
    wiring = wire(captured)
    rules = sharding.RuleCache()
    limit = options.memory_limit if options.memory_limit is not None else cluster.memory_bytes
    meshes = mesh_candidates(cluster, options)
    best: _Candidate | None = None
    tight: list[_Candidate] = []
    for i, mesh in enumerate(meshes):
        progress(f"price {mesh}", i / len(meshes))
        table = sharding.build_table(captured, mesh, options, rules=rules)
        priced = build_problem(captured, wiring, table, MeshPrices(cluster, mesh), options, limit)
        dump(f"problem {mesh}", priced.problem)
        cutoff = best.solution.objective_us if best else None
        if cutoff is not None and lower_bound_us(priced.problem) >= cutoff:
            continue
        progress(f"solve {mesh}", (i + 0.5) / len(meshes))
        solution = solve(priced.problem, time_limit_s=options.time_limit_s, cutoff_us=cutoff)
        if solution is None:
            continue
        found = _Candidate(mesh, table, priced, solution)
        if solution.status is Status.INFEASIBLE:
            tight.append(found)
        elif solution.choice and (best is None or solution.objective_us < best.solution.objective_us):
            best = found
    if best is None:
        raise _infeasible(captured, tight, limit)
    progress("write the plan", 1.0)
    flops = model_flops(captured, wiring)
    notes = best.table.notes + tuple(Note(*n) for n in captured.notes)
    plan = make_plan(
        captured, best.priced, best.solution, MeshPrices(cluster, best.mesh), cluster, options, notes, flops
    )  # fmt: skip
    dump("plan", plan.to_json().decode())
    return plan


def _infeasible(captured: CapturedGraph, tight: list[_Candidate], limit: int) -> InfeasibleError:
    """Says what would fit: the smallest memory over all meshes, and what takes the most of it."""
    sizes = [(c.solution.needed_bytes, i) for i, c in enumerate(tight) if c.solution.needed_bytes > 0]
    if not sizes:
        return InfeasibleError(
            f"{captured.model_name}: no plan exists under these pins",
            needed_bytes=0,
            budget_bytes=limit,
            largest_terms=(),
        )
    needed, at = min(sizes)
    problem = tight[at].priced.problem
    least = minimise_memory(problem)
    terms = largest_terms(problem, least.choice, 0) if least else ()
    listed = ", ".join(f"{what} {size / 2**30:.2f} GiB" for what, size in terms[:3])
    return InfeasibleError(
        f"{captured.model_name}: no plan fits {limit / 2**30:.2f} GiB per device; the least is {needed / 2**30:.2f} GiB on mesh "
        f"{tight[at].mesh} (largest: {listed}). More devices, a smaller batch or --memory-limit {needed} would do.",
        needed_bytes=needed,
        budget_bytes=limit,
        largest_terms=terms,
    )


class _Dump:
    """Writes what each stage hands on as NN_name.txt."""

    def __init__(self, folder: str | None) -> None:
        self._folder = Path(folder) if folder else None
        self._count = 0

    def __call__(self, name: str, noun: object) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        safe = name.replace(" ", "_").replace("/", "-")
        (self._folder / f"{self._count:02d}_{safe}.txt").write_text(str(noun))
        self._count += 1


def mesh_of(plan: Plan) -> Mesh:
    """The mesh that a plan names."""
    return Mesh(axes=tuple(Axis(name=n, size=s, level=plan.mesh.levels.get(n, 0)) for n, s in plan.mesh.axes.items()))
