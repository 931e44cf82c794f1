"""Roofline in closed form. `ops` is stood in for: its own tests say what flops and bytes an op has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import ops
from autopar.cost_model.device import flops_per_us
from autopar.cost_model.model import CostModel
from autopar.cost_model.op_cost import compute_dtype, op_cost, optimizer_us, roofline
from autopar.ir.cluster import ClusterSpec, DeviceGroup
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.layout import parse_layout
from tests.cost_model.helpers import cluster, device, mesh, node

Metas = tuple[TensorMeta, ...]
SPEC = cluster((2, 1.0, 100.0))


def f32(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float32")


@pytest.fixture(autouse=True)
def plain_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrix products have 2mnk flops; every op reads its inputs and writes its outputs; `view` is a view."""

    def flops(node: Node, inputs: Metas, outputs: tuple[TensorMeta | None, ...]) -> float:
        return 2.0 * inputs[0].numel * inputs[1].shape[-1] if ".mm." in node.op else 0.0

    def moved(node: Node, inputs: Metas, outputs: tuple[TensorMeta | None, ...]) -> float:
        return float(sum(m.nbytes for m in (*inputs, *outputs) if m is not None))

    monkeypatch.setattr(ops, "flops", flops, raising=False)
    monkeypatch.setattr(ops, "moved_bytes", moved, raising=False)
    monkeypatch.setattr(ops, "is_view", lambda op: ".view." in op, raising=False)
    yield


def test_big_product_is_bound_by_flops() -> None:
    cost = op_cost(node(), (f32(100, 200), f32(200, 300)), (f32(100, 300),), SPEC)
    assert cost.flops == 12e6  # 2·100·200·300
    assert cost.bytes == 4 * (20_000 + 60_000 + 30_000)
    assert cost.us == pytest.approx(440)  # bytes: 440 000/1000; flops: 2 + 12e6/1e6 = 14
    cubic = op_cost(
        node(), (f32(2000, 2000), f32(2000, 2000)), (f32(2000, 2000),), cluster((1, 0, 1), memory_bytes_per_us=1e6)
    )
    assert cubic.us == pytest.approx(16_002)  # 2 + 2·2000³/1e6


def test_dtype_of_the_operands_decides_the_peak() -> None:
    single = roofline(1e9, 0, "float32", device())
    half = roofline(1e9, 0, "bfloat16", device())
    assert (single.us, half.us) == (pytest.approx(1002), pytest.approx(502))
    index, table = TensorMeta((8,), "int64"), TensorMeta((8, 8), "bfloat16")
    assert compute_dtype((index, table), (None, f32(1))) == "bfloat16"
    assert compute_dtype((index,), (None,)) == "int64"
    assert compute_dtype((), (None,)) == "float32"


def test_tiny_ops_cost_the_floor() -> None:
    assert op_cost(node("aten.add.Tensor"), (f32(2), f32(2)), (f32(2),), SPEC).us == 2
    assert op_cost(node(), (f32(4, 4), f32(4, 4)), (f32(4, 4),), SPEC).us == pytest.approx(2, rel=1e-3)


def test_rate_saturates() -> None:
    # half the rate at F·floor = 2e6 flops: 2 + 2 µs
    assert roofline(2e6, 0, "float32", device()).us == pytest.approx(4)


def test_views_are_free() -> None:
    cost = op_cost(node("aten.view.default"), (f32(4096, 4096),), (f32(4096 * 4096),), SPEC)
    assert (cost.us, cost.flops, cost.bytes) == (0, 0, 0)


def test_unlisted_dtype_is_a_labelled_estimate() -> None:
    assert flops_per_us(device(), "float64") == (pytest.approx(1e6 / 32), False)
    assert flops_per_us(device(), "float16") == (pytest.approx(1e6), False)
    assert roofline(1e6, 0, "float64", device()).source == "estimated"
    assert roofline(0, 1e6, "int64", device()).source == "analytic"
    assert roofline(1e6, 0, "float32", device(source="measured 2026-01-01")).source == "calibrated"


def test_slowest_device_counts() -> None:
    slow = DeviceGroup(count=1, device=device(memory_bytes_per_us=200.0))
    mixed = ClusterSpec(name="mixed", groups=(*SPEC.groups, slow), levels=SPEC.levels)
    metas = ((f32(1000), f32(1000)), (f32(1000),))
    assert op_cost(node("aten.add.Tensor"), *metas, SPEC).us == pytest.approx(12)  # 12 000/1000
    assert op_cost(node("aten.add.Tensor"), *metas, mixed).us == pytest.approx(120)


def test_optimizer_moves_parameter_gradient_and_state() -> None:
    # 1000·(3·4 + 2·8) = 28 000 bytes at 1000 bytes/µs
    assert optimizer_us(1000, "float32", 8, SPEC) == pytest.approx(28)
    assert optimizer_us(0, "float32", 8, SPEC) == 0
    assert optimizer_us(2000, "float32", 8, SPEC) == pytest.approx(2 * optimizer_us(1000, "float32", 8, SPEC))


@given(st.floats(0, 1e15), st.floats(0, 1e15), st.floats(0, 1e12), st.floats(0, 1e12))
def test_more_work_is_never_faster(flops_a: float, flops_b: float, bytes_a: float, bytes_b: float) -> None:
    less = roofline(min(flops_a, flops_b), min(bytes_a, bytes_b), "float32", device())
    more = roofline(max(flops_a, flops_b), max(bytes_a, bytes_b), "float32", device())
    assert device().kernel_floor_us <= less.us <= more.us


@given(st.floats(0, 1e15), st.floats(0, 1e12), st.floats(1, 1e7), st.floats(1, 1e7))
def test_more_bandwidth_is_never_slower(flops: float, moved: float, a: float, b: float) -> None:
    slow, fast = (roofline(flops, moved, "float32", device(memory_bytes_per_us=rate)) for rate in sorted((a, b)))
    assert fast.us <= slow.us


def test_model_prices_equal_ops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CostModel(SPEC, mesh(SPEC, tp=2))
    asked: list[str] = []
    plain = ops.flops
    monkeypatch.setattr(ops, "flops", lambda n, i, o: (asked.append(n.name), plain(n, i, o))[1])
    metas = ((f32(8, 8), f32(8, 8)), (f32(8, 8),))
    first = model.op(node("aten.mm.default", Ref("a"), Ref("b"), name="x"), *metas)
    assert model.op(node("aten.mm.default", Ref("c"), Ref("d"), name="y"), *metas) is first
    assert model.op(node("aten.mm.default", Ref("c"), Ref("d"), 2, name="z"), *metas) is not first
    assert asked == ["x", "z"]
    # Other shapes, another dtype, another device are other prices.
    half = tuple(tuple(TensorMeta(m.shape, "bfloat16") for m in side) for side in metas)
    wide = ((f32(8, 8), f32(8, 4096)), (f32(8, 4096),))
    mm = node("aten.mm.default", Ref("a"), Ref("b"), name="x")
    assert len({id(model.op(mm, *m)) for m in (metas, half, wide)}) == 3
    slow = cluster((2, 1.0, 100.0), memory_bytes_per_us=1.0)
    assert CostModel(slow, mesh(slow, tp=2)).op(mm, *metas).us > first.us
    assert len(asked) == 5


def test_a_remembered_price_takes_microseconds() -> None:
    model = CostModel(SPEC, mesh(SPEC, tp=2))
    op, metas = node(), ((f32(8, 8), f32(8, 8)), (f32(8, 8),))
    before, after = parse_layout("tp:P", model.mesh), parse_layout("tp:R", model.mesh)
    fastest = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(1000):
            model.op(op, *metas)
            model.reshard_us(metas[0][0], before, after)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest / 1000 < 50e-6  # about 6 µs on a slow core
