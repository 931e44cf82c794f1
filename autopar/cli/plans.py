"""`autopar inspect`, `diff` and `explain`: a plan that is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console, Group, RenderableType

from autopar.errors import UserError
from autopar.present import arguments
from autopar.present.progress import working

if TYPE_CHECKING:
    from autopar.ir.plan import Plan
from autopar.cli.shared import Batch, Json, PlanFile, Seq, app, planned_model


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
        source = planned_model(found, model, seq, global_batch, "meta")
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

        source = planned_model(plan, model, seq, global_batch, "meta")
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

        source = planned_model(plan, model, seq, global_batch, "meta")
        write_trace(api.timeline(plan, source.model, source.example_inputs), path)
