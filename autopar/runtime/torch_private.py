"""The private names of torch that the runtime uses, all of them here (torch 2.13)."""

from __future__ import annotations

import torch


def keeps_graph() -> bool:
    """True inside a backward that was asked to keep the graph (retain_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
