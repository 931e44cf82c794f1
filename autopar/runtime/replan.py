"""A call that no program of a module fits: captured again on every rank, planned on the first, the same for all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import CapturedGraph
from autopar.ir.plan import Plan, decode_plan
from autopar.runtime.agreement import agree_among, from_first
from autopar.runtime.calls import Request
from autopar.runtime.comm import Communicator


class Replanner:
    """Of one module: the mesh stays, and parameters are stored alike.

    Args:
        model: what is captured; its values don't matter.
        plan: what the module was compiled with.
        capture: of the model's call with these arguments.
        again: that plan for the model as captured; asked on rank 0.
    """

    def __init__(
        self,
        model: nn.Module,
        rt: Communicator,
        plan: Plan,
        capture: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], CapturedGraph],
        again: Callable[[CapturedGraph], Plan],
    ) -> None:
        self.model, self.rt, self.plan = model, rt, plan
        self.capture, self.again = capture, again
        self.trains = {name: p.requires_grad for name, p in model.named_parameters()}

    def planned(self, request: Request) -> tuple[CapturedGraph, Plan]:
        """What runs such a call. Collective."""
        what = f"{self.plan.model.name} is called in a new way"
        agree_among(self.rt, str(request.wanted), what)
        captured = self._captured(request)
        agree_among(self.rt, captured.hash, what)
        data = from_first(self.rt, lambda: self.again(captured).to_json())
        return captured, decode_plan(data, f"for {captured.model_name}", Plan)

    def _captured(self, request: Request) -> CapturedGraph:
        for path, module in self.model.named_modules():
            module.training = request.modes.get(path, module.training)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.trains[name] or name in request.wanted.unfrozen)
        return self.capture(self.model, request.args, request.kwargs)


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model's code without its weights, so that these can go; the model itself if it can't be copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # whatever a user's class does in its own copying
        return model
