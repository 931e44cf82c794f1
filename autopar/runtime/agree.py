"""Ranks that decide alike: a digest compared over all of them, and what rank 0 found handed to the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from autopar.errors import AutoparError, PlanError
from autopar.runtime.comm import Communicator


def agree(rt: Communicator, text: str, what: str) -> None:
    """PlanError on every rank if `text` is not the same on all. Collective."""
    if rt.mesh.size == 1:
        return
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    ends = torch.tensor([digest, -digest], dtype=torch.int64, device=rt.device)
    for axis in rt.mesh.axes:
        ends = rt.all_reduce_max(ends, axis.name)
    if int(ends[0]) != -int(ends[1]):
        raise PlanError(f"{what}: ranks differ. Call the module alike on every rank, with inputs of the same shapes")


def from_first(rt: Communicator, make: Callable[[], bytes]) -> bytes:
    """What `make` gives on rank 0. Where it raises an error of ours, the others raise PlanError with its message."""
    if rt.mesh.size == 1:
        return make()
    failed: AutoparError | None = None
    data = b""
    if rt.rank == 0:
        try:
            data = b"+" + make()
        except AutoparError as error:
            failed, data = error, b"-" + str(error).encode()
    length = _sum(rt, torch.tensor([len(data)], dtype=torch.int64, device=rt.device))
    size = int(length[0])
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(size, dtype=torch.uint8)
    found = bytes(_sum(rt, own.to(rt.device, torch.int32)).to("cpu", torch.uint8).numpy())
    if failed is not None:
        raise failed
    if found[:1] == b"-":
        raise PlanError(f"rank 0: {found[1:].decode()}")
    return found[1:]


def _sum(rt: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Over all ranks: all but rank 0 add zeros."""
    for axis in rt.mesh.axes:
        x = rt.all_reduce(x, axis.name)
    return x
