"""The table: known good plans are in it, it is small, it is fast, pins and notes say what they should."""

from __future__ import annotations

import re
import time
from functools import cache

import pytest
import torch

from autopar.errors import UserError
from autopar.ir.graph import CapturedGraph, Node
from autopar.ir.layout import Kind, Layout, divides, parse_layout
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.options import Options
from autopar.ir.strategy import StrategyTable
from autopar.sharding import PinError, RuleCache, build_table
from autopar.tracer import capture
from tests.models import tiny

CACHE = RuleCache()


@cache
def captured(name: str) -> CapturedGraph:
    model, kwargs = tiny(name)
    return capture(model, (), kwargs, options=Options(), model_name=name)


def mesh(**axes: int) -> Mesh:
    return Mesh(axes=tuple(Axis(name=n, size=s) for n, s in axes.items()))


@cache
def table(name: str, **axes: int) -> StrategyTable:
    return build_table(captured(name), mesh(**axes), Options(), rules=CACHE)


def fills(layout: Layout, shape: tuple[int, ...], on: Mesh) -> bool:
    """True if each cut dim has a row for each rank, and those that several axes cut divide."""
    cut = [(p.dim, a.size) for p, a in zip(layout.placements, on.axes, strict=True) if p.kind is Kind.SHARD]
    dims = [d for d, _ in cut]
    return all(shape[d] >= n for d, n in cut) and (len(set(dims)) == len(dims) or divides(layout, shape, on))


def texts(found: StrategyTable, graph: str, node: Node) -> set[str]:
    """Strategies as text, without tags."""
    return {re.sub(r" \[.*\]$", "", str(s)) for s in found.nodes[graph][node.name]}


def node_of(model: str, op: str, path: str, phase: str = "forward") -> tuple[str, Node]:
    """The first node of an op under a module path."""
    for graph in captured(model).graphs:
        for node in graph.nodes:
            if node.op == op and node.module_path.endswith(path) and node.phase.value == phase:
                return graph.name, node
    raise AssertionError(f"no {op} under {path}")


@pytest.mark.parametrize(
    ("op", "path", "phase", "wanted"),
    [
        ("aten.matmul.default", "up_proj", "forward", "dp:S(0) tp:R, dp:R tp:S(1) -> dp:S(0) tp:S(2)"),  # column
        ("aten.matmul.default", "down_proj", "forward", "dp:S(0) tp:S(2), dp:R tp:S(0) -> dp:S(0) tp:P"),  # row
        ("aten.embedding.default", "embed_tokens", "forward", "dp:R tp:S(0), dp:S(0) tp:R -> dp:S(0) tp:P"),
        ("aten._log_softmax.default", "", "forward", "dp:S(0) tp:S(2) -> dp:S(0) tp:S(2)"),  # cut vocabulary
        ("autopar.pick.default", "", "forward", "dp:S(0) tp:S(2), dp:S(0) tp:R -> dp:S(0) tp:P"),
        ("autopar.place.default", "", "backward", "dp:S(0) tp:R, dp:S(0) tp:R -> dp:S(0) tp:S(2)"),
        ("aten.rsqrt.default", "input_layernorm", "forward", "dp:S(0) tp:S(1) -> dp:S(0) tp:S(1)"),  # sequence
    ],
)
def test_known_plans_of_a_transformer(op: str, path: str, phase: str, wanted: str) -> None:
    graph, node = node_of("llama", op, path, phase)
    assert wanted in texts(table("llama", dp=2, tp=2), graph, node)


def test_matrices_are_stored_cut_on_tp_and_cut_or_whole_on_dp() -> None:
    found = table("llama", dp=2, tp=2).storage
    assert {str(x) for x in found["model.layers.1.mlp.up_proj.weight"]} == {
        "dp:R tp:S(0)", "dp:S(1) tp:S(0)", "dp:R tp:S(1)", "dp:S(0) tp:S(1)",
    }  # fmt: skip
    assert {str(x) for x in found["model.norm.weight"]} == {"dp:R tp:R", "dp:S(0) tp:R", "dp:R tp:S(0)"}
    assert {str(x) for x in table("llama", dp=2).storage["model.norm.weight"]} == {"dp:R", "dp:S(0)"}


def test_weight_gradients_are_sums_over_the_batch() -> None:
    graph, node = node_of("llama", "aten.tensordot.default", "up_proj", "backward")
    assert any(s.outputs[0].on("dp").kind.value == "P" for s in table("llama", dp=2, tp=2).nodes[graph][node.name])


def test_batch_stays_cut_on_dp_and_is_never_cut_on_tp() -> None:
    for graph in captured("llama").graphs:
        for node in graph.nodes:
            if node.op in ("aten.matmul.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"):
                for strategy in table("llama", dp=2, tp=2).nodes[graph.name][node.name]:
                    assert any(str(x.on("dp")).startswith("S") for x in strategy.inputs)
                    assert str(strategy.inputs[0].on("tp")) != str(strategy.inputs[0].on("dp"))


class Masked(torch.nn.Module):
    """A mask of all rows, made of counts alone, as libraries make it for rows that hold several documents."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, steps] -> []."""
        rows, steps = (torch.arange(n) for n in x.shape)
        of = torch.zeros(x.shape[1]).expand(x.shape)[rows[:, None, None, None], steps[None, None, :, None]]
        near = steps[:, None] - steps[None, :]
        return torch.where(of + near < 1, x[:, None, :, None], 0.0).sum()


@pytest.mark.parametrize("shape", [(6, 4), (6, 6)])
def test_rows_of_a_mask_are_made_where_the_batch_is(shape: tuple[int, int]) -> None:
    """Else every rank makes the mask of the whole batch. With as many steps as rows, what is put behind them tells."""
    made = capture(Masked(), (torch.ones(shape, requires_grad=True),), {}, options=Options(), model_name="masked")
    found = build_table(made, mesh(dp=2), Options()).nodes[made.top.name]
    counted = [n for n in made.top.nodes if n.op == "aten.arange.default"]
    assert [{str(s.outputs[0].on("dp")) for s in found[n.name]} for n in counted[:2]] == [{"S(0)"}, {"R"}]
    compared = next(n for n in made.top.nodes if n.op.startswith("aten.lt"))
    assert {str(s.outputs[0].on("dp")) for s in found[compared.name]} == {"S(0)"}


def test_the_sequence_stays_cut_on_cp_through_matrices() -> None:
    """A view to [batch · sequence, features] before each of them would end it."""
    strategies = table("llama", dp=2, cp=2).nodes
    for graph in captured("llama").graphs:
        for node in graph.nodes:
            if node.op == "aten.matmul.default":
                assert all(str(s.inputs[0].on("cp")) == "S(1)" for s in strategies[graph.name][node.name])
            if node.op == "aten.tensordot.default":
                assert any(str(s.outputs[0].on("cp")) == "P" for s in strategies[graph.name][node.name])


def test_convolutions_can_be_cut_by_batch_and_by_channels() -> None:
    graph, node = node_of("convnet", "aten.convolution.default", "")
    found = {str(s.inputs[0]) + " / " + str(s.inputs[1]) for s in table("convnet", dp=2, tp=2).nodes[graph][node.name]}
    assert "dp:S(0) tp:R / dp:R tp:S(0)" in found
    assert all("tp:S(2)" not in s and "tp:S(3)" not in s for s in found)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 3}, {"dp": 2, "tp": 3}, {"dp": 2, "cp": 3, "tp": 2}, {"free": 2},
                                  {"dp": 5, "tp": 7}, {"dp": 6, "tp": 6}])  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "convnet"])
def test_every_layout_fits_and_every_node_has_a_strategy(name: str, axes: dict[str, int]) -> None:
    found, on = table(name, **axes), mesh(**axes)
    for graph in captured(name).graphs:
        values = graph.values()
        for node in graph.nodes:
            if node.block is not None:
                assert node.name not in found.nodes[graph.name]
                continue
            strategies = found.nodes[graph.name][node.name]
            assert strategies
            assert len(set(strategies)) == len(strategies) <= 60
            for s in strategies:
                assert all(fills(x, values[r].meta.shape, on) for x, r in zip(s.inputs, node.refs, strict=True))
                for out, value in zip(s.outputs, node.outputs, strict=True):
                    assert (out is None) == (value is None)
                    assert out is None or fills(out, value.meta.shape, on)
    for parameter in captured(name).parameters:
        assert found.storage[parameter.name]
        assert all(fills(x, parameter.meta.shape, on) for x in found.storage[parameter.name])


def test_counts_stay_modest() -> None:
    assert max(len(s) for g in table("llama", dp=2, tp=2).nodes.values() for s in g.values()) <= 30
    assert max(len(s) for g in table("llama", dp=2, cp=2, tp=2).nodes.values() for s in g.values()) <= 60


def test_a_table_is_fast_once_rules_are_known() -> None:
    table("llama", dp=2, tp=2)
    start = time.perf_counter()
    build_table(captured("llama"), mesh(dp=4, tp=3), Options(), rules=CACHE)
    assert time.perf_counter() - start < 1.0


def test_indivisible_sizes_are_noted_once_per_size() -> None:
    notes = [n for n in table("llama", dp=5, tp=7).notes if n.kind == "indivisible"]
    assert notes
    assert len({n.message.split(":")[0] for n in notes}) == len(notes)
    assert any("a dim of size 48 can't be cut 7 ways on tp: 4 ops don't take unequal" in n.message for n in notes)
    few = [n.message for n in table("llama", dp=13).notes if n.kind == "indivisible"]
    assert any("a dim of size 12 can't be cut 13 ways on dp: ranks would be left with nothing" in m for m in few)


def test_a_batch_that_does_not_divide_is_cut_in_unequal_pieces() -> None:
    """12 samples on 5 ranks are 3 3 3 3 0: nothing of the batch is computed twice."""
    found = table("llama", dp=5)
    assert not [n for n in found.notes if n.kind == "indivisible"]
    assert str(found.inputs["top"]["x_input_ids"][0]) == "dp:S(0)"
    graph, node = node_of("llama", "aten.matmul.default", "up_proj")
    assert {str(s.inputs[0]) for s in found.nodes[graph][node.name]} == {"dp:S(0)"}
    assert {str(x) for x in found.storage["lm_head.weight"]} == {"dp:R", "dp:S(0)"}


def test_pins_restrict_storage_and_use() -> None:
    options = Options(pins={"model.layers.*.mlp.up_proj": "tp:S(1)", "zero": 3, "tp": 2})
    found = build_table(captured("llama"), mesh(dp=2, tp=2), options, rules=CACHE)
    assert [str(x) for x in found.storage["model.layers.0.mlp.up_proj.weight"]] == ["dp:S(0) tp:S(1)"]
    assert {x.on("dp").kind.value for x in found.storage["lm_head.weight"]} == {"S"}
    graph, node = node_of("llama", "aten.matmul.default", "up_proj")
    assert {str(s.inputs[1].on("tp")) for s in found.nodes[graph][node.name]} == {"S(0)"}


def test_zero_0_stores_whole_on_dp() -> None:
    found = build_table(captured("llama"), mesh(dp=2, tp=2), Options(pins={"zero": 0}), rules=CACHE)
    assert {str(x.on("dp")) for layouts in found.storage.values() for x in layouts} == {"R"}


def test_a_pin_to_whole_is_used_whole() -> None:
    found = build_table(captured("llama"), mesh(tp=2), Options(pins={"lm_head.weight": "tp:R"}), rules=CACHE)
    assert [str(x) for x in found.storage["lm_head.weight"]] == ["tp:R"]


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"model.layers.*.mlp.up_prj": "tp:S(0)"}, "up_proj"),
        ({"lm_heed": "tp:S(0)"}, "did you mean lm_head"),
        ({"lm_head": "tp:X(0)"}, "is no layout"),
        ({"lm_head": "tp:P"}, "can't be stored as a sum"),
        ({"zero": 2}, "wanted 0"),
        ({"model.layers.0.mlp.up_proj": "tp:S(0)", "model.layers.1.mlp.up_proj": "tp:S(1)"}, "fold_blocks=False"),
    ],
)
def test_bad_pins_are_refused_in_words(pins: dict[str, str | int], words: str) -> None:
    """USE-02: a pin that matches nothing names what comes closest."""
    with pytest.raises(UserError, match=re.escape(words)):
        build_table(captured("llama"), mesh(dp=2, tp=2), Options(pins=pins), rules=CACHE)


def test_a_pin_that_does_not_fit_is_this_meshs_fault() -> None:
    with pytest.raises(PinError, match="can't cut so"):
        build_table(captured("llama"), mesh(tp=7), Options(pins={"lm_head": "tp:S(2)"}), rules=CACHE)


def test_a_pin_may_ask_for_unequal_and_for_empty_pieces() -> None:
    pins = {"lm_head": "tp:S(0)", "model.norm": "tp:S(0)"}
    found = build_table(captured("llama"), mesh(tp=7), Options(pins=pins), rules=CACHE)
    assert [str(x) for x in found.storage["lm_head.weight"]] == ["tp:S(0)"]
    assert [str(x) for x in found.storage["model.norm.weight"]] == ["tp:S(0)"]


def test_ends_of_the_graphs() -> None:
    found, model = table("llama", dp=2, tp=2), captured("llama")
    assert {str(x) for x in found.inputs["top"]["x_input_ids"]} == {"dp:R tp:R", "dp:S(0) tp:R"}
    loss = next(i for i, o in enumerate(model.top.outputs) if o.target == "0")
    assert [str(x) for x in found.outputs["top"][loss]] == ["dp:R tp:R"]
    block = model.blocks[0].graph
    hidden = next(i.value.name for i in block.inputs if i.value.meta.shape == (12, 12, 48))
    assert parse_layout("dp:S(0) tp:S(1)", mesh(dp=2, tp=2)) in found.inputs[block.name][hidden]
    assert all(found.outputs[block.name].values())


class _Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.autopar_test_build.odd(x)


class _HasOdd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Odd()
        self.fc = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.fc(x)).sum()


LIBRARY = torch.library.Library("autopar_test_build", "DEF")
LIBRARY.define("odd(Tensor x) -> Tensor")
LIBRARY.impl("odd", lambda x: x * 3, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "autopar_test_build::odd", lambda _, g: torch.ops.autopar_test_build.odd(g), lib=LIBRARY
)


def test_an_op_without_a_rule_is_replicated_and_listed() -> None:
    """USE-01: op name, module path, file and line."""
    model = capture(_HasOdd(), (torch.randn(4, 6),), {}, options=Options())
    found = build_table(model, mesh(dp=2), Options())
    graph, node = next((g, n) for g in model.graphs for n in g.nodes if "odd" in n.op)
    assert [str(s) for s in found.nodes[graph.name][node.name]] == ["dp:R -> dp:R"]
    note = next(n for n in found.notes if n.kind == "replicated")
    assert "autopar_test_build.odd.default" in note.message
    assert "inner" in note.where
    assert re.search(r"test_build\.py:\d+", note.where)
