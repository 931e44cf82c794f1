"""autopar: trains the same PyTorch model, with the same numbers, spread over a cluster.

The names below are the public ones. They are imported when first used, so that `import autopar` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import ClusterSpec, capture, compile, emit_source, search, verify
    from autopar.errors import AutoparError, CaptureError, InfeasibleError, PlanError, RankError, UserError
    from autopar.ir.options import Options
    from autopar.ir.plan import Plan
    from autopar.runtime.launch import launch

_HOME = {
    **dict.fromkeys(("ClusterSpec", "Plan", "capture", "compile", "emit_source", "search", "verify"), "autopar.api"),
    **dict.fromkeys(
        ("AutoparError", "CaptureError", "InfeasibleError", "PlanError", "RankError", "UserError"), "autopar.errors"
    ),
    "Options": "autopar.ir.options",
    "launch": "autopar.runtime.launch",
}

__all__ = [
    "AutoparError",
    "CaptureError",
    "ClusterSpec",
    "InfeasibleError",
    "Options",
    "Plan",
    "PlanError",
    "RankError",
    "UserError",
    "capture",
    "compile",
    "emit_source",
    "launch",
    "search",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
