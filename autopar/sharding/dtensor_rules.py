"""The one place that asks torch's private DTensor rules: one node -> its rules on one mesh axis of any size.

DTensor answers in two ways: a function of the argument metas that lists placements for one mesh dim, or a function of
an `OpSchema` that is enumerated here on a mesh of one device (so that nothing depends on the axis size). Kept: R, S(d)
and P(sum). Dropped: averages, maxima, masked sums, strided cuts. No process group is made or touched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TorchMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

from autopar.ir.graph import Node, Ref, TensorMeta, TorchConst
from autopar.ir.layout import P, Placement, R, S
from autopar.ir.strategy import Rule
from autopar.ops import TABLE, all_replicated
from autopar.ops.entry import Pieces
from autopar.ops.unordered import suits_unordered
from autopar.sharding.denied import denied


class RuleCache:
    """One-axis rules already asked for, by op, metas and arguments. Rules are the same for every mesh: share it.

    `replicated` holds the ops for which nobody had a rule.
    """

    def __init__(self) -> None:
        self.rules: dict[tuple[Any, ...], tuple[Rule, ...]] = {}
        self.replicated: set[str] = set()
        self.states: dict[Any, Any] = {}
        self.mesh: DeviceMesh | None = None

    def one_axis_mesh(self) -> DeviceMesh:
        """A mesh of one CPU device without a backend."""
        if self.mesh is None:
            self.mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("axis",), _init_backend=False, _rank=0)
        return self.mesh


def one_axis_rules(node: Node, metas: tuple[TensorMeta, ...], cache: RuleCache) -> tuple[Rule, ...]:
    """Rules for a node whose tensor arguments (`node.refs` order) have these global metas. All-R is the first."""
    key = rule_key(node, metas)
    found = cache.rules.get(key)
    if found is None:
        found = cache.rules[key] = _rules(node, metas, cache)
    return found


def rule_key(node: Node, metas: tuple[TensorMeta, ...]) -> tuple[Any, ...]:
    """What rules depend on: the op, its arguments without value names, and all metas."""
    outputs = tuple(None if o is None else o.meta for o in node.outputs)
    return node.op, _nameless(node.args), _nameless(node.kwargs), metas, outputs


def _nameless(tree: Any) -> Any:
    if isinstance(tree, Ref):
        return Ref
    if isinstance(tree, (tuple, list)):
        return tuple(_nameless(item) for item in tree)
    return (type(tree), tree)


def _rules(node: Node, metas: tuple[TensorMeta, ...], cache: RuleCache) -> tuple[Rule, ...]:
    whole = all_replicated(node, metas)
    entry = TABLE.get(node.op)
    op = torch_op(node.op)
    user = op is not None and _user_rule(op)
    if not user and entry is not None and entry.rules is not None:
        found = tuple(entry.rules(node, metas))
    else:
        asked = None if op is None else ask_dtensor(op, node, metas, cache.one_axis_mesh())
        if asked is None:
            cache.replicated.add(node.op)
        found = asked or ()
        if not user:
            found = tuple(r for r in found if not denied(node.op, r))
        if op is not None and (entry is None or entry.local is None):
            found = tuple(r for r in found if _holds_for_pieces(op, node, metas, r))
    return tuple(dict.fromkeys((whole, *(r for r in found if _sound(r, node, metas)))))


def pieces_of(name: str) -> Pieces:
    """Which pieces an op's rules hold for: as its entry says; equal ones only where a user gave the rule.

    Of ops that only DTensor knows, those that aren't pointwise get no empty piece: many of torch's kernels refuse one.
    """
    entry, op = TABLE.get(name), torch_op(name)
    if op is not None and _user_rule(op):
        return Pieces.EQUAL
    if entry is not None and entry.rules is not None:
        return entry.pieces
    return Pieces.ANY if op is not None and torch.Tag.pointwise in op.tags else Pieces.FILLED


def _sound(rule: Rule, node: Node, metas: tuple[TensorMeta, ...]) -> bool:
    """Right lengths, dims that exist and can be cut at all, None exactly where the node has None, no pointless sum."""
    if len(rule.inputs) != len(metas) or len(rule.outputs) != len(node.outputs):
        return False
    for placement, meta in zip(rule.inputs, metas, strict=True):
        if not _cuttable(placement, meta):
            return False
    for out, value in zip(rule.outputs, node.outputs, strict=True):
        if (out is None) != (value is None) or (
            value is not None and out is not None and not _cuttable(out, value.meta)
        ):
            return False
    return suits_unordered(rule, node, metas)


def _cuttable(placement: Placement, meta: TensorMeta) -> bool:
    if placement == P:
        return meta.dtype.startswith(("float", "bfloat", "complex", "int"))
    return placement.dim < 0 or (placement.dim < len(meta.shape) and meta.shape[placement.dim] > 1)


def torch_op(name: str) -> torch._ops.OpOverload | None:
    """`aten.mm.default` -> torch.ops.aten.mm.default; None if torch has no such op."""
    parts = name.split(".")
    if len(parts) != 3:
        return None
    try:
        found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError:
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def _holds_for_pieces(op: torch._ops.OpOverload, node: Node, metas: tuple[TensorMeta, ...], rule: Rule) -> bool:
    """Does the op, with its arguments as they are, take pieces and give pieces?

    DTensor replaces sizes among the arguments (of resizes, of factories) when it runs an op; emitted code runs the op
    as it stands. So an op with a size that is global, or with operands that don't fit each other, has no such rule.
    """
    sizes = [m.shape[p.dim] for p, m in zip(rule.inputs, metas, strict=True) if p.dim >= 0]
    sizes += [v.meta.shape[p.dim] for p, v in zip(rule.outputs, node.outputs, strict=True) if p and v and p.dim >= 0]
    common = math.gcd(*sizes)
    if common < 2 or torch.Tag.pointwise in op.tags:
        return True
    parts = next(n for n in range(2, common + 1) if common % n == 0)
    pieces = iter([_empty_piece(m, p, parts) for m, p in zip(metas, rule.inputs, strict=True)])
    try:
        found = op(*(_to_torch(a, pieces) for a in node.args), **{k: _to_torch(v, pieces) for k, v in node.kwargs})
    except NotImplementedError:  # an op without shapes of its own
        return True
    except Exception:
        return False
    made = found if isinstance(found, (tuple, list)) else (found,)
    return all(
        v is None or p is None or tuple(x.shape) == _piece_shape(v.meta.shape, p, parts)
        for x, v, p in zip(made, node.outputs, rule.outputs, strict=True)
    )


def _empty_piece(meta: TensorMeta, placement: Placement, parts: int) -> torch.Tensor:
    shape = _piece_shape(meta.shape, placement, parts)
    return torch.empty(shape, dtype=getattr(torch, meta.dtype), device="meta")


def _piece_shape(shape: tuple[int, ...], placement: Placement, parts: int) -> tuple[int, ...]:
    return tuple(n // parts if d == placement.dim else n for d, n in enumerate(shape))


def _user_rule(op: torch._ops.OpOverload) -> bool:
    """True if the op's rule was given with torch's public `register_sharding`."""
    func = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(op)
    inner = func.func if isinstance(func, functools.partial) else func
    return "register_sharding" in getattr(inner, "__qualname__", "")


def ask_dtensor(
    op: torch._ops.OpOverload, node: Node, metas: tuple[TensorMeta, ...], mesh: DeviceMesh
) -> tuple[Rule, ...] | None:
    """DTensor's rules, or None where it has none or its function fails on these arguments."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    single = propagator.op_single_dim_strategy_funcs.get(op)
    listed = propagator.op_strategy_funcs.get(op)
    torch_metas = iter([_torch_meta(m) for m in metas])
    args = tuple(_to_torch(a, torch_metas) for a in node.args)
    kwargs = {k: _to_torch(v, torch_metas) for k, v in node.kwargs}
    try:
        if single is not None and not (listed is not None and _user_rule(op)):
            return _single(single(op, args, kwargs), node, len(metas))
        if listed is not None:
            return _enumerated(listed, op, args, kwargs, node, mesh)
    except Exception:  # private code: whatever it raises means that there is no rule for these arguments
        return None
    return None


def _torch_meta(meta: TensorMeta) -> TorchMeta:
    strides: list[int] = []
    step = 1
    for size in reversed(meta.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return TorchMeta(torch.Size(meta.shape), tuple(strides), getattr(torch, meta.dtype))


def _to_torch(tree: Any, metas: Any) -> Any:
    if isinstance(tree, Ref):
        return next(metas)
    if isinstance(tree, (tuple, list)):
        return [_to_torch(item, metas) for item in tree]
    if isinstance(tree, TorchConst):
        return torch.device(tree.name) if tree.kind == "device" else getattr(torch, tree.name)
    return tree


def _single(lists: Iterable[Sequence[Any]], node: Node, inputs: int) -> tuple[Rule, ...]:
    found = []
    for placements in lists:
        mine = [_placement(p) for p in placements]
        if any(m is _DROP for m in mine):
            continue
        outputs = tuple(mine[: len(mine) - inputs])
        ins = tuple(R if m is None else m for m in mine[len(mine) - inputs :])
        if len(outputs) == 1 and len(node.outputs) > 1:
            outputs = outputs * len(node.outputs)
        found.append(Rule(_masked(outputs, node), ins))
    return tuple(found)


def _masked(outputs: tuple[Any, ...], node: Node) -> tuple[Placement | None, ...]:
    if len(outputs) != len(node.outputs):
        return outputs
    return tuple(None if v is None else o for o, v in zip(outputs, node.outputs, strict=True))


_DROP = Placement(R.kind, -2)


def _placement(placement: Any) -> Placement | None:
    """Ours, None for None, `_DROP` for what we don't use."""
    if placement is None:
        return None
    if isinstance(placement, Replicate):
        return R
    if isinstance(placement, _ShardingPlaceholder) or type(placement) is Shard:
        return S(placement.dim) if placement.dim >= 0 else _DROP
    if type(placement) is Partial and placement.reduce_op == "sum":
        return P
    return _DROP


def _enumerated(
    func: Any, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], node: Node, mesh: DeviceMesh
) -> tuple[Rule, ...]:
    found: list[Rule] = []
    for partial in (True, False):
        schema = OpSchema(
            op,
            tuple(_candidates(a, mesh, partial) for a in args),
            {k: _candidates(v, mesh, partial) for k, v in kwargs.items()},
        )
        schema.schema_info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info.get(op)
        try:
            strategy = func(schema)
        except Exception:
            if partial:
                continue
            raise
        if isinstance(strategy, OpStrategy):
            found += [r for spec in strategy.strategies if (r := _from_spec(spec, node)) is not None]
        break
    return tuple(dict.fromkeys(found))


def _candidates(value: Any, mesh: DeviceMesh, partial: bool) -> Any:
    if isinstance(value, TorchMeta):
        choices: list[Any] = [Replicate(), *(Shard(d) for d in range(len(value.shape)))]
        if partial:
            choices.append(Partial("sum"))
        return OpStrategy([OpSpec(DTensorSpec(mesh, (c,), tensor_meta=value)) for c in choices])
    if isinstance(value, list):
        if value and all(isinstance(v, TorchMeta) for v in value):
            return TupleStrategy([_candidates(v, mesh, partial) for v in value])
        return [_candidates(v, mesh, partial) for v in value]
    return value


def _from_spec(spec: OpSpec, node: Node) -> Rule | None:
    outs = spec.output_specs
    outputs = [outs] if isinstance(outs, DTensorSpec) or outs is None else list(outs)
    if len(outputs) == 1 and len(node.outputs) > 1:
        outputs = outputs * len(node.outputs)
    if spec.input_specs is None:
        if len(node.refs) != 1 or not isinstance(outs, DTensorSpec):
            return None
        inputs: list[Any] = [outs]
    else:
        inputs = list(spec.input_specs)
    mine_out = tuple(None if o is None else _placement(o.placements[0]) for o in outputs)
    mine_in = tuple(_placement(i.placements[0]) for i in inputs)
    if any(m is _DROP for m in (*mine_out, *mine_in)):
        return None
    return Rule(_masked(mine_out, node), tuple(R if m is None else m for m in mine_in))
