"""Is a rule true? Cut random inputs, run the local form on every piece, join the pieces, compare with the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import autopar.ops.custom  # noqa: F401 (defines autopar::pick and autopar::place)
from autopar.ir.cuts import Own, chunk
from autopar.ir.graph import (
    CallSignature,
    CapturedGraph,
    Graph,
    GraphInput,
    InputKind,
    Node,
    Phase,
    Ref,
    TensorMeta,
    TorchConst,
    Value,
)
from autopar.ir.layout import Kind, Layout, Placement, local_piece, local_shape, unit_of
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.strategy import Rule, Strategy
from autopar.ops import LocalCall, local_call
from autopar.ops.attention import RING
from autopar.ops.units import with_units
from autopar.runtime import local_ops
from autopar.runtime.comm import Alone
from autopar.runtime.threads import ThreadWorld, run_threads
from autopar.sharding.dtensor_rules import pieces_of as taken_by
from autopar.sharding.dtensor_rules import torch_op
from autopar.sharding.expand import Expander

ONE = Mesh(axes=(Axis(name="x", size=1),))


def node_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[TensorMeta | None]) -> Node:
    """A node outside any graph."""
    values = tuple(None if m is None else Value(f"out{i}", m) for i, m in enumerate(outputs))
    return Node(
        name="n", op=op, args=args, kwargs=tuple(kwargs.items()), outputs=values, phase=Phase.FORWARD, key="n/0"
    )


def make(op: str, *args: Any, **kwargs: Any) -> tuple[Node, tuple[TensorMeta, ...]]:
    """A node from example arguments: tensors become Refs, outputs are found by running the op on the meta device."""
    metas: list[TensorMeta] = []

    def lift(x: Any) -> Any:
        if isinstance(x, Tensor):
            metas.append(meta_of(x))
            return Ref(f"a{len(metas) - 1}")
        if isinstance(x, torch.dtype):
            return TorchConst("dtype", str(x).removeprefix("torch."))
        return tuple(map(lift, x)) if isinstance(x, (tuple, list)) else x

    overload = torch_op(op)
    assert overload is not None, op
    found = overload(*args, **kwargs)
    outs = [found] if isinstance(found, Tensor) else list(found)
    node = node_of(op, tuple(map(lift, args)), {k: lift(v) for k, v in kwargs.items()},
                   [None if o is None else meta_of(o) for o in outs])  # fmt: skip
    return node, tuple(metas)


def with_node_units(node: Node, metas: tuple[TensorMeta, ...]) -> tuple[Node, tuple[TensorMeta, ...]]:
    """The node and its metas with the units that they'd have in a model of this op alone."""
    inputs = tuple(
        GraphInput(value=Value(name, meta), kind=InputKind.BUFFER, target=name)
        for name, meta in zip(node.refs, metas, strict=True)
    )
    signature = CallSignature(inputs=(), outputs=(), differentiable=(), flatten=None, rebuild=None)
    graph = Graph(name="top", inputs=inputs, nodes=(node,), outputs=())
    marked = with_units(
        CapturedGraph(model_name="m", top=graph, blocks=(), parameters=(), buffers=(), signature=signature)
    )
    return marked.top.nodes[0], tuple(i.value.meta for i in marked.top.inputs)


def meta_of(x: Tensor) -> TensorMeta:
    """Shape and dtype name."""
    return TensorMeta(tuple(x.shape), str(x.dtype).removeprefix("torch."))


@dataclass
class Inputs:
    """Random whole tensors for a node. `limit(node, i)` bounds integer argument i."""

    node: Node
    metas: tuple[TensorMeta, ...]
    seed: int = 0

    def draw(self) -> list[Tensor]:
        """One per `node.refs`."""
        generator = torch.Generator().manual_seed(self.seed)
        return [self._one(m, i, generator) for i, m in enumerate(self.metas)]

    def _one(self, meta: TensorMeta, i: int, generator: torch.Generator) -> Tensor:
        dtype = getattr(torch, meta.dtype)
        if dtype == torch.bool:
            return torch.rand(meta.shape, generator=generator) > 0.4
        if not dtype.is_floating_point and not dtype.is_complex:
            return integers(self.node, self.metas, i, generator).to(dtype)
        x = torch.randn(meta.shape, generator=generator, dtype=torch.float64)
        return (x.abs() + 0.5 if positive(self.node, i) else x).to(dtype)


def positive(node: Node, i: int) -> bool:
    """Arguments that must not be negative: scales of norms, arguments of roots and logarithms, probabilities."""
    op = node.op.split(".")[1]
    return op in ("rsqrt", "sqrt", "log", "pow", "bernoulli", "reciprocal", "div") or ("norm" in op and i >= 2)


def integers(node: Node, metas: tuple[TensorMeta, ...], i: int, generator: torch.Generator) -> Tensor:
    """Indices that fit what they index."""
    shape, op = metas[i].shape, node.op.split(".")[1]
    high = 5
    if op in ("gather", "scatter", "scatter_add", "index_select", "index_add"):
        dim = node.args[1]
        high = metas[0].shape[dim] if metas[0].shape else 1
        if op == "scatter":  # no index twice in a line: which write wins isn't defined
            return (
                torch.rand((*shape[:dim], high, *shape[dim % len(shape) + 1 :]), generator=generator)
                .argsort(dim)
                .narrow(dim, 0, shape[dim])
            )
    elif op == "embedding":
        high = metas[0].shape[0]
    elif op == "embedding_dense_backward":
        high = node.args[2]
    elif op in ("index", "index_put") and i:
        at = [d for d, x in enumerate(node.args[1]) if isinstance(x, Ref)]
        high = metas[0].shape[at[i - 1]] if i - 1 < len(at) else 5
        if op == "index_put" and i - 1 < len(at) and metas[i].numel <= high:
            return torch.randperm(high, generator=generator)[: metas[i].numel].view(shape)
    elif op == "pick":
        high = metas[0].shape[node.args[1]] + 1
    elif op == "place":
        high = node.args[3] + 1
    elif op == "max_pool2d_with_indices_backward":
        high = metas[1].shape[-1] * metas[1].shape[-2]
    elif "grouped_mm" in op and i == 2:
        return torch.linspace(0, metas[0].shape[0], shape[0]).long()
    return torch.randint(0, max(high, 1), shape, generator=generator)


def run(call: LocalCall, tensors: list[Tensor], rt: Any) -> list[Tensor | None]:
    """What emitted code does with a call."""
    supply = iter(tensors)

    def fill(x: Any) -> Any:
        if isinstance(x, Ref):
            return next(supply)
        if isinstance(x, Own):
            return getattr(rt.piece(x.whole, x.axes, x.unit), x.part)
        if isinstance(x, TorchConst):
            return torch.device(x.name) if x.kind == "device" else getattr(torch, x.name)
        return [fill(v) for v in x] if isinstance(x, (tuple, list)) else x

    args = tuple(tuple(fill(v) for v in a) if _shape_like(a) else fill(a) for a in call.args)
    kwargs = {k: fill(v) for k, v in call.kwargs}
    if call.function.startswith("local_ops."):
        found = getattr(local_ops, call.function.removeprefix("local_ops."))(rt, *args, **kwargs)
    else:
        name = call.function if call.function.count(".") == 2 else call.function + ".default"
        overload = torch_op(name)
        assert overload is not None, name
        found = overload(*args, **kwargs)
    return [found] if isinstance(found, Tensor) else list(found)


def _shape_like(x: Any) -> bool:
    return isinstance(x, tuple) and not any(isinstance(v, Ref) for v in x)


def whole(node: Node, metas: tuple[TensorMeta, ...], inputs: list[Tensor]) -> list[Tensor | None]:
    """The op on whole tensors."""
    rep = Layout(("x",), (Placement(Kind.REPLICATE),))
    strategy = Strategy(tuple(None if o is None else rep for o in node.outputs), (rep,) * len(metas), ("",))
    outs = tuple(None if o is None else o.meta for o in node.outputs)
    return run(local_call(node, strategy, ONE, metas, outs), inputs, Alone(ONE, torch.device("cpu")))


def pieces_of(x: Tensor, layout: Layout, mesh: Mesh, seed: int, units: tuple[int, ...] = ()) -> list[Tensor]:
    """One per rank: slices; for P random summands along that axis."""
    parts = {(): x}
    generator = torch.Generator().manual_seed(seed)
    for axis, placement in zip(mesh.axes, layout.placements, strict=True):
        split: dict[tuple[int, ...], Tensor] = {}
        done: dict[int, list[Tensor]] = {}  # replicas are split alike
        for at, piece in parts.items():
            if id(piece) not in done:
                done[id(piece)] = _split(piece, axis.size, placement, generator, units)
            split.update({(*at, i): p for i, p in enumerate(done[id(piece)])})
        parts = split
    return [parts[mesh.coordinate(r)].contiguous() for r in range(mesh.size)]


def _split(
    piece: Tensor, n: int, placement: Placement, generator: torch.Generator, units: tuple[int, ...]
) -> list[Tensor]:
    if placement.kind is Kind.SHARD:
        size = chunk(piece.shape[placement.dim], n, unit_of(units, placement.dim))
        found = list(piece.split(size, placement.dim))
        return found + [piece.narrow(placement.dim, 0, 0)] * (n - len(found))
    return _summands(piece, n, generator) if placement.kind is Kind.PARTIAL else [piece] * n


def _summands(x: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    if x.dtype.is_floating_point:
        first = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for _ in range(n - 1)]
    else:
        first = [torch.randint(-3, 3, x.shape, generator=generator).to(x.dtype) for _ in range(n - 1)]
    return [*first, x - sum(first)]


def joined(
    pieces: list[Tensor], shape: tuple[int, ...], layout: Layout, mesh: Mesh, units: tuple[int, ...] = ()
) -> Tensor:
    """The whole from every rank's piece; replicas must agree."""
    total = torch.zeros(shape, dtype=torch.float64 if pieces[0].dtype.is_floating_point else pieces[0].dtype)
    if pieces[0].dtype.is_complex:
        total = torch.zeros(shape, dtype=pieces[0].dtype)
    seen: dict[tuple[Any, ...], Tensor] = {}
    for rank, piece in enumerate(pieces):
        start, expected = local_piece(shape, layout, mesh, rank, units)
        assert tuple(piece.shape) == expected, f"piece has shape {tuple(piece.shape)}, wanted {expected}"
        at = mesh.coordinate(rank)
        key = tuple(i for i, p in zip(at, layout.placements, strict=True) if p.kind is not Kind.REPLICATE)
        if key in seen:
            assert close(piece, seen[key]), "replicas differ"
            continue
        seen[key] = piece
        where = tuple(slice(s, s + n) for s, n in zip(start, piece.shape, strict=True))
        if layout.partial:
            total[where] += piece.to(total.dtype)
        else:
            total[where] = piece.to(total.dtype)
    return total


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding, relative to the largest entry; integers exactly."""
    if a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b.to(a.dtype))
    a, b = a.double(), b.double()
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return False
    return bool(((a - b)[finite].abs() <= 2e-4 * max(1.0, float(b[finite].abs().max() if finite.any() else 0.0))).all())


def strategy_of(rules: tuple[Rule, ...], mesh: Mesh) -> Strategy:
    """The product of one rule per axis."""
    ins = zip(*(r.inputs for r in rules), strict=True)
    outs = zip(*(r.outputs for r in rules), strict=True)
    return Strategy(
        tuple(None if o[0] is None else Layout(mesh.names, o) for o in outs),
        tuple(Layout(mesh.names, i) for i in ins),
        tuple(r.tag for r in rules),
    )


def fits(node: Node, metas: tuple[TensorMeta, ...], rules: tuple[Rule, ...], mesh: Mesh) -> bool:
    """The product of these rules, one per axis, is a choice on the mesh."""
    outs, taken = tuple(None if o is None else o.meta for o in node.outputs), taken_by(node.op)
    expander = Expander(mesh)
    kept = tuple(expander.fitting(i, (rule,), metas, outs, taken) for i, rule in enumerate(rules))
    return all(kept) and bool(expander.expand(kept, metas, outs))


def local_meta(meta: TensorMeta, layout: Layout, mesh: Mesh) -> TensorMeta:
    """The largest piece."""
    return TensorMeta(local_shape(meta.shape, layout, mesh, meta.units), meta.dtype)


def check(node: Node, metas: tuple[TensorMeta, ...], strategy: Strategy, mesh: Mesh, seed: int = 0) -> str:
    """ "" if the strategy gives what the op gives; else what is wrong."""
    inputs = Inputs(node, metas, seed).draw()
    expected = whole(node, metas, inputs)
    cut = [
        pieces_of(x, p, mesh, seed + 1000 + i, m.units)
        for i, (x, p, m) in enumerate(zip(inputs, strategy.inputs, metas, strict=True))
    ]
    outs = tuple(
        None if v is None or x is None else local_meta(v.meta, x, mesh)
        for v, x in zip(node.outputs, strategy.outputs, strict=True)
    )
    ins = tuple(local_meta(m, x, mesh) for m, x in zip(metas, strategy.inputs, strict=True))
    call = local_call(node, strategy, mesh, ins, outs, metas)

    def rank(rt: Any) -> list[Tensor | None]:
        return run(call, [c[rt.rank] for c in cut], rt)

    try:
        if {"inner", RING} & set(strategy.tags):
            results = run_threads(mesh, rank)
        else:
            world = ThreadWorld(mesh)
            results = [rank(world.communicator(r)) for r in range(mesh.size)]
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    for i, (value, layout, whole_out) in enumerate(zip(node.outputs, strategy.outputs, expected, strict=True)):
        if value is None or layout is None or whole_out is None:
            continue
        if "empty" in node.op:
            continue
        try:
            found = joined([r[i] for r in results], tuple(whole_out.shape), layout, mesh, value.meta.units)  # type: ignore[misc]
        except AssertionError as error:
            return f"output {i}: {error}"
        if not close(found, whole_out):
            return f"output {i}: values differ by {float((found.double() - whole_out.double()).abs().max()):.3g}"
    return ""
