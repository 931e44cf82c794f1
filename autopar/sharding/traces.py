"""Which dim of each value is the batch (or the sequence), found by sending placements through the one-axis rules.

From the inputs on, every value is one of: cut along a dim (it descends from batch inputs), a sum over the batch (P), or
without batch (R). The rules that fit an op's arguments are the op's choices on the axis. Where none fits, all rules
are offered (`lost`), and a dim of the same place and size in the result is taken to go on being the batch: a wrong
guess costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import CapturedGraph, Graph, InputKind, Node, OutputKind, Phase, TensorMeta
from autopar.ir.layout import Kind, P, Placement, R, S
from autopar.ir.strategy import Rule
from autopar.ops.attention import RING
from autopar.ops.experts import EXCHANGE
from autopar.sharding.weights import Weights, is_follower

MASK_DIMS = 4
"""Of a mask: rows, heads, queries, keys."""
RulesOf = Callable[[Node], tuple[Rule, ...]]


@dataclass(frozen=True, slots=True)
class Trace:
    """Of one graph.

    Attributes:
        placement: value name -> S(dim) where the batch is, P of a sum over it, R without it.
        allowed: node name -> the rules that suit.
        lost: nodes for which no rule suited.
        stored: values laid out as a parameter is stored: gradients that a block hands over, and sums of them.
        by_experts: values that may be cut by experts instead, and along which dim: weights, their gradients, and where
            the rows of each expert end.
    """

    placement: dict[str, Placement] = field(default_factory=dict)
    allowed: dict[str, tuple[Rule, ...]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    by_experts: dict[str, Placement] = field(default_factory=dict)


def trace_graphs(
    captured: CapturedGraph, rules_of: RulesOf, dim: int, weights: Mapping[str, Weights], *, experts: bool = False
) -> dict[str, Trace]:
    """By graph name. `dim` is the dim of the inputs that is followed: 0 the batch, 1 the sequence.

    `experts`: they may be cut as well, and the rows of tokens sent to them.
    """
    size = followed_size(captured.top, dim)
    walker = _Walker(captured, rules_of, weights, experts, _rows_made(captured, size if dim == 0 else None))
    for given in captured.top.inputs:
        meta = given.value.meta
        follows = given.kind is InputKind.INPUT and size is not None and _follows(meta, dim) and meta.shape[dim] == size
        walker.traces[captured.top.name].placement[given.value.name] = S(dim) if follows else R
    walker.walk(captured.top)
    return walker.traces


def followed_size(top: Graph, dim: int) -> int | None:
    """Size of the batch or of the sequence: that of the first input that has one."""
    shapes = [i.value.meta for i in top.inputs if i.kind is InputKind.INPUT and _follows(i.value.meta, dim)]
    return shapes[0].shape[dim] if shapes else None


def _rows_made(captured: CapturedGraph, size: int | None) -> dict[str, frozenset[str]]:
    """Graph name -> nodes that make, of nothing, an entry or more for each of the batch's `size` rows.

    Such are tensors of the rows and steps of an input, and numbers of rows that get the three dims of a mask behind
    them (heads, queries, keys). Nothing less tells: as many heads, or steps, as rows may be counted as well.
    """
    if size is None:
        return {}
    starts = {i.value.meta.shape[:2] for i in captured.top.inputs if i.kind is InputKind.INPUT}
    starts = {start for start in starts if len(start) == 2 and start[0] == size}
    found = {}
    for graph in captured.graphs:
        readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in node.refs:
                readers.setdefault(name, []).append(node)
        found[graph.name] = frozenset(
            node.name
            for node in graph.nodes
            if node.block is None and not node.refs and (out := node.first) is not None
            and (out.meta.shape[:2] in starts or (out.meta.shape == (size,) and _heads_a_mask(out.name, readers)))
        )  # fmt: skip
    return found


def _heads_a_mask(value: str, readers: Mapping[str, list[Node]]) -> bool:
    """Whether it is read as [rows, 1, 1, 1] only."""
    for _ in range(MASK_DIMS - 1):
        at = readers.get(value, [])
        if len(at) != 1 or at[0].op != "aten.unsqueeze.default" or at[0].args[1] == 0 or at[0].first is None:
            return False
        value = at[0].first.name
    return True


def _follows(meta: TensorMeta, dim: int) -> bool:
    return len(meta.shape) >= 1 if dim == 0 else 2 <= len(meta.shape) <= 3


class _Walker:
    """Carries placements forward; blocks are walked when first called, with what their arguments have."""

    def __init__(
        self,
        captured: CapturedGraph,
        rules_of: RulesOf,
        weights: Mapping[str, Weights],
        experts: bool,
        rows_made: Mapping[str, frozenset[str]],
    ) -> None:
        self.captured = captured
        self.rows_made = rows_made
        self.experts = experts
        self.rules_of = rules_of
        self.weights = weights
        self.traces = {g.name: Trace() for g in captured.graphs}
        self.hints: dict[tuple[int, ...], int] = {}
        self.walked: set[tuple[str, Phase]] = set()

    def walk(self, graph: Graph, phase: Phase | None = None) -> None:
        trace = self.traces[graph.name]
        self._tangents(graph, trace)
        if self.experts:
            marked = (i.value for i in graph.inputs if i.value.meta.experts >= 0)
            trace.by_experts.update({value.name: S(value.meta.experts) for value in marked})
        for node in graph.nodes:
            if phase is not None and node.phase is not phase:
                continue
            if node.block is not None:
                self._call(node, trace)
            else:
                self._step(node, trace, graph.name)

    def _tangents(self, graph: Graph, trace: Trace) -> None:
        """A tangent not given by a caller is R until its output is known; then it is laid out like its output."""
        for given in graph.inputs:
            if given.kind is InputKind.TANGENT:
                trace.placement.setdefault(given.value.name, R)

    def _call(self, node: Node, trace: Trace) -> None:
        assert node.block is not None
        block = self.captured.block(node.block.key)
        inner = self.traces[block.graph.name]
        if (node.block.key, node.phase) not in self.walked:
            self.walked.add((node.block.key, node.phase))
            for argument, given in zip(node.args, block.graph.inputs, strict=False):
                name = getattr(argument, "name", None)
                if name is None or (node.phase is Phase.BACKWARD and given.kind is not InputKind.TANGENT):
                    continue
                found = trace.placement.get(name, R)
                inner.placement[given.value.name] = found
                self._hint(given.value.meta, found)
            if node.phase is Phase.BACKWARD:
                _mirror_tangents(block.graph, inner)
            self.walk(block.graph, node.phase)
        kind = OutputKind.OUTPUT if node.phase is Phase.FORWARD else OutputKind.GRADIENT
        results = [o for o in block.graph.outputs if o.kind is kind]
        parameters = {i.value.name for i in block.graph.inputs if i.kind is InputKind.PARAMETER}
        for value, result in zip(node.outputs, results, strict=True):
            if value is not None:
                trace.placement[value.name] = inner.placement.get(result.value or "", R)
                if result.target in parameters:
                    trace.placement[value.name] = R
                    trace.stored.add(value.name)

    def _step(self, node: Node, trace: Trace, graph: str) -> None:
        weights, rules = self.weights[graph], self.rules_of(node)
        if node.refs and trace.stored.issuperset(node.refs):
            trace.allowed[node.name] = _as_stored(rules)
            made = {value.name for value in node.outputs if value is not None}
            trace.stored.update(made)
            trace.placement.update(dict.fromkeys(made, R))
            return
        states = tuple(trace.placement.get(name, R) for name in node.refs)
        held = tuple(name in weights.parameter for name in node.refs)
        metas = tuple(weights.metas[name] for name in node.refs)
        if node.name in self.rows_made.get(graph, ()) and (pieces := _in_pieces(rules)):
            fitting, lost = pieces, False
        else:
            fitting, lost = self._fitting(node, rules, states, held, metas)
        more = self._by_experts(node, rules, trace, states, held) if self.experts else ()
        if any(r.tag == RING for r in fitting):  # or otherwise in this op: keys whole, or heads cut
            more = tuple(r for r in rules if r not in fitting)
        trace.allowed[node.name] = (*fitting, *more)
        if lost:
            trace.lost.add(node.name)
        for i, value in enumerate(node.outputs):
            if value is not None:
                found = _guess(states, metas, value.meta) if lost else _result(fitting, i)
                trace.placement[value.name] = found
                self._hint(value.meta, found)

    def _by_experts(
        self, node: Node, rules: tuple[Rule, ...], trace: Trace, states: tuple[Placement, ...], held: tuple[bool, ...]
    ) -> tuple[Rule, ...]:
        """Rules that take every argument that may be cut by experts so, and the others as they are."""
        cut = tuple(trace.by_experts.get(name) for name in node.refs)
        if any(c is not None for c in cut):
            found = tuple(
                r for r in rules
                if all(
                    w == c if c is not None else _suits(w, s, h, False)
                    for w, c, s, h in zip(r.inputs, cut, states, held, strict=True)
                )
            )  # fmt: skip
        else:
            found = tuple(r for r in rules if r.tag == EXCHANGE and r.inputs == states)
        for rule in found[:1]:
            for value, placement in zip(node.outputs, rule.outputs, strict=True):
                if value is not None and placement is not None and _is_experts(value.meta, placement):
                    trace.by_experts[value.name] = placement
        return found

    def _hint(self, meta: TensorMeta, found: Placement) -> None:
        if found.kind is Kind.SHARD and "float" in meta.dtype and len(meta.shape) > 1:
            self.hints.setdefault(meta.shape, found.dim)

    def _fitting(
        self,
        node: Node,
        rules: tuple[Rule, ...],
        states: tuple[Placement, ...],
        held: tuple[bool, ...],
        metas: tuple[TensorMeta, ...],
    ) -> tuple[tuple[Rule, ...], bool]:
        if is_follower(node) and held[0]:
            return _of_weight(node, rules), False
        if P in states and (late := _reduced_later(node, rules, states, metas)):
            return late, False
        if all(s == R for s in states):
            return self._made_here(node, rules), False
        if rounds := _going_round(rules, states):
            return rounds, False
        for free in (False, True):
            fit = tuple(r for r in rules if all(map(_suits, r.inputs, states, held, (free,) * len(states))))
            if fit:
                return fit, False
        whole = tuple(r for r in rules if all(not h or p == R for p, h in zip(r.inputs, held, strict=True)))
        return whole, True

    def _made_here(self, node: Node, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """No argument has a batch: whole; or, where a float result has the shape of a batch value, made in pieces."""
        out = node.first
        if out is not None and "float" in out.meta.dtype and out.meta.shape in self.hints:
            cut = S(self.hints[out.meta.shape])
            made = tuple(r for r in rules if r.outputs[0] == cut and all(p == R for p in r.inputs) and not r.tag)
            if made:
                return made
        return tuple(r for r in rules if all(p == R for p in r.inputs) and all(o in (R, None) for o in r.outputs))


def _in_pieces(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules of what is made of nothing, by rows: a mask of all rows would else be made by every rank."""
    return tuple(r for r in rules if r.outputs == (S(0),) and not r.tag)


def _going_round(rules: tuple[Rule, ...], states: tuple[Placement, ...]) -> tuple[Rule, ...]:
    """Rules by which blocks go round, if queries and keys are cut so. A mask may be converted."""
    return tuple(r for r in rules if r.tag == RING and r.inputs[:3] == states[:3])


def _as_stored(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules that keep whole what is whole and cut what is cut, alike for every tensor."""
    kept = [r for r in rules if len({*r.inputs, *r.outputs}) == 1 and r.inputs[0] != P]
    return tuple(kept) or rules


def _reduced_later(
    node: Node, rules: tuple[Rule, ...], states: tuple[Placement, ...], metas: tuple[TensorMeta, ...]
) -> tuple[Rule, ...]:
    """Rules that take every sum as a sum, if the result is no larger than the sums: then reducing it is no dearer."""
    out = node.first
    summed = [m.nbytes for m, s in zip(metas, states, strict=True) if s == P]
    if out is None or len(node.outputs) > 1 or out.meta.nbytes > max(summed):
        return ()
    return tuple(r for r in rules if r.outputs == (P,) and r.inputs == states)


def _mirror_tangents(graph: Graph, trace: Trace) -> None:
    """A gradient with no batch found is laid out like the value that it is the gradient of."""
    outputs = {o.target: o.value for o in graph.outputs if o.kind is OutputKind.OUTPUT}
    for given in graph.inputs:
        if given.kind is InputKind.TANGENT and trace.placement.get(given.value.name, R) == R:
            primal = trace.placement.get(outputs.get(given.target) or "", R)
            trace.placement[given.value.name] = primal if primal.kind is Kind.SHARD else R


def _of_weight(node: Node, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Weights are used whole, but a cast may come before the gather."""
    casts = _casts(node)
    return tuple(r for r in rules if r.inputs == r.outputs == (R,) or (casts and r.inputs[0].kind is Kind.SHARD))


def _casts(node: Node) -> bool:
    return node.op in ("aten._to_copy.default", "prims.convert_element_type.default")


def _suits(wanted: Placement, state: Placement, weight: bool, free: bool) -> bool:
    """Whether an argument in this state may be wanted so. `free`: what has no batch may be cut (sliced)."""
    if weight:
        return wanted == R
    if state.kind is Kind.SHARD:
        return wanted == state
    if state == P:
        return True
    return wanted == R or (free and wanted.kind is Kind.SHARD)


def _is_experts(meta: TensorMeta, placement: Placement) -> bool:
    return placement.kind is Kind.SHARD and placement.dim == meta.experts


def _result(rules: tuple[Rule, ...], output: int) -> Placement:
    """A sum if some rule gives one, else what the first rule gives."""
    found = [p for r in rules if (p := r.outputs[output]) is not None]
    if P in found:
        return P
    return found[0] if found else R


def _guess(states: tuple[Placement, ...], metas: tuple[TensorMeta, ...], out: TensorMeta) -> Placement:
    """The first cut argument's dim, if the result has one of the same size there."""
    for state, meta in zip(states, metas, strict=True):
        if state.kind is Kind.SHARD and state.dim < len(out.shape) and out.shape[state.dim] == meta.shape[state.dim]:
            return state
    return R
