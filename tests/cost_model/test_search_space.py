"""Which meshes are looked at, and what is said when none can be."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.search_space import mesh_candidates
from autopar.errors import UserError
from autopar.ir.options import Options
from tests.cost_model.helpers import cluster


def flat(devices: int) -> Any:
    return cluster((devices, 1.0, 100.0))


def shown(devices: int, **options: Any) -> list[str]:
    return [str(m) for m in mesh_candidates(flat(devices), Options(**options))]


def test_every_factorisation_into_dp_and_tp() -> None:
    assert shown(4) == ["dp=4", "dp=2 × tp=2", "tp=4"]
    assert shown(6) == ["dp=6", "dp=3 × tp=2", "dp=2 × tp=3", "tp=6"]
    assert shown(5) == ["dp=5", "tp=5"]


def test_one_device_has_no_axes() -> None:
    assert shown(1) == ["one device"]
    assert mesh_candidates(flat(1), Options())[0].axes == ()


def test_pins() -> None:
    assert shown(4, pins={"dp": 2}) == ["dp=2 × tp=2"]
    assert shown(4, pins={"tp": 1}) == ["dp=4"]
    assert shown(4, pins={"tp": "2"}) == ["dp=2 × tp=2"]
    assert shown(8, pins={"cp": 2, "tp": 2}) == ["dp=2 × cp=2 × tp=2"]
    assert shown(4, pins={"free": 4}) == ["free=4"]
    assert shown(4, pins={"zero": 3, "model.layers.*": "dp:S(0) tp:R", "dp": 4}) == ["dp=4"]
    assert shown(4, pins={"pp": 1, "dp": 4}) == ["dp=4"]


def test_search_space() -> None:
    assert shown(4, search_space={"tensor": (1, 2)}) == ["dp=4", "dp=2 × tp=2"]
    assert shown(4, search_space={"context": (1, 2), "tensor": (1,)}) == ["dp=4", "dp=2 × cp=2"]
    assert shown(4, search_space={"pipeline": (1, 2), "data": (4,)}) == ["dp=4"]


def test_tensor_axis_inside_a_node_comes_first() -> None:
    """CLU-15: the axis with the most traffic lies within a node."""
    spec = cluster((4, 1.0, 300.0), (2, 5.0, 10.0))
    meshes = mesh_candidates(spec, Options())
    assert [str(m) for m in meshes] == ["dp=8", "dp=4 × tp=2", "dp=2 × tp=4", "tp=8"]
    assert [[a.level for a in m.axes] for m in meshes] == [[1], [1, 0], [1, 0], [1]]
    heavy = mesh_candidates(spec, Options(pins={"tp": 4}))[0]
    assert heavy.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))  # each within a node


def test_axes_come_in_every_order_where_neighbours_are_not_the_fastest() -> None:
    """CLU-15: link speeds decide where an axis lies (`tests/cases/test_clu.py`: which order is chosen)."""
    slow_inside = cluster((2, 5.0, 10.0), (2, 1.0, 300.0))
    assert {str(m) for m in mesh_candidates(slow_inside, Options())} == {"dp=4", "dp=2 × tp=2", "tp=2 × dp=2", "tp=4"}
    across = next(m for m in mesh_candidates(slow_inside, Options()) if m.names == ("tp", "dp"))
    assert across.groups("tp") == ((0, 2), (1, 3)) and [a.level for a in across.axes] == [1, 0]
    assert len(mesh_candidates(slow_inside, Options(pins={"dp": 4}))) == 1
    one_node = cluster((4, 1.0, 10.0), (1, 1.0, 300.0))
    assert all(m.names != ("tp", "dp") for m in mesh_candidates(one_node, Options())), "a level of one has no links"


def test_experts_are_spread_where_a_model_has_some() -> None:
    """Over ranks whose number divides theirs, and with dp the batch; asked for, also where that leaves unequal rows."""

    def meshes(sizes: dict[str, int], **options: Any) -> set[str]:
        return {str(m) for m in mesh_candidates(flat(8), Options(**options), sizes)}

    found = meshes({"dp": 4, "ep": 12})
    assert {"ep=4 × tp=2", "dp=2 × ep=2 × tp=2", "dp=4 × tp=2", "dp=8"} <= found
    assert not any("ep=8" in m or "dp=4 × ep=2" in m for m in found)
    assert not any("ep" in m for m in meshes({"dp": 4, "ep": 1}))
    assert meshes({"dp": 4, "ep": 12}, pins={"dp": 4, "ep": 2}) == {"dp=4 × ep=2"}
    assert meshes({"dp": 4, "ep": 12}, pins={"dp": 2, "tp": 2}) == {"dp=2 × ep=2 × tp=2"}
    assert all("ep=2" in m for m in meshes({"dp": 8, "ep": 12}, search_space={"expert": (2,)}))
    for experts in (12, 1):
        with pytest.raises(UserError, match=f"pin ep=8: a set of experts of {experts} experts can't be cut 8 ways"):
            meshes({"dp": 8, "ep": experts}, pins={"ep": 8})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pins": {"dp": 2, "tp": 4}}, ["dp=2, tp=4", "8", "has 4 devices"]),
        ({"pins": {"dp": 1, "tp": 2}}, ["dp=1, tp=2", "multiply to 2", "has 4 devices"]),
        ({"pins": {"dp": 3}}, ["pin dp=3", "has 4 devices"]),
        ({"pins": {"tp": 0}}, ["pin tp=0", "whole number of 1 or more"]),
        ({"pins": {"tp": -2}}, ["pin tp=-2", "whole number of 1 or more"]),
        ({"pins": {"tp": "two"}}, ["pin tp=two", "whole number of 1 or more"]),
        ({"pins": {"tp": True}}, ["pin tp=True", "whole number of 1 or more"]),
        ({"pins": {"vp": 2}}, ["pin vp=2", "no mesh axis 'vp'", "dp, cp, ep, free, tp"]),
        ({"pins": {"pp": 2}}, ["pin pp=2", "no mesh axis 'pp'"]),
        ({"pins": {"tp": 4}, "search_space": {"tensor": (1, 2)}}, ["pin tp=4", "tensor=[1, 2]"]),
        ({"search_space": {"data": (1,), "tensor": (1, 2)}}, ["data=[1]", "tensor=[1, 2]", "4 devices"]),
        ({"pins": {"dp": 4, "head": "tp:S(0)"}}, ["pin head=tp:S(0)", "cuts over tp", "pin dp=4", "4 devices"]),
        ({"pins": {"h": "tp:S(0)"}, "search_space": {"tensor": (1,)}}, ["pin h=tp:S(0)", "tensor=[1]", "one rank"]),
        ({"pins": {"tp": 4, "zero": 3}}, ["pin zero=3", "cuts over dp", "pin tp=4"]),
        ({"pins": {"h": "cp:S(1)"}}, ["pin h=cp:S(1)", "cuts over cp", "isn't told"]),
        ({"search_space": {"tensor": (0,)}}, ["tensor=[0]", "whole numbers of 1 or more"]),
        ({"search_space": {"tensor": ()}}, ["tensor=[]"]),
    ],
)
def test_what_cannot_be_is_said_in_one_line(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        mesh_candidates(flat(4), Options(**options))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 200), st.sampled_from([(), (1, 2), (1, 2, 3)]))
def test_candidates_use_every_device_once(devices: int, contexts: tuple[int, ...]) -> None:
    space = {"context": contexts} if contexts else {}
    meshes = mesh_candidates(flat(devices), Options(search_space=space))
    assert len(set(meshes)) == len(meshes) >= 1
    for mesh in meshes:
        assert math.prod(mesh.shape) == devices
        assert 1 not in mesh.shape
        assert list(mesh.names) == [n for n in ("dp", "cp", "free", "tp") if n in mesh.names]
