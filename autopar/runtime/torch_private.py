"""The private names of torch that the runtime uses, all of them here (torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed


def keeps_graph() -> bool:
    """True inside a backward that was asked to keep the graph (retain_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def default_store() -> Any:
    """The key-value store through which the ranks of the default process group found each other."""
    return torch.distributed.distributed_c10d._get_default_store()
