"""Whole predictions: they move the right way, refuse what cannot be, and say what they assume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost_model.clusters import list_presets, load_cluster
from autopar.errors import UserError
from autopar.ir.cluster import DeviceGroup
from autopar.prediction.rates import read_rates
from autopar.prediction.step import predict
from tests.prediction.samples import ROUTED, SMALL, gpt, other_device, plain_cluster, setting

KEPT = ("none", "selective", "full")
HALF = 2


def price(model: autopar.Transformer = SMALL, cluster: Any = None, **config: Any) -> autopar.Prediction:
    found = autopar.Configuration(**config)
    return predict(model, found, cluster or plain_cluster(found.devices))


SIZES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 4]),
        "dp": st.sampled_from([1, 2, 3]),
        "cp": st.sampled_from([1, 2]),
        "zero": st.sampled_from([0, 1, 2]),
        "micro_batch": st.integers(1, 3),
        "recompute": st.sampled_from(KEPT),
        "precision": st.sampled_from(["fp32", "fp16", "bf16", "fp8"]),
        "attention": st.sampled_from(["flash", "plain"]),
        "seq": st.sampled_from([512, 2048]),
    }
)


@settings(deadline=None, max_examples=40)
@given(SIZES, st.integers(1, 4), st.booleans())
def test_more_bandwidth_is_never_slower(sizes: dict[str, Any], times: int, gathered: bool) -> None:
    if gathered:
        sizes = sizes | {"zero": 3, "pp": 1, "dp": sizes["dp"] + 1}
    sizes = sizes | {"global_batch": 12 * sizes["dp"] * sizes["micro_batch"]}
    devices = autopar.Configuration(**sizes).devices
    slow, fast = (price(cluster=plain_cluster(devices, bytes_per_us=10_000 * n), **sizes) for n in (1, times + 1))
    assert fast.step_time_us <= slow.step_time_us * (1 + 1e-12)


@settings(deadline=None, max_examples=40)
@given(SIZES)
def test_keeping_less_never_takes_more_memory_nor_less_time(sizes: dict[str, Any]) -> None:
    sizes = sizes | {"global_batch": 12 * sizes["dp"] * sizes["micro_batch"]}
    found = [price(**(sizes | {"recompute": kept})) for kept in KEPT]
    memory = [p.peak_memory_bytes for p in found]
    times = [p.step_time_us for p in found]
    assert memory == sorted(memory, reverse=True)
    assert times == sorted(times)


@settings(deadline=None, max_examples=30)
@given(SIZES)
def test_the_breakdown_is_the_step(sizes: dict[str, Any]) -> None:
    found = price(**(sizes | {"global_batch": 12 * sizes["dp"] * sizes["micro_batch"]}))
    counted = sum(us for what, us in found.breakdown_us.items() if not what.startswith("hidden:"))
    assert counted == pytest.approx(found.step_time_us)
    assert sum(found.memory_bytes.values()) == found.peak_memory_bytes


def test_step_is_linear_in_the_batch_with_an_intercept() -> None:
    """(p − 1) bubbles and what is spent once a step."""
    times = [price(pp=4, global_batch=n).step_time_us for n in (8, 16, 32)]
    slope = (times[1] - times[0]) / 8
    assert times[2] == pytest.approx(times[1] + 16 * slope)
    assert times[0] - 8 * slope > 3 * slope / HALF


def test_misaligned_heads_are_slow_where_scores_are_kept() -> None:
    aligned = price(attention="plain", tp=1, global_batch=1).step_time_us
    odd = replace(SMALL, heads=20, key_value_heads=20, head_size=51)
    assert price(odd, attention="plain", global_batch=1).step_time_us > 1.1 * aligned


def test_tensor_parallelism_beyond_the_fast_link_collapses() -> None:
    times = {tp: price(cluster=load_cluster("dgx-h100:2"), tp=tp, dp=16 // tp, global_batch=16) for tp in (8, 16)}
    assert times[16].step_time_us > 1.3 * times[8].step_time_us


def test_a_shard_group_inside_a_node_beats_one_over_all_ranks_on_a_slow_network() -> None:
    spec = load_cluster("a10g:64")
    sizes = {"dp": 64, "zero": 1, "global_batch": 64}
    inside, over_all = (price(cluster=spec, shard_group=n, **sizes) for n in (8, 0))
    assert inside.step_time_us < over_all.step_time_us
    assert inside.memory_bytes["optimizer state"] == pytest.approx(
        8 * over_all.memory_bytes["optimizer state"], rel=1e-6
    )


def test_zero_3_at_a_small_batch_is_bound_by_the_network() -> None:
    spec = load_cluster("dgx-a100-80g:8")
    slow = msgspec.structs.replace(
        spec, levels=(spec.levels[0], msgspec.structs.replace(spec.levels[1], bytes_per_us=500.0))
    )
    waits = [
        sum(
            us
            for what, us in price(cluster=c, dp=64, zero=3, global_batch=64).breakdown_us.items()
            if "exposed" in what
        )
        for c in (spec, slow)
    ]
    assert waits[1] > 3 * waits[0]


def test_experts_are_noted_and_priced() -> None:
    found = price(ROUTED, dp=4, ep=4, global_batch=8)
    assert any("evenly" in note for note in found.notes)
    assert any("all-to-all" in what for what in found.breakdown_us)


def test_adapters_have_neither_state_nor_synchronisation() -> None:
    found = price(dp=4, trains="adapters", global_batch=8)
    assert found.memory_bytes["optimizer state"] == found.memory_bytes["gradients"] == 0
    assert not any("reduce-scatter" in what for what in found.breakdown_us)


def test_adapters_read_and_write_what_they_stand_beside() -> None:
    """Six passes over inputs and six over outputs; beside queries, keys and values alone, or beside all products."""
    narrow, wide = (
        price(dp=1, tp=2, trains=trains, global_batch=1).breakdown_us["compute:pointwise"]
        for trains in ("adapters", "adapters-everywhere")
    )
    h = SMALL.hidden
    inputs = 2 * h + h / 2 + h + 4 * h / 2  # queries, keys and values read theirs one by one; the other three products
    outputs = h + 4 * h / 2 + h
    elements = 2048 * (inputs + outputs) * SMALL.layers
    assert wide - narrow == pytest.approx(setting(SMALL, tp=2).speed.memory_us(6 * 2 * elements))


def test_all_reduces_over_tp_are_waited_for() -> None:
    cut, whole = (
        price(dp=1, tp=4, global_batch=4, sequence_parallel=s, software=2024.0).breakdown_us for s in (True, False)
    )
    assert whole["exposed:all-gather"] > cut["exposed:all-gather"]
    assert "hidden:all-gather" in cut and "hidden:all-gather" not in whole


def test_a_device_without_rates_is_an_estimate() -> None:
    spec = plain_cluster(2)
    spec = msgspec.structs.replace(spec, groups=(DeviceGroup(count=2, device=other_device()),))
    found = price(cluster=spec, dp=2, global_batch=2)
    assert found.cost_source == "estimated"
    assert "no rates for unheard-of" in found.notes[0]
    assert price(dp=2, global_batch=2).cost_source == "calibrated"


def test_every_preset_of_nvidia_has_rates() -> None:
    missing = {p.device.name for p in list_presets()} - set(read_rates().devices)
    assert missing == {"MI300X-192"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tp": 3, "global_batch": 1}, "tp 3 does not divide 16 attention heads"),
        ({"tp": 0}, "tp 0: wanted 1 or more"),
        ({"pp": 2, "chunks": 6, "global_batch": 4}, "is more than 8 layers"),
        ({"chunks": 2}, "without pp"),
        ({"pp": 2, "zero": 3, "global_batch": 4}, "wanted pp 1"),
        ({"zero": 4}, "wanted 0, 1, 2 or 3"),
        ({"dp": 2, "ep": 2, "global_batch": 2}, "has no experts"),
        ({"dp": 4, "global_batch": 2}, "without a sequence"),
        ({"cp": 3, "seq": 512}, "does not divide seq"),
        ({"schedule": "2f2b"}, "schedule '2f2b': wanted one of"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        price(**config)


def test_other_devices_than_the_cluster_has() -> None:
    with pytest.raises(UserError, match="tp 2 × pp 1 × dp 1 × cp 1 is 2 devices, but the cluster has 8"):
        price(cluster=load_cluster("dgx-h100:1"), tp=2)


def test_a_v_of_stages_waits_less_and_holds_no_more() -> None:
    """Both ends of the model on its first stage; as many layers in flight as on the first stage of 1F1B."""
    sizes = {"pp": 4, "global_batch": 16, "zero": 0}
    plain = price(**sizes, schedule="1f1b")
    v = price(**sizes, schedule="zb-v", chunks=2)
    assert v.breakdown_us["bubble"] < plain.breakdown_us["bubble"] / 4
    assert v.step_time_us < plain.step_time_us
    held = [
        sum(size for what, size in p.timeline.memory[0].contributors if what.startswith("held")) for p in (plain, v)
    ]
    assert held[1] == pytest.approx(held[0], rel=0.05)


def test_a_thousand_devices() -> None:
    """16 stages of 8 chunks, 1 024 micro-batches."""
    found = price(gpt(128, 1024, 16), tp=8, pp=16, dp=8, chunks=8, global_batch=8 * 1024)
    assert found.configuration.devices == 1024
    assert found.timeline.schedule.stages == 16
