"""`autopar ...`: what `api` does, from a shell.

Torch is imported inside the commands that need it, after their arguments are checked: the rest answers at once.
Results go to stdout, everything else to stderr. Exit: 0 done, 1 verification found a difference or the doctor something
missing, 2 bad input, 3 no plan fits, 4 a rank failed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console, Group, RenderableType

from autopar.errors import AutoparError, CompilerError, PlanError, UserError
from autopar.ir.options import Options, Precision
from autopar.present import arguments
from autopar.present.progress import working

if TYPE_CHECKING:
    from autopar.catalogue.source import ModelSource
    from autopar.ir.plan import Plan

app = App(
    name="autopar",
    help="Trains the same PyTorch model, with the same numbers, spread over a cluster in the fastest way that fits.",
    default_parameter=Parameter(negative=()),
    version=lambda: _version(),
)

Model = Annotated[
    str,
    Parameter(
        help="Catalogue name (NAME-tiny: a tiny one like it), config.json, model folder or package.module:factory."
    ),
]
Seq = Annotated[int | None, Parameter(help="Tokens per sample; default: see `autopar models`.")]
Batch = Annotated[int | None, Parameter(help="Samples per step over all devices; default: see `autopar models`.")]
Pins = Annotated[
    list[str] | None,
    Parameter(
        name="--pin",
        help="tp=2, zero=3, stages=12,11,11,12, or a layout: 'model.layers.*.mlp.up_proj=tp:S(0)'. May repeat.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", help="One JSON object on stdout and nothing else.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a search may choose, and how hard it tries."""

    objective: Annotated[
        Literal["time", "memory", "cost"],
        Parameter(help="Least step; least memory of plans nearly as fast; or least device-hours per token."),
    ] = "time"
    slack: Annotated[
        str | None,
        Parameter(help="For memory: how much longer a step may be, as a part of the fastest (0.05), or: any."),
    ] = None
    pin: Pins = None
    forbid: Annotated[list[str] | None, Parameter(help="recompute: keep all that the backward reads. May repeat.")] = (
        None
    )
    space: Annotated[
        list[str] | None,
        Parameter(
            help="Degrees to try: data=1,2,4, tensor=1,2, context=1 or pipeline=1,2; or schedule=zb-h1. May repeat."
        ),
    ] = None
    stages: Annotated[bool, Parameter(help="Search pipeline stages and micro-batches too.")] = False
    micro_batches: Annotated[int | None, Parameter(help="Of a step, on every rank; implies --stages.")] = None
    reduce_dtype: Annotated[
        Literal["stored", "compute"],
        Parameter(help="In half precision: what gradients made in it are summed over ranks in."),
    ] = "stored"
    memory_limit: Annotated[str | None, Parameter(help="Bytes per device, such as 40GiB; default: the device's.")] = (
        None
    )
    gap: Annotated[
        float, Parameter(help="How far from proven optimal will do, as a part of the step time; 0: solve to the end.")
    ] = 0.005
    time_limit: Annotated[float | None, Parameter(help="Seconds for the solver; the plan then says its gap.")] = None
    strict: Annotated[
        bool, Parameter(help="Refuse a model of which a part cannot be captured, instead of running that part whole.")
    ] = False
    dump_dir: Annotated[Path | None, Parameter(help="Each stage writes what it hands on there.")] = None

    def checked(self) -> dict[str, Any]:
        """Arguments of `Options`. Raises UserError before anything slow starts."""
        arguments.check_positive("--time-limit", self.time_limit)
        arguments.check_positive("--micro-batches", self.micro_batches)
        arguments.check_part("--gap", self.gap)
        asked: dict[str, Any] = {
            "objective": self.objective, "memory_slack": arguments.parse_slack(self.slack, self.objective),
            "allow": arguments.parse_forbidden(self.forbid or ()),
            "memory_limit": arguments.parse_bytes("--memory-limit", self.memory_limit),
            "pins": arguments.parse_pins(self.pin or ()), "search_space": arguments.parse_space(self.space or ()),
            "schedules": arguments.parse_schedules(self.space or ()),
            "stages": self.stages, "micro_batches": self.micro_batches, "reduce_dtype": self.reduce_dtype,
            "gap": self.gap,
            "time_limit_s": self.time_limit, "strict": self.strict,
            "dump_dir": str(self.dump_dir) if self.dump_dir else None,
        }  # fmt: skip
        try:
            Options(**asked)
        except ValueError as error:  # what options say of each other
            raise UserError(str(error)) from None
        return asked


@app.command
def search(
    model: Model,
    /,
    *,
    cluster: Annotated[str, Parameter(name=["--cluster", "-c"], help="preset:N, local:N or a TOML file.")],
    seq: Seq = None,
    global_batch: Batch = None,
    precision: Annotated[Precision | None, Parameter(help="Default: bf16 on GPUs, fp32 on CPUs.")] = None,
    wishes: Wishes = Wishes(),
    output: Annotated[Path | None, Parameter(name=["--output", "-o"], help="Write the plan there as JSON.")] = None,
    json_: Json = False,
) -> None:
    """Find the fastest plan that fits, and print it."""
    from autopar.catalogue.entries import resolve

    resolve(model)
    asked = wishes.checked()
    arguments.check_positive("--seq", seq)
    arguments.check_positive("--global-batch", global_batch)
    arguments.check_writable("-o", output)
    with working("search") as progress:
        from autopar.cost_model.clusters import load_cluster

        spec = load_cluster(cluster)
        precision = precision or ("bf16" if spec.backend == "nccl" else "fp32")
        progress("import torch", 0.0)
        from autopar import api
        from autopar.catalogue.source import load_model
        from autopar.ir.plan import PlanRequest

        progress(f"build {model}", 0.0)
        source = load_model(model, seq=seq, global_batch=global_batch, precision=precision)
        plan = api.search(
            source.model,
            spec,
            example_inputs=source.example_inputs,
            options=Options(precision=precision, **asked),
            progress=progress,
            model_name=source.name,
        )
        request = msgspec.structs.replace(
            plan.request or PlanRequest(), model=model, seq=seq, global_batch=global_batch
        )
        plan = msgspec.structs.replace(plan, request=request)
    if output is not None:
        _save(plan, output)
    if json_:
        sys.stdout.write(plan.to_json().decode())
        return
    from autopar.present.plan_text import plan_view

    console = Console(highlight=False)
    console.print(plan_view(plan, console.width))
    if source.note:
        console.print(f"\n{source.note}")
    if output is not None:
        console.print(f"\nwritten to {output}; see `autopar inspect {output}`")


@app.command
def inspect(
    plan: Annotated[Path, Parameter(help="A plan's JSON file.")],
    /,
    *,
    param: Annotated[str | None, Parameter(help="Only this parameter, or those that match a pattern with *.")] = None,
    notes: Annotated[bool, Parameter(help="Every note, none folded away.")] = False,
    html: Annotated[Path | None, Parameter(help="Write the plan as one HTML page.")] = None,
    code: Annotated[Path | None, Parameter(help="Write the emitted Python module into this folder.")] = None,
    trace: Annotated[Path | None, Parameter(help="Write the predicted step over time, for ui.perfetto.dev.")] = None,
    model: Annotated[
        str | None, Parameter(help="For --code, --trace: the model, if its name isn't in the plan.")
    ] = None,
    seq: Seq = None,
    global_batch: Batch = None,
    json_: Json = False,
) -> None:
    """Show a plan: its table, one parameter, its notes, a page, or the code that each rank runs."""
    from autopar.ir.plan import Plan
    from autopar.present import plan_text

    found = Plan.load(plan)
    arguments.check_writable("--html", html)
    arguments.check_writable("--trace", trace)
    console = Console(highlight=False)
    view: RenderableType
    data: dict[str, object] | None = None
    if html is not None or code is not None or trace is not None:
        written = []
        if html is not None:
            from autopar.present.report import write_report

            write_report(found, html)
            written.append(str(html))
        if code is not None:
            written.append(str(_write_code(found, code, model, seq, global_batch)))
        if trace is not None:
            _write_step(found, trace, model, seq, global_batch)
            written.append(str(trace))
        print(json.dumps({"written": written}, indent=1) if json_ else f"written to {', '.join(written)}")
        return
    if param is not None:
        view, data = plan_text.parameter_view(found, param, console.width)
    elif notes:
        view = Group(*plan_text.notes_view(found.notes, None))
        data = {"notes": [msgspec.to_builtins(n) for n in found.notes]}
    else:
        view = plan_text.plan_view(found, console.width)
    if json_:
        sys.stdout.write(found.to_json().decode() if data is None else json.dumps(data, indent=1) + "\n")
    else:
        console.print(view)


@app.command
def predict(
    model: Annotated[str, Parameter(help="Catalogue name, config.json or model folder of a transformer.")],
    /,
    *,
    cluster: Annotated[str, Parameter(name=["--cluster", "-c"], help="preset:N or a TOML file.")],
    tp: Annotated[int, Parameter(help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, Parameter(help="Pipeline stages.")] = 1,
    dp: Annotated[int | None, Parameter(help="Data parallel ranks; default: what is left of the cluster.")] = None,
    cp: Annotated[int, Parameter(help="Context parallel ranks.")] = 1,
    ep: Annotated[int, Parameter(help="Expert parallel ranks, inside tp × dp × cp.")] = 1,
    zero: Annotated[int, Parameter(help="0, or cut over dp: 1 optimizer, 2 gradients, 3 parameters as well.")] = 1,
    shard_group: Annotated[int, Parameter(help="ZeRO over so many neighbours; 0: over all.")] = 0,
    chunks: Annotated[int, Parameter(help="Parts of the model on each stage (interleaved schedule).")] = 1,
    schedule: Annotated[
        str, Parameter(help="1f1b, interleaved, gpipe, zb-h1, zb-h2, zb-v, v-half, v-min; default by sizes.")
    ] = "",
    micro_batch: Annotated[int, Parameter(help="Sequences of one micro-batch on one rank.")] = 1,
    global_batch: Annotated[
        int | None, Parameter(help="Sequences of one step; default: dp × micro-batch × pp.")
    ] = None,
    seq: Annotated[int, Parameter(help="Tokens of a sequence.")] = 2048,
    precision: Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"] = "bf16",
    recompute: Literal["none", "selective", "full"] = "none",
    attention: Annotated[
        Literal["flash", "plain"], Parameter(help="One fused kernel, or scores kept in memory.")
    ] = "flash",
    no_sequence_parallel: Annotated[bool, Parameter(help="Norms and residuals whole on every tensor rank.")] = False,
    trains: Annotated[
        Literal["all", "adapters", "adapters-everywhere"],
        Parameter(
            help="All parameters, or low-rank adapters on frozen ones: at queries, keys, values, or at all products."
        ),
    ] = "all",
    software: Annotated[
        float | None, Parameter(help="Year of the software, such as 2024.5; default: the newest measured.")
    ] = None,
    trace: Annotated[Path | None, Parameter(help="Write the step as a Perfetto trace.")] = None,
    json_: Json = False,
) -> None:
    """Price one given configuration of a transformer: step time, throughput, MFU, peak memory, and whether it fits."""
    from autopar.catalogue.shape import transformer_of
    from autopar.cost_model.clusters import load_cluster
    from autopar.ir.configuration import LATEST_SOFTWARE, Configuration
    from autopar.prediction.step import predict as price
    from autopar.present import prediction_text

    arguments.check_writable("--trace", trace)
    shape, spec = transformer_of(model), load_cluster(cluster)
    ranks = dp if dp is not None else max(1, spec.devices // max(1, tp * pp * cp))
    found = price(
        shape,
        Configuration(
            tp=tp,
            pp=pp,
            dp=ranks,
            cp=cp,
            ep=ep,
            zero=zero,
            shard_group=shard_group,
            chunks=chunks,
            schedule=schedule,
            micro_batch=micro_batch,
            global_batch=global_batch if global_batch is not None else ranks * micro_batch * pp,
            seq=seq,
            precision=precision,
            recompute=recompute,
            attention=attention,
            sequence_parallel=not no_sequence_parallel,
            trains=trains,
            software=software if software is not None else LATEST_SOFTWARE,
        ),
        spec,
    )
    if trace is not None:
        from autopar.present.trace import write_trace

        write_trace(found.timeline, trace)
    if json_:
        print(json.dumps(prediction_text.prediction_json(found), indent=1))
        return
    Console(highlight=False).print(prediction_text.prediction_view(found))


PlanFile = Annotated[Path, Parameter(help="A plan's JSON file.")]


@app.command
def diff(a: PlanFile, b: PlanFile, /, *, json_: Json = False) -> None:
    """Say what differs between two plans: mesh, layouts, predicted time and memory."""
    from autopar.ir.plan import Plan
    from autopar.present.plan_diff import diff_plans, diff_view

    found = diff_plans(Plan.load(a), Plan.load(b), (str(a), str(b)))
    if json_:
        print(json.dumps({"same": found.same, **msgspec.to_builtins(found)}, indent=1))
    else:
        Console(highlight=False).print(diff_view(found))


@app.command
def explain(
    plan: PlanFile,
    name: Annotated[str | None, Parameter(help="A parameter, a module path, a pattern with * or an op's key.")] = None,
    /,
    *,
    why_not: Annotated[str | None, Parameter(help="Pins to price beside the plan: tp=8, 'dp=4 tp=2', zero=3.")] = None,
    model: Annotated[str | None, Parameter(help="The model, if the plan doesn't name it.")] = None,
    cluster: Annotated[str | None, Parameter(name=["--cluster", "-c"], help="If the plan doesn't describe it.")] = None,
    seq: Seq = None,
    global_batch: Batch = None,
    json_: Json = False,
) -> None:
    """Say why something is laid out as it is and what the next best would cost, or what other degrees would cost."""
    from autopar.ir.plan import Plan

    found = Plan.load(plan)
    if (name is None) == (why_not is None):
        raise UserError("explain: wanted a NAME (a parameter, module or op) or --why-not PINS, and not both")
    if why_not is not None:
        arguments.split_pins(why_not, "--why-not")
    with working("explain") as progress:
        progress("import torch", 0.0)
        from autopar import api
        from autopar.cost_model.clusters import load_cluster

        spec = load_cluster(cluster) if cluster is not None else None
        source = _planned_model(found, model, seq, global_batch, "meta")
        asked = api.Plan.load(plan)
        answer: Any
        if why_not is not None:
            answer = asked.why_not(
                why_not, model=source.model, example_inputs=source.example_inputs, cluster=spec, progress=progress
            )
        else:
            answer = asked.explain(
                str(name), model=source.model, example_inputs=source.example_inputs, cluster=spec, progress=progress
            )
    print(json.dumps(answer.to_json(), indent=1) if json_ else answer)


def _write_code(plan: Plan, folder: Path, model: str | None, seq: int | None, global_batch: int | None) -> Path:
    arguments.check_folder("--code", folder)
    with working("inspect") as progress:
        progress("import torch", 0.0)
        from autopar import api

        source = _planned_model(plan, model, seq, global_batch, "meta")
        text = api.emit_source(source.model, source.example_inputs, plan)
    path = folder / f"{arguments.file_name(plan.model.name)}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(f"--code {folder}: cannot be written ({error.strerror})") from None
    return path


def _write_step(plan: Plan, path: Path, model: str | None, seq: int | None, global_batch: int | None) -> None:
    with working("inspect") as progress:
        progress("import torch", 0.0)
        from autopar import api
        from autopar.present.trace import write_trace

        source = _planned_model(plan, model, seq, global_batch, "meta")
        write_trace(api.timeline(plan, source.model, source.example_inputs), path)


def _planned_model(
    plan: Plan, model: str | None, seq: int | None, global_batch: int | None, device: Literal["meta", "cpu"]
) -> ModelSource:
    """The model that a plan was made for, as its search was asked for it unless another is given."""
    from autopar.catalogue.source import load_model

    request = plan.request
    name = model or (request.model if request is not None else "") or plan.model.name
    if request is not None and model in (None, request.model):
        seq, global_batch = seq or request.seq, global_batch or request.global_batch
    try:
        precision: Any = plan.precision
        return load_model(name, seq=seq, global_batch=global_batch, precision=precision, device=device)
    except UserError as error:
        if model is not None:
            raise
        raise PlanError(
            f"the plan is for a model called {name}, which this can't build ({error}); give --model"
        ) from None


@app.command
def verify(
    model_or_plan: Annotated[str, Parameter(help="A model (catalogue names: its tiny config) or a plan's JSON file.")],
    /,
    *,
    ranks: Annotated[int | None, Parameter(help="CPU ranks; default 2, or the plan's devices.")] = None,
    pin: Pins = None,
    micro_batches: Annotated[
        int | None, Parameter(help="Micro-batches of a step; with --pin pp=, of a pipeline.")
    ] = None,
    steps: Annotated[int, Parameter(help="Optimizer steps.")] = 3,
    precision: Precision = "fp32",
    model: Annotated[str | None, Parameter(help="For a plan: the model, if its name isn't in the plan.")] = None,
    seq: Seq = None,
    global_batch: Batch = None,
    code: Annotated[
        Path | None, Parameter(help="For a plan: the module that `inspect --code` wrote, edited; run this.")
    ] = None,
    bisect: Annotated[bool, Parameter(help="Compare every value too, and name the first op that goes wrong.")] = False,
    all_: Annotated[bool, Parameter(name="--all", help="Every tensor, in the model's order.")] = False,
    json_: Json = False,
) -> None:
    """Run a plan on CPU ranks beside one device: compare loss, gradients, and what optimizer steps leave."""
    pins = arguments.parse_pins(pin or ())
    positive = {"--ranks": ranks, "--steps": steps, "--seq": seq, "--global-batch": global_batch}
    for option, value in {**positive, "--micro-batches": micro_batches}.items():
        arguments.check_positive(option, value)
    plan = arguments.plan_or_none(model_or_plan)
    text = arguments.read_text("--code", code)
    if text is not None and plan is None:
        raise UserError("--code: emitted code belongs to a plan; give the plan's file in the place of the model")
    if plan is not None:
        if ranks is not None and ranks != plan.cluster.devices:
            raise PlanError(f"plan {model_or_plan}: is for {plan.cluster.devices} ranks, not --ranks {ranks}")
        if pins or micro_batches is not None:
            raise UserError("--pin, --micro-batches: a plan is already decided; these go with a model")
        ranks = plan.cluster.devices
    else:
        from autopar.catalogue.entries import resolve

        resolve(model_or_plan)
    with working("verify") as progress:
        progress("import torch", 0.0)
        from autopar import api
        from autopar.catalogue.source import load_model

        if plan is not None:
            arguments.check_affordable(plan)
            source = _planned_model(plan, model, seq, global_batch, "cpu")
            kept: Any = plan.precision
            options = Options(precision=kept)
        else:
            source = load_model(
                model_or_plan, seq=seq, global_batch=global_batch, precision=precision, tiny=True, device="cpu"
            )
            options = Options(precision=precision, pins=pins, micro_batches=micro_batches)
        progress(f"run {source.name}", 0.0)
        report = api.verify(
            source.model,
            source.example_inputs,
            ranks=ranks or 2,
            options=options,
            plan=plan,
            steps=steps,
            bisect=bisect,
            code=text,
        )
    _show_report(report, source, ranks or 2, json_, all_)
    if not report.ok:
        raise SystemExit(1)


def _show_report(report: Any, source: ModelSource, ranks: int, as_json: bool, every: bool) -> None:
    rows = [{"name": r.name, "layout": r.layout, "error": r.error, "tolerance": r.tolerance} for r in report.rows]
    first = report.first_difference
    note = "; ".join(x for x in (source.note, report.note) if x)
    if as_json:
        data = {"ok": report.ok, "model": source.name, "note": note, "ranks": ranks, "rows": rows}
        data["first_difference"] = str(first) if first else None
        if report.bisection is not None:
            data["bisection"] = msgspec.to_builtins(report.bisection)
        print(json.dumps(data, indent=1))
        return
    from autopar.present.tables import verify_table

    console = Console(highlight=False)
    console.print(f"{source.name} on {ranks} ranks beside one device{f'; {note}' if note else ''}")
    console.print(verify_table(report.rows, every))
    if report.ok:
        shown = "all" if every else "the worst"
        console.print(f"[green]same numbers:[/] {len(rows)} tensors within tolerance, {shown} shown")
    else:
        wrong = sum(not r.ok for r in report.rows)
        console.print(f"[red]{wrong} of {len(rows)} tensors differ[/], first: {' '.join(str(first).split())}")
    if report.bisection is not None:
        console.print(f"\n{report.bisection}", markup=False)


@app.command
def models(*, json_: Json = False) -> None:
    """List the architectures that `search` and `verify` know by name."""
    from autopar.catalogue.entries import entries
    from autopar.present.tables import models_table

    rows = [e.summary() for e in entries().values()]
    if json_:
        print(json.dumps({"models": rows}, indent=1))
        return
    console = Console(highlight=False)
    console.print(models_table(rows, wide=console.width >= 110))
    console.print("\nseq and batch are defaults: --seq, --global-batch. Architectures only, no weights.")


@app.command
def clusters(*, json_: Json = False) -> None:
    """List the cluster presets that `--cluster` knows by name."""
    from autopar.cost_model.catalogue import list_presets
    from autopar.present.tables import clusters_table, preset_row

    rows = [preset_row(p) for p in list_presets()]
    if json_:
        print(json.dumps({"clusters": rows}, indent=1))
        return
    console = Console(highlight=False)
    console.print(clusters_table(rows))
    console.print("\nPRESET:N is N nodes or cards; local:N is this machine with N ranks; or a TOML file.")


@app.command
def profile(
    *,
    ranks: Annotated[
        int | None, Parameter(help="Ranks that measure at the same time; default 2, or those of torchrun.")
    ] = None,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="Where to write the cluster as TOML.")],
    seconds: Annotated[float, Parameter(help="About how long to measure.")] = 80.0,
    refit: Annotated[
        Path | None, Parameter(help="Measure nothing: correct the profile in -o by what module.report(PATH) wrote.")
    ] = None,
    json_: Json = False,
) -> None:
    """Measure this machine or, under torchrun, this cluster, and write it as a cluster description with its profile."""
    arguments.check_positive("--ranks", ranks)
    arguments.check_positive("--seconds", seconds)
    arguments.check_writable("-o", output)
    if refit is not None:
        if ranks is not None:
            raise UserError("--refit: the profile says how many ranks; leave --ranks out")
        _refit(refit, output, json_)
        return
    from autopar.profiling.run import profile_here

    spec = profile_here(ranks, output, seconds)
    if spec is None:
        return
    assert spec.profile is not None
    found = spec.profile
    if json_:
        points = sum(len(c.sizes) for c in found.curves) + sum(len(c.sizes) for c in found.links)
        print(json.dumps({"written": str(output), "ranks": found.ranks, "points": points, "notes": list(found.notes)}))
        return
    from autopar.present.tables import profile_table

    console = Console(highlight=False)
    console.print(profile_table(found))
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"written to {output}; use it with `--cluster {output}`", markup=False)


def _refit(run: Path, output: Path, as_json: bool) -> None:
    from autopar.cost_model.clusters import dump_cluster, read_cluster
    from autopar.ir.account import RunReport
    from autopar.profiling.refit import refitted, scales_text

    spec, found = refitted(read_cluster(output), RunReport.load(run), str(run))
    scratch = output.with_name(f"{output.name}.{os.getpid()}")
    scratch.write_text(dump_cluster(spec))
    scratch.replace(output)
    if as_json:
        print(json.dumps({"written": str(output), "scales": [msgspec.to_builtins(s) for s in found]}))
    else:
        print(f"{scales_text(found)}\nwritten to {output}")


@app.command
def doctor(
    *, ranks: Annotated[int, Parameter(help="Ranks to start on this machine.")] = 2, json_: Json = False
) -> None:
    """Say what is installed, what this machine has, and whether ranks see each other."""
    arguments.check_positive("--ranks", ranks)
    from autopar import native
    from autopar.present.doctor import facts
    from autopar.present.tables import facts_table

    with working("doctor") as progress:
        progress("look around", 0.0)
        from autopar.runtime.groups import carrier
        from autopar.runtime.launch import launch

        kernels = native.found()
        found = list(facts(launch, ranks, (kernels.kernels is not None, kernels.reason), carrier))
    if json_:
        print(json.dumps({"facts": [{"what": w, "ok": ok, "detail": d} for w, ok, d in found]}, indent=1))
    else:
        Console(highlight=False).print(facts_table(found))
    if any(ok is False for _, ok, _ in found):
        raise SystemExit(1)


def _save(plan: Plan, path: Path) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise UserError(f"-o {path}: cannot be written ({error.strerror})") from None


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("autopar")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    # Nearly all of a command's many small records live to its end: collecting garbage took 2 of a search's 18 seconds.
    gc.set_threshold(200_000, 20, 20)
    try:
        app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _fail(_usage(error), 2)
    except CompilerError as error:
        import traceback

        traceback.print_exc()
        _fail(f"a bug in autopar: {error}", error.exit_code)
    except UserError as error:
        _fail(" ".join(str(error).split()), error.exit_code)
    except AutoparError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _usage(error: CycloptsError) -> str:
    return f"{' '.join(str(error).split())} See `autopar --help`."


def _fail(message: str, code: int) -> None:
    print(f"autopar: {message}", file=sys.stderr)
    raise SystemExit(code) from None
