"""The command itself, and what several of its parts take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from autopar.errors import PlanError, UserError

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
PlanFile = Annotated[Path, Parameter(help="A plan's JSON file.")]


def planned_model(
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


def save(plan: Plan, path: Path) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise UserError(f"-o {path}: cannot be written ({error.strerror})") from None


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("autopar")
