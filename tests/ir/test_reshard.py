"""The reshard planner against truth: every rank's piece after the steps is what the target layout says."""

import itertools

import numpy as np
import pytest

from autopar.ir.layout import Kind, Layout, P, R, S, divides, local_piece, parse_layout
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.reshard import Collective, ReshardStep, plan_reshard


def mesh_of(*sizes):
    return Mesh(axes=tuple(Axis(name=n, size=s) for n, s in zip(("dp", "cp", "tp"), sizes, strict=False)))


def spread(whole, layout, mesh, rng):
    """One piece per rank; partial axes get random summands that add up to the piece."""
    pieces = []
    for rank in range(mesh.size):
        start, size = local_piece(whole.shape, layout, mesh, rank)
        pieces.append(whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].copy())
    for axis, placement in zip(mesh.axes, layout.placements, strict=True):
        if placement.kind is Kind.PARTIAL:
            for group in mesh.groups(axis.name):
                parts = rng.normal(size=(axis.size - 1, *pieces[group[0]].shape))
                base = [pieces[r] for r in group]
                for i, rank in enumerate(group):
                    pieces[rank] = base[i] - parts.sum(0) if i == 0 else parts[i - 1]
    return pieces


def apply(step: ReshardStep, pieces, mesh):
    done = list(pieces)
    size = mesh.axis(step.axis).size
    for group in mesh.groups(step.axis):
        mine = [pieces[r] for r in group]
        for i, rank in enumerate(group):
            match step.collective:
                case Collective.ALL_REDUCE:
                    done[rank] = sum(mine)
                case Collective.ALL_GATHER:
                    done[rank] = np.concatenate(mine, step.dim)
                case Collective.REDUCE_SCATTER:
                    done[rank] = np.split(sum(mine), size, step.dim)[i]
                case Collective.SLICE:
                    done[rank] = np.split(mine[i], size, step.dim)[i]
                case Collective.ALL_TO_ALL:
                    done[rank] = np.concatenate([np.split(m, size, step.to_dim)[i] for m in mine], step.dim)
    return done


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 3), (3, 2), (2, 2, 3)])
def test_steps_lead_from_one_layout_to_the_other(sizes):
    mesh = mesh_of(*sizes)
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(12, 24))
    layouts = [Layout(mesh.names, p) for p in itertools.product([R, P, S(0), S(1)], repeat=len(sizes))]
    layouts = [x for x in layouts if divides(x, whole.shape, mesh)]
    pairs = list(itertools.product(layouts, layouts))
    if len(pairs) > 600:
        pairs = [pairs[i] for i in rng.choice(len(pairs), 600, replace=False)]
    checked = 0
    for before, after in pairs:
        steps = plan_reshard(before, after)
        if steps is None:
            assert any(
                a.kind is Kind.PARTIAL and b.kind is not Kind.PARTIAL
                for a, b in zip(after.placements, before.placements, strict=True)
            )
            continue
        pieces = spread(whole, before, mesh, rng)
        for step in steps:
            pieces = apply(step, pieces, mesh)
        free = Layout(mesh.names, tuple(R if p.kind is Kind.PARTIAL else p for p in after.placements))
        want = spread(whole, free, mesh, rng)
        for axis, placement in zip(mesh.axes, after.placements, strict=True):
            if placement.kind is Kind.PARTIAL:
                for group in mesh.groups(axis.name):
                    total = sum(pieces[r] for r in group)
                    pieces = [total if r in group else x for r, x in enumerate(pieces)]
        for got, wanted in zip(pieces, want, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-12)
        checked += 1
    assert checked > 0


def test_a_step_is_what_a_specialist_expects():
    mesh = mesh_of(4)
    names = {
        ("P", "R"): "all_reduce(dp)",
        ("P", "S(0)"): "reduce_scatter(dp, 0)",
        ("S(1)", "R"): "all_gather(dp, 1)",
        ("S(0)", "S(1)"): "all_to_all(dp, 0->1)",
        ("R", "S(1)"): "slice(dp, 1)",
    }
    for (a, b), text in names.items():
        steps = plan_reshard(parse_layout(f"dp:{a}", mesh), parse_layout(f"dp:{b}", mesh))
        assert [str(s) for s in steps] == [text]


def test_layouts_print_and_parse_back():
    mesh = mesh_of(2, 2)
    for placements in itertools.product([R, P, S(0), S(3)], repeat=2):
        layout = Layout(mesh.names, placements)
        assert parse_layout(str(layout), mesh) == layout
    with pytest.raises(ValueError, match="axes dp, cp"):
        parse_layout("xx:R", mesh)
    with pytest.raises(ValueError, match="wanted AXIS"):
        parse_layout("dp:Q", mesh)
