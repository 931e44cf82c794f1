"""Hand-made captured graphs and plans: a chain of equal blocks with a loss, and any plan over a captured graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.graph import (
    Block,
    BlockCall,
    CallSignature,
    CapturedGraph,
    Graph,
    GraphInput,
    GraphOutput,
    InputKind,
    InputLeaf,
    Node,
    OutputKind,
    ParameterInfo,
    Phase,
    Ref,
    TensorMeta,
    Value,
)
from autopar.ir.layout import Layout, parse_layout
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import (
    Plan,
    PlanCluster,
    PlanMesh,
    PlanModel,
    PlanParameter,
    PlanPrediction,
    PlanReshard,
    PlanSchedule,
    PlanSolver,
    PlanStrategy,
)
from autopar.ir.reshard import plan_reshard

ROWS, WIDTH = 12, 12
DTYPE = "float64"


def mesh(**axes: int) -> Mesh:
    """mesh(dp=2, tp=2)."""
    return Mesh(axes=tuple(Axis(name=n, size=s) for n, s in axes.items()))


def node(
    name: str, op: str, args: tuple[Any, ...], shape: tuple[int, ...], phase: Phase, path: str = "", **kw: Any
) -> Node:
    return Node(
        name=name, op=op, args=args, kwargs=tuple(kw.items()), outputs=(Value(name, TensorMeta(shape, DTYPE)),),
        phase=phase, key=f"{path}/{op}/{phase.value}#{name}", module_path=path, source="hand.py:1",
    )  # fmt: skip


def _input(name: str, shape: tuple[int, ...], kind: InputKind, target: str) -> GraphInput:
    return GraphInput(
        value=Value(name, TensorMeta(shape, DTYPE)), kind=kind, target=target, requires_grad=kind is InputKind.PARAMETER
    )


F, B = Phase.FORWARD, Phase.BACKWARD
SQ, HID = (WIDTH, WIDTH), (ROWS, WIDTH)


def block_graph() -> Graph:
    """y = relu(h @ weight)."""
    nodes = (
        node("mm", "aten.mm.default", (Ref("h"), Ref("weight")), HID, F, "linear"),
        node("relu", "aten.relu.default", (Ref("mm"),), HID, F, "act"),
        node("dmm", "aten.threshold_backward.default", (Ref("dy"), Ref("relu"), 0), HID, B, "act"),
        node("ht", "aten.t.default", (Ref("h"),), (WIDTH, ROWS), B, "linear"),
        node("dweight", "aten.mm.default", (Ref("ht"), Ref("dmm")), SQ, B, "linear"),
        node("wt", "aten.t.default", (Ref("weight"),), SQ, B, "linear"),
        node("dh", "aten.mm.default", (Ref("dmm"), Ref("wt")), HID, B, "linear"),
    )
    return Graph(
        name="layer",
        inputs=(
            _input("weight", SQ, InputKind.PARAMETER, "linear.weight"),
            _input("h", HID, InputKind.INPUT, "0"),
            _input("dy", HID, InputKind.TANGENT, "0"),
        ),
        nodes=nodes,
        outputs=(
            GraphOutput(kind=OutputKind.OUTPUT, target="0", value="relu"),
            GraphOutput(kind=OutputKind.GRADIENT, target="weight", value="dweight"),
            GraphOutput(kind=OutputKind.GRADIENT, target="h", value="dh"),
        ),
    )


def _call(
    i: int, phase: Phase, args: tuple[str, ...], outputs: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
) -> Node:
    name = f"layer_{i}" if phase is F else f"layer_{i}_backward"
    return Node(
        name=name, op="autopar.block" if phase is F else "autopar.block_backward", args=tuple(map(Ref, args)),
        outputs=tuple(Value(n, TensorMeta(s, DTYPE)) for n, s in zip(outputs, shapes, strict=True)), phase=phase,
        key=f"layers.{i}/block/{phase.value}", module_path=f"layers.{i}", source="hand.py:2",
        block=BlockCall(key="layer", instance=f"layers.{i}"),
    )  # fmt: skip


def chain(layers: int = 4) -> CapturedGraph:
    """loss = sum((layers(x @ first) @ first.T)^2): `first` is used twice, so its gradient is a sum."""
    ins = [_input("first", SQ, InputKind.PARAMETER, "first")]
    ins += [_input(f"w{i}", SQ, InputKind.PARAMETER, f"layers.{i}.linear.weight") for i in range(layers)]
    ins += [_input("x", HID, InputKind.INPUT, "x"), _input("dloss", (), InputKind.TANGENT, "0")]
    nodes = [node("h0", "aten.mm.default", (Ref("x"), Ref("first")), HID, F, "first")]
    nodes += [_call(i, F, (f"w{i}", f"h{i}"), (f"h{i + 1}",), (HID,)) for i in range(layers)]
    last = f"h{layers}"
    nodes += [
        node("ft", "aten.t.default", (Ref("first"),), SQ, F, "head"),
        node("y", "aten.mm.default", (Ref(last), Ref("ft")), HID, F, "head"),
        node("sq", "aten.mul.Tensor", (Ref("y"), Ref("y")), HID, F, "loss"),
        node("loss", "aten.sum.default", (Ref("sq"),), (), F, "loss"),
        node("two", "aten.mul.Tensor", (Ref("dloss"), 2.0), (), B, "loss"),
        node("spread", "aten.expand.default", (Ref("two"), HID), HID, B, "loss"),
        node("dy", "aten.mul.Tensor", (Ref("spread"), Ref("y")), HID, B, "loss"),
        node("ftb", "aten.t.default", (Ref("first"),), SQ, B, "head"),
        node("ftt", "aten.t.default", (Ref("ftb"),), SQ, B, "head"),
        node(f"dh{layers}", "aten.mm.default", (Ref("dy"), Ref("ftt")), HID, B, "head"),
        node("lt", "aten.t.default", (Ref(last),), (WIDTH, ROWS), B, "head"),
        node("dft", "aten.mm.default", (Ref("lt"), Ref("dy")), SQ, B, "head"),
        node("df1", "aten.t.default", (Ref("dft"),), SQ, B, "head"),
    ]
    for i in reversed(range(layers)):
        nodes.append(_call(i, B, (f"w{i}", f"h{i}", f"dh{i + 1}"), (f"dw{i}", f"dh{i}"), (SQ, HID)))
    nodes += [
        node("xt", "aten.t.default", (Ref("x"),), (WIDTH, ROWS), B, "first"),
        node("df0", "aten.mm.default", (Ref("xt"), Ref("dh0")), SQ, B, "first"),
        node("dfirst", "aten.add.Tensor", (Ref("df0"), Ref("df1")), SQ, B, "first"),
    ]
    outs = [GraphOutput(kind=OutputKind.OUTPUT, target="0", value="loss")]
    outs += [GraphOutput(kind=OutputKind.GRADIENT, target="first", value="dfirst")]
    outs += [GraphOutput(kind=OutputKind.GRADIENT, target=f"w{i}", value=f"dw{i}") for i in range(layers)]
    meta = TensorMeta(SQ, DTYPE)
    names = ["first", *(f"layers.{i}.linear.weight" for i in range(layers))]
    return CapturedGraph(
        model_name="chain",
        top=Graph(name="top", inputs=tuple(ins), nodes=tuple(nodes), outputs=tuple(outs)),
        blocks=(Block(key="layer", graph=block_graph(), instances=tuple(f"layers.{i}" for i in range(layers))),),
        parameters=tuple(ParameterInfo(name=n, meta=meta, requires_grad=True) for n in names),
        buffers=(),
        signature=CallSignature(
            inputs=(InputLeaf(path="x", meta=TensorMeta(HID, DTYPE)),), outputs=("[0]",), differentiable=(True,),
            flatten=lambda args, kwargs: [*args, *kwargs.values()], rebuild=lambda outs: outs[0],
        ),
    )  # fmt: skip


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Module()
        self.linear.weight = nn.Parameter(torch.randn(SQ, dtype=torch.float64) / 3)

    def forward(self, h: Tensor) -> Tensor:
        return torch.relu(h @ self.linear.weight)


class Chain(nn.Module):
    """The model of `chain`."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(SQ, dtype=torch.float64) / 3)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.first
        for layer in self.layers:
            h = layer(h)
        return ((h @ self.first.T) ** 2).sum()


Choice = tuple[list[str], list[str]]


def plan(
    captured: CapturedGraph,
    on: Mesh,
    choose: Callable[[Graph, Node], Choice | None],
    *,
    storage: Mapping[str, str] | None = None,
    inputs: Mapping[str, Mapping[str, str]] | None = None,
    outputs: Mapping[str, str] | None = None,
) -> Plan:
    """A plan from one choice per op: (inputs' layouts, outputs' layouts), or None: everything whole."""
    whole = str(parse_layout("whole", on))
    strategies: dict[str, dict[str, PlanStrategy]] = {}
    for graph in captured.graphs:
        rows = strategies[graph.name] = {}
        for n in graph.nodes:
            if n.block is None:
                ins, outs = choose(graph, n) or ([whole] * len(n.refs), [whole] * len(n.outputs))
                rows[n.key] = PlanStrategy(inputs=ins, outputs=outs, tags=[""] * len(on.axes), us=1.0)
    stored = {
        p.name: PlanParameter(
            stage=0, layout=(storage or {}).get(p.name, whole), bytes_per_device=0, optimizer_bytes_per_device=0
        )
        for p in captured.parameters
    }
    made = Plan(
        model=PlanModel(name=captured.model_name, parameters=0, graph_hash=captured.hash),
        cluster=PlanCluster(name="hand", devices=on.size),
        mesh=PlanMesh(pipeline=1, axes={a.name: a.size for a in on.axes}),
        schedule=PlanSchedule(), stages=[], parameters=stored,
        predicted=PlanPrediction(
            step_time_us=1, tokens_per_s=1, mfu=0, peak_memory_bytes=0, breakdown_us={}, breakdown_bytes={},
            cost_source="",
        ),
        solver=PlanSolver(status="hand", objective_us=0, bound_us=0, gap=0, time_s=0, memory_price=0), notes=[],
        strategies=strategies, inputs={g: dict(v) for g, v in (inputs or {}).items()},
        outputs={"top": dict(outputs or {})}, conversions=[],
    )  # fmt: skip
    return replace_conversions(captured, made, on)


def replace_conversions(captured: CapturedGraph, made: Plan, on: Mesh) -> Plan:
    """The plan with the conversions that it needs, counted apart from codegen: every (made, wanted) pair once."""
    import msgspec

    found: Counter[tuple[str, str, Layout, Layout]] = Counter()
    block_out: dict[tuple[str, str], Layout] = {}
    for graph in (*[b.graph for b in captured.blocks], captured.top):
        layouts = _made(captured, graph, made, on, block_out)
        parameters = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
        pairs = set()
        for value, want, phase in _wanted(captured, graph, made, on):
            if layouts[value] != want:
                pairs.add((value, layouts[value], want, phase if value in parameters else None))
        count = 1 if graph is captured.top else len(captured.block(graph.name).instances)
        for value, before, after, _ in pairs:
            found[(graph.name, value, before, after)] += count
    rows = [
        PlanReshard(
            graph=g,
            value=v,
            before=str(p),
            after=str(q),
            steps=[str(s) for s in plan_reshard(p, q) or ()],
            count=n,
            us=1.0,
        )
        for (g, v, p, q), n in found.items()
    ]
    return msgspec.structs.replace(made, conversions=rows)


def _arrival(captured: CapturedGraph, graph: Graph, own: GraphInput, made: Plan, on: Mesh) -> Layout:
    if own.kind is not InputKind.PARAMETER:
        return parse_layout(made.inputs.get(graph.name, {}).get(f"{own.kind.value}:{own.target}", "whole"), on)
    name = own.target
    if graph is not captured.top:
        call = next(n for n in captured.top.nodes if n.block and n.block.key == graph.name)
        args = dict(zip([i.value.name for i in graph.inputs], call.refs, strict=False))
        name = next(i.target for i in captured.top.inputs if i.value.name == args[own.value.name])
    return parse_layout(made.parameters[name].layout, on)


def _made(
    captured: CapturedGraph, graph: Graph, made: Plan, on: Mesh, block_out: dict[tuple[str, str], Layout]
) -> dict[str, Layout]:
    found = {i.value.name: _arrival(captured, graph, i, made, on) for i in graph.inputs}
    for n in graph.nodes:
        if n.block is None:
            texts = made.strategies[graph.name][n.key].outputs
            found.update({o.name: parse_layout(t, on) for o, t in zip(n.outputs, texts, strict=True) if o})
        else:
            inner = captured.block(n.block.key).graph
            kind = OutputKind.OUTPUT if n.phase is F else OutputKind.GRADIENT
            ends = [o for o in inner.outputs if o.kind is kind]
            found.update(
                {
                    o.name: block_out[(inner.name, f"{kind.value}{e.target}")]
                    for o, e in zip(n.outputs, ends, strict=True)
                    if o
                }
            )
    parameters = {i.value.name for i in graph.inputs if i.kind is InputKind.PARAMETER}
    for out in graph.outputs:
        if out.value:
            at = found[out.target] if out.target in parameters else found[out.value]
            block_out[(graph.name, f"{out.kind.value}{out.target}")] = at
    return found


def _wanted(captured: CapturedGraph, graph: Graph, made: Plan, on: Mesh) -> list[tuple[str, Layout, Phase]]:
    found = []
    for n in graph.nodes:
        if n.block is None:
            texts = made.strategies[graph.name][n.key].inputs
            found += [(r, parse_layout(t, on), n.phase) for r, t in zip(n.refs, texts, strict=True)]
            continue
        inner = captured.block(n.block.key).graph
        args = [i for i in inner.inputs if i.kind is not InputKind.TANGENT]
        args += [i for i in inner.inputs if i.kind is InputKind.TANGENT]
        for own, ref in zip(args, n.refs, strict=False):
            skip = own.kind is InputKind.PARAMETER or (n.phase is B and own.kind is not InputKind.TANGENT)
            if not skip:
                found.append((ref, _arrival(captured, inner, own, made, on), n.phase))
    arrivals = {
        i.value.name: _arrival(captured, graph, i, made, on) for i in graph.inputs if i.kind is InputKind.PARAMETER
    }
    for position, out in enumerate(graph.outputs):
        if out.kind is OutputKind.GRADIENT and out.target in arrivals and out.value:
            found.append((out.value, arrivals[out.target], B))
        elif graph is captured.top and out.kind is not OutputKind.GRADIENT:
            found.append((out.value or "", parse_layout(made.outputs["top"].get(str(position), "whole"), on), F))
    return found


def _sides(n: Node, table: Mapping[str, tuple[str, str]], on: Mesh) -> Choice | None:
    """Layouts of an op from a short table: "name" -> ("a b", "c") with one placement per argument, of one axis."""
    if n.name not in table:
        return None
    ins, outs = table[n.name]
    axis = on.axes[0].name
    return [f"{axis}:{p}" for p in ins.split()], [f"{axis}:{p}" for p in outs.split()]


DP = {
    "layer": {"mm": ("S(0) R", "S(0)"), "relu": ("S(0)", "S(0)"), "dmm": ("S(0) S(0)", "S(0)"), "ht": ("S(0)", "S(1)"),
              "dweight": ("S(1) S(0)", "P"), "dh": ("S(0) R", "S(0)")},
    "top": {"h0": ("S(0) R", "S(0)"), "y": ("S(0) R", "S(0)"), "sq": ("S(0) S(0)", "S(0)"), "loss": ("S(0)", "P"),
            "spread": ("R", "S(0)"), "dy": ("S(0) S(0)", "S(0)"), "dh4": ("S(0) R", "S(0)"), "lt": ("S(0)", "S(1)"),
            "dft": ("S(1) S(0)", "P"), "df1": ("P", "P"), "xt": ("S(0)", "S(1)"), "df0": ("S(1) S(0)", "P"),
            "dfirst": ("P P", "P")},
}  # fmt: skip

COLUMN = {
    "layer": {"mm": ("R S(1)", "S(1)"), "relu": ("S(1)", "S(1)"), "dmm": ("S(1) S(1)", "S(1)"),
              "dweight": ("R S(1)", "S(1)"), "wt": ("S(1)", "S(0)"), "dh": ("S(1) S(0)", "P")},
}  # fmt: skip


def named_plan(captured: CapturedGraph, name: str, n: int) -> Plan:
    """whole | dp | zero3 | tp | tp_top on one axis of n ranks, or dp_tp on (2, n)."""
    if name == "whole":
        return plan(captured, mesh(dp=n), lambda g, x: None)
    if name in ("dp", "zero3"):
        on = mesh(dp=n)
        stored = {p.name: "dp:S(0)" for p in captured.parameters} if name == "zero3" else {}
        ins = {"top": {"input:x": "dp:S(0)"}, "layer": {"input:0": "dp:S(0)", "tangent:0": "dp:S(0)"}}
        return plan(captured, on, lambda g, x: _sides(x, DP[g.name], on), storage=stored, inputs=ins)
    on = mesh(tp=n)
    stored = {p.name: "tp:S(1)" for p in captured.parameters if p.name != "first"}
    ins = {"layer": {"input:0": "tp:R", "tangent:0": "tp:S(1)"}}
    return plan(captured, on, lambda g, x: _sides(x, COLUMN.get(g.name, {}), on), storage=stored, inputs=ins)
