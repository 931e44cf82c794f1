"""What the user calls. `search` is the compiler's line, read top to bottom."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace as replace_fields
from torch import nn

from autopar import codegen, meshes, objectives, pipelines, proofs, questions, sharding, staging, timelines, tracer
from autopar.candidates import Progress, Task
from autopar.cost_model.answer import inputs_of
from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.local import fingerprint, local_cluster
from autopar.cost_model.search_space import mesh_candidates
from autopar.errors import ClusterError, InputError, PlanError, UserError, without_frames
from autopar.ir import cluster as description
from autopar.ir import plan as records
from autopar.ir.graph import CapturedGraph
from autopar.ir.mesh import Mesh
from autopar.ir.options import Options
from autopar.ir.plan import mesh_of
from autopar.ir.profile import refuse_foreign
from autopar.ir.program import Source
from autopar.ir.staged import StagedSource
from autopar.ir.timeline import Timeline
from autopar.present.plan_diff import PlanDiff, diff_plans
from autopar.present.plan_text import plan_text
from autopar.present.report import write_report
from autopar.questions import Explanation, WhyNot
from autopar.runtime.agreement import agree, agree_among, parts_of
from autopar.runtime.calls import Request
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.compiled import CompiledModule
from autopar.runtime.deferred import DeferredModule
from autopar.runtime.groups import communicator, init_ranks, ranks_started
from autopar.runtime.module import ParallelModule
from autopar.runtime.replan import Replanner, skeleton
from autopar.runtime.watch import edited
from autopar.verification import VerifyReport
from autopar.verification.bisect import Bisection

_log = logging.getLogger("autopar")


class ClusterSpec(description.ClusterSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster description that can be loaded by name or measured. Everything takes the plain record as well."""

    @classmethod
    def load(cls, text: str) -> ClusterSpec:
        """From "preset:nodes" ("dgx-h100:4"), "local:ranks" or a TOML path. Raises ClusterError."""
        return cls._of(load_cluster(text))

    @classmethod
    def local(cls, ranks: int = 1) -> ClusterSpec:
        """This machine with `ranks` ranks, measured in a few seconds the first time."""
        return cls._of(local_cluster(ranks))

    @classmethod
    def _of(cls, spec: description.ClusterSpec) -> ClusterSpec:
        return cls(**{name: getattr(spec, name) for name in spec.__struct_fields__})


def _quiet(what: str, part: float) -> None:
    """No progress."""


Inputs = Mapping[str, Any] | tuple[Any, ...]
_TASK = "_autopar_task"


class Plan(records.Plan, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A plan that prints as a table, and that one can question.

    One that `search` found in this process knows what it was searched from; that stands beside its fields and is
    neither saved nor compared nor copied. To question a plan that was loaded, pass the model and its inputs again.
    """

    @classmethod
    def found(cls, plan: records.Plan, task: Task) -> Plan:
        """The plan of this search."""
        mine = cls(**{name: getattr(plan, name) for name in plan.__struct_fields__})
        mine.__dict__[_TASK] = task
        return mine

    def __str__(self) -> str:
        return plan_text(self)

    def diff(self, other: records.Plan) -> PlanDiff:
        """What differs; prints as a table, or as "same"."""
        return diff_plans(self, other)

    def explain(
        self,
        name: str,
        *,
        model: nn.Module | None = None,
        example_inputs: Inputs | None = None,
        cluster: description.ClusterSpec | None = None,
        progress: Progress | None = None,
    ) -> Explanation:
        """Why a parameter, a module path or an op is laid out as it is: the next best layout, and what it would cost.

        Args:
            model, example_inputs, cluster: only where the plan was loaded (the cluster: where its file has none).

        Raises:
            UserError: nothing is called so (with the closest names), or the model is needed.
            PlanError: the plan is for another model.
        """
        task = question_task(self, model, example_inputs, cluster)
        return questions.explain(self, name, task, _searching(task, progress or _quiet), progress or _quiet)

    def why_not(
        self,
        pins: str | Mapping[str, str | int],
        *,
        model: nn.Module | None = None,
        example_inputs: Inputs | None = None,
        cluster: description.ClusterSpec | None = None,
        progress: Progress | None = None,
    ) -> WhyNot:
        """What a plan with these pins would cost beside this one ("tp=8", "dp=4 tp=2", "zero=3"), or why none can be.

        Arguments and errors as for `explain`.
        """
        task = question_task(self, model, example_inputs, cluster)
        return questions.why_not(self, pins, task, _searching(task, progress or _quiet))

    def again(
        self,
        model: nn.Module,
        example_inputs: Inputs,
        *,
        cluster: description.ClusterSpec | None = None,
        options: Options | None = None,
        progress: Progress | None = None,
    ) -> Plan:
        """This plan for another batch, sequence length or mode of the same model: mesh and stored layouts are kept, all
        else is chosen again, so that times and memory are those of these inputs; a note says so. Of a plan with stages
        or micro-batches all choices are kept, but for the number of micro-batches, and what it predicts is left.

        Args:
            cluster: where the plan's file has none, or the same devices with other figures or links.
            options: None: those that the plan was searched with.

        Raises:
            InfeasibleError: it does not fit the memory with these inputs.
            PlanError: the plan is for another model, or has stages that can't run these inputs.
        """
        options = options or records.options_of(self)
        captured = capture(model, example_inputs, options=options, model_name=self.model.name)
        if captured.hash == self.model.graph_hash and cluster is None:
            return self
        return plan_again(self, captured, cluster or _described(self), options, progress=progress or _quiet)

    def report(self, path: str | Path) -> None:
        """Write the plan as one HTML page that needs nothing else."""
        write_report(self, path)


def _searching(task: Task, progress: Progress) -> Callable[[Options], Plan]:
    """The search that questions ask again, under other options."""

    def search_again(options: Options) -> Plan:
        return plan_captured(task.captured, task.cluster, options=options, progress=progress, rules=task.rules)

    return search_again


def question_task(
    plan: records.Plan,
    model: nn.Module | None,
    example_inputs: Inputs | None,
    cluster: description.ClusterSpec | None,
) -> Task:
    """What a plan was searched from: known, or made again of what is given."""
    if model is None and example_inputs is None:
        known = getattr(plan, "__dict__", {}).get(_TASK)
        if known is None:
            raise UserError(
                f"this plan for {plan.model.name} was loaded, so what it was searched from is not here: "
                f"pass model= and example_inputs= (the global batch)"
            )
        assert isinstance(known, Task)
        return known if cluster is None else Task.of(known.captured, cluster, known.options)
    if model is None or example_inputs is None:
        raise UserError("pass both model= and example_inputs= (the global batch), or neither")
    spec = cluster or plan.cluster.spec
    if spec is None:
        raise UserError(f"the plan's file says of its cluster only the name, {plan.cluster.name}: pass cluster=")
    options = records.options_of(plan)
    captured = capture(model, example_inputs, options=options, model_name=plan.model.name)
    _check_model(captured, plan)
    return Task.of(captured, spec, options)


@without_frames
def search(
    model: nn.Module,
    cluster: description.ClusterSpec,
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
    _require_cluster(cluster)
    options = options or Options()
    progress = progress or _quiet
    progress("capture", 0.0)
    captured = capture(model, example_inputs, options=options, model_name=model_name)
    return plan_captured(captured, cluster, options=options, progress=progress)


@without_frames
def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    options: Options | None = None,
    model_name: str | None = None,
) -> CapturedGraph:
    """The joint graph of a model called with these inputs. Submodules that run as they are are logged as warnings."""
    args, kwargs = _call(example_inputs)
    return _captured_call(model, args, kwargs, options or Options(), model_name)


def _captured_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, name: str | None = None
) -> CapturedGraph:
    with _CAPTURING:
        captured = tracer.capture(model, args, kwargs, options=options, model_name=name)
    if os.environ.get("RANK", "0") == "0":
        for region in captured.regions:
            _log.warning("region %s (%s): %s", region.key, region.source, region.message)
    return captured


def _call(example_inputs: Mapping[str, Any] | tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    return (example_inputs,), {}


def plan_captured(
    captured: CapturedGraph,
    cluster: description.ClusterSpec,
    *,
    options: Options,
    progress: Progress = _quiet,
    rules: sharding.RuleCache | None = None,
    mesh: Mesh | None = None,
) -> Plan:
    """Search over mesh shapes, the most promising first. A mesh proven to be no better is not solved to the end.

    `rules` keeps answers about ops for another search. `mesh`: on this one only.
    """
    dump = _Dump(options.dump_dir)
    dump("captured", captured)
    task = Task.of(captured, cluster, options, rules)

    def best(part: Task, /, *, cutoff_us: float = math.inf, required: bool = True) -> records.Plan | None:
        if options.searches_stages:
            return pipelines.staged(part, progress) if required else pipelines.staged_below(part, progress, cutoff_us)
        followed = sharding.followed_sizes(captured)
        every = (mesh,) if mesh is not None else mesh_candidates(part.cluster, options, followed)
        return meshes.best_plan(part, every, progress, dump, cutoff_us=cutoff_us, required=required)

    if options.objective == "cost" and mesh is None:
        plan, task = objectives.cheapest(task, best, progress)
    elif options.objective == "memory" and options.searches_stages:
        plan = objectives.least_memory(task, best, progress)
    else:
        found = best(task)
        assert found is not None
        plan = found
    progress("write the plan", 1.0)
    dump("plan", plan.to_json().decode())
    return Plan.found(plan, task)


def plan_again(
    plan: records.Plan,
    captured: CapturedGraph,
    cluster: description.ClusterSpec,
    options: Options,
    *,
    progress: Progress = _quiet,
    rules: sharding.RuleCache | None = None,
) -> Plan:
    """`Plan.again` of the model as captured. It says that it was asked what the search for `plan` was."""
    if {p.name for p in captured.parameters} != set(plan.parameters):
        raise _of_another(captured, plan)
    if records.is_staged(plan):
        return _staged_again(plan, captured, cluster, options, rules)
    stored = {name: p.layout for name, p in plan.parameters.items()} if plan.mesh.axes else {}
    kept = replace(options, pins={**options.pins, **plan.mesh.axes, **stored})
    found = plan_captured(captured, cluster, options=kept, rules=rules, mesh=mesh_of(plan), progress=progress)
    asked = records.asked_options(options)
    request = replace_fields(found.request or records.PlanRequest(), options=asked)
    said = records.PlanNote(
        kind="again", where="",
        message=f"made of a plan {_for_inputs(plan)}: its mesh and stored layouts are kept, all else is chosen and "
        f"priced for these inputs",
    )  # fmt: skip
    pins = {k: str(v) for k, v in options.pins.items()}
    made = replace_fields(found, request=request, pins=pins, notes=[said, *found.notes])
    return Plan.found(made, Task.of(captured, cluster, options, rules))


def _staged_again(
    plan: records.Plan, captured: CapturedGraph, cluster: description.ClusterSpec, options: Options,
    rules: sharding.RuleCache | None,
) -> Plan:  # fmt: skip
    """The same for a plan with stages: nothing is chosen anew, so that each parameter stays on its stage."""
    found = staging.carried_on(plan, captured, rules or sharding.RuleCache())
    request = replace_fields(plan.request or records.PlanRequest(), inputs=inputs_of(captured))
    schedule = found.schedule
    said = records.PlanNote(
        kind="again", where="",
        message=f"made of a plan {_for_inputs(plan)}: its stages, mesh, layouts and what is made again are kept, with "
        f"{schedule.micro_batches} micro-batches; times and memory are those predicted for that plan",
    )  # fmt: skip
    return Plan.found(replace_fields(found, request=request, notes=[said, *plan.notes]),
                      Task.of(captured, cluster, options, rules))  # fmt: skip


def _for_inputs(plan: records.Plan) -> str:
    if plan.request is None or not plan.request.inputs:
        return "for other inputs"
    return "for " + ", ".join(f"{path} {list(given.shape)}" for path, given in plan.request.inputs.items())


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


@without_frames
def compile(
    model: nn.Module,
    cluster: description.ClusterSpec | None = None,
    *,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    plan: records.Plan | None = None,
    options: Options | None = None,
) -> nn.Module:
    """This rank's part of the model, spread as the plan says. Under torchrun or `launch`, called alike by every rank.

    Without `example_inputs` the module is compiled at its first call. Inputs of other sizes than the plan's are planned
    for again (`Plan.again`).

    Raises:
        PlanError: the plan is for another model, or for another number of ranks than were started.
        ClusterError: the cluster's profile was measured on other hardware.
    """
    if cluster is None and plan is None:
        raise UserError("compile needs a cluster or a plan")
    options = options or (records.options_of(plan) if plan is not None else Options())
    _refuse_foreign("compile", plan.cluster.spec if plan is not None else cluster)
    started = ranks_started()
    wanted = plan.cluster.devices if plan is not None else cluster.devices if cluster is not None else 1
    if started != wanted:
        raise PlanError(f"the {'plan' if plan else 'cluster'} describes {wanted} ranks, {started} were launched")
    if example_inputs is None:
        return DeferredModule(
            lambda args, kwargs: compile_on(model, _started, cluster, args, kwargs, plan=plan, options=options),
            training=model.training,
        )
    args, kwargs = _call(example_inputs)
    return compile_on(model, _started, cluster, args, kwargs, plan=plan, options=options)


def _refuse_foreign(what: str, cluster: description.ClusterSpec | None) -> None:
    """ClusterError if a cluster's profile was measured on other hardware than what is about to run."""
    _require_cluster(cluster)
    if cluster is not None and cluster.profile is not None:
        refuse_foreign(cluster.profile, fingerprint(), f"{what} on {cluster.name}")


def _require_cluster(cluster: object) -> None:
    if cluster is not None and not isinstance(cluster, description.ClusterSpec):
        raise UserError(f"cluster {cluster!r}: wanted a ClusterSpec, as ClusterSpec.load('rtx4090:8') makes one")


def _started(plan: records.Plan, source: Source | StagedSource) -> Communicator:
    """This process's `rt` under torchrun or `launch`, once all ranks are seen to hold the same plan and program."""
    mesh, started = records.all_ranks(plan), ranks_started()
    if started != plan.cluster.devices:
        raise PlanError(
            f"the plan is for {plan.cluster.devices} ranks ({plan.cluster.name}), {started} were launched: search "
            f"first, then launch as many ranks as the plan says"
        )
    if mesh.size == 1:
        return Alone(mesh, torch.device("cpu"))
    init_ranks()
    agree(parts_of(plan, source))
    return communicator(mesh)


def compile_on(
    model: nn.Module,
    ranks: Callable[[records.Plan, Source | StagedSource], Communicator],
    cluster: description.ClusterSpec | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    plan: records.Plan | None = None,
    options: Options,
) -> CompiledModule:
    """`compile` for ranks of any kind: `ranks` gives this rank's `rt` for a plan and its program."""
    captured = _captured_call(model, args, kwargs, options)
    if plan is None:
        assert cluster is not None
        plan = plan_captured(captured, cluster, options=options)
    elif plan.model.graph_hash != captured.hash and _is_called_otherwise(plan, captured):
        plan = plan_again(plan, captured, cluster or _described(plan), options)
    if records.is_staged(plan):
        _check_model(captured, plan)
        made = staging.staged(captured, plan)
        rt = ranks(plan, made.source)
        again = _replanner(skeleton(model), rt, cluster, plan, options)
        return made.module(
            model, rt, recompile=lambda request: staging.staged(*again.planned(request)).compiled,
            predicts=lambda: timeline_captured(captured, plan), seed=options.seed,
        )  # fmt: skip
    source = emit_captured(captured, plan)
    rt = ranks(plan, source)
    agree_among(rt, f"{options.seed}|{source.text}", f"compile({captured.model_name}): the program or the seed")
    code = model if captured.regions else skeleton(model)  # regions show their shapes by running
    again = _replanner(code, rt, cluster, plan, options)

    def recompile(request: Request) -> tuple[CapturedGraph, records.Plan, Source]:
        found = again.planned(request)
        return *found, emit_captured(*found)

    return ParallelModule(
        captured, plan, source, model, rt, recompile=recompile, seed=options.seed, hardware=fingerprint()
    )


def _replanner(
    model: nn.Module, rt: Communicator, cluster: description.ClusterSpec | None, plan: records.Plan, options: Options
) -> Replanner:  # fmt: skip
    """Calls that no program fits are captured and planned for as this plan was."""
    rules = sharding.RuleCache()

    def again(captured: CapturedGraph) -> records.Plan:
        return plan_again(plan, captured, cluster or _described(plan), options, rules=rules)

    return Replanner(model, rt, plan, lambda m, args, kwargs: _captured_call(m, args, kwargs, options), again)


_CAPTURING = threading.RLock()
"""Capture changes names of torch for a while: one thread at a time."""


def _described(plan: records.Plan) -> description.ClusterSpec:
    """The plan's cluster: as its file describes it, or by its name where the catalogue has it."""
    try:
        return plan.cluster.spec or load_cluster(plan.cluster.name)
    except ClusterError as error:
        raise InputError(
            f"this call differs from the one that the plan was made for, and to plan again the cluster is needed "
            f"({error}): pass it too, compile(model, cluster, plan=plan)"
        ) from None


def _is_called_otherwise(plan: records.Plan, captured: CapturedGraph) -> bool:
    """True if the plan is of this model as far as its parameters say, but for inputs of other shapes or dtypes."""
    if plan.request is None:
        return False
    same = {p.name for p in captured.parameters} == set(plan.parameters)
    same &= sum(p.meta.numel for p in captured.parameters) == plan.model.parameters
    return same and plan.request.inputs != inputs_of(captured)


def emit_captured(captured: CapturedGraph, plan: records.Plan) -> Source:
    """The module that a plan makes of a captured graph. Checks that what is priced is what is emitted."""
    _check_model(captured, plan)
    program = codegen.lower(captured, plan, mesh_of(plan))
    codegen.check_program(program, plan)
    return codegen.emit(program)


def _check_model(captured: CapturedGraph, plan: records.Plan) -> None:
    if plan.model.graph_hash != captured.hash:
        raise _of_another(captured, plan)


def _of_another(captured: CapturedGraph, plan: records.Plan) -> PlanError:
    return PlanError(
        f"the plan is for model {plan.model.name} (graph {plan.model.graph_hash}), this one is "
        f"{captured.model_name} (graph {captured.hash}): search again, with the same batch and options, or for other "
        f"inputs of the same model ask for plan.again(model, example_inputs)"
    )


def timeline(plan: records.Plan, model: nn.Module, example_inputs: Mapping[str, Any] | tuple[Any, ...]) -> Timeline:
    """The predicted step of a plan over time: every op and collective of the emitted program as it is priced.

    Raises PlanError: the plan is for another model, or its file does not describe its cluster.
    """
    options = records.options_of(plan)
    return timeline_captured(capture(model, example_inputs, options=options, model_name=plan.model.name), plan)


def timeline_captured(captured: CapturedGraph, plan: records.Plan) -> Timeline:
    """`timeline` of a model at hand as captured."""
    _check_model(captured, plan)
    return timelines.predicted(captured, plan)


@without_frames
def emit_source(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    plan: records.Plan,
    *,
    options: Options | None = None,
) -> str:
    """The emitted Python of a plan."""
    options = options or Options(precision=plan.precision)  # type: ignore[arg-type]
    captured = capture(model, example_inputs, options=options)
    if records.is_staged(plan):
        _check_model(captured, plan)
        return staging.staged(captured, plan).source.text
    return emit_captured(captured, plan).text


@without_frames
def verify(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    ranks: int = 2,
    options: Options | None = None,
    plan: records.Plan | None = None,
    cluster: description.ClusterSpec | None = None,
    captured: CapturedGraph | None = None,
    steps: int = 3,
    bisect: bool = False,
    code: str | None = None,
) -> VerifyReport:
    """Run a plan on in-process ranks beside one device and compare. `plan` None: searched, on `cluster` or here.

    Args:
        code: the emitted module of this plan, edited; run in the place of what is emitted.
        bisect: compare every value of one forward and backward as well, and name the first op that goes wrong.

    Raises:
        ClusterError: the cluster's profile, or the one that the plan was priced with, is of other hardware.
    """
    options = options or Options()
    _refuse_foreign("verify", plan.cluster.spec if plan is not None else cluster)
    captured = captured or capture(model, example_inputs, options=options)
    if plan is None:
        plan = plan_captured(captured, cluster or local_cluster(ranks), options=options)
    if records.is_staged(plan):
        if bisect or code is not None:
            raise UserError("a plan with stages or micro-batches: verify compares it whole, without bisect or code")
        _check_model(captured, plan)
        return _proof(captured, plan, model, example_inputs).of_stages(staging.staged(captured, plan), steps)
    source = emit_captured(captured, plan)
    if code is not None:
        source = edited(source, code)
    return verify_source(captured, plan, source, model, example_inputs, steps=steps, bisect=bisect)


def verify_source(
    captured: CapturedGraph,
    plan: records.Plan,
    source: Source,
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    steps: int = 3,
    timeout_s: float = proofs.TIMEOUT_S,
    bisect: bool = False,
) -> VerifyReport:
    """As `verify`, for emitted source: every rank's results are compared, so replicas that differ are seen."""
    proof = _proof(captured, plan, model, example_inputs, timeout_s)
    return proof.of_source(source, steps, bisect=bisect)


def bisect_source(
    captured: CapturedGraph,
    plan: records.Plan,
    source: Source,
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    timeout_s: float = proofs.TIMEOUT_S,
) -> Bisection:
    """The first op of one forward and backward, on any rank, whose result is not one device's.

    `source` may be edited: its lines are told apart by what is emitted for the plan. Every value is kept on both sides.
    """
    return _proof(captured, plan, model, example_inputs, timeout_s).bisect(source)


def _proof(
    captured: CapturedGraph, plan: records.Plan, model: nn.Module, example_inputs: Inputs,
    timeout_s: float = proofs.TIMEOUT_S,
) -> proofs.Proof:  # fmt: skip
    """The plan's modules beside one device."""

    def on_one_device() -> ParallelModule:
        any_device = load_cluster("rtx4090:1")  # which one is priced doesn't matter: there is nothing to decide
        alone = plan_captured(captured, any_device, options=Options(precision=plan.precision, memory_limit=2**62))
        rt = Alone(mesh_of(alone), torch.device("cpu"))
        return ParallelModule(captured, alone, emit_captured(captured, alone), model, rt)

    args, kwargs = _call(example_inputs)
    return proofs.Proof(captured, plan, model, args, kwargs, on_one_device, timeout_s)
