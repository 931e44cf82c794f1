"""autopar: trains the same PyTorch model, with the same numbers, spread over a cluster.

The names below are the public ones. They are imported when first used, so that `import autopar` does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar import optim
    from autopar.api import ClusterSpec, Plan, capture, compile, emit_source, search, verify
    from autopar.errors import AutoparError, CaptureError, InfeasibleError, PlanError, RankError, UserError
    from autopar.ir.configuration import Configuration
    from autopar.ir.options import Options
    from autopar.ir.prediction import Prediction
    from autopar.ir.transformer import Experts, Latent, Transformer
    from autopar.prediction.step import predict
    from autopar.present.plan_diff import PlanDiff
    from autopar.questions import Explanation, WhyNot
    from autopar.runtime.dataset import shard_dataset
    from autopar.runtime.launch import launch
    from autopar.runtime.weightless import without_weights

_HOME = {
    **dict.fromkeys(("ClusterSpec", "Plan", "capture", "compile", "emit_source", "search", "verify"), "autopar.api"),
    **dict.fromkeys(
        ("AutoparError", "CaptureError", "InfeasibleError", "PlanError", "RankError", "UserError"), "autopar.errors"
    ),
    "Options": "autopar.ir.options",
    "Configuration": "autopar.ir.configuration",
    **dict.fromkeys(("Experts", "Latent", "Transformer"), "autopar.ir.transformer"),
    "Prediction": "autopar.ir.prediction",
    "predict": "autopar.prediction.step",
    "PlanDiff": "autopar.present.plan_diff",
    "Explanation": "autopar.questions",
    "WhyNot": "autopar.questions",
    "launch": "autopar.runtime.launch",
    "shard_dataset": "autopar.runtime.dataset",
    "without_weights": "autopar.runtime.weightless",
}

__all__ = [
    "AutoparError",
    "CaptureError",
    "ClusterSpec",
    "Configuration",
    "Experts",
    "Explanation",
    "InfeasibleError",
    "Latent",
    "Options",
    "Plan",
    "PlanDiff",
    "PlanError",
    "Prediction",
    "RankError",
    "Transformer",
    "UserError",
    "WhyNot",
    "capture",
    "compile",
    "emit_source",
    "launch",
    "optim",
    "predict",
    "search",
    "shard_dataset",
    "verify",
    "without_weights",
]


SUPPORTED_TORCH = "2.13"


def _check_torch() -> None:
    """ImportError if the torch that this process has loaded is of another minor version: its private API moves."""
    torch = sys.modules.get("torch")
    found = str(getattr(torch, "__version__", SUPPORTED_TORCH))
    if found.split("+")[0].split(".")[:2] != SUPPORTED_TORCH.split("."):
        raise ImportError(
            f"autopar supports torch {SUPPORTED_TORCH}, found {found}: pip install 'torch=={SUPPORTED_TORCH}.*'"
        )


_check_torch()


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("autopar.optim")
    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    _check_torch()
    return found
