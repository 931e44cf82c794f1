"""`autopar verify`: a plan run beside one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console

from autopar.errors import PlanError, UserError
from autopar.ir.options import Options, Precision
from autopar.present import arguments
from autopar.present.progress import working

if TYPE_CHECKING:
    from autopar.catalogue.source import ModelSource
from autopar.cli.shared import Batch, Json, Pins, Seq, app, planned_model


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
            source = planned_model(plan, model, seq, global_batch, "cpu")
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
