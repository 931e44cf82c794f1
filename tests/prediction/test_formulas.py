"""The published formulas and tables (docs/cost-model.md lists them), exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.held import in_flight
from autopar.ir.schedules import build_schedule
from autopar.ir.transformer import Experts, Latent, Transformer
from autopar.prediction.memory import chunk_memory, layer_bytes, stored_bytes
from autopar.prediction.stage import stage_works
from tests.prediction.samples import ROUTED, SMALL, described_links, gpt, plain_cluster, setting

GIB = 2**30
TABLE = (
    # layers, hidden, heads, micro-batch, p, v, parameters and optimizer, activations: none, SP and selective (GiB)
    (48, 6144, 64, 4, 1, 1, 45.56, 59.25, 9.56),
    (96, 12288, 96, 1, 8, 3, 45.56, 66.84, 12.35),
    (105, 20480, 128, 1, 35, 3, 31.64, 114.02, 23.08),
    (128, 25600, 160, 1, 64, 1, 32.96, 131.25, 26.56),
)
"""arXiv 2205.05198, t = 8, s = 2048."""


@pytest.mark.parametrize("row", TABLE, ids=("22B", "175B", "530B", "1T"))
def test_memory_of_korthikanti(row: tuple[float, ...]) -> None:
    layers, hidden, heads, micro, p, v = map(int, row[:6])
    model = gpt(layers, hidden, heads)
    matrices = layers * (model.attention_parameters + model.dense_parameters) / (8 * p)
    assert matrices * 18 / GIB == pytest.approx(row[6], abs=0.006)
    schedule = build_schedule(
        "none" if p == 1 else "interleaved" if v > 1 else "1f1b", stages=p, micro_batches=4 * p, chunks=v
    )
    held = in_flight(schedule, 0) * layers / (p * v)
    sizes = {"tp": 8, "pp": p, "chunks": v, "micro_batch": micro, "seq": 2048, "attention": "plain"}
    none = setting(model, sequence_parallel=False, **sizes)
    both = setting(model, sequence_parallel=True, recompute="selective", **sizes)
    assert held * layer_bytes(none) / GIB == pytest.approx(row[7], abs=0.006)
    assert held * stored_bytes(both) / GIB == pytest.approx(row[8], abs=0.006)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, lambda sbh, t, scores: sbh * (10 + 24 / t) + scores),
        ({"sequence_parallel": True}, lambda sbh, t, scores: sbh * 34 / t + scores),
        ({"recompute": "selective"}, lambda sbh, t, scores: sbh * (10 + 24 / t)),
        ({"recompute": "selective", "sequence_parallel": True}, lambda sbh, t, scores: sbh * 34 / t),
        ({"recompute": "full"}, lambda sbh, t, scores: 2 * sbh),
    ],
)
def test_activation_bytes_by_mode(more: dict[str, object], wanted: object) -> None:
    """Table 2 of the same paper."""
    t, s, b = 4, 512, 2
    case = setting(SMALL, **({"sequence_parallel": False} | more), tp=t, seq=s, micro_batch=b, attention="plain")
    sbh = s * b * SMALL.hidden
    assert stored_bytes(case) == wanted(sbh, t, 5 * SMALL.heads * s * s * b / t)  # type: ignore[operator]


def test_activation_bytes_of_one_device() -> None:
    """sbh(34 + 5as/h); `tests/cost_model/test_kept.py` has it from a captured layer."""
    case = setting(SMALL, sequence_parallel=False, tp=1, seq=512, micro_batch=2, attention="plain")
    sbh = 512 * 2 * SMALL.hidden
    assert layer_bytes(case) == sbh * (34 + 5 * SMALL.heads * 512 / SMALL.hidden)


def test_fused_attention_keeps_a_statistic_instead_of_scores() -> None:
    sizes = {"tp": 1, "seq": 512, "micro_batch": 2, "sequence_parallel": False}
    plain, fused = (layer_bytes(setting(SMALL, attention=a, **sizes)) for a in ("plain", "flash"))
    assert plain - fused == 5 * SMALL.heads * 512 * 512 * 2 - 4 * 2 * SMALL.heads * 512


def test_flops_of_a_token() -> None:
    model = Transformer(
        name="x", layers=3, hidden=64, heads=8, key_value_heads=2, head_size=8, width=96, gated=True, vocabulary=100
    )
    h, f, s = 64, 96, 32
    whole = 3 * (2 * 3 * (2 * h * h + 2 * h * h * 2 / 8 + 3 * h * f) + 4 * 3 * s * h + 2 * h * 100)
    assert model.flops_per_token(s, halved=False) == whole
    assert whole - model.flops_per_token(s, halved=True) == 3 * 2 * 3 * s * h


def test_parameters_of_latent_attention_and_experts() -> None:
    """DeepSeek-V3: 671.0 billion (arXiv 2412.19437)."""
    model = Transformer(
        name="v3",
        layers=61,
        hidden=7168,
        heads=128,
        key_value_heads=128,
        head_size=192,
        width=18432,
        gated=True,
        vocabulary=129280,
        experts=Experts(count=256, top_k=8, width=2048, shared_width=2048, dense_layers=3),
        latent=Latent(query_rank=1536, key_value_rank=512, rope=64, plain=128, value=128),
    )
    assert model.parameters / 1e9 == pytest.approx(671.0, abs=0.05)


@pytest.mark.parametrize(("zero", "wanted"), [(0, 16.0), (1, 4 + 12 / 4), (2, 2 + 14 / 4), (3, 16 / 4)])
def test_state_of_a_parameter(zero: int, wanted: float) -> None:
    """arXiv 1910.02054, gradients summed in 16 bits."""
    memory = chunk_memory(setting(SMALL, dp=4, zero=zero), 8, 0, False, False)
    assert memory.resident_bytes / memory.own == pytest.approx(wanted, rel=1e-6)
    # Software that keeps an fp32 sum beside a micro-batch's gradients: 4 more, cut from ZeRO-2 on.
    older = chunk_memory(setting(SMALL, dp=4, zero=zero, software=2022.0), 8, 0, False, False)
    assert older.resident_bytes / older.own == pytest.approx(wanted + (4 if zero < 2 else 1), rel=1e-6)


def dp_bytes(zero: int, ranks: int, micro_batches: int = 1, model: Transformer = SMALL, **more: object) -> float:
    """What one device sends a step for gradients and parameters, over the parameters' bytes: µs at 1 byte per µs."""
    case = setting(model, plain_cluster(ranks, bytes_per_us=1.0), dp=ranks, zero=zero, precision="fp32", **more)
    case = described_links(case)
    (row,) = stage_works(case, build_schedule("none", micro_batches=micro_batches))
    (work,) = row
    late = [t for t in (*work.first_forward, *work.last_backward) if t.late]
    once = sum(t.us for t in (*work.sync, *work.end, *late) if t.stream == "comm:dp")
    every = sum(t.us for t in (*work.forward, *work.backward) if t.stream == "comm:dp")
    layers = model.layers * (model.attention_parameters + model.dense_parameters)
    tables = (1 if model.tied else 2) * model.embedding_parameters
    return (once + micro_batches * every) / (4 * (layers + tables))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_volume_of_data_parallelism(ranks: int) -> None:
    part = (ranks - 1) / ranks
    assert dp_bytes(0, ranks) == pytest.approx(2 * part)
    assert dp_bytes(1, ranks) == pytest.approx(2 * part)
    assert dp_bytes(2, ranks) == pytest.approx(2 * part)
    assert dp_bytes(3, ranks) == pytest.approx(3 * part)
    assert dp_bytes(3, ranks, micro_batches=5) == pytest.approx(3 * part * 5)
    tied = gpt(8, 1024, 16, tied=True)
    assert dp_bytes(1, ranks, model=tied) == pytest.approx(2 * part)
    assert dp_bytes(3, ranks, model=tied) == pytest.approx(3 * part)
    assert dp_bytes(3, ranks, trains="adapters") == pytest.approx(2 * part)  # gathered twice; no gradients


def stream_us(stream: str, model: Transformer, ranks: int, **config: object) -> tuple[float, float]:
    """(forward, backward) µs of one layer on a stream, at 1 byte per µs."""
    case = setting(model, plain_cluster(ranks, bytes_per_us=1.0), seq=256, micro_batch=2, **config)
    case = described_links(case)
    ((work,),) = stage_works(case, build_schedule("none"))
    forward, backward = (
        sum(t.us for t in tasks if t.stream == stream) / model.layers for tasks in (work.forward, work.backward)
    )
    return forward, backward


def test_volume_of_tensor_parallelism() -> None:
    """Two all-reduces each way, as gathers and scatters; one more gather for the weights' gradient."""
    forward, backward = stream_us("comm:tp", SMALL, 4, tp=4)
    whole = 2 * 256 * SMALL.hidden * 2
    assert forward == pytest.approx(4 * 3 / 4 * whole)
    assert backward == pytest.approx(5 * 3 / 4 * whole)
    # Without sequence parallelism: four all-reduces of bsh, 2(t-1)/t of it each.
    plain = stream_us("comm:tp", SMALL, 4, tp=4, sequence_parallel=False)
    assert sum(plain) == pytest.approx(4 * 2 * 3 / 4 * whole)


def test_volume_of_the_context_ring() -> None:
    forward, backward = stream_us("comm:cp", SMALL, 4, cp=4)
    whole = 2 * 2 * 256 * SMALL.hidden * 2  # keys and values, 16 bits
    assert forward == pytest.approx(3 / 4 * whole)
    assert backward == pytest.approx(2 * 3 / 4 * whole)
    shared = replace(SMALL, key_value_heads=4)  # of 16: kv/a of it
    assert stream_us("comm:cp", shared, 4, cp=4)[0] == pytest.approx(3 / 4 * whole / 4)


def test_volume_of_experts() -> None:
    """Two all-to-alls each way of top_k copies of each token."""
    forward, backward = stream_us("comm:ep", ROUTED, 4, dp=4, ep=4)
    one = 3 / 4 * 2 * 256 * 2 * ROUTED.hidden * 2
    slower = forward / (2 * one)
    assert slower >= 1 and forward == pytest.approx(backward)
    assert slower == pytest.approx(1.0)  # the newest software
