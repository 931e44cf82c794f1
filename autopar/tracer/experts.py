"""Mixtures of experts of transformers, captured with our own operators (`ops.custom`) whatever the model's config says.

transformers' ways to run experts (a loop over those that are hit, copies of matrices for each token, grouped products
after a global sort) are one function of hidden states, chosen experts and their weights; which of them runs is the
choice of its public `ExpertsInterface`. While a model is captured, ours is what every choice means: it says no more
than which rows belong together, so that tokens and experts can be cut.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import autopar.ops.custom  # noqa: F401 (defines the operators)

INTERFACE = "transformers.integrations.moe"
NAMES = ("eager", "batched_mm", "grouped_mm", None)
"""Values of `config._experts_implementation` that mean the same function; None in a module built by itself."""


@contextmanager
def experts_routed() -> Iterator[None]:
    """While entered, experts of transformers are ours. Without transformers nothing happens."""
    module = sys.modules.get(INTERFACE)
    table: MutableMapping[Any, Any] | None = getattr(module, "ALL_EXPERTS_FUNCTIONS", None)
    if table is None:
        yield
        return
    before = {name: table[name] for name in NAMES if name in table}
    own = _ours(before.get("grouped_mm"))
    try:
        for name in NAMES:
            table[name] = own
        yield
    finally:
        for name in NAMES:
            if name in before:
                table[name] = before[name]
            else:
                del table[name]


def _ours(other: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    def forward(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden: [tokens, width], index and weights: [tokens, k] -> [tokens, width]."""
        if getattr(module, "_is_expert_parallel", False) and other is not None:
            return other(module, hidden, index, weights)
        return experts_forward(module, hidden, index, weights)

    return forward


def experts_forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """`sum over k of weights[:, k] · expert[index[:, k]](hidden)`.

    Args:
        module: with 3-d `gate_up_proj` or `up_proj`, and `down_proj`, as transformers' decorator describes them.
    """
    ends, order = torch.ops.autopar.route(index, module.num_experts)
    slots = hidden.unsqueeze(-2).expand(*hidden.shape[:-1], index.shape[-1], hidden.shape[-1])
    rows = torch.ops.autopar.spread(slots, ends, order)
    expert = None
    if module.has_bias:
        expert = torch.ops.autopar.spread(index.unsqueeze(-1), ends, order).squeeze(-1)

    def product(x: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        weight = weight if module.is_transposed else weight.transpose(1, 2)
        out: Tensor = torch.ops.autopar.grouped_mm(x.to(weight.dtype), weight, ends)
        return out if expert is None else out + getattr(module, f"{name}_bias")[expert]

    if module.has_gate:
        rows = module._apply_gate(product(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(product(rows, "up_proj"))
    rows = product(rows, "down_proj")
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    slots = torch.ops.autopar.collect(rows, ends, order, list(index.shape))
    found: Tensor = (slots * weights.unsqueeze(-1)).sum(-2).to(hidden.dtype)
    return found
