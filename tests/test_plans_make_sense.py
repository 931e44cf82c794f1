"""What a specialist would expect of a plan, without running it: layouts follow memory and links."""

from __future__ import annotations

from functools import lru_cache

import pytest

from autopar import api
from autopar.catalogue.source import load_model
from autopar.cost_model.clusters import load_cluster
from autopar.errors import InfeasibleError
from autopar.ir.options import Options


@lru_cache
def captured(name: str, precision: str, batch: int, seq: int):
    source = load_model(name, seq=seq, global_batch=batch, precision=precision)
    return api.capture(source.model, source.example_inputs, options=Options(precision=precision), model_name=name)


def search(name: str, cluster, *, batch: int, seq: int, **options):
    graph = captured(name, "bf16", batch, seq)
    return api.plan_captured(graph, cluster, options=Options(precision="bf16", **options))


def test_a_small_model_on_a_fast_node_is_data_parallel():
    """tp=2 gains a few percent by cutting the 50 257 words, in unequal pieces; no more of it is of use."""
    found = search("gpt2", load_cluster("dgx-h100:1"), batch=64, seq=512)
    plan = search("gpt2", load_cluster("dgx-h100:1"), batch=64, seq=512, pins={"dp": 8})
    assert found.mesh.axes in ({"dp": 8}, {"dp": 4, "tp": 2})
    assert found.predicted.step_time_us <= plan.predicted.step_time_us <= 1.1 * found.predicted.step_time_us
    assert plan.mesh.axes == {"dp": 8}
    assert plan.solver.status == "optimal"
    ids = {c.after for c in plan.conversions if c.graph == "top" and c.steps and c.value == "x_input_ids"}
    assert (ids or {plan.inputs["top"]["input:input_ids"]}) == {"dp:S(0)"}
    assert {p.role for p in plan.parameters.values()} <= {"data parallel", "ZeRO-3"}
    assert plan.parameters["transformer.h.0.mlp.c_fc.weight"].role == "data parallel"


def test_a_model_that_does_not_fit_is_cut():
    cluster = load_cluster("rtx3090:8")
    plan = search("gpt2-xl", cluster, batch=8, seq=256)
    whole = 1_557_611_200 * 16
    assert whole > cluster.memory_bytes
    assert plan.predicted.peak_memory_bytes <= cluster.memory_bytes * 1.02
    cut = sum(p.bytes_per_device for p in plan.parameters.values())
    assert cut < whole / 16 * 4 * 0.6


def test_tensor_parallelism_stays_inside_a_node_when_links_between_nodes_are_slow():
    plan = search("gpt2-xl", load_cluster("dgx-a100-40g:2"), batch=16, seq=256, pins={"tp": 8})
    assert plan.mesh.axes == {"dp": 2, "tp": 8}
    assert plan.mesh.levels["tp"] == 0 and plan.mesh.levels["dp"] == 1


def test_no_plan_fits_and_the_error_says_what_would():
    cluster = load_cluster("rtx3090:2")
    with pytest.raises(InfeasibleError, match="no plan fits") as caught:
        search("gpt2", cluster, batch=8, seq=256, memory_limit=300 * 2**20)
    error = caught.value
    assert error.exit_code == 3 and error.budget_bytes == 300 * 2**20 and error.largest_terms
    search("gpt2", cluster, batch=8, seq=256, memory_limit=error.needed_bytes)
    with pytest.raises(InfeasibleError):
        search("gpt2", cluster, batch=8, seq=256, memory_limit=int(error.needed_bytes * 0.95))


def test_the_same_search_gives_the_same_plan():
    first = search("gpt2", load_cluster("rtx3090:4"), batch=16, seq=256)
    again = search("gpt2", load_cluster("rtx3090:4"), batch=16, seq=256)
    timeless = [
        p.__class__(**{**{f: getattr(p, f) for f in p.__struct_fields__}, "solver": None}) for p in (first, again)
    ]
    assert timeless[0] == timeless[1]
