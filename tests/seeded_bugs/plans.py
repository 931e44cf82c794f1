"""The plans that bugs are planted into: small, flat and with stages, each made once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn

from autopar import api
from autopar.cost_model.clusters import load_cluster
from autopar.ir.graph import CapturedGraph
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.verification import VerifyReport
from tests.cases.lm import TinyLM, text
from tests.test_recompute import Dropping


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with all that `verify` takes."""

    model: nn.Module
    inputs: dict[str, Any]
    captured: CapturedGraph
    plan: Plan

    def verify(self, code: str | None = None) -> VerifyReport:
        """The function behind the command. `code`: other emitted text than the plan's."""
        return api.verify(self.model, self.inputs, plan=self.plan, captured=self.captured, code=code)


def tied_lm() -> tuple[nn.Module, dict[str, Any]]:
    """Unequally many labels of its rows are padding; embedding and head are one tensor."""
    return TinyLM(layers=4, tie=True, heads=6), text()


def dropping() -> tuple[nn.Module, dict[str, Any]]:
    """Three layers with dropout."""
    return Dropping(), {"x": torch.randn(12, 6, 12)}


STAGES = {"pp": 2, "dp": 2, "tp": 1}
PLANS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "dp": (tied_lm, {"dp": 3, "zero": 0}, {}),
    "zero3": (tied_lm, {"dp": 3, "zero": 3}, {}),
    "tp": (tied_lm, {"tp": 3}, {}),
    "cp": (tied_lm, {"dp": 1, "cp": 3, "tp": 1}, {}),
    "stages": (tied_lm, STAGES, {"micro_batches": 3}),
    "stages zero": (tied_lm, {**STAGES, "*.weight": "dp:S(0)"}, {"micro_batches": 3}),
    "drawing": (dropping, {"dp": 3, "zero": 0}, {}),
    "drawing stages": (dropping, STAGES, {"micro_batches": 2}),
    "recompute": (dropping, {"dp": 3, "zero": 0}, {"objective": "memory", "memory_slack": None}),
    "recompute stages": (dropping, STAGES, {"micro_batches": 2, "objective": "memory", "memory_slack": None}),
}
"""Name -> (model and inputs, pins, options)."""


@lru_cache(maxsize=1)
def _captured(make: Any) -> tuple[nn.Module, dict[str, Any], CapturedGraph]:
    torch.manual_seed(0)
    model, inputs = make()
    return model, inputs, api.capture(model, inputs)


@cache
def planned(name: str) -> Planned:
    """By its name."""
    make, pins, more = PLANS[name]
    model, inputs, captured = _captured(make)
    options = replace(Options(pins=pins), **more)
    devices = pins.get("pp", 1) * pins.get("dp", 1) * pins.get("tp", 1) * pins.get("cp", 1)
    plan = api.plan_captured(captured, load_cluster(f"rtx3090:{devices}"), options=options)
    return Planned(model=model, inputs=inputs, captured=captured, plan=plan)
