"""Same numbers: a compiled module's loss, gradients and state after three AdamW steps equal one device's.

In-process ranks. The default run takes each model under the searched plan, a 2 x 2 mesh, and one of the other kinds of
plan by turns; `-m slow` takes all at every number of ranks.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache

import pytest

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.ir.options import Options
from tests.models import NAMES, tiny

KINDS = {
    "searched": lambda ranks: {},
    "dp": lambda ranks: {"dp": ranks, "zero": 0},
    "tp": lambda ranks: {"tp": ranks},
    "zero3": lambda ranks: {"dp": ranks, "zero": 3},
    "2x2": lambda ranks: {"dp": 2, "tp": 2},
}
DEFAULT = {"searched": 2, "dp": 3, "tp": 2, "zero3": 3, "2x2": 4}
BY_TURNS = ("dp", "tp", "zero3")
DEFAULT_RUN = [(n, k) for i, n in enumerate(NAMES) for k in ("searched", "2x2", BY_TURNS[i % 3])]
EVERY = [(kind, ranks) for kind in KINDS for ranks in ((4,) if kind == "2x2" else (1, 2, 3, 4))]


@lru_cache(maxsize=2)
def captured(name: str, precision: str):
    model, batch = tiny(name)
    if precision == "fp64":
        model, batch = (
            model.double(),
            {k: v.double() if hasattr(v, "dtype") and v.is_floating_point() else v for k, v in batch.items()},
        )
    options = Options(precision="fp64" if precision == "fp64" else "fp32")
    return model, batch, api.capture(model, batch, options=options, model_name=name)


def check(name: str, kind: str, ranks: int, precision: str) -> None:
    model, batch, graph = captured(name, precision)
    options = Options(pins=KINDS[kind](ranks), precision=precision)
    report = api.verify(
        model, batch, ranks=ranks, options=options, cluster=load_cluster(f"rtx3090:{ranks}"), captured=graph
    )
    assert report.ok, str(report)


@pytest.mark.parametrize(("name", "kind"), DEFAULT_RUN)
def test_same_numbers(name, kind):
    check(name, kind, DEFAULT[kind], "fp64")


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        (r"rt\.all_reduce\((\w+), \"dp\"\)", r"\1.clone()"),
        (r"rt\.reduce_scatter\((\w+), \"dp\", (\d)\)", r'rt.slice(\1, "dp", \2).contiguous()'),
    ],
    ids=["a sum not reduced", "a gradient not reduced before it is cut"],
)
def test_a_wrong_program_is_seen(line, instead):
    model, batch, graph = captured("llama", "fp64")
    options = Options(pins=KINDS["zero3"](3), precision="fp64")
    plan = api.plan_captured(graph, load_cluster("rtx3090:3"), options=options)
    source = api.emit_captured(graph, plan)
    for found in re.finditer(line, source.text):
        wrong = source.text[: found.start()] + found.expand(instead) + source.text[found.end() :]
        report = api.verify_source(graph, plan, replace(source, text=wrong), model, batch)
        assert not report.ok and report.first_difference is not None, found.group()
        break
    else:
        pytest.fail(f"nothing like {line} is emitted")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(("kind", "ranks"), EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_same_numbers_everywhere(name, kind, ranks, precision):
    check(name, kind, ranks, precision)


@pytest.mark.parametrize(("pins", "micro_batches"), [({"dp": 3}, None), ({"dp": 2, "pp": 2}, 3)])
def test_masks_made_of_counts_are_cut_with_rows(pins, micro_batches):
    """The mask that llama makes of positions alone."""
    model, batch, graph = captured("llama", "fp64")
    ranks = math.prod(pins.values())
    options, cluster = (
        Options(pins=pins, precision="fp64", micro_batches=micro_batches),
        load_cluster(f"rtx3090:{ranks}"),
    )
    plan = api.plan_captured(graph, cluster, options=options)
    rows = [s for some in plan.strategies.values() for k, s in some.items() if "/aten.where.self/" in k]
    assert rows and all("dp:R" not in s.outputs[0] for s in rows)
    report = api.verify(model, batch, plan=plan, captured=graph)
    assert report.ok, str(report)
