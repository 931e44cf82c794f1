"""Ranks as processes: torch.distributed, gloo on CPU and NCCL on GPUs; one process group per mesh axis.

Groups whose ranks are all on one host and compute on its CPU exchange tensors through memory that they share
(`runtime.shared`), which is faster than gloo. `GroupCommunicator.carriers` says what carries which axis.

gloo of torch 2.13 carries every collective used here, for floating, integer and boolean dtypes, at 2, 3 and 4 ranks
(tests/runtime/test_groups.py). Nothing is emulated (`EMULATED` would list it).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import PlanError, UserError
from autopar.ir.mesh import Mesh
from autopar.runtime.comm import Communicator
from autopar.runtime.shared import DTYPES, SharedGroup, shared_group
from autopar.runtime.spread_numbers import serve_whole_numbers
from autopar.runtime.torch_private import default_store, storage_uses
from autopar.runtime.whole_steps import serve_whole_steps

EMULATED: frozenset[str] = frozenset()
"""Collectives that a backend lacks and that are made of others here, as "backend/collective"."""

YIELDS = 100
"""How often at most after a collective the processor is given to the threads that still hold its tensors."""
GROUP_TIMEOUT_S = 1800.0
"""How long a collective waits for a rank that is alive. A rank that dies ends the others at once (gloo), within seconds
(shared memory), or is ended by torchrun or `launch`. AUTOPAR_GROUP_TIMEOUT_S sets another."""


EVERY = "every rank"
"""Where carriers are named by axis: that of messages between any two ranks."""


class GroupCommunicator(Communicator):
    """`rt` of one process. `device_mesh` is the same mesh as torch knows it, for DTensors.

    `carriers`: axis, or EVERY -> what its tensors go through, for people.
    """

    def __init__(self, mesh: Mesh, device: torch.device, device_mesh: DeviceMesh) -> None:
        super().__init__(mesh, dist.get_rank(), device)
        self.device_mesh = device_mesh
        serve_whole_numbers()
        serve_whole_steps()
        self._groups: dict[str, Any] = {name: device_mesh.get_group(name) for name in mesh.names}
        self._under_way: list[tuple[Any, Tensor]] = []
        self._shared: dict[str, SharedGroup] = {}
        self.carriers = dict.fromkeys((*mesh.names, EVERY), "nccl" if device.type == "cuda" else "gloo")
        if device.type == "cpu":
            self._share()

    def _share(self) -> None:
        """Share memory in every group that can. Collective."""
        limit_s = group_timeout_s()
        groups = {name: dist.get_process_group_ranks(group) for name, group in self._groups.items()}
        for name, members in {**groups, EVERY: list(range(self.mesh.size))}.items():
            if len(members) == 1:
                continue
            shared, why = shared_group(default_store(), members, self.rank, limit_s)
            self.carriers[name] = _carrier(shared, why)
            if shared is not None:
                self._shared[name] = shared

    def _summing(self, axis: str, dtype: torch.dtype) -> SharedGroup | None:
        """The shared memory of an axis, if it can add up such numbers."""
        return self._shared.get(axis) if dtype in DTYPES else None

    def _reduce(self, x: Tensor, axis: str, largest: bool) -> Tensor:
        if (shared := self._summing(axis, _real(x).dtype)) is not None:
            out = torch.empty_like(x)
            shared.all_reduce(_real(x), _real(out), largest=largest)
            return out
        out = x.clone()
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        self._run(axis, partial(dist.all_reduce, op=op), _real(out))
        return out

    def _gather(self, x: Tensor, axis: str) -> Tensor:
        n = self.size(axis)
        out = torch.empty((n, *x.shape), dtype=x.dtype, device=x.device)
        if (shared := self._shared.get(axis)) is not None:
            shared.all_gather(x, out)
        else:
            self._run(axis, dist.all_gather_single, _real(out).view(-1), _real(x).reshape(-1))
        return out

    def _scatter(self, x: Tensor, axis: str, own: bool) -> Tensor:
        if (shared := self._summing(axis, _real(x).dtype)) is not None:
            out = torch.empty(x.shape[1:], dtype=x.dtype)
            shared.reduce_scatter(_real(x), _real(out))
            return out
        if self.device.type == "cpu":
            # gloo's is an all-reduce of a copy: where x can be given up the copy is spared.
            summed = x if own else x.clone()
            self._run(axis, dist.all_reduce, _real(summed))
            return summed[self.index(axis)].clone()
        out = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
        self._run(axis, dist.reduce_scatter_single, _real(out).reshape(-1), _real(x).reshape(-1))
        return out

    def _exchange(self, x: Tensor, axis: str) -> Tensor:
        out = torch.empty_like(x)
        if (shared := self._shared.get(axis)) is not None:
            shared.all_to_all(x, out)
        else:
            self._run(axis, dist.all_to_all_single, _real(out).view(-1), _real(x).reshape(-1))
        return out

    def send_to(self, x: Tensor, to: int, tag: int) -> None:
        """Give a tensor to another rank, which asks for it by the same tag; goes on at once."""
        x = x.contiguous()
        if (shared := self._shared.get(EVERY)) is not None:
            shared.send(x, to, tag)
            return
        self._under_way = [w for w in self._under_way if not w[0].is_completed()]
        self._under_way.append((dist.isend(_real(x), to, tag=tag), x))

    def receive_from(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> Tensor:
        """What another rank sends by this tag; waits for it."""
        out = torch.empty(shape, dtype=dtype, device=self.device)
        if (shared := self._shared.get(EVERY)) is not None:
            shared.receive(out, source, tag)
            return out
        dist.recv(_real(out), source, tag=tag)
        return out

    def sent(self) -> None:
        """Wait until all that was sent has arrived."""
        if (shared := self._shared.get(EVERY)) is not None:
            shared.sent()
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def pass_on(self, x: Tensor, axis: str) -> Callable[[], Tensor]:
        """Begin to send x to the next rank along the axis; what waits for the one that the rank before sends."""
        x, group = x.contiguous(), self._groups[axis]
        out = torch.empty_like(x)
        before, after = self.beside(axis)
        uses = self._uses(x, out)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, out, before, group)]
        )

        def arrived() -> Tensor:
            while works:
                works.pop().wait()
            self._let_go((x, out), uses)
            return out

        return arrived

    def _run(self, axis: str, collective: Callable[..., object], *tensors: Tensor) -> None:
        """A collective that ends when its tensors are the program's alone again."""
        uses = self._uses(*tensors)
        collective(*tensors, group=self._groups[axis])
        self._let_go(tensors, uses)

    def _uses(self, *tensors: Tensor) -> list[int]:
        """How many hold each, where gloo's threads may come to."""
        return [storage_uses(x) for x in tensors] if self.device.type == "cpu" else []

    def _let_go(self, tensors: Sequence[Tensor], before: list[int]) -> None:
        """gloo's threads hold tensors a moment longer than a collective lasts, and with them memory that the program
        has freed: give them the processor until they let go (once is nearly always enough)."""
        for x, uses in zip(tensors, before, strict=False):
            for _ in range(YIELDS):
                if storage_uses(x) <= uses:
                    break
                time.sleep(0)

    def _send_rows(self, x: Tensor, axis: str, give: list[int], take: list[int]) -> Tensor:
        out = x.new_empty((sum(take), *x.shape[1:]))
        if (shared := self._shared.get(axis)) is not None:
            shared.all_to_all(x, out, give, take)
            return out
        dist.all_to_all_single(_real(out), _real(x), take, give, group=self._groups[axis])
        return out


def _real(x: Tensor) -> Tensor:
    """Complex numbers travel as pairs."""
    return torch.view_as_real(x) if x.is_complex() else x


def ranks_started() -> int:
    """How many ranks there are, before any group is made: of a process group that the user made, or of the
    environment; 1 without either. UserError where the environment's number is none."""
    if dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise UserError(f"WORLD_SIZE is {text!r}; wanted the number of ranks, as torchrun sets it")
    return int(text)


def _carrier(shared: SharedGroup | None, why: str) -> str:
    return why if shared is not None else f"gloo ({why})"


def carrier() -> str:
    """What CPU tensors go through where all ranks meet, for people. Collective over the default process group."""
    members = list(range(dist.get_world_size()))
    shared, why = shared_group(default_store(), members, dist.get_rank(), group_timeout_s())
    if shared is not None:
        shared.leave()
    return _carrier(shared, why)


def group_timeout_s() -> float:
    """How long a collective waits for a rank that is alive."""
    return float(os.environ.get("AUTOPAR_GROUP_TIMEOUT_S", GROUP_TIMEOUT_S))


def init_ranks(backend: str | None = None) -> None:
    """Start the default process group from the environment (torchrun's, SLURM's, `launch`'s) unless there is one."""
    if dist.is_initialized():
        return
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=group_timeout_s()))


def communicator(mesh: Mesh, device_type: str | None = None) -> GroupCommunicator:
    """`rt` of this process on `mesh`; collective. The default process group must have as many ranks as the mesh.

    Raises:
        PlanError: there is no process group, or it has another number of ranks.
    """
    if not dist.is_initialized():
        raise PlanError(
            f"the plan is for {mesh.size} ranks, and no process group is there; start the script with "
            f"torchrun --nproc-per-node {mesh.size}, or autopar.launch(train, ranks={mesh.size})"
        )
    if dist.get_world_size() != mesh.size:
        raise PlanError(
            f"the plan is for {mesh.size} ranks ({mesh}), this run has {dist.get_world_size()}; search again or start "
            f"{mesh.size} ranks"
        )
    kind = device_type or ("cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()) else "cpu")
    device_mesh = init_device_mesh(kind, mesh.shape, mesh_dim_names=mesh.names)
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    return GroupCommunicator(mesh, device, device_mesh)
