"""Collectives and reshards in closed form."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.collectives import collective_us, reshard_us, spans, step_bytes
from autopar.cost_model.model import CostModel
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout, P, R, S, parse_layout
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.reshard import Collective, plan_reshard
from tests.cost_model.helpers import cluster, mesh

FLAT = cluster((4, 3.0, 100.0))
FOUR = mesh(FLAT, tp=4)
NODES = cluster((2, 1.0, 300.0), (2, 5.0, 10.0))
NETWORK = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


def test_one_level_in_closed_form() -> None:
    # n = 4, α = 3, β = 100, V = 8000
    price = {c: collective_us(c, 8000, "tp", FOUR, FLAT) for c in Collective}
    assert price[Collective.ALL_REDUCE] == pytest.approx(138)  # 2·3·3 + 2·¾·8000/100
    assert price[Collective.ALL_GATHER] == pytest.approx(69)  # 3·3 + ¾·8000/100
    assert price[Collective.REDUCE_SCATTER] == pytest.approx(69)
    assert price[Collective.ALL_TO_ALL] == pytest.approx(69)
    assert price[Collective.SLICE] == pytest.approx(4)  # a piece of 2000 read and written at 1000 bytes/µs


def test_axis_across_nodes_is_priced_at_the_slow_level() -> None:
    """SOL-15: one member per node, intra 300, inter 10, no latency: 30 times."""
    spec = cluster((2, 0.0, 300.0), (2, 0.0, 10.0))
    both = mesh(spec, dp=2, tp=2)
    for collective in NETWORK:
        outer, inner = (collective_us(collective, 1e6, axis, both, spec) for axis in ("dp", "tp"))
        assert outer / inner == pytest.approx(30)


def test_group_over_two_levels_shares_the_links_of_its_node() -> None:
    whole = mesh(NODES, dp=4)
    # latencies 1·1 + 1·5; inside ½·1200/300 = 2 while ½·600/10 = 30 go between, half for each of the two NICs
    assert collective_us(Collective.ALL_GATHER, 1200, "dp", whole, NODES) == pytest.approx(36)
    assert collective_us(Collective.ALL_REDUCE, 1200, "dp", whole, NODES) == pytest.approx(72)
    # 300 to one neighbour: 1 + 300/300, while 300 go to each of two across: 2·(5 + 300/10)
    assert collective_us(Collective.ALL_TO_ALL, 1200, "dp", whole, NODES) == pytest.approx(71)


def test_small_all_reduce_of_many_takes_the_tree() -> None:
    many = cluster((64, 3.0, 100.0))
    # ring: 2·63·3; tree: 2·6·3, and 2·V/β
    assert collective_us(Collective.ALL_REDUCE, 100, "tp", mesh(many, tp=64), many) == pytest.approx(38)


def test_switches_that_sum_bound_an_all_reduce_inside_their_level() -> None:
    level = msgspec.structs.replace(FLAT.levels[0], switch_bytes_per_us=200.0)
    summing = msgspec.structs.replace(FLAT, levels=(level,))
    # 2·3 + 2·¾·8000/200; nothing else is faster for it
    assert collective_us(Collective.ALL_REDUCE, 8000, "tp", FOUR, summing) == pytest.approx(66)
    assert collective_us(Collective.ALL_GATHER, 8000, "tp", FOUR, summing) == pytest.approx(69)


@pytest.mark.parametrize(
    ("sizes", "axis", "members"),
    [
        ({"dp": 2, "tp": 8}, "tp", (8,)),
        ({"dp": 2, "tp": 8}, "dp", (2,)),
        ({"dp": 8, "tp": 2}, "dp", (4, 2)),
        ({"dp": 16}, "dp", (8, 2)),
        ({"dp": 2, "cp": 4, "tp": 2}, "cp", (4,)),
    ],
)
def test_members_by_level(sizes: dict[str, int], axis: str, members: tuple[int, ...]) -> None:
    spec = cluster((8, 1.0, 300.0), (2, 5.0, 10.0))
    assert tuple(n for n, _ in spans(axis, mesh(spec, **sizes), spec)) == members


def test_an_axis_whose_level_was_set_by_hand_is_priced_there() -> None:
    by_hand = Mesh(axes=(Axis(name="tp", size=2, level=1),))
    # 2·1·5 + 2·½·100/10
    assert collective_us(Collective.ALL_REDUCE, 100, "tp", by_hand, NODES) == pytest.approx(20)


def test_group_that_does_not_fill_its_nodes_is_priced_at_the_slow_level() -> None:
    spec = cluster((8, 1.0, 300.0), (3, 5.0, 10.0))
    assert [n for n, _ in spans("dp", mesh(spec, dp=12, tp=2), spec)] == [4, 3]
    assert [(n, link.name) for n, link in spans("tp", mesh(spec, dp=2, tp=12), spec)] == [(12, "level1")]


META = TensorMeta((8, 16), "float32")  # 512 bytes


def test_reshard_sums_the_planned_steps() -> None:
    spec = cluster((2, 1.0, 100.0), (2, 5.0, 10.0))
    both = mesh(spec, dp=2, tp=2)

    def us(before: str, after: str) -> float:
        return reshard_us(META, parse_layout(before, both), parse_layout(after, both), both, spec)

    assert us("dp:S(0) tp:R", "dp:S(0) tp:R") == 0
    assert us("dp:S(0) tp:P", "dp:S(0) tp:R") == pytest.approx(4.56)  # 2·1 + 2·½·256/100: tp's whole is dp's piece
    assert us("dp:S(0) tp:S(1)", "dp:S(0) tp:R") == pytest.approx(2.28)  # 1 + ½·256/100
    assert us("dp:P tp:R", "dp:R tp:R") == pytest.approx(61.2)  # 2·5 + 2·½·512/10
    assert us("dp:S(0) tp:S(0)", "dp:R tp:R") == pytest.approx(2.28 + 5 + 25.6)  # tp first, 256; then dp, ½·512/10
    assert us("dp:R tp:R", "dp:S(0) tp:R") == pytest.approx(0.512)  # 2·256/1000
    assert reshard_us(META, *(parse_layout(x, both) for x in ("dp:R tp:R", "dp:S(0) tp:R")), both, spec, True) == 0
    assert us("dp:R tp:R", "dp:R tp:S(1)") == pytest.approx(0.512)  # a copy: 256 bytes read and written at 1000
    assert us("dp:R tp:S(0)", "dp:R tp:S(1)") == pytest.approx(2.28)  # 1 + ½·256/100: V is the piece


def test_nothing_becomes_a_partial_sum() -> None:
    assert reshard_us(META, Layout(("tp",), (R,)), Layout(("tp",), (P,)), FOUR, FLAT) == math.inf


def test_layout_of_a_dim_that_is_not_there_cannot_be_reached() -> None:
    assert reshard_us(META, Layout(("tp",), (R,)), Layout(("tp",), (S(2),)), FOUR, FLAT) == math.inf
    odd = TensorMeta((6, 16), "float32")
    assert reshard_us(odd, Layout(("tp",), (S(0),)), Layout(("tp",), (R,)), FOUR, FLAT) == pytest.approx(
        reshard_us(TensorMeta((8, 16), "float32"), Layout(("tp",), (S(0),)), Layout(("tp",), (R,)), FOUR, FLAT)
    )


def test_slice_of_what_stays_is_a_view_where_it_is_contiguous() -> None:
    row = TensorMeta((1, 16), "float32")
    ends = Layout(("tp",), (R,)), Layout(("tp",), (S(1),))
    assert reshard_us(row, *ends, FOUR, FLAT) == pytest.approx(2 * 16 / 1000)
    assert reshard_us(row, *ends, FOUR, FLAT, stays=True) == 0
    assert reshard_us(TensorMeta((2, 16), "float32"), *ends, FOUR, FLAT, stays=True) == pytest.approx(2 * 32 / 1000)


def test_same_collective_costs_the_same_by_every_route() -> None:
    """SOL-09: inside an op, as a conversion, from the cache or not."""
    model = CostModel(NODES, mesh(NODES, dp=2, tp=2))
    before, after = (parse_layout(text, model.mesh) for text in ("dp:P", "dp:R"))
    routes = {
        model.reshard_us(META, before, after),
        model.reshard_us(META, before, after),
        model.collective_us(Collective.ALL_REDUCE, META.nbytes, "dp"),
        collective_us(Collective.ALL_REDUCE, META.nbytes, "dp", model.mesh, NODES),
        reshard_us(META, before, after, model.mesh, NODES),
    }
    assert len(routes) == 1


@pytest.mark.parametrize("collective", NETWORK)
def test_twice_the_bandwidth_halves_the_volume_part(collective: Collective) -> None:
    fast = cluster((2, 1.0, 600.0), (2, 5.0, 20.0))
    for sizes in ({"dp": 4}, {"dp": 2, "tp": 2}):
        slow_mesh, fast_mesh = mesh(NODES, **sizes), mesh(fast, **sizes)
        latency = collective_us(collective, 0, "dp", slow_mesh, NODES)
        slow = collective_us(collective, 4096, "dp", slow_mesh, NODES) - latency
        assert collective_us(collective, 4096, "dp", fast_mesh, fast) - latency == pytest.approx(slow / 2)


SIZES = st.integers(0, 10**12)
RATES = st.floats(1e-1, 1e7)


@given(st.sampled_from(list(Collective)), SIZES, SIZES, st.sampled_from([2, 3, 4, 8]))
def test_more_bytes_are_never_faster(collective: Collective, a: int, b: int, n: int) -> None:
    spec = cluster((n, 1.0, 300.0), (2, 5.0, 10.0))
    whole = mesh(spec, dp=2 * n)
    less, more = (collective_us(collective, v, "dp", whole, spec) for v in sorted((a, b)))
    assert less <= more


@given(st.sampled_from(NETWORK), SIZES, RATES, RATES)
def test_more_bandwidth_is_never_slower(collective: Collective, nbytes: int, a: float, b: float) -> None:
    slow, fast = (cluster((4, 1.0, rate)) for rate in sorted((a, b)))
    assert collective_us(collective, nbytes, "tp", FOUR, fast) <= collective_us(collective, nbytes, "tp", FOUR, slow)


@given(st.sampled_from(NETWORK), SIZES, st.tuples(RATES, RATES), st.tuples(st.floats(1, 100), st.floats(1, 100)))
def test_more_bandwidth_of_any_level_is_never_slower(
    collective: Collective, nbytes: int, rates: tuple[float, float], times: tuple[float, float]
) -> None:
    """Groups over two levels, and groups inside one of them."""
    slow = cluster((4, 1.0, rates[0]), (2, 5.0, rates[1]))
    fast = cluster((4, 1.0, rates[0] * times[0]), (2, 5.0, rates[1] * times[1]))
    for sizes in ({"dp": 8}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}):
        before, after = (collective_us(collective, nbytes, "dp", mesh(x, **sizes), x) for x in (slow, fast))
        assert after <= before * (1 + 1e-12)


@given(st.sampled_from(["R", "P", "S(0)", "S(1)"]), st.sampled_from(["R", "S(0)", "S(1)"]))
def test_conversions_within_a_node_cost_less_than_between(one: str, other: str) -> None:
    spec = load_cluster("dgx-h100:2")
    both = mesh(spec, dp=2, tp=8)
    meta = TensorMeta((1024, 1024), "float32")
    inner, outer = (
        reshard_us(meta, parse_layout(f"{a}:{one}", both), parse_layout(f"{a}:{other}", both), both, spec)
        for a in ("tp", "dp")
    )
    if one in ("P", "S(1)") and other == "R":
        assert 0 < inner < outer
    assert inner >= 0 and outer >= 0


def _bytes(shape: tuple[int, ...], before: str, after: str, on: Mesh, units: tuple[int, ...] = ()) -> list[float]:
    meta = TensorMeta(shape, "float32", units)
    steps = plan_reshard(parse_layout(before, on), parse_layout(after, on))
    assert steps
    return [step_bytes(meta, step, on) for step in steps]


def test_bytes_of_a_step() -> None:
    """The larger side of the step, of one device's piece over the other axes."""
    both = mesh(NODES, dp=2, tp=2)
    assert _bytes((8, 16), "dp:P", "dp:R", both) == [512]
    assert _bytes((8, 16), "dp:P tp:S(1)", "dp:R tp:S(1)", both) == [256]
    assert _bytes((8, 16), "dp:S(0) tp:S(1)", "dp:R tp:S(1)", both) == [256]
    assert _bytes((8, 16), "dp:P", "dp:S(0)", both) == [512]
    assert _bytes((8, 16), "dp:S(0)", "dp:S(1)", both) == [256]


def test_unequal_pieces_travel_as_large_as_the_largest() -> None:
    """7 rows on 4 ranks are 2 2 2 1: 8 rows on the way. In units of 3, 21 rows are 6 6 6 3, so 24."""
    row = 16 * 4
    assert _bytes((7, 16), "tp:S(0)", "tp:R", FOUR) == [8 * row]
    assert _bytes((7, 16), "tp:P", "tp:S(0)", FOUR) == [8 * row]
    assert _bytes((7, 16), "tp:P", "tp:R", FOUR) == [7 * row]
    assert _bytes((21, 16), "tp:S(0)", "tp:R", FOUR, (3, 1)) == [24 * row]
    # Each rank hands in 2 rows of 12 columns (10 padded), whichever way.
    assert _bytes((7, 10), "tp:S(0)", "tp:S(1)", FOUR) == [2 * 12 * 4]
    assert _bytes((7, 10), "tp:S(1)", "tp:S(0)", FOUR) == [3 * 8 * 4]
