"""Normalisations. Cut along dims that aren't normalised over; gradients of scales and offsets are then sums.

Batch normalisation of a cut batch needs the whole batch's statistics: its local form adds up per-channel sums inside
(tag "inner"), so the statistics are those of one process and equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import ITEM_BYTES, Node
from autopar.ir.layout import P, R, S
from autopar.ir.reshard import Collective
from autopar.ir.strategy import Rule
from autopar.ops.entry import Inner, LocalCall, LocalContext, Metas, OpEntry, arg, each_out, mask_outputs

INNER = "inner"


def _free_dims(node: Node, metas: Metas, position: int) -> range:
    return range(len(metas[0].shape) - len(arg(node, position, "normalized_shape")))


def _forward(node: Node, metas: Metas) -> Iterator[Rule]:
    """x, normalized_shape, scale and offset -> out, statistics."""
    for d in _free_dims(node, metas, 1):
        yield Rule(each_out(node, S(d)), (S(d), *(R,) * (len(metas) - 1)))


def _layer_norm_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """grad, x, normalized_shape, mean, rstd, scale, offset, mask -> gradients of x, scale, offset."""
    for d in _free_dims(node, metas, 2):
        yield Rule(mask_outputs(node, (S(d), P, P)), (S(d),) * 4 + (R,) * (len(metas) - 4))


def _rms_norm_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """grad, x, normalized_shape, rstd, scale, mask -> gradients of x, scale."""
    for d in _free_dims(node, metas, 2):
        yield Rule(mask_outputs(node, (S(d), P)), (S(d),) * 3 + (R,) * (len(metas) - 3))


def _local_layer_norm_backward(here: LocalContext) -> LocalCall:
    """torch reads mean and rstd as if they were contiguous."""
    return LocalCall("local_ops.layer_norm_backward", here.node.args)


def _group_norm(node: Node, metas: Metas) -> Iterator[Rule]:
    """x, scale, offset, N, C, HxW, groups, eps -> out, mean [N, groups], rstd."""
    yield Rule(each_out(node, S(0)), (S(0), *(R,) * (len(metas) - 1)))


def _group_norm_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """grad, x, mean, rstd, scale, N, C, HxW, groups, mask -> gradients of x, scale, offset."""
    yield Rule(mask_outputs(node, (S(0), P, P)), (S(0),) * 4 + (R,) * (len(metas) - 4))


def _local_group_norm(here: LocalContext) -> LocalCall:
    return here.with_args({3: here.in_length(0)})


def _local_group_norm_backward(here: LocalContext) -> LocalCall:
    return here.with_args({5: here.in_length(0)})


def _batch_norm(node: Node, metas: Metas) -> Iterator[Rule]:
    """x, then per-channel tensors -> out, then per-channel tensors."""
    others = len(metas) - 1
    training = _training(node)
    outputs = tuple(None if o is None else o.meta.shape for o in node.outputs)
    yield Rule(
        tuple(None if s is None else R if s == (0,) else S(1 if i == 0 else 0) for i, s in enumerate(outputs)),
        (S(1), *(S(0),) * others),
    )
    yield Rule((S(0), *each_out(node, R)[1:]), (S(0), *(R,) * others), INNER if training else "")


def _training(node: Node) -> bool:
    position = {"aten._native_batch_norm_legit.no_stats": 3}.get(node.op, 5)
    return bool(arg(node, position, "training"))


def _local_batch_norm(here: LocalContext) -> LocalCall:
    axes = here.tagged(INNER)
    if not axes:
        return here.same()
    name = "batch_norm_functional" if "functional" in here.node.op else "batch_norm"
    args = here.node.args
    if "no_stats" in here.node.op:
        args = (*args[:3], None, None, *args[3:])
    return LocalCall(f"local_ops.{name}", (*args, axes, *_count(here, 0)))


def _count(here: LocalContext, argument: int) -> tuple[int, ...]:
    """Elements of a channel in the whole batch, where pieces aren't equal."""
    if here.in_cut(0, argument) is None:
        return ()
    return (here.wholes[argument].numel // here.wholes[argument].shape[1],)


def _batch_norm_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    """grad, x, scale, running mean and variance, saved mean and rstd, training, eps, mask -> of x, scale, offset."""
    others = len(metas) - 2
    yield Rule(mask_outputs(node, (S(1), S(0), S(0))), (S(1), S(1), *(S(0),) * others))
    if arg(node, 7, "train"):
        yield Rule(mask_outputs(node, (S(0), R, R)), (S(0), S(0), *(R,) * others), INNER)
    else:
        yield Rule(mask_outputs(node, (S(0), P, P)), (S(0), S(0), *(R,) * others))


def _local_batch_norm_backward(here: LocalContext) -> LocalCall:
    axes = here.tagged(INNER)
    if not axes:
        return here.same()
    return LocalCall("local_ops.batch_norm_backward", (*here.node.args, axes, *_count(here, 1)))


def _inner_batch_norm(here: LocalContext) -> Iterator[Inner]:
    """Forward: the sums, then the squared distances from the mean. Backward: two sums at once."""
    meta = here.inputs[0]
    channel_bytes = meta.shape[1] * max(ITEM_BYTES[meta.dtype], 4)
    for axis in here.tagged(INNER):
        if "backward" in here.node.op:
            yield (Collective.ALL_REDUCE, axis, 2 * channel_bytes)
        else:
            yield from [(Collective.ALL_REDUCE, axis, channel_bytes)] * 2


_BATCH_NORM = OpEntry(rules=_batch_norm, local=_local_batch_norm, inner=_inner_batch_norm)

NORMS: Mapping[str, OpEntry] = {
    "aten.native_layer_norm.default": OpEntry(rules=_forward),
    "aten.native_layer_norm_backward.default": OpEntry(rules=_layer_norm_backward, local=_local_layer_norm_backward),
    "aten._fused_rms_norm.default": OpEntry(rules=_forward),
    "aten._fused_rms_norm_backward.default": OpEntry(rules=_rms_norm_backward),
    "aten.native_group_norm.default": OpEntry(rules=_group_norm, local=_local_group_norm),
    "aten.native_group_norm_backward.default": OpEntry(rules=_group_norm_backward, local=_local_group_norm_backward),
    "aten.native_batch_norm.default": _BATCH_NORM,
    "aten._native_batch_norm_legit_functional.default": _BATCH_NORM,
    "aten._native_batch_norm_legit.no_stats": _BATCH_NORM,
    "aten.native_batch_norm_backward.default": OpEntry(
        rules=_batch_norm_backward, local=_local_batch_norm_backward, inner=_inner_batch_norm
    ),
}
