"""Random ops. Each element's number depends on the seed, the step, the op and the element's *global* position only, so
the plan doesn't change what is drawn: replicas agree, shards differ, and a recomputed op draws the same (see
`autopar.runtime.local_ops.uniform`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import Node, TorchConst
from autopar.ir.layout import P, R, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import LocalCall, LocalContext, Lower, Metas, OpEntry, arg, each_out, out_shape, rule


def _elementwise(node: Node, metas: Metas) -> Iterator[Rule]:
    for d in range(len(metas[0].shape)):
        yield Rule(each_out(node, S(d)), (S(d),) * len(metas))


def _free(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from (rule((), S(d)) for d in range(len(out_shape(node))))


def _dropout_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from (rule((S(d), S(d)), S(d)) for d in range(len(metas[0].shape)))
    yield rule((P, R), P)


def draw(here: LocalContext) -> tuple[str, tuple[int, ...], tuple[tuple[str, ...], ...]]:
    """What names a draw: the node's key, the local shape, and the axes that cut each dim."""
    return here.node.key, here.shape, tuple(here.out_axes(d) for d in range(len(here.shape)))


def _dropout(here: LocalContext) -> LocalCall:
    if arg(here.node, 2, "train", True) is False:
        return here.same()
    return LocalCall("local_ops.dropout", (here.node.args[0], arg(here.node, 1, "p"), *draw(here)))


def _dtype(here: LocalContext) -> TorchConst:
    out = here.outputs[0]
    assert out is not None
    return TorchConst("dtype", out.dtype)


def _bernoulli(here: LocalContext) -> LocalCall:
    probability = arg(here.node, 1, "p") if here.node.op == "aten.bernoulli.p" else None
    return LocalCall("local_ops.bernoulli", (here.node.args[0], probability, *draw(here)))


def _like(name: str) -> Lower:
    def local(here: LocalContext) -> LocalCall:
        like = here.node.args[0] if here.node.refs else None
        return LocalCall(f"local_ops.{name}", (like, *draw(here), _dtype(here)))

    return local


def _randint(here: LocalContext) -> LocalCall:
    like = here.node.args[0] if here.node.refs else None
    first = 1 if here.node.refs else 0
    low, high = (0, here.node.args[first]) if "low" not in here.node.op else here.node.args[first : first + 2]
    return LocalCall("local_ops.randint", (like, low, high, *draw(here), _dtype(here)))


RANDOM: Mapping[str, OpEntry] = {
    "aten.native_dropout.default": OpEntry(rules=_elementwise, local=_dropout, random=True),
    "aten.native_dropout_backward.default": OpEntry(rules=_dropout_backward),
    "aten.bernoulli.default": OpEntry(rules=_elementwise, local=_bernoulli, random=True),
    "aten.bernoulli.p": OpEntry(rules=_elementwise, local=_bernoulli, random=True),
    "aten.rand.default": OpEntry(rules=_free, local=_like("rand"), random=True),
    "aten.randn.default": OpEntry(rules=_free, local=_like("randn"), random=True),
    "aten.rand_like.default": OpEntry(rules=_elementwise, local=_like("rand"), random=True),
    "aten.randn_like.default": OpEntry(rules=_elementwise, local=_like("randn"), random=True),
    "aten.randint.default": OpEntry(rules=_free, local=_randint, random=True),
    "aten.randint.low": OpEntry(rules=_free, local=_randint, random=True),
    "aten.randint_like.default": OpEntry(rules=_elementwise, local=_randint, random=True),
    "aten.randint_like.low_dtype": OpEntry(rules=_elementwise, local=_randint, random=True),
}
