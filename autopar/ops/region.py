"""A region: a submodule that could not be captured. It runs whole on every rank, as the user wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.graph import REGION, REGION_BACKWARD, Node, Ref
from autopar.ir.strategy import Rule
from autopar.ops.entry import LocalCall, LocalContext, Metas, OpEntry


def _whole(node: Node, metas: Metas) -> Iterator[Rule]:
    yield from ()


def _forward(here: LocalContext) -> LocalCall:
    """args: key, tensors -> rt.region(key, *tensors)."""
    key, tensors = here.node.args
    return LocalCall("rt.region", (key, *tensors))


def _backward(here: LocalContext) -> LocalCall:
    """args: key, what the forward kept, tangents -> rt.region_backward(key, kept, *tangents)."""
    key, kept, tangents = here.node.args
    assert isinstance(kept, Ref)
    return LocalCall("rt.region_backward", (key, kept, *tangents))


REGIONS: Mapping[str, OpEntry] = {
    REGION: OpEntry(rules=_whole, local=_forward),
    REGION_BACKWARD: OpEntry(rules=_whole, local=_backward),
}
