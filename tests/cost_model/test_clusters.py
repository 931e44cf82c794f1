"""Presets, files, and the words of refusals."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from autopar.cost_model import local
from autopar.cost_model.clusters import dump_cluster, list_presets, load_cluster, parse_cluster
from autopar.errors import ClusterError
from autopar.ir.cluster import ClusterSpec, Host
from tests.cost_model.helpers import cluster

GOOD = dump_cluster(cluster((2, 1.0, 100.0), (3, 5.0, 10.0)))


def test_preset_and_nodes() -> None:
    spec = load_cluster("dgx-h100:4")
    assert (spec.name, spec.devices, spec.backend) == ("dgx-h100:4", 32, "nccl")
    assert [(level.name, level.size) for level in spec.levels] == [("nvlink4", 8), ("infiniband", 4)]
    assert load_cluster("dgx-h100") == load_cluster("dgx-h100:1")


def test_single_cards() -> None:
    assert [level.size for level in load_cluster("rtx3090:3").levels] == [3]
    assert [level.size for level in load_cluster("rtx3090:16").levels] == [8, 2]
    assert load_cluster("rtx4090:16").devices == 16


def test_every_preset_is_sane_and_says_where_it_is_from() -> None:
    presets = list_presets()
    assert {p.name for p in presets} >= {"dgx-a100-40g", "dgx-a100-80g", "dgx-h100", "h200", "b200", "rtx3090", "l4"}
    for preset in presets:
        spec = load_cluster(f"{preset.name}:8")
        assert parse_cluster(dump_cluster(spec), preset.name) == spec
        assert spec.date and all(level.source for level in spec.levels)
        device = spec.groups[0].device
        assert device.source and device.matmul_efficiency < 1
        assert device.peak_flops["float16"] >= device.peak_flops["float32"]
        assert preset.device.memory.total_bytes > device.memory_bytes
        assert "held back" in device.source


def test_figures_of_one_preset() -> None:
    """hardware.csv: A100-40 312 TFLOP/s, 255 reached; 235 GB/s all-reduce; 25 GB/s of InfiniBand per GPU."""
    spec = load_cluster("dgx-a100-40g:2")
    device = spec.groups[0].device
    assert device.peak_flops["bfloat16"] * device.matmul_efficiency == pytest.approx(255e12, rel=1e-3)
    assert device.peak_flops["float32"] == 19.5e12  # no TF32
    assert [level.bytes_per_us for level in spec.levels] == [235_000, 0.9 * 25_000]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dgx-h1000:4", "'dgx-h1000': no such preset; closest: dgx-h100"),
        ("qqq", "wanted one of a100-pcie"),
        ("", "no such preset"),
        ("dgx-h100:0", "'0' is not a count; wanted a whole number of 1 or more"),
        ("dgx-h100:-1", "'-1' is not a count"),
        ("dgx-h100:1.5", "'1.5' is not a count"),
        ("dgx-h100:", "'' is not a count"),
        ("dgx-h100:2:3", "'2:3' is not a count"),
        ("dgx-h100:99999999", "absurd"),
        ("local:0", "'0' is not a count"),
        ("local:100000", "from 1 to 1024"),
        ("rtx3090:12", "a multiple of 8"),
        ("none/such.toml", "cannot be read (No such file or directory)"),
    ],
)
def test_bad_names(text: str, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "round"', 'name = "round', "malformed TOML: Illegal character '\\n' (at line 1"),
        ('backend = "gloo"', 'backend = "mpi"', "backend is 'mpi'; wanted 'nccl' or 'gloo'"),
        ('backend = "gloo"', 'colour = "red"', "unknown field `colour`"),
        ("latency_us = 5.0\n", "", "missing required field `latency_us` - at `$.levels[1]`"),
        ("latency_us = 5.0", "latency_us = -5.0", "levels[1].latency_us is -5; wanted 0 to"),
        ("latency_us = 5.0", "latency_us = nan", "levels[1].latency_us is nan"),
        ("latency_us = 5.0", 'latency_us = "5"', "Expected `float`, got `str` - at `$.levels[1].latency_us`"),
        ("size = 3", "size = 4", "level sizes 2 × 4 multiply to 8, but groups hold 6 devices"),
        ("size = 3", "size = 0", "levels[1].size is 0"),
        ("count = 6", "count = 0", "groups[0].count is 0; wanted 1 to"),
        ("memory_bytes = 1073741824", "memory_bytes = 80", "groups[0].device.memory_bytes is 80; wanted"),
        ("bytes_per_us = 10.0", "bytes_per_us = 0", "levels[1].bytes_per_us is 0; wanted"),
        ("matmul_efficiency = 0.5", "matmul_efficiency = 50", "matmul_efficiency is 50; wanted 0.001 to 1"),
        ("float32 = 2000000000000.0", "float31 = 2e12", "float31: no such dtype"),
        ("float32 = 2000000000000.0", "float32 = 2.0", "peak_flops.float32 is 2; wanted"),
    ],
)
def test_bad_files(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in GOOD
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ClusterError) as caught:
        load_cluster(str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ClusterError, match="is not UTF-8 text"):
        load_cluster(str(path))
    with pytest.raises(ClusterError, match="cannot be read"):
        load_cluster(str(tmp_path) + "/")


def test_file_by_path_with_any_ending(tmp_path: Path) -> None:
    path = tmp_path / "mine.cluster"
    path.write_text(GOOD)
    assert load_cluster(str(path)).devices == 6


def test_dump_reads_back_equal() -> None:
    spec = msgspec.structs.replace(
        cluster((2, 1.5, 1e16 / 1e9), source='two "quotes"\n\tÄ \x7f \\'),
        host=Host(memory_bytes=2**40, link_bytes_per_us=0.1),
    )
    assert parse_cluster(dump_cluster(spec), "x") == spec


def test_described_clusters_probe_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CLU-17: the description wins."""

    def refuse(*_: object, **__: object) -> ClusterSpec:
        raise AssertionError("looked at this machine")

    for name in ("is_available", "device_count", "get_device_name", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(local.psutil, "virtual_memory", refuse)
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    assert load_cluster("dgx-h100:2").devices == 16
    assert load_cluster(str(path)).devices == 6
    assert list_presets()


def test_file_in_the_manual_is_read() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text("utf-8")
    _, rest = manual.split("```toml\n")
    assert parse_cluster(rest.split("```")[0], "docs/clusters.md").devices == 8
