"""Random ops. Each element's number depends on the seed, the step, the op and the element's *global* position only, so
the plan doesn't change what is drawn: replicas agree, shards differ, and a recomputed op draws the same (see
docs/randomness.md). `draw` says how a local form names what it draws.

Three kinds: elementwise draws, each piece made where it is wanted; ops that are not elementwise (a permutation, a
rejection loop), run whole by every rank with torch's generator seeded from the same names; and dropout's backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.cuts import Own
from autopar.ir.graph import Node, TorchConst
from autopar.ir.layout import P, R, S
from autopar.ir.strategy import Rule
from autopar.ops.entry import (
    LocalCall,
    LocalContext,
    Lower,
    Metas,
    OpEntry,
    arg,
    broadcast_cut,
    each_out,
    out_shape,
    rule,
)
from autopar.ops.factories import beside


def _elementwise(node: Node, metas: Metas) -> Iterator[Rule]:
    """Tensor arguments that broadcast to the output."""
    shape = out_shape(node)
    for d in range(len(shape)):
        yield Rule(each_out(node, S(d)), tuple(broadcast_cut(m.shape, shape, d) for m in metas))


def _free(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from (rule((), S(d)) for d in range(len(out_shape(node))))


def _whole(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from ()


def _dropout_backward(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from (rule((S(d), S(d)), S(d)) for d in range(len(metas[0].shape)))
    yield rule((P, R), P)


def draw(here: LocalContext) -> tuple[str, tuple[int, ...], tuple[tuple[str | int, ...], ...]]:
    """What names a draw: the node's key, the whole shape, and the axes that cut each dim.

    Where that is in unequal pieces of more rows than one that stay together, their number follows the axes.
    """
    whole = out_shape(here.node)
    return here.node.key, whole, tuple((*here.out_axes(d), *_unit(here.out_cut(d))) for d in range(len(whole)))


def _unit(cut: Own | None) -> tuple[int, ...]:
    return () if cut is None or cut.unit == 1 else (cut.unit,)


def _dropout(here: LocalContext) -> LocalCall:
    if arg(here.node, 2, "train", True) is False:
        return here.same()
    return LocalCall("local_ops.dropout", (here.node.args[0], arg(here.node, 1, "p"), *draw(here)))


def _backward_of_dropout(here: LocalContext) -> LocalCall:
    return here.same("local_ops.dropout_backward")


def _dtype(here: LocalContext) -> TorchConst:
    out = here.outputs[0]
    assert out is not None
    return TorchConst("dtype", out.dtype)


def _bernoulli(here: LocalContext) -> LocalCall:
    """default: the argument is the probability; p, Tensor: the second one is, and the first is not read."""
    like = here.node.args[0]
    probability = like if here.node.op == "aten.bernoulli.default" else arg(here.node, 1, "p", 0.5)
    given = (None, like) if here.node.op == "aten.bernoulli.default" else (like, probability)
    return LocalCall("local_ops.bernoulli", (*given, *draw(here), _dtype(here)))


def _filled(name: str, *defaults: float) -> Lower:
    """A tensor that isn't read and the distribution's numbers."""

    def local(here: LocalContext) -> LocalCall:
        numbers = tuple(arg(here.node, 1 + i, _NAMES[name][i], d) for i, d in enumerate(defaults))
        return LocalCall(f"local_ops.{name}", (here.node.args[0], *numbers, *draw(here), _dtype(here)))

    return local


_NAMES = {
    "uniform": ("from", "to"), "normal": ("mean", "std"), "exponential": ("lambd",), "geometric": ("p",),
    "cauchy": ("median", "sigma"), "log_normal": ("mean", "std"),
}  # fmt: skip


def _standard(name: str, *numbers: float) -> Lower:
    """rand and randn, of a size or like a tensor."""

    def local(here: LocalContext) -> LocalCall:
        like = here.node.args[0] if here.node.refs else None
        return LocalCall(f"local_ops.{name}", (like, *numbers, *draw(here), _dtype(here)))

    return local


def _normal_of(here: LocalContext) -> LocalCall:
    """normal of a mean and a spread, each a tensor or a number."""
    mean, std = arg(here.node, 0, "mean", 0.0), arg(here.node, 1, "std", 1.0)
    return LocalCall("local_ops.normal", (None, mean, std, *draw(here), _dtype(here)))


def _randint(here: LocalContext) -> LocalCall:
    like = here.node.args[0] if "_like" in here.node.op else None
    first = 1 if "_like" in here.node.op else 0
    low, high = (0, here.node.args[first]) if "low" not in here.node.op else here.node.args[first : first + 2]
    return LocalCall("local_ops.randint", (like, low, high, *draw(here), _dtype(here)))


def _rrelu(here: LocalContext) -> LocalCall:
    if arg(here.node, 4, "training", False) is False:
        return here.same()
    lower, upper = arg(here.node, 2, "lower", 0.125), arg(here.node, 3, "upper", 1 / 3)
    return LocalCall("local_ops.rrelu", (here.node.args[0], here.node.args[1], lower, upper, *draw(here)))


def _seeded(here: LocalContext) -> LocalCall:
    kwargs = tuple((k, v) for k, v in here.node.kwargs if k not in ("generator", "pin_memory"))
    return LocalCall("local_ops.seeded", (here.node.op, here.node.key, *here.node.args), kwargs)


def _like(local: Lower) -> OpEntry:
    return OpEntry(rules=beside, local=local, random=True)


def _sized(local: Lower) -> OpEntry:
    return OpEntry(rules=_free, local=local, random=True)


def _of_each(local: Lower) -> OpEntry:
    return OpEntry(rules=_elementwise, local=local, random=True)


_SEEDED = OpEntry(rules=_whole, local=_seeded, random=True)

RANDOM: Mapping[str, OpEntry] = {
    "aten.native_dropout.default": _of_each(_dropout),
    "aten.native_dropout_backward.default": OpEntry(rules=_dropout_backward, local=_backward_of_dropout),
    "aten.bernoulli.default": _of_each(_bernoulli),
    "aten.bernoulli.p": _like(_bernoulli),
    "aten.bernoulli.Tensor": _of_each(_bernoulli),
    "aten.rand.default": _sized(_standard("uniform", 0.0, 1.0)),
    "aten.randn.default": _sized(_standard("normal", 0.0, 1.0)),
    "aten.rand_like.default": _like(_standard("uniform", 0.0, 1.0)),
    "aten.randn_like.default": _like(_standard("normal", 0.0, 1.0)),
    "aten.randint.default": _sized(_randint),
    "aten.randint.low": _sized(_randint),
    "aten.randint_like.default": _like(_randint),
    "aten.randint_like.low_dtype": _like(_randint),
    "aten.randint_like.Tensor": _of_each(_randint),
    "aten.uniform.default": _like(_filled("uniform", 0.0, 1.0)),
    "aten.normal_functional.default": _like(_filled("normal", 0.0, 1.0)),
    "aten.normal.float_float": _sized(_normal_of),
    "aten.normal.Tensor_float": _of_each(_normal_of),
    "aten.normal.float_Tensor": _of_each(_normal_of),
    "aten.normal.Tensor_Tensor": _of_each(_normal_of),
    "aten.exponential.default": _like(_filled("exponential", 1.0)),
    "aten.geometric.default": _like(_filled("geometric", 0.5)),
    "aten.cauchy.default": _like(_filled("cauchy", 0.0, 1.0)),
    "aten.log_normal.default": _like(_filled("log_normal", 1.0, 2.0)),
    "aten.rrelu_with_noise_functional.default": _of_each(_rrelu),
    "aten.rrelu_with_noise_backward.default": OpEntry(rules=_elementwise),
    "aten.randperm.default": _SEEDED,
    "aten.multinomial.default": _SEEDED,
    "aten.poisson.default": _SEEDED,
    "aten.binomial.default": _SEEDED,
    "aten._standard_gamma.default": _SEEDED,
    "aten._sample_dirichlet.default": _SEEDED,
}
