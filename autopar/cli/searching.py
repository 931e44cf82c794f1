"""`autopar search` and `autopar predict`: what a step will take."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Console

from autopar.errors import UserError
from autopar.ir.options import Options, Precision
from autopar.present import arguments
from autopar.present.progress import working

if TYPE_CHECKING:
    pass
from autopar.cli.shared import Batch, Json, Model, Pins, Seq, app, save


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
        save(plan, output)
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
