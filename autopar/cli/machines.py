"""`autopar models`, `clusters`, `profile` and `doctor`: what there is, and what this machine can do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from autopar.errors import UserError
from autopar.present import arguments
from autopar.present.progress import working

if TYPE_CHECKING:
    pass
from autopar.cli.shared import Json, app


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
