"""Collectives: the same results from threads and from processes, by gloo and shared memory, against whole tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar import native
from autopar.errors import PlanError, RankError
from autopar.ir.layout import Layout, P, Placement, R, S
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import plan_reshard
from autopar.runtime.comm import Alone, Communicator
from autopar.runtime.groups import communicator
from autopar.runtime.launch import launch
from autopar.runtime.threads import run_threads
from autopar.runtime.torch_private import storage_uses
from tests.codegen.hand import mesh

DTYPES = ("float64", "float32", "bfloat16", "int64", "bool")


def pieces(whole: Tensor, layout: Layout, rt: Communicator) -> Tensor:
    """This rank's piece of `whole`; of a sum, the whole on the first rank of the axis and zeros elsewhere."""
    for axis, place in zip(layout.axes, layout.placements, strict=True):
        if place.dim >= 0:
            whole = whole.chunk(rt.size(axis), place.dim)[rt.index(axis)]
        elif place == P:
            whole = whole if rt.index(axis) == rt.size(axis) - 1 else torch.zeros_like(whole)
    return whole


def check_conversions(rt: Communicator) -> int:
    """Every conversion of every layout of a [12, 12, 2] tensor, in every dtype. Returns how many."""
    count = 0
    choices: tuple[Placement, ...] = (R, P, S(0), S(1))
    names = rt.mesh.names
    layouts = [Layout(names, (a,)) for a in choices] if len(names) == 1 else [
        Layout(names, (a, b)) for a in choices for b in choices
    ]  # fmt: skip
    for name in DTYPES if len(names) == 1 else DTYPES[:1]:
        whole = (torch.arange(288).view(12, 12, 2) % 7).to(getattr(torch, name))
        for before in layouts:
            for after in layouts:
                if plan_reshard(before, after) is None:
                    continue
                mine = pieces(whole, before, rt).transpose(0, 2).contiguous().transpose(0, 2)
                got = rt.convert(mine, before, after, (12, 12, 2))
                wanted = whole if after.partial else pieces(whole, after, rt)
                for axis, place in zip(names, after.placements, strict=True):
                    if place == P:
                        got = rt.all_reduce(got, axis)
                if after.partial:
                    wanted = pieces(whole, Layout(names, tuple(R if p == P else p for p in after.placements)), rt)
                assert torch.equal(got, wanted), (rt.rank, name, str(before), str(after))
                assert got.is_contiguous() or before == after
                count += 1
    return count


def check_rest(rt: Communicator) -> None:
    """Maxima, scalars, tuples of axes."""
    names = rt.mesh.names
    n, at = rt.size(names), rt.index(names)
    assert (n, at) == (rt.mesh.size, rt.rank)
    assert rt.all_reduce_max(torch.tensor(float(rt.rank)), names).item() == n - 1
    assert rt.all_reduce(torch.tensor(rt.rank + 1), names).item() == n * (n + 1) // 2
    x = torch.arange(2.0 * n).view(n, 2)
    mine = rt.slice(x, names, 0)
    assert torch.equal(mine, x[at : at + 1])
    assert torch.equal(rt.all_gather(mine, names, 0), x)
    assert torch.equal(rt.reduce_scatter(x, names, 0), n * mine)
    y = torch.arange(1.0 * n * n).view(n, n)
    assert torch.equal(rt.all_to_all(rt.slice(y, names, 0), names, 0, 1), rt.slice(y, names, 1))
    pair = torch.complex(torch.ones(2), torch.full((2,), float(rt.rank)))
    assert torch.equal(rt.all_gather(pair, names, 0).imag[::2], torch.arange(float(n)))
    for axis in names:
        check_rows(rt, axis)
        if rt.size(axis) > 1:
            check_passing_on(rt, axis)
    rt.barrier()


def check_rows(rt: Communicator, axis: str) -> None:
    """Unequal counts, none among them: rank i sends (i + 2j) % 3 rows to rank j."""
    n, me = rt.size(axis), rt.index(axis)
    give, take = [(me + 2 * j) % 3 for j in range(n)], [(i + 2 * me) % 3 for i in range(n)]
    told = rt.exchange_counts(torch.tensor(give).view(n, 1), axis)
    assert told.flatten().tolist() == take
    rows = torch.tensor([[me, j] for j, count in enumerate(give) for _ in range(count)]).view(-1, 2)
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        got = rt.exchange_rows(rows.to(dtype), axis, give, take)
        assert got.tolist() == [[i, me] for i, count in enumerate(take) for _ in range(count)]
    back = rt.exchange_rows(got, axis, take, give)
    assert torch.equal(back, rows)


def check_passing_on(rt: Communicator, axis: str) -> None:
    """Round the ring, two tensors at a time; the second is waited for after the next one has set off."""
    n, me = rt.size(axis), rt.index(axis)
    for dtype in (torch.float64, torch.bfloat16):
        x, y = torch.full((3, 2), me, dtype=dtype), torch.full((5,), me, dtype=dtype)
        behind = rt.pass_on(y, axis)
        for turn in range(1, n + 1):
            ahead = rt.pass_on(x, axis)
            y = behind()
            behind = rt.pass_on(y, axis)
            x = ahead()
            assert x.tolist() == [[(me - turn) % n] * 2] * 3 and y.tolist() == [(me - turn) % n] * 5
        assert behind().tolist() == [(me - 1) % n] * 5


MESHES = {"one": mesh(dp=1), "two": mesh(dp=2), "three": mesh(tp=3), "2x2": mesh(dp=2, tp=2), "2x3": mesh(dp=2, tp=3)}


@pytest.mark.parametrize("name", MESHES)
def test_threads(name: str) -> None:
    def both(rt: Communicator) -> int:
        check_rest(rt)
        return check_conversions(rt)

    counts = run_threads(MESHES[name], both, timeout_s=60)
    assert len(set(counts)) == 1 and counts[0] > 50


def in_process(on: Mesh, carrier: str) -> int:
    os.environ["AUTOPAR_SHARED_MEMORY"] = "off" if carrier == "gloo" else ""
    rt = communicator(on)
    assert carrier == "gloo" or native.kernels() is None or set(rt.carriers.values()) == {carrier}
    check_rest(rt)
    x = torch.ones(6, 6)
    uses = storage_uses(x)
    for _ in range(100):
        rt.all_gather(x, on.names[0], 0)
        assert storage_uses(x) == uses, "gloo still holds a tensor of a collective that has ended"
    return check_conversions(rt)


@pytest.mark.ranks
@pytest.mark.timeout(100)
@pytest.mark.parametrize(("name", "carrier"), [("three", "gloo"), ("2x2", "gloo"), ("2x2", "shared memory")])
def test_processes(name: str, carrier: str) -> None:
    assert launch(in_process, MESHES[name].size, (MESHES[name], carrier), timeout_s=80) > 50


def test_one_device_needs_no_process_group() -> None:
    rt = Alone(mesh(dp=1, tp=1), torch.device("cpu"))
    check_rest(rt)
    assert check_conversions(rt) > 50


def test_a_plan_for_ranks_that_are_not_there() -> None:
    with pytest.raises(PlanError, match=r"torchrun --nproc-per-node 2"):
        communicator(mesh(dp=2))


def _fails_on(rank: int) -> Callable[[Communicator], None]:
    def run(rt: Communicator) -> None:
        if rt.rank == rank:
            raise ValueError("no such token")
        rt.all_reduce(torch.zeros(1), "dp")

    return run


def test_a_failing_thread_ends_all() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 of 3 failed: ValueError: no such token") as caught:
        run_threads(3, _fails_on(2), timeout_s=30)
    assert time.monotonic() - start < 10
    assert isinstance(caught.value.__cause__, ValueError)


def test_threads_that_disagree() -> None:
    with pytest.raises(RankError, match="different tensors"):
        run_threads(2, lambda rt: rt.all_reduce(torch.zeros(rt.rank + 1), "dp"), timeout_s=30)


def test_threads_that_never_meet() -> None:
    def run(rt: Communicator) -> None:
        if rt.rank == 0:
            rt.all_reduce(torch.zeros(1), "dp")

    with pytest.raises(RankError, match=r"rank 0 of 2 waited 1 s for the others|ranks \[0\] of 2 did not end in 1 s"):
        run_threads(2, run, timeout_s=1)
