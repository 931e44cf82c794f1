"""CLU rows of the field cases: odd counts, one device, tiny parameters, descriptions that fit no launch."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Options, api, launch
from autopar.cost_model import local
from autopar.cost_model.clusters import dump_cluster, load_cluster, parse_cluster
from autopar.cost_model.search_space import mesh_candidates
from autopar.errors import ClusterError, InfeasibleError, PlanError, RankError, UserError
from autopar.ir.plan import Plan, mesh_of
from autopar.runtime import groups
from autopar.runtime.threads import run_threads
from autopar.verification import losses_of
from tests.cases.lm import TinyLM, text
from tests.cases.run import agree, captured, compared, gradients, on_ranks, planned, same, strategies, unequal
from tests.cost_model.helpers import cluster
from tests.models import tiny


def lm(**more: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(**more)


# ---- CLU-01, 02: one device


@pytest.mark.parametrize("name", ["lm", "convnet", "mlp"])
def test_clu01_one_device_is_the_identity_bit_for_bit(name: str) -> None:
    model, batch = (lm(), text()) if name == "lm" else tiny(name)
    graph = captured(model, batch, "fp32")
    plan = planned(graph, 1, {}, "fp32")
    source = api.emit_captured(graph, plan)
    assert plan.mesh.axes == {} and plan.cluster.devices == 1
    assert not re.search(r"rt\.(all|reduce|slice)", source.text)
    eager = copy.deepcopy(model)
    loss = losses_of(eager(**batch))[0]
    loss.backward()

    def once(module: nn.Module) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        mine = losses_of(module(**batch))[0]
        mine.backward()
        return mine.detach(), gradients(module), module.full_state_dict()

    ((mine, grads, state),) = on_ranks(graph, plan, model, once)
    close = {} if name == "lm" else {"rtol": 1e-6, "atol": 1e-7}  # batch and smoothed losses are taken apart
    check = torch.testing.assert_close if close else lambda a, b: torch.equal(a, b) or pytest.fail("not bit for bit")
    torch.testing.assert_close(mine, loss.detach(), rtol=1e-6, atol=1e-7)  # the loss's sum is taken in another order
    for key, wanted in gradients(eager).items():
        check(grads[key], wanted, **close)
    for key, wanted in eager.state_dict().items():
        check(state[key], wanted, **close)


class Scaled(nn.Module):
    """A wrapped submodule with a tiny parameter of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(1 + torch.rand(shape))
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 4) -> loss ()."""
        return (self.linear(x) * self.inner.scale).pow(2).mean()


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,), ()])
def test_clu02_tiny_parameters_get_their_gradient(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, batch = Scaled(shape), {"x": unequal(12, 4)}
    for ranks in (1, 2, 3):
        for pins in strategies(ranks).values():
            same(model, batch, ranks, pins=pins)
    model.double()(**batch).backward()
    assert float(model.inner.scale.grad.abs().min()) > 0


# ---- CLU-03: described is not launched


def compile_there(plan: str, devices: int) -> list[str]:
    """What compiling says in a launch of another size, and after how long: a plan's file, then a description.

    No mesh's group is made.
    """
    groups.communicator = None  # type: ignore[assignment]
    found = []
    for asked in (
        {"plan": autopar.Plan.load(plan), "example_inputs": text()},
        {"cluster": load_cluster(f"rtx3090:{devices}")},
    ):
        started = time.monotonic()
        try:
            autopar.compile(lm(), **asked)
            found.append("compiled")
        except PlanError as error:
            found.append(f"{time.monotonic() - started < 5} {error}")
    return found


@pytest.mark.ranks
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("described", "launched"), [(4, 2), (2, 4)])
def test_clu03_described_and_launched_differ(described: int, launched: int, tmp_path: Path) -> None:
    plan = autopar.search(lm(), load_cluster(f"rtx3090:{described}"), example_inputs=text())
    plan.save(tmp_path / "plan.json")
    for said in launch(compile_there, launched, (str(tmp_path / "plan.json"), described), timeout_s=90):
        assert said.startswith("True "), said
        assert re.search(rf"\b{described} ranks\b", said) and re.search(rf"\b{launched} were launched\b", said)
        assert "\n" not in said


def raise_there(devices: int) -> None:
    autopar.compile(lm(), load_cluster(f"rtx3090:{devices}"))


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_clu03_all_ranks_end_with_the_message() -> None:
    with pytest.raises(RankError, match="describes 4 ranks, 2 were launched"):
        launch(raise_there, 2, (4,), timeout_s=50)


def test_clu03_the_world_size_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for text_ in ("", "two", "0", "-1", "1.5"):
        monkeypatch.setenv("WORLD_SIZE", text_)
        with pytest.raises(UserError, match="WORLD_SIZE is"):
            autopar.compile(lm(), load_cluster("rtx3090:1"))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(PlanError, match="describes 1 ranks, 3 were launched"):
        autopar.compile(lm(), load_cluster("rtx3090:1"))


# ---- CLU-05, 06, 08, 09: counts that divide nothing


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7])
def test_clu05_every_strategy_is_usable_or_says_why_not(ranks: int) -> None:
    """An axis that cuts nothing is noted with the reason. Seen to fail: no such notes."""
    model, batch = lm(), text()
    graph = captured(model, batch)
    for name, pins in strategies(ranks).items():
        try:
            plan, report = compared(model, batch, ranks, pins=pins, graph=graph)
        except (InfeasibleError, UserError) as error:
            assert re.search(rf"can't be cut {ranks} ways", str(error)), f"{name}: {error}"
            continue
        assert report.ok, f"{name}: {report}"
        layouts = [p.layout for p in plan.parameters.values()] + list(plan.inputs["top"].values())
        for axis, size in plan.mesh.axes.items():
            if not any(re.search(rf"\b{axis}:S\(", layout) for layout in layouts):
                assert any(f"{size} ways on {axis}" in n.message for n in plan.notes), (name, plan.notes)


def test_clu06_three_devices_and_sizes_that_are_powers_of_two() -> None:
    """Ranks slow enough, links fast enough: three are modelled faster than one, though nothing divides by three."""
    torch.manual_seed(0)
    model = TinyLM(vocab=32, width=16, heads=4, layers=3, seq=12)
    batch = text(rows=12, vocab=32)
    options = Options(precision="fp64")
    slow = {"peak_flops": {"float32": 1e9, "float64": 1e9}, "memory_bytes_per_us": 100.0, "kernel_floor_us": 0.01}
    graph = captured(model, batch)
    plans = [
        api.plan_captured(graph, cluster((n, 1.0, 1e5), **slow), options=options)  # type: ignore[arg-type]
        for n in (1, 3)
    ]
    assert plans[1].cluster.devices == 3
    assert plans[1].predicted.step_time_us < plans[0].predicted.step_time_us
    assert api.verify(model, batch, options=options, plan=plans[1], captured=graph).ok


class Small(nn.Module):
    """Parameters with fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 4) -> loss ()."""
        return (self.linear(x).pow(2).mean() + self.norm(x[:, :2]).pow(3)).mean()


@pytest.mark.parametrize("ranks", [4, 7])
def test_clu08_parameters_smaller_than_the_ranks(ranks: int) -> None:
    torch.manual_seed(0)
    model = Small()
    batch = {"x": unequal(28, 4)}
    graph = captured(model, batch)
    for name in ("dp", "zero3", "tp"):
        _, report = compared(model, batch, ranks, pins=strategies(ranks)[name], graph=graph)
        assert report.ok, f"{name}: {report}"
    plan = planned(graph, ranks, strategies(ranks)["zero3"])

    def round_trip(module: Any) -> bool:
        state = module.full_state_dict()
        module.load_full_state_dict({k: torch.zeros_like(v) for k, v in state.items()})
        module.load_full_state_dict(state)
        return all(torch.equal(v, state[k]) for k, v in module.full_state_dict().items())

    assert all(on_ranks(graph, plan, model, round_trip))


class Odd(nn.Module):
    """A parameter of shape (), one without elements, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("table", torch.tensor([3, 1, 2, 0]))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 4) -> loss ()."""
        h = torch.cat([self.linear(x)[:, self.table], self.nothing])
        return (h * self.logit_scale.exp()).pow(2).mean()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_clu09_parameters_without_dims_or_elements(ranks: int) -> None:
    torch.manual_seed(0)
    model, batch = Odd(), {"x": unequal(12, 4)}
    graph = captured(model, batch)
    for name, pins in strategies(ranks).items():
        if "cp" in name:
            continue
        plan, report = compared(model, batch, ranks, pins=pins, graph=graph)
        assert report.ok, f"{name}: {report}"
        for state in on_ranks(graph, plan, model, lambda module: module.full_state_dict()):
            assert state["logit_scale"].shape == () and state["nothing"].shape == (0, 4)
            assert torch.equal(state["table"], model.table) and state["table"].dtype == torch.int64


# ---- CLU-11, 12, 14: no layer is lost, stages span nodes (that they train the same waits: `test_rows.py`)


def block_stages(plan: Plan) -> dict[int, set[int]]:
    """Block -> the stages that its parameters are on."""
    found: dict[int, set[int]] = {}
    for name, parameter in plan.parameters.items():
        if name.startswith("blocks."):
            found.setdefault(int(name.split(".")[1]), set()).add(parameter.stage)
    return found


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_clu11_every_layer_is_on_one_stage(stages: int) -> None:
    """Seven blocks on stages that do not divide them. Seen to fail: as many on each, the rest left out."""
    model = lm(layers=7)
    plan = planned(captured(model, text()), stages, {"pp": stages})
    assert plan.mesh.pipeline == len(plan.stages) == stages
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    at = block_stages(plan)
    assert sorted(at) == list(range(7)) and all(len(where) == 1 for where in at.values())
    counts = Counter(next(iter(where)) for where in at.values())
    assert [sum(n for _, n in stage.blocks) for stage in plan.stages] == [counts[s] for s in range(stages)]
    assert sum(counts.values()) == 7 and min(counts.values()) >= 1


def test_clu11_more_stages_than_layers() -> None:
    """Three blocks on four stages: refused with both counts, and fewer stages where the search may choose."""
    graph = captured(lm(layers=3), text())
    with pytest.raises(UserError, match=r"pp=4: .* 4 devices .* 3 blocks"):
        planned(graph, 4, {"pp": 4})
    options = Options(precision="fp64", stages=True)
    plan = api.plan_captured(graph, load_cluster("rtx3090:4"), options=options)
    assert plan.mesh.pipeline < 4 and sorted(block_stages(plan)) == [0, 1, 2]


@pytest.mark.parametrize("pins", [{}, {"dp": 2, "tp": 2}, {"dp": 4}], ids=str)
def test_clu14_a_stage_may_span_nodes(pins: dict[str, int]) -> None:
    """Four nodes of two, two stages of four: planned, and the axis that leaves the node is priced there. Seen to fail:
    every axis of a stage inside one node."""
    spec = cluster((2, 1.0, 300.0), (4, 5.0, 10.0))
    options = Options(precision="fp64", pins={"pp": 2, **pins})
    plan = api.plan_captured(captured(lm(layers=4), text()), spec, options=options)
    assert [stage.devices for stage in plan.stages] == [4, 4]
    assert math.prod(plan.mesh.axes.values()) == 4 and max(plan.mesh.levels.values()) == 1
    assert 0 < plan.solver.bound_us <= plan.solver.objective_us < math.inf
    assert sum(n for stage in plan.stages for _, n in stage.blocks) == 4


def test_clu12_one_stage_keeps_every_layer() -> None:
    """No option can shrink the model: all layers of L=5 are there and run; other stage counts are refused. A loop over
    four of five blocks fails the comparison."""
    model = lm(layers=5).double()
    graph = captured(model, text())
    plan = planned(graph, 2, {"pp": 1, "dp": 2})
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    source = api.emit_captured(graph, plan)
    short = source.text.replace("in range(5):", "in range(4):").replace("reversed(range(5))", "reversed(range(4))")
    assert short.count("range(4)") == 2
    for text_, right in ((source.text, True), (short, False)):
        assert api.verify_source(graph, plan, replace(source, text=text_), model, text(), steps=1).ok == right
    staged = planned(graph, 2, {"pp": 2})
    assert sum(n for stage in staged.stages for _, n in stage.blocks) == 5
    with pytest.raises(PlanError, match="one stage"):
        api.emit_captured(graph, staged)


# ---- CLU-15: the heavy axis on the fast links


def test_clu15_link_speeds_decide_where_the_tensor_axis_lies() -> None:
    """Two nodes of two: groups of tp lie in a node, or across where those links are the faster. Seen to fail: the axes
    in one order whatever the links."""
    graph = captured(lm(width=24, heads=6), text())
    fast, slow = (5.0, 300.0), (5.0, 1.0)
    for inside, across, wanted in ((fast, slow, ((0, 1), (2, 3))), (slow, fast, ((0, 2), (1, 3)))):
        options = Options(precision="fp64", pins={"dp": 2, "tp": 2})
        plan = api.plan_captured(graph, cluster((2, *inside), (2, *across)), options=options)
        assert mesh_of(plan).groups("tp") == wanted


@pytest.mark.parametrize("names", [("tp", "dp"), ("dp", "tp")])
def test_clu15_axes_in_any_order_train_alike(names: tuple[str, ...]) -> None:
    """Also the dearer order, and a batch that it plans again for. Seen to fail: planned again on the cheapest mesh."""
    model, batch = lm(width=24, heads=6).double(), text()
    graph = captured(model, batch)
    options = Options(precision="fp64", pins={"dp": 2, "tp": 2})
    spec = cluster((2, 5.0, 1.0), (2, 5.0, 300.0))
    mesh = next(m for m in mesh_candidates(spec, options) if m.names == names)
    plan = api.plan_captured(graph, spec, options=options, mesh=mesh)
    assert mesh_of(plan) == mesh
    assert api.verify(model, batch, options=options, plan=plan, captured=graph).ok

    def again(rt: Any) -> None:
        module = api.compile_on(copy.deepcopy(model), lambda *_: rt, spec, (), batch, plan=plan, options=options)
        plain = copy.deepcopy(model)
        for rows in (12, 6):
            module(**text(rows=rows)).backward()
            plain(**text(rows=rows)).backward()
        agree(gradients(module), gradients(plain))

    run_threads(mesh, again)


# ---- CLU-17: the description wins


def test_clu17_a_plan_looks_at_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of eight, described: the plan is the same with GPUs hidden, or where asking for one raises."""
    graph = captured(lm(), text(rows=16))

    def found() -> bytes:
        options = Options(precision="fp64")
        plan = api.plan_captured(graph, load_cluster("dgx-h100:2"), options=options)
        assert math.prod(plan.mesh.axes.values()) == 16
        return msgspec.structs.replace(plan, solver=msgspec.structs.replace(plan.solver, time_s=0.0)).to_json()

    before = found()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("looked at this machine")

    for name in ("is_available", "device_count", "get_device_name", "get_device_properties", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(local.psutil, "virtual_memory", refuse)
    assert found() == before
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found() == before


# ---- CLU-18: one sample on two devices


def test_clu18_one_sample_is_shared() -> None:
    model = lm(width=16, heads=4, seq=64)  # long, so that activations are what the peak is made of
    batch = text(rows=1, seq=64)
    options = Options(precision="fp64")
    graph = captured(model, batch)
    plans = {n: api.plan_captured(graph, load_cluster(f"rtx3090:{n}"), options=options) for n in (1,)}
    for name in ("tp", "cp"):
        plan, report = compared(model, batch, 2, pins=strategies(2)[name], graph=graph)
        assert report.ok, f"{name}: {report}"
        plans[name] = plan
    activations = {n: p.predicted.breakdown_bytes["activations"] for n, p in plans.items()}
    assert max(activations["tp"], activations["cp"]) < activations[1], activations


# ---- descriptions of every sort

GOOD = dump_cluster(cluster((4, 1.0, 100.0), (2, 5.0, 10.0)))


def with_line(key: str, value: str) -> str:
    return re.sub(rf"(?m)^{key} = .*$", lambda _: f"{key} = {value}", GOOD, count=1)


NUMBERS = ("count", "size", "latency_us", "bytes_per_us", "memory_bytes", "memory_bytes_per_us", "kernel_floor_us",
           "matmul_efficiency", "memory_efficiency", "float32", "link_bytes_per_us", "nvme_bytes_per_us")  # fmt: skip


@pytest.mark.parametrize("key", NUMBERS)
def test_clu_numbers_out_of_range_are_one_line(key: str) -> None:
    assert with_line(key, "-1") != GOOD
    for value in ("-1", "nan", "inf", "-inf", "1e400", "1e308", "9" * 40, "true", '"3"', "[]", "{}", "1979-05-27"):
        with pytest.raises(ClusterError) as caught:
            parse_cluster(with_line(key, value), "f.toml")
        assert key in str(caught.value) or "at `$." in str(caught.value)
        assert "\n" not in str(caught.value) and "f.toml" in str(caught.value)


TWICE = GOOD.replace('name = "level1"', 'name = "level0"')
BAD_FILES = {
    "empty": b"", "nul": b"\0" * 9, "utf-16": GOOD.encode("utf-16"), "truncated": GOOD.encode()[: len(GOOD) // 2],
    "deep": b"x = " + b"[" * 5000, "array": b"groups = 3", "no links": GOOD.split("[[levels]]")[0].encode(),
    "no level multiplies": with_line("size", "3").encode(), "unknown key": b"colour = 1\n" + GOOD.encode(),
    "unnamed": with_line("name", '""').encode(), "two lines": with_line("name", '"a\\nb"').encode(),
    "long": with_line("name", f'"{"x" * 300}"').encode(), "two levels of one name": TWICE.encode(),
    "named twice": b'name = "x"\n' + GOOD.encode(), "no figures": re.sub(r"(?m)^b?float.*$", "", GOOD).encode(),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_clu_malformed_files_are_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(BAD_FILES[kind])
    with pytest.raises(ClusterError) as caught:
        load_cluster(str(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


BAD_NAMES = (
    "local:0", "local:", "local:-1", "local:1.5", "local:abc", "dgx-h100:", "dgx-h100:-1", "dgx-h100:1.5",
    "dgx-h100:1000001", "dgx-h100:" + "9" * 5000, "dgx-h100:٣", "dgx-h100:+4", "dgx-h100:1e2", "dgx-h100:4:", ":4", ":",
    "a\0b", "x" * 5000, "/", "no/such.toml", "日本:3", "a\0b/c", "rtx3090:9",
)  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda n: ascii(n[:20]))
def test_clu_names_that_name_nothing_are_one_short_line(name: str) -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_clu_a_bad_cluster_ends_the_command_with_2_and_writes_nothing(tmp_path: Path) -> None:
    path, out = tmp_path / "c.toml", tmp_path / "plan.json"
    path.write_text(with_line("size", "0"))
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "search", "gpt2-tiny", "--cluster", str(path), "-o", str(out)],
        capture_output=True, text=True, timeout=100, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout and not out.exists()
    assert done.stderr.strip().count("\n") == 0 and "levels[0].size is 0" in done.stderr


@pytest.mark.parametrize("text_", [GOOD.replace("\n", "\r\n"), "\ufeff" + GOOD, with_line("name", '"日本 Ä"')])
def test_clu_files_as_editors_leave_them_are_read(text_: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(text_.encode())
    assert load_cluster(str(path)).devices == 8


LEVELS = {
    "1 device × 6 nodes": ((1, 1.0, 100.0), (6, 5.0, 10.0)), "3 × 5": ((5, 1.0, 100.0), (3, 5.0, 10.0)),
    "prime": ((13, 1.0, 100.0),), "96": ((8, 1.0, 100.0), (12, 5.0, 10.0)),
    "three levels": ((2, 1.0, 100.0), (1, 2.0, 50.0), (3, 5.0, 10.0)), "one": ((1, 1.0, 100.0),),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEVELS)
def test_clu_odd_clusters_get_a_plan(kind: str) -> None:
    spec = cluster(*LEVELS[kind])
    plan = api.plan_captured(LM_GRAPH(), spec, options=Options(precision="fp64", time_limit_s=20))
    sizes = 1
    for size in plan.mesh.axes.values():
        sizes *= size
    assert sizes == spec.devices == plan.cluster.devices


def LM_GRAPH() -> Any:  # noqa: N802
    return captured(lm(), text(rows=96))


def test_clu_unlike_groups_take_the_slowest_and_the_smallest() -> None:
    fast = cluster((4, 1.0, 100.0))
    slow = cluster((4, 1.0, 100.0), memory_bytes=2**28, memory_bytes_per_us=200.0)
    both = parse_cluster(dump_cluster(fast).replace("count = 4", "count = 2"), "x") if False else None
    assert both is None
    import msgspec

    halves = tuple(msgspec.structs.replace(c.groups[0], count=2) for c in (fast, slow))
    mixed = msgspec.structs.replace(fast, groups=halves)
    assert mixed.devices == 4 and mixed.memory_bytes == 2**28
    graph = LM_GRAPH()
    options = Options(precision="fp64", pins={"dp": 4, "zero": 0})
    times = [api.plan_captured(graph, c, options=options).predicted.step_time_us for c in (fast, mixed, slow)]
    assert times[0] < times[1] == times[2]


def test_clu_very_large_descriptions_are_enumerated_not_built() -> None:
    meshes = mesh_candidates(load_cluster("dgx-h100:999999"), Options())
    assert all(m.size == 7_999_992 for m in meshes)
