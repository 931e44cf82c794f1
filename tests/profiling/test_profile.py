"""`autopar profile`: points kept and gone on from, curves made of them, and the command on its smallest budget."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from autopar import cli
from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.local import fingerprint
from autopar.errors import ClusterError, UserError
from autopar.ir.profile import LinkCurve
from autopar.profiling import links
from autopar.profiling import run as running
from autopar.profiling.clock import Crew, MeasureError, Timed, quantiles, spread, time_calls
from autopar.profiling.partial import Partial, Point, curves_of, path_of, read_partial, write_partial
from autopar.profiling.run import SECONDS, profile_here, ring_figures
from autopar.profiling.works import work_specs

LIKE = Partial(hardware=fingerprint(), torch=str(torch.__version__), ranks=1, threads=1)
KEY = ("matmul", "square", "float32")


def point(
    size: float, p50: float, *, kind: str = "work", key: tuple[str, str, str] = KEY, stable: bool = True
) -> Point:
    """With quantiles around p50."""
    return Point.of(kind, key, int(size), size, Timed(p50 * 0.9, p50, p50 * 1.1, stable))


def test_partial_files_come_back(tmp_path: Path) -> None:
    path = path_of(tmp_path / "here.toml")
    assert read_partial(path, LIKE) == (LIKE, "")
    kept = msgspec.structs.replace(LIKE, points=(point(8, 1.0), point(16, 2.0)), notes=("one",))
    write_partial(path, kept)
    found, word = read_partial(path, LIKE)
    assert found == kept
    assert "2 points are there" in word
    assert [p.name for p in tmp_path.iterdir()] == ["here.toml.partial"]


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_truncated_partial_files_are_measured_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "p"
    write_partial(path, msgspec.structs.replace(LIKE, points=(point(8, 1.0),)))
    path.write_bytes(path.read_bytes()[:cut])
    found, word = read_partial(path, LIKE)
    assert found == LIKE
    assert "measuring all of them" in word and "\n" not in word


def test_partial_files_with_unknown_keys_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(LIKE), "colour": "red"}))
    found, word = read_partial(path, LIKE)
    assert found == LIKE
    assert "colour" in word


@pytest.mark.parametrize(
    "change",
    [
        {"p50": -1.0}, {"p50": 0.1}, {"p90": 0.5}, {"size": 0}, {"kind": "guess"},
        {"kind": "link", "key": ["all_reduce", "loopback", "two"]},
    ],
)  # fmt: skip
def test_points_that_cannot_be_are_measured_again(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "p"
    good = msgspec.to_builtins(point(8, 1.0))
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(LIKE), "points": [good, {**good, **change}]}))
    found, word = read_partial(path, LIKE)
    assert found == LIKE
    assert "measuring all of them" in word and "\n" not in word


@pytest.mark.parametrize("name", ["hardware", "ranks", "threads", "torch"])
def test_points_of_another_machine_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "p"
    other = {"hardware": msgspec.structs.replace(LIKE.hardware, cores=999), "ranks": 7, "threads": 9, "torch": "0.1"}
    write_partial(path, msgspec.structs.replace(LIKE, **{name: other[name]}))
    with pytest.raises(ClusterError, match=f"was measured with {name}") as caught:
        read_partial(path, LIKE)
    assert "\n" not in str(caught.value)


def test_curves_are_in_order_and_never_fall() -> None:
    link = ("all_reduce", "loopback", "2")
    curves, links = curves_of(
        [point(32, 3.0), point(8, 2.0), point(16, 1.0, stable=False), point(64, 5.0, kind="link", key=link)]
    )
    (curve,) = curves
    assert (curve.key, curve.sizes, curve.unstable) == (KEY, (8, 16, 32), (16,))
    assert curve.p50 == pytest.approx((2**0.5, 2**0.5, 3.0), rel=1e-4)
    assert [(c.collective, c.level, c.members, c.p50) for c in links] == [("all_reduce", "loopback", 2, (5.0,))]


def test_alpha_and_beta_of_a_ring_come_back() -> None:
    n, latency, bandwidth = 4, 5.0, 100.0
    sizes = (1e3, 1e6)
    times = tuple(2 * (n - 1) * latency + 2 * (n - 1) / n * size / bandwidth for size in sizes)
    curve = LinkCurve(
        collective="all_reduce", level="l", members=n, sizes=sizes, p10=times, p50=times, p90=times
    )  # fmt: skip
    assert ring_figures(curve) == pytest.approx((latency, bandwidth))


def test_quantiles() -> None:
    assert quantiles([float(n) for n in range(10, -1, -1)]) == (1.0, 5.0, 9.0)
    assert spread([2.0, 2.0, 2.0]) == 0


ALONE = Crew(0, 1, torch.device("cpu"))


def test_what_fails_is_named() -> None:
    def prepare() -> tuple[object, int]:
        raise ValueError("no such\nkernel")

    with pytest.raises(MeasureError, match="ValueError: no such kernel"):
        time_calls(ALONE, prepare, 0.01)  # type: ignore[arg-type]


def test_every_kind_of_work_runs_at_its_least_size() -> None:
    for spec in work_specs("cpu"):
        made = spec.make(min(spec.scales), getattr(torch, spec.dtype or "float32"), ALONE.device)
        for call in range(3):
            made.call(call)
        assert made.size > 0 and made.out_bytes >= 0, spec.key


def test_smallest_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What time did not allow is said; the file is a cluster and no points are left beside it."""
    output = tmp_path / "here.toml"
    with pytest.raises(SystemExit) as ended:
        cli.main(["profile", "--ranks", "1", "--seconds", "0.5", "-o", str(output), "--json"])
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["points"] > 0
    assert any("time was up" in note for note in said["notes"])
    assert [p.name for p in tmp_path.iterdir()] == ["here.toml"]
    spec = load_cluster(str(output))
    assert spec.profile is not None
    assert (spec.devices, spec.profile.ranks, spec.profile.hardware) == (1, 1, fingerprint())
    assert "time was up" in spec.profile.notes[0]


def test_two_ranks_measure_links(tmp_path: Path) -> None:
    spec = profile_here(2, tmp_path / "here.toml", 0.5)
    assert spec is not None and spec.profile is not None
    assert (spec.devices, spec.profile.ranks, [level.size for level in spec.levels]) == (2, 2, [2])
    assert set(spec.profile.overlap) == {"compute", "communication"}
    assert load_cluster(str(tmp_path / "here.toml")) == spec


def test_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points that are there are not measured again; the rest are."""
    output = tmp_path / "here.toml"
    asked: list[float] = []

    def stop_at_third(crew: Crew, prepare: Callable[[], tuple[Any, int]], seconds: float) -> Timed:
        asked.append(seconds)
        if len(asked) == 3:
            raise KeyboardInterrupt
        prepare()
        return Timed(1.0, 2.0, 3.0, True)

    monkeypatch.setattr(running, "SAVED_EVERY_S", 0.0)
    monkeypatch.setattr(running, "time_calls", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        profile_here(1, output)
    first, _ = read_partial(path_of(output), LIKE)
    assert len(first.points) == 2 and not output.exists()
    kept = msgspec.structs.replace(first, points=tuple(msgspec.structs.replace(p, p10=0.7) for p in first.points))
    write_partial(path_of(output), kept)

    def quick(crew: Crew, prepare: Callable[[], tuple[Any, int]], seconds: float) -> Timed:
        prepare()
        asked.append(seconds)
        return Timed(1.0, 2.0, 3.0, True)

    jobs = running._Run._jobs
    monkeypatch.setattr(running._Run, "_jobs", lambda self: jobs(self)[:5])
    monkeypatch.setattr(running, "time_calls", quick)
    asked.clear()
    spec = profile_here(1, output)
    assert len(asked) == 3
    assert "going on from" in capsys.readouterr().err
    assert spec is not None and spec.profile is not None
    assert sum(p == 0.7 for c in spec.profile.curves for p in c.p10) == 2
    assert not path_of(output).exists()


HOST_LINKS = {"host_to_device", "device_to_host", "nvme_write", "nvme_read"}


def only_host_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured, at two sizes each, called twice however long that takes."""
    jobs = running._Run._jobs

    def twice(crew: Crew, prepare: Callable[[], tuple[Any, int]], seconds: float) -> Timed:
        try:
            call, _ = prepare()
        except OSError as error:
            raise MeasureError(str(error)) from error
        start = time.perf_counter()
        call(0), call(1)
        us = (time.perf_counter() - start) * 1e6
        return Timed(0.9 * us, us, 1.1 * us, True)

    monkeypatch.setattr(running, "time_calls", twice)
    monkeypatch.setattr(running, "COPY_BYTES", (2**14, 2**16))
    monkeypatch.setattr(running, "DISK_BYTES", (2**14, 2**16))
    monkeypatch.setattr(running._Run, "_jobs", lambda self: [j for j in jobs(self) if j.key[0] in HOST_LINKS])


def test_host_and_disk_are_links_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantiles of each way, the slower way as the link's figure, and nothing left on the disk."""
    only_host_links(monkeypatch)
    spec = profile_here(1, tmp_path / "here.toml", 60)
    assert spec is not None and spec.profile is not None
    curves = {c.work: c for c in spec.profile.curves}
    assert set(curves) == HOST_LINKS and all(c.sizes == (2**14, 2**16) for c in curves.values())
    assert all(0 < a < b for x in curves.values() for a, b in zip(x.p10, x.p90, strict=True))
    assert spec.host.nvme_bytes_per_us == min(2**16 / curves[k].p50[-1] for k in ("nvme_write", "nvme_read"))
    assert spec.host.link_bytes_per_us == min(2**16 / curves[k].p50[-1] for k in ("host_to_device", "device_to_host"))
    assert spec.host.memory_bytes == 0 or torch.cuda.is_available()
    assert [p.name for p in tmp_path.iterdir()] == ["here.toml"]
    assert load_cluster(str(tmp_path / "here.toml")) == spec


def test_a_disk_behind_the_page_cache_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_host_links(monkeypatch)
    monkeypatch.setattr(running, "takes_direct", lambda folder: False)
    spec = profile_here(1, tmp_path / "here.toml", 60)
    assert spec is not None and spec.profile is not None
    assert spec.host.nvme_bytes_per_us > 0
    assert any("through the page cache" in note for note in spec.profile.notes)


def test_a_full_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noted, and the figure stays unknown."""
    only_host_links(monkeypatch)
    monkeypatch.setattr(links.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**15))
    spec = profile_here(1, tmp_path / "here.toml", 60)
    assert spec is not None and spec.profile is not None
    assert spec.host.nvme_bytes_per_us == 0 < spec.host.link_bytes_per_us
    assert sum("nvme_" in note and "disk are free" in note for note in spec.profile.notes) == 4


def test_where_nothing_can_be_written_the_systems_folder_is_timed(tmp_path: Path) -> None:
    assert links.disk_folder(tmp_path) == tmp_path
    assert links.disk_folder(tmp_path / "not there") == Path(tempfile.gettempdir())


@pytest.mark.slow
def test_a_killed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed without a word: what had been written is whole, and the next run measures the rest."""
    output = tmp_path / "here.toml"
    command = [sys.executable, "-m", "autopar", "profile", "--ranks", "1", "--seconds", "60", "-o", str(output)]
    running_there = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if path_of(output).exists():
                break
            time.sleep(0.1)
    finally:
        running_there.kill()
        running_there.wait()
    kept, word = read_partial(path_of(output), LIKE)
    assert kept.points and "going on" in word
    asked: list[float] = []

    def quick(crew: Crew, prepare: Callable[[], tuple[Any, int]], seconds: float) -> Timed:
        prepare()
        asked.append(seconds)
        return Timed(1.0, 2.0, 3.0, True)

    monkeypatch.setattr(running, "time_calls", quick)
    spec = profile_here(1, output)
    assert spec is not None and spec.profile is not None
    every = sum(len(c.sizes) for c in spec.profile.curves)
    assert len(asked) == every - len(kept.points)
    assert asked[0] <= SECONDS / every + 0.1  # those that are there had their part of the time
    assert f"{len(kept.points)} points are there" in capsys.readouterr().err


def test_ranks_are_torchruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="torchrun started 1"):
        profile_here(3, tmp_path / "here.toml")
