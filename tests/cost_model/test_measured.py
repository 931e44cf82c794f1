"""Curves of a profile: read off exactly, between points never falling, refused where they are of other hardware."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import api
from autopar.cost_model.clusters import dump_cluster, load_cluster
from autopar.cost_model.collectives import collective_us, spans
from autopar.cost_model.groups import group_us
from autopar.cost_model.local import fingerprint
from autopar.cost_model.measured import NARROW, ODD, ROWS, SLIM, SQUARE, Measured, Work, product_shape
from autopar.cost_model.op_cost import FREE, op_cost, optimizer_us
from autopar.errors import ClusterError
from autopar.ir import profile as kinds
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import TensorMeta
from autopar.ir.profile import (
    Curve,
    Fingerprint,
    LinkCurve,
    Profile,
    Scale,
    interpolate,
    merged,
    never_falling,
    op_class,
    refuse_foreign,
)
from autopar.ir.reshard import Collective
from tests.cost_model.helpers import cluster, mesh, node

HERE = Fingerprint(kind="cpu", device="round", cores=2, memory_gib=8)
SIZES, TIMES = (1e3, 1e5, 1e6), (10.0, 20.0, 150.0)


def curve(work: str, shape: str = "", dtype: str = "float32", times: tuple[float, ...] = TIMES) -> Curve:
    """One through three points."""
    return Curve(work=work, shape=shape, dtype=dtype, sizes=SIZES, p10=times, p50=times, p90=times)


def link(collective: str, level: str, members: int, times: tuple[float, ...] = TIMES) -> LinkCurve:
    """As `curve`."""
    return LinkCurve(
        collective=collective, level=level, members=members, sizes=SIZES, p10=times, p50=times, p90=times
    )  # fmt: skip


def profile(*curves: Curve | LinkCurve, hardware: Fingerprint = HERE, **changes: object) -> Profile:
    """Of these curves."""
    given_ = {
        "date": "2026-01-02",
        "torch": "2.13.0",
        "ranks": 2,
        "threads": 1,
        "hardware": hardware,
        "curves": tuple(c for c in curves if isinstance(c, Curve)),
        "links": tuple(c for c in curves if isinstance(c, LinkCurve)),
    }
    return Profile(**{**given_, **changes})  # type: ignore[arg-type]


def profiled(found: Profile, *levels: tuple[int, float, float]) -> ClusterSpec:
    """The round cluster with a profile."""
    return msgspec.structs.replace(cluster(*levels or ((2, 1.0, 100.0),)), profile=found)


positive = st.floats(1e-3, 1e12)
points = st.lists(st.tuples(positive, positive), min_size=1, max_size=8, unique_by=lambda p: p[0]).map(sorted)


@settings(max_examples=200, deadline=None)
@given(points, positive, st.floats(1.0, 1e3))
def test_exact_at_points_and_never_falling_between(rows: list[tuple[float, float]], size: float, larger: float) -> None:
    sizes, times = tuple(s for s, _ in rows), tuple(sorted(t for _, t in rows))
    assert [interpolate(sizes, times, s) for s in sizes] == list(times)
    a, b = interpolate(sizes, times, size), interpolate(sizes, times, size * larger)
    assert times[0] <= a <= b * (1 + 1e-9)


def test_between_below_and_above() -> None:
    assert interpolate((1.0, 100.0), (1.0, 100.0), 10.0) == pytest.approx(10.0)
    assert interpolate(SIZES, TIMES, 1.0) == 10.0
    assert interpolate(SIZES, TIMES, 4e6) == 600.0


@settings(max_examples=100, deadline=None)
@given(st.lists(positive, min_size=1, max_size=12))
def test_medians_made_never_to_fall(times: list[float]) -> None:
    found = never_falling(times)
    assert len(found) == len(times)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(found))
    assert never_falling(found) == pytest.approx(found)
    assert found[0] <= times[0] * (1 + 1e-9) and found[-1] >= times[-1] * (1 - 1e-9)


def test_which_curve_a_product_is_read_from() -> None:
    assert product_shape(512, 512, 512) == SQUARE
    assert product_shape(512, 512, 4) == ROWS
    assert product_shape(512, 512, NARROW) == SLIM
    assert product_shape(512, 513, 512) == ODD


def test_source_says_how_near_the_curve_is() -> None:
    measured = Measured(profile(curve(kinds.MATMUL, SQUARE), curve(kinds.POINTWISE)))
    assert measured.op_us(Work(kinds.MATMUL, SQUARE, "float32", 1e5, 0.0)) == (20.0, "measured")
    assert measured.op_us(Work(kinds.MATMUL, ODD, "float32", 1e5, 0.0)) == (20.0, "calibrated")
    assert measured.op_us(Work(kinds.NORM, "", "bfloat16", 1e5, 1e5)) == (20.0, "calibrated")
    assert measured.op_us(Work(kinds.ATTENTION, "", "float32", 1e5, 0.0)) is None
    assert measured.op_us(Work(kinds.MATMUL, SQUARE, "float16", 1e5, 0.0)) is None
    # A product that moves more than it computes takes at least what moving takes.
    assert measured.op_us(Work(kinds.MATMUL, SQUARE, "float32", 1e5, 1e6)) == (150.0, "measured")


def test_a_correction_scales_the_curve_and_says_so() -> None:
    scale = Scale(what=kinds.NORM, factor=2.0, date="2026-01-03", run="r", steps=5)
    measured = Measured(profile(curve(kinds.NORM), scales=(scale,)))
    assert measured.op_us(Work(kinds.NORM, "", "float32", 1e5, 1e5)) == (40.0, "calibrated")


def test_ops_are_read_off_the_curve_else_the_roofline() -> None:
    a, out = TensorMeta((64, 64), "float32"), TensorMeta((64, 64), "float32")
    with_curve = profiled(profile(curve(kinds.MATMUL, SLIM), curve(kinds.VIEW, "", "", (3.0, 3.0, 3.0))))
    found = op_cost(node("aten.mm.default"), (a, a), (out,), with_curve)
    assert (found.source, found.flops) == ("measured", 2 * 64**3)
    assert found.us == interpolate(SIZES, TIMES, 2 * 64**3)
    assert op_cost(node("aten.view.default"), (a,), (out,), with_curve).us == 3.0
    without = profiled(profile())
    bare = cluster((2, 1.0, 100.0))
    assert op_cost(node("aten.mm.default"), (a, a), (out,), without) == op_cost(
        node("aten.mm.default"), (a, a), (out,), bare
    )  # fmt: skip
    assert op_cost(node("aten.view.default"), (a,), (out,), without) == FREE
    assert optimizer_us(100, "float32", 8, without) == optimizer_us(100, "float32", 8, bare)
    kept = profiled(profile(curve(kinds.OPTIMIZER)))
    assert optimizer_us(1, "float32", 8, kept) == 10.0


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten.mm.default", kinds.MATMUL),
        ("aten.native_layer_norm_backward.default", kinds.NORM_BACKWARD),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", kinds.ATTENTION_BACKWARD),
        ("local_ops.embedding", kinds.EMBEDDING),
        ("aten.add.Tensor", kinds.POINTWISE),
        ("no.such_op", kinds.POINTWISE),
    ],
)
def test_classes_of_ops(op: str, name: str) -> None:
    assert op_class(op) == name


def test_a_collective_inside_one_level_is_its_curve() -> None:
    spec = profiled(profile(link("all_reduce", "level0", 2)))
    on = mesh(spec, x=2)
    assert collective_us(Collective.ALL_REDUCE, 1e5, "x", on, spec) == 20.0
    # No curve of this collective: the formula.
    formula = group_us(Collective.ALL_GATHER, 1e5, spans("x", on, spec))
    assert collective_us(Collective.ALL_GATHER, 1e5, "x", on, spec) == formula


def test_a_group_without_a_curve_is_read_from_the_nearest_size() -> None:
    measured = Measured(profile(link("all_reduce", "level0", 2)))
    # 10 µs of latency for each further member; (20 − 10) µs for half the volume's worth.
    assert measured.collective_us("all_reduce", "level0", 4, 1e5) == pytest.approx(10 * 3 + 10 * 1.5)
    assert measured.collective_us("all_reduce", "level1", 4, 1e5) is None


@pytest.mark.parametrize("rates", [(100.0, 10.0), (10.0, 100.0)], ids=["slow outside", "slow inside"])
def test_levels_compose_as_the_formulas_do(rates: tuple[float, float]) -> None:
    """Curves that are α-β give what the α-β formulas give."""
    spec = cluster((2, 1.0, rates[0]), (3, 5.0, rates[1]))
    on = mesh(spec, x=6)
    sizes = tuple(2.0 ** (n / 2) for n in range(1, 54))

    def of(collective: Collective, at: int) -> LinkCurve:
        level = spec.levels[at]
        times = tuple(group_us(collective, n, ((level.size, level),)) for n in sizes)
        return LinkCurve(
            collective=collective.value, level=level.name, members=level.size,
            sizes=sizes, p10=times, p50=times, p90=times,
        )  # fmt: skip

    sends = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.ALL_REDUCE)
    known = msgspec.structs.replace(spec, profile=profile(*(of(c, at) for c in sends for at in (0, 1))))
    for collective in sends:
        for nbytes in (600.0, 1e6, 3e7):
            formula = group_us(collective, nbytes, spans("x", on, spec))
            assert collective_us(collective, nbytes, "x", on, known) == pytest.approx(formula, rel=0.02), collective


FULL = profiled(profile(curve(kinds.MATMUL, SQUARE), link("all_reduce", "level0", 2), overlap={"compute": 1.5}))


def test_a_profile_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(dump_cluster(FULL))
    assert load_cluster(str(path)) == FULL


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('work = "matmul"', 'work = "matmul"\ncolour = "red"', "unknown field `colour` - at `$.profile.curves[0]`"),
        ("version = 1", "version = 7", "profile.version is 7; wanted 1"),
        ("cores = 2\n", "", "missing required field `cores` - at `$.profile.hardware`"),
        ("sizes = [1000.0, ", "sizes = [", "sizes, p10, p50 and p90 hold [2, 3] numbers"),
        ("p50 = [10.0, 20.0", "p50 = [10.0, 2.0", "p50 goes from 10 to 2; wanted to never fall"),
        ("sizes = [1000.0, 100000.0", "sizes = [1000.0, 1000.0", "sizes goes from 1000 to 1000; wanted to rise"),
        ("p10 = [10.0", "p10 = [nan", "p10 has nan; wanted numbers above 0"),
        ("members = 2", "members = 1", "members is 1; wanted 2 or more"),
        ("compute = 1.5", "colour = 1.5", "overlap has colour; wanted compute and communication"),
        ("compute = 1.5", "compute = 0.5", "overlap.compute is 0.5; wanted 1 to 100"),
        ("ranks = 2", "ranks = 0", "ranks is 0; wanted 1 or more"),
    ],
)
def test_bad_profiles(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = dump_cluster(FULL)
    assert old in text
    path = tmp_path / "here.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ClusterError) as caught:
        load_cluster(str(path))
    assert words.lower() in str(caught.value).lower()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_same_curve_twice(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(dump_cluster(profiled(profile(curve(kinds.NORM), curve(kinds.NORM)))))
    with pytest.raises(ClusterError, match="stands there twice"):
        load_cluster(str(path))


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    text = dump_cluster(FULL)
    path = tmp_path / "here.toml"
    curve_at = text.index("[[profile.curves]]")
    for cut in (len(text) // 2, curve_at + 40, text.index("p90", curve_at), len(text) - 4):
        path.write_text(text[:cut])
        with pytest.raises(ClusterError) as caught:
            load_cluster(str(path))
        assert "\n" not in str(caught.value)


def test_foreign_profiles_are_refused_in_one_line() -> None:
    foreign = msgspec.structs.replace(HERE, cores=64)
    with pytest.raises(ClusterError, match="other hardware") as caught:
        refuse_foreign(FULL.profile or profile(), foreign, "compile on round")
    words = str(caught.value)
    assert "round (2 cores, 8 GiB)" in words and "round (64 cores, 8 GiB)" in words and "\n" not in words
    refuse_foreign(FULL.profile or profile(), HERE, "compile on round")


def test_compile_refuses_a_foreign_profile() -> None:
    """Planning for another machine is what descriptions are for; running on its times is refused."""
    model, inputs = torch.nn.Linear(2, 2), (torch.ones(1, 2),)
    spec = msgspec.structs.replace(cluster((1, 1.0, 100.0)), profile=profile(curve(kinds.MATMUL, SQUARE)))
    plan = api.search(model, spec, example_inputs=inputs)
    for given_ in ({"cluster": spec}, {"plan": plan}):
        with pytest.raises(ClusterError, match="other hardware"):
            api.compile(model, example_inputs=inputs, **given_)  # type: ignore[arg-type]
    own = msgspec.structs.replace(spec, profile=profile(curve(kinds.MATMUL, SQUARE), hardware=fingerprint()))
    api.compile(model, cluster=own, example_inputs=inputs)


def test_profiles_merge_only_with_their_own_kind() -> None:
    old, new = profile(curve(kinds.NORM), curve(kinds.MATMUL)), profile(curve(kinds.NORM, times=(1.0, 2.0, 3.0)))
    both = merged(old, new)
    assert {c.work: c.p50[0] for c in both.curves} == {kinds.NORM: 1.0, kinds.MATMUL: 10.0}
    for other in (profile(ranks=4), profile(hardware=msgspec.structs.replace(HERE, device="other"))):
        with pytest.raises(ClusterError, match="merge"):
            merged(old, other)
