"""Classes of ops, as timelines and reports count them."""

from __future__ import annotations

from autopar import ops
from autopar.ops.attention import ATTENTION
from autopar.ops.convolution import CONVOLUTIONS
from autopar.ops.experts import GROUPED
from autopar.ops.matmul import MATMULS
from autopar.ops.norms import NORMS
from autopar.ops.region import REGIONS

_FAMILIES = {
    "matmul": {**MATMULS, **GROUPED},
    "attention": ATTENTION,
    "convolution": CONVOLUTIONS,
    "norm": NORMS,
    "region": REGIONS,
}
_WORDS = {"norm": "norm", "embedding": "embedding", "nll_loss": "loss", "cross_entropy": "loss", "log_softmax": "loss"}


def op_kind(op: str) -> str:
    """The class of an op: "matmul", "attention", "norm", "embedding", "loss", "view", "region", else "pointwise"."""
    if ops.is_view(op):
        return "view"
    for kind, family in _FAMILIES.items():
        if op in family:
            return kind
    return next((kind for word, kind in _WORDS.items() if word in op), "pointwise")
