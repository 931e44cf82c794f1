"""Products, losses and the like on flattened leading dims become the same ops on the tensors before flattening.

ATen multiplies matrices: a linear layer on [batch, sequence, features] is a view to [batch · sequence, features], a
product, and a view back; attention on [batch, heads, ...] goes through [batch · heads, ...]. A cut along the sequence
or the heads cannot pass such a view (its pieces are not a range of the flattened dim), so the views would keep those
dims whole. Here a flattened value is remembered as its source, ops that treat every row alike are moved to the source,
and the views that nobody reads any more go.

    mm(flat(x), w) -> flat(matmul(x, w))           addmm(b, flat(x), t(w)) -> flat(linear(x, w, b))
    bmm(flat(a), flat(b)) -> flat(matmul(a, b))    mm(t(flat(g)), flat(x)) -> tensordot(g, x) over the leading dims
    pointwise, softmax, reductions along or over the rows, picks, views of the other dims: likewise
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.graph import Graph, Node, Ref, TensorMeta, Value
from autopar.tracer.simplify import output_of, with_refs
from autopar.tracer.torch_private import is_pointwise

RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
ALIKE = frozenset(
    {
        "aten._to_copy.default",
        "aten.clone.default",
        "prims.convert_element_type.default",
        "aten.alias.default",
        "aten.detach.default",
    }
    | {"aten.native_dropout.default", "aten.native_dropout_backward.default", "aten.zeros_like.default"}
    | {"aten.ones_like.default", "aten.full_like.default"}
)
"""Ops besides the pointwise ones that do the same whatever the shape."""
ONE_DIM = {
    "aten._softmax.default": 1, "aten._log_softmax.default": 1, "aten._safe_softmax.default": 1,
    "aten._softmax_backward_data.default": 2, "aten._log_softmax_backward_data.default": 2,
    "autopar.pick.default": 1, "autopar.place.default": 1, "aten.gather.default": 1, "aten.unsqueeze.default": 1,
    "aten.squeeze.dim": 1, "aten.argmax.default": 1, "aten.select.int": 1,
}  # fmt: skip
"""Ops that speak of one dim: position of that argument. All their tensors are rows alike."""
SEVERAL_DIMS = frozenset(
    {"aten.sum.dim_IntList", "aten.amax.default", "aten.amin.default", "aten.logsumexp.default", "aten.squeeze.dims"}
)
"""Ops that speak of several dims, their second argument; `keepdim` is the third."""
OVER_ROWS = frozenset({"aten.sum.dim_IntList", "aten.amax.default", "aten.amin.default", "aten.logsumexp.default"})


@dataclass(frozen=True, slots=True)
class Flat:
    """A value that is `source` with its first `lead` dims flattened into one."""

    source: str
    lead: int


def unflatten(graph: Graph) -> Graph:
    """The same graph with ops moved before the flattening of their arguments."""
    walker = _Walker(graph)
    for node in graph.nodes:
        walker.visit(with_refs(node, walker.same))
    outputs = tuple(output_of(o, walker.same) for o in graph.outputs)
    read = {o.value for o in outputs if o.value is not None}
    kept = []
    for node in reversed(walker.nodes):
        if node.op in _REMOVABLE and not any(v is not None and v.name in read for v in node.outputs):
            continue
        read.update(node.refs)
        kept.append(node)
    return replace(graph, nodes=_with_keys(list(reversed(kept))), outputs=outputs)


_REMOVABLE = RESHAPES | {"aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.expand.default"}


def _with_keys(nodes: list[Node]) -> tuple[Node, ...]:
    """Keys count the ops of one kind at one place, and ops have changed."""
    count: Counter[str] = Counter()
    found = []
    for node in nodes:
        base = f"{node.module_path}/{node.op}/{node.phase.value}"
        found.append(replace(node, key=f"{base}#{count[base]}"))
        count[base] += 1
    return tuple(found)


class _Walker:
    """Rewrites nodes in order."""

    def __init__(self, graph: Graph) -> None:
        self.metas = {name: value.meta for name, value in graph.values().items()}
        self.taken = set(self.metas) | {n.name for n in graph.nodes}
        self.flat: dict[str, Flat] = {}
        self.transposed: dict[str, str] = {}
        self.repeated: dict[str, str] = {}
        self.same: dict[str, str] = {}
        self.nodes: list[Node] = []

    def visit(self, node: Node) -> None:
        """Append the node, or what stands for it."""
        if node.block is None and len(node.outputs) >= 1:
            if node.op in RESHAPES and self._reshape(node):
                return
            moved = _MOVES.get(node.op) or (_alike if node.op in ALIKE or is_pointwise(node.op) else None)
            reads = any(ref in self.flat or ref in self.transposed for ref in node.refs)
            if moved is not None and reads and moved(self, node):
                return
            out = node.outputs[0]
            if node.op == "aten.t.default" and out is not None:
                self.transposed[out.name] = node.refs[0]
            if node.op == "aten.expand.default" and out is not None and self._repeats_rows(node.refs[0], out):
                self.repeated[out.name] = node.refs[0]
        self.nodes.append(node)

    def _repeats_rows(self, ref: str, out: Value) -> bool:
        """Whether an expand makes rows out of one, or of none."""
        shape = self.shape(ref)
        return len(out.meta.shape) >= 1 and (len(shape) < len(out.meta.shape) or shape[0] == 1)

    # What is flat ---------------------------------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        return self.metas[name].shape

    def lead_of(self, names: tuple[str, ...]) -> tuple[int, ...] | None:
        """The leading dims that all these values have flattened, if they are all flat and alike."""
        leads = {self.lead(n) for n in names}
        return leads.pop() if len(leads) == 1 else None

    def lead(self, name: str) -> tuple[int, ...] | None:
        """Sizes of the flattened dims."""
        found = self.flat.get(name)
        return None if found is None else self.shape(found.source)[: found.lead]

    def source(self, name: str) -> Ref:
        return Ref(self.flat[name].source)

    def _reshape(self, node: Node) -> bool:
        """A view of a flat value is a view of its source; views that flatten are remembered."""
        out, ref = node.outputs[0], node.refs[0]
        assert out is not None
        base = self.flat[ref].source if ref in self.flat else ref
        shape = self.shape(base)
        if shape == out.meta.shape and base != ref:
            self.same[out.name] = base
            return True
        lead = flattened(shape, out.meta.shape)
        if lead:
            self.flat[out.name] = Flat(base, lead)
        elif ref in self.flat and self._keeps_rows(ref, out):
            wanted = (*(self.lead(ref) or ()), *out.meta.shape[1:])
            self.emit(node, "aten.reshape.default", (Ref(base), wanted), {0: wanted})
            return True
        if base != ref:
            node = replace(node, op="aten.reshape.default", args=(Ref(base), out.meta.shape), kwargs=())
        self.nodes.append(node)
        return True

    def _keeps_rows(self, ref: str, out: Value) -> bool:
        before, after = self.shape(ref), out.meta.shape
        return len(after) >= 1 and before[0] == after[0] and math.prod(before[1:]) == math.prod(after[1:])

    # Writing nodes --------------------------------------------------------------------------------------------------

    def emit(
        self,
        node: Node,
        op: str,
        args: tuple[Any, ...],
        shapes: dict[int, tuple[int, ...]],
        kwargs: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        """`op` in place of `node`. `shapes`: of the outputs that become unflattened; views give their old shapes.

        The other outputs stay what they were.
        """
        outputs: list[Value | None] = []
        views = []
        for k, old in enumerate(node.outputs):
            if old is None or k not in shapes or shapes[k] == old.meta.shape:
                outputs.append(old)
                continue
            new = Value(self.fresh(op.split(".")[1].lstrip("_")), replace(old.meta, shape=shapes[k]))
            self.metas[new.name] = new.meta
            outputs.append(new)
            views.append((new, old))
        self.nodes.append(replace(node, op=op, args=args, kwargs=kwargs, outputs=tuple(outputs)))
        for new, old in views:
            lead = flattened(new.meta.shape, old.meta.shape)
            if lead:
                self.flat[old.name] = Flat(new.name, lead)
            self.helper(node, "aten.reshape.default", (Ref(new.name), old.meta.shape), old)

    def helper(self, node: Node, op: str, args: tuple[Any, ...], out: Value) -> None:
        """A node beside `node`."""
        name = self.fresh(f"{node.name}_{out.name}")
        self.nodes.append(replace(node, name=name, op=op, args=args, kwargs=(), outputs=(out,)))

    def repeat(self, node: Node, name: str, lead: tuple[int, ...]) -> str:
        """An expand like the one that made `name`, over the leading dims."""
        meta = self.metas[name]
        made = Value(self.fresh("expand"), replace(meta, shape=(*lead, *meta.shape[1:])))
        self.metas[made.name] = made.meta
        self.helper(node, "aten.expand.default", (Ref(self.repeated[name]), made.meta.shape), made)
        return made.name

    def fresh(self, wanted: str) -> str:
        """A name that nothing has."""
        name, k = wanted, 1
        while name in self.taken:
            name, k = f"{wanted}_{k}", k + 1
        self.taken.add(name)
        return name


def flattened(shape: tuple[int, ...], flat: tuple[int, ...]) -> int:
    """How many first dims of `shape` are one in `flat`, 0 if that is not what makes the one of the other.

    The fewest if dims of size 1 leave a choice.
    """
    for lead in range(2, len(shape) + 1):
        if len(flat) == len(shape) - lead + 1 and flat[1:] == shape[lead:] and flat[0] == math.prod(shape[:lead]):
            return lead
    return 0


# Moves: each rewrites a node that reads a flat value, or says that it can't -------------------------------------------

Move = Callable[[_Walker, Node], bool]


def _mm(walker: _Walker, node: Node) -> bool:
    a, b = node.refs
    if a in walker.flat and b not in walker.flat:
        return _product(walker, node, a, "aten.matmul.default", (walker.source(a), Ref(b)))
    rows = walker.transposed.get(a)
    if rows is None or rows not in walker.flat or walker.lead_of((rows, b)) is None:
        return False
    dims = tuple(range(walker.flat[b].lead))
    walker.emit(node, "aten.tensordot.default", (walker.source(rows), walker.source(b), dims, dims), {})
    return True


def _product(walker: _Walker, node: Node, rows: str, op: str, args: tuple[Any, ...]) -> bool:
    out, lead = node.outputs[0], walker.lead(rows)
    assert out is not None and lead is not None
    walker.emit(node, op, args, {0: (*lead, *out.meta.shape[1:])})
    return True


def _addmm(walker: _Walker, node: Node) -> bool:
    if len(node.refs) != 3 or node.kwargs or len(node.args) != 3:
        return False
    bias, a, b = node.refs
    if a not in walker.flat or b in walker.flat or len(walker.shape(bias)) != 1 or walker.shape(bias)[0] == 1:
        return False
    weight = walker.transposed.get(b)
    if weight is None:
        meta = walker.metas[b]
        made = Value(walker.fresh(f"{b}_t"), TensorMeta((meta.shape[1], meta.shape[0]), meta.dtype))
        walker.metas[made.name] = made.meta
        walker.helper(node, "aten.t.default", (Ref(b),), made)
        weight = made.name
    return _product(walker, node, a, "aten.linear.default", (walker.source(a), Ref(weight), Ref(bias)))


def _bmm(walker: _Walker, node: Node) -> bool:
    lead = walker.lead_of(node.refs)
    if lead is None:
        return False
    args = tuple(map(walker.source, node.refs))
    return _product(walker, node, node.refs[0], "aten.matmul.default", args)


def _alike(walker: _Walker, node: Node) -> bool:
    """Every row alike: all tensors are flat alike, or broadcast over the rows."""
    args = _unflattened(walker, node)
    if args is None:
        return False
    walker.emit(node, node.op, args[0], _shapes(node, args[2]), args[1])
    return True


def _shapes(node: Node, lead: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    return {k: (*lead, *v.meta.shape[1:]) for k, v in enumerate(node.outputs) if v is not None}


Unflattened = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...], tuple[int, ...]]


def _unflattened(walker: _Walker, node: Node, broadcast: bool = True) -> Unflattened | None:
    """(args, kwargs, lead) reading sources; None if some tensor is neither flat nor the same for all rows.

    `broadcast`: a tensor of fewer dims is broadcast over the rows; else its first dim is the rows', too.
    """
    flat = tuple(n for n in node.refs if n in walker.flat)
    lead = walker.lead_of(flat) if flat else None
    if lead is None:
        return None
    rank = max(len(walker.shape(n)) for n in node.refs) if broadcast else 0
    names: dict[str, str] = {}
    for name in dict.fromkeys(node.refs):
        if len(walker.shape(name)) < rank:
            if name in walker.flat:
                return None
        elif name in walker.flat:
            names[name] = walker.flat[name].source
        elif name in walker.repeated:
            names[name] = walker.repeat(node, name, lead)
        else:
            return None
    moved = with_refs(node, names)
    return moved.args, moved.kwargs, lead


def _one_dim(walker: _Walker, node: Node) -> bool:
    """Softmax, picks and views along a dim that is not the rows'."""
    position = ONE_DIM[node.op]
    if position >= len(node.args) or node.args[position] is None:
        return False
    rank = len(walker.shape(node.refs[0])) + (node.op in ("aten.unsqueeze.default", "autopar.place.default"))
    dim = node.args[position] % rank
    found = _unflattened(walker, node, broadcast=False) if dim else None
    if found is None:
        return False
    args, kwargs, lead = found
    moved = (*args[:position], dim + len(lead) - 1, *args[position + 1 :])
    walker.emit(node, node.op, moved, _shapes(node, lead), kwargs)
    return True


def _several_dims(walker: _Walker, node: Node) -> bool:
    """Reductions along other dims keep the rows; those over the rows go over the leading dims."""
    (ref,) = node.refs
    lead = walker.lead(ref)
    out = node.outputs[0]
    if lead is None or out is None or len(node.args) < 2:
        return False
    rank, moved = len(walker.shape(ref)), len(lead) - 1
    dims = node.args[1]
    listed = [d % rank for d in ((dims,) if isinstance(dims, int) else dims or range(rank))]
    later = [d + moved for d in listed if d > 0]
    args = list(node.args)
    args[0] = walker.source(ref)
    if 0 not in listed:
        args[1] = tuple(later)
        walker.emit(node, node.op, tuple(args), _shapes(node, lead), node.kwargs)
        return True
    if node.op not in OVER_ROWS:
        return False
    args[1] = (*range(len(lead)), *later)
    keeps = len(args) > 2 and bool(args[2])
    shape = (*(1 for _ in lead), *out.meta.shape[1:]) if keeps else out.meta.shape
    walker.emit(node, node.op, tuple(args), {0: shape}, node.kwargs)
    return True


def _sum(walker: _Walker, node: Node) -> bool:
    """Over everything: the shape does not matter."""
    walker.emit(node, node.op, (walker.source(node.refs[0]), *node.args[1:]), {}, node.kwargs)
    return True


def _transpose(walker: _Walker, node: Node) -> bool:
    """Of dims that are not the rows'."""
    (ref,) = node.refs
    lead, out = walker.lead(ref), node.outputs[0]
    if lead is None or out is None:
        return False
    rank, moved = len(walker.shape(ref)), len(lead) - 1
    if node.op == "aten.permute.default":
        order = [d % rank for d in node.args[1]]
        if order[0] != 0:
            return False
        args: tuple[Any, ...] = (walker.source(ref), (*range(len(lead)), *(d + moved for d in order[1:])))
    else:
        first, second = (d % rank for d in node.args[1:3])
        if 0 in (first, second):
            return False
        args = (walker.source(ref), first + moved, second + moved)
    walker.emit(node, node.op, args, {0: (*lead, *out.meta.shape[1:])})
    return True


def _expand(walker: _Walker, node: Node) -> bool:
    (ref,) = node.refs
    lead, out = walker.lead(ref), node.outputs[0]
    if lead is None or out is None or len(out.meta.shape) != len(walker.shape(ref)):
        return False
    shape = (*lead, *out.meta.shape[1:])
    if math.prod(lead) != out.meta.shape[0]:
        return False
    walker.emit(node, node.op, (walker.source(ref), shape), {0: shape})
    return True


def _embedding(walker: _Walker, node: Node) -> bool:
    """embedding(table, flat ids); the table is no row."""
    table, ids = node.refs
    lead, out = walker.lead(ids), node.outputs[0]
    if lead is None or out is None or table in walker.flat:
        return False
    args = (node.args[0], walker.source(ids), *node.args[2:])
    walker.emit(node, node.op, args, {0: (*lead, *out.meta.shape[1:])}, node.kwargs)
    return True


def _embedding_backward(walker: _Walker, node: Node) -> bool:
    if len(node.refs) != 2 or walker.lead_of(node.refs) is None:
        return False
    walker.emit(node, node.op, (*map(walker.source, node.refs), *node.args[2:]), {}, node.kwargs)
    return True


_MOVES: dict[str, Move] = {
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.bmm.default": _bmm,
    "aten.sum.default": _sum,
    "aten.transpose.int": _transpose,
    "aten.permute.default": _transpose,
    "aten.expand.default": _expand,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    **dict.fromkeys(ONE_DIM, _one_dim),
    **dict.fromkeys(SEVERAL_DIMS, _several_dims),
}
