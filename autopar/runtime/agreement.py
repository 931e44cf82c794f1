"""Ranks that decide alike: what each holds is compared, and what rank 0 found is handed to the others.

`agree`, before groups form: the same plan and program, made by the same versions? Each rank puts a digest into the
store through which the process group was formed. Rank 0 compares and tells all. Only if they differ do texts travel:
then every rank ends with the same error.

`agree_among` and `from_first`, between calls, where there is a communicator and no store (threads, or one device): by
its collectives.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count, zip_longest
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from autopar.errors import AutoparError, PlanError
from autopar.ir.plan import Plan
from autopar.ir.program import Source
from autopar.ir.staged import StagedSource
from autopar.runtime.comm import Communicator
from autopar.runtime.torch_private import default_store

_AGREED = b"agreed"
_rounds = count()
"""Each rank agrees on the same things in the same order: the n-th of one is the n-th of all."""

Parts = Mapping[str, str]


def parts_of(plan: Plan, source: Source | StagedSource) -> dict[str, str]:
    """What ranks must have in common: texts by name. What a plan says of its own making may differ."""
    decided = {
        name: getattr(plan, name)
        for name in ("model", "mesh", "schedule", "precision", "parameters", "inputs", "outputs")
    }
    decided["strategies"] = {
        graph: {key: [row.inputs, row.outputs, row.tags] for key, row in rows.items()}
        for graph, rows in plan.strategies.items()
    }
    return {
        "torch": str(torch.__version__),
        "autopar": importlib.metadata.version("autopar"),
        "program": source.text,
        "plan": msgspec.json.format(msgspec.json.encode(decided), indent=1).decode(),
    }


def agree(parts: Parts) -> None:
    """Return when all ranks of the default process group hold the same; without one there is nobody to agree with.

    Raises:
        PlanError: on every rank, naming the ranks that differ and the first line that does.
    """
    if dist.is_initialized():
        key = f"autopar/agree/{next(_rounds)}"
        agree_through(default_store(), key, dist.get_rank(), dist.get_world_size(), parts)


def agree_through(store: Any, key: str, rank: int, ranks: int, parts: Parts) -> None:
    """As `agree`, through this store, under this key."""
    store.set(f"{key}/{rank}", _digest(parts))
    if rank == 0:
        store.set(f"{key}/verdict", _verdict(store, key, ranks))
    verdict: bytes = store.get(f"{key}/verdict")
    if verdict == _AGREED:
        return
    between, _, message = verdict.decode().partition(";")
    pair = [int(r) for r in between.split(",") if r]
    if rank in pair:
        store.set(f"{key}/text/{rank}", zlib.compress(msgspec.json.encode(dict(parts))))
    texts = [msgspec.json.decode(zlib.decompress(store.get(f"{key}/text/{r}"))) for r in pair]
    raise PlanError(f"{message}; {_first_difference(pair[0], pair[1], *texts)}" if pair else message)


def _digest(parts: Parts) -> str:
    return hashlib.sha256("\0".join(f"{k}\0{v}" for k, v in sorted(parts.items())).encode()).hexdigest()


def _verdict(store: Any, key: str, ranks: int) -> bytes:
    """_AGREED, or "rank to compare with,rank that differs;message"."""
    try:
        digests = list(store.multi_get([f"{key}/{r}" for r in range(ranks)]))
    except dist.DistStoreError:
        late = [r for r in range(ranks) if not store.check([f"{key}/{r}"])]
        return f";{_listed(late, ranks)} did not come to compile what the others compile".encode()
    common = Counter(digests).most_common(1)[0][0]
    odd = [r for r, d in enumerate(digests) if d != common]
    if not odd:
        return _AGREED
    what = f"{_listed(odd, ranks)} would not run what the others run"
    return f"{digests.index(common)},{odd[0]};{what}".encode()


def _listed(some: list[int], ranks: int) -> str:
    shown = ", ".join(map(str, some[:8])) + (", …" if len(some) > 8 else "")
    return f"rank{'s' if len(some) > 1 else ''} {shown} of {ranks}"


def _first_difference(a: int, b: int, mine: Parts, theirs: Parts) -> str:
    """The first line that differs, in the order of `parts_of`: versions, program, plan."""
    for part in mine:
        if mine[part] == theirs.get(part):
            continue
        rows = zip_longest(mine[part].splitlines(), theirs.get(part, "").splitlines(), fillvalue="nothing more")
        for line, (x, y) in enumerate(rows, start=1):
            if x != y:
                where = f"{part} line {line}" if "\n" in mine[part] else part
                return f"first difference, {where}:\n  rank {a}: {x.strip()}\n  rank {b}: {y.strip()}"
    return "they hold different parts"


def agree_among(rt: Communicator, text: str, what: str) -> None:
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
