"""This machine, measured and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.cost_model import local
from autopar.cost_model.clusters import dump_cluster, load_cluster, parse_cluster
from autopar.cost_model.local import LARGE_BYTES, SMALL_BYTES, Rates, find_preset, link_figures, local_cluster
from autopar.errors import ClusterError
from autopar.ir.cluster import ClusterSpec

RATES = Rates(
    flops={"float32": 8e10, "float64": 4e10, "bfloat16": 2e10},
    bytes_per_us=8000.0,
    floor_us=2.0,
    latency_us=50.0,
    link_bytes_per_us=1000.0,
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "autopar"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rank counts that were measured, with figures made up."""
    asked: list[int] = []

    def measure(ranks: int) -> tuple[Rates, str]:
        asked.append(ranks)
        return RATES, "measured"

    monkeypatch.setattr(local, "_measure", measure)
    monkeypatch.setattr(local, "_cores", lambda: 2)
    return asked


def test_measured_once_and_kept(measured: list[int], own_cache: Path) -> None:
    first = local_cluster(2)
    assert local_cluster(2) == first
    assert measured == [2]
    assert (first.name, first.devices, first.backend) == ("local:2", 2, "gloo")
    assert [p.suffix for p in own_cache.iterdir()] == [".json"]
    local_cluster(2, fresh=True)
    local_cluster(3)
    assert measured == [2, 2, 3]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"key": "x"}', b"[]"])
def test_damaged_cache_is_measured_again(measured: list[int], own_cache: Path, damage: bytes) -> None:
    first = local_cluster(2)
    (path,) = own_cache.iterdir()
    path.write_bytes(damage)
    assert local_cluster(2) == first
    assert measured == [2, 2]
    local_cluster(2)
    assert measured == [2, 2]


def test_figures_of_another_machine_are_not_taken(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    local_cluster(2)
    monkeypatch.setattr(local, "_cpu", lambda: "another")
    local_cluster(2)
    assert measured == [2, 2]


def test_no_place_to_keep_it(measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert local_cluster(2).devices == 2


def test_many_ranks_are_scaled_from_few(measured: list[int]) -> None:
    spec = local_cluster(8)
    device, level = spec.groups[0].device, spec.levels[0]
    assert measured == [4]  # 2 cores: 4 ranks share them as 8 do
    assert device.peak_flops["float32"] == 4e10
    assert device.kernel_floor_us == 4
    assert (level.latency_us, level.bytes_per_us, level.size) == (100, 500, 8)
    assert "scaled from 4 ranks" in device.source


def test_memory_is_shared(measured: list[int]) -> None:
    assert local_cluster(1).memory_bytes // 2 == local_cluster(2).memory_bytes
    assert "held back" in local_cluster(2).groups[0].device.source


def test_link_figures_invert_the_ring_formula() -> None:
    # n = 4, α = 50, β = 1000: 2·3·50 + 2·¾·V/1000
    small, large = (300 + 1.5 * nbytes / 1000 for nbytes in (SMALL_BYTES, LARGE_BYTES))
    assert link_figures(4, small, large) == (pytest.approx(50), pytest.approx(1000))
    latency, bandwidth = link_figures(2, 500.0, 400.0)  # noise
    assert latency >= 0 and bandwidth > 0


def test_without_gloo_the_link_is_an_estimate_and_not_kept(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    def fail(ranks: int) -> Rates:
        raise RuntimeError("no sockets")

    monkeypatch.setattr(local, "_measure_ranks", fail)
    monkeypatch.setattr(local, "measure_rates", lambda device: RATES)
    spec = local_cluster(2)
    assert spec.levels[0].source.startswith("estimate: gloo did not run here (no sockets)")
    assert spec.levels[0].latency_us > 0
    assert not own_cache.exists()


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, 10**6])
def test_bad_ranks(ranks: int) -> None:
    with pytest.raises(ClusterError, match="wanted a whole number from 1 to 1024"):
        local_cluster(ranks)


def test_gpus_by_name() -> None:
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "dgx-h100",
        "NVIDIA A100-SXM4-40GB": "dgx-a100-40g",
        "NVIDIA GeForce RTX 3090": "rtx3090",
        "NVIDIA L4": "l4",
        "Tesla V100-SXM2-32GB": "dgx-v100",
    }
    for name, preset in names.items():
        found = find_preset(name)
        assert found is not None and found.name == preset
    assert find_preset("NVIDIA L40S") is None
    assert find_preset("NVIDIA GeForce RTX 3090 Ti") is None


def check_sane(spec: ClusterSpec, ranks: int) -> None:
    device, level = spec.groups[0].device, spec.levels[0]
    assert spec.devices == level.size == ranks
    assert set(device.peak_flops) == {"float32", "float64", "bfloat16"}
    assert min(device.peak_flops.values()) > 1e7 and max(device.peak_flops.values()) < 1e13
    assert 10 < device.memory_bytes_per_us < 1e6
    assert 0.05 < device.kernel_floor_us < 1e5
    assert parse_cluster(dump_cluster(spec), "x") == spec


def test_one_rank_for_real() -> None:
    threads = torch.get_num_threads()
    check_sane(load_cluster("local"), 1)
    assert torch.get_num_threads() == threads


@pytest.mark.ranks
def test_two_ranks_for_real() -> None:
    spec = load_cluster("local:2")
    check_sane(spec, 2)
    assert spec.levels[0].source.startswith("measured")
    assert 0 < spec.levels[0].latency_us < 1e6
