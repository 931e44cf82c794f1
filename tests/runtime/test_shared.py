"""Collectives through shared memory: gloo's results, any sizes and dtypes, messages, and ranks that die or stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from autopar import native
from autopar.errors import RankError
from autopar.runtime import shared
from autopar.runtime.groups import EVERY, communicator
from autopar.runtime.launch import launch
from autopar.runtime.shared import DTYPES, SharedGroup, shared_group
from autopar.runtime.torch_private import default_store
from tests.codegen.hand import mesh

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        native.kernels() is None or sys.platform != "linux", reason=f"no kernels here: {native.found().reason}"
    ),
]
ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 2**12
COUNTS = (1, 7, 1000, 1024, 30_001)
"""Elements: less than a line of the cache, and several chunks of CHUNK_BYTES, odd ones."""


def whole_group() -> SharedGroup:
    """Of all ranks, with small chunks."""
    shared.CHUNK_BYTES = CHUNK_BYTES
    group, why = shared_group(default_store(), list(range(dist.get_world_size())), dist.get_rank(), 60.0)
    assert group is not None, why
    return group


def values(count: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Whole numbers, so that no order of a sum matters."""
    return ((torch.arange(count) * (rank + 3)) % 11 - (0 if dtype in (torch.uint8, torch.bool) else 5)).to(dtype)


def as_gloo() -> int:
    """Every collective, dtype and size; the input of a sum in place and not. Returns how many.

    Sums are compared with gloo's in float64; what is only moved, with what each rank is known to give.
    """
    group, checked = whole_group(), 0
    n, me = group.size, group.rank
    for dtype in (*DTYPES, torch.complex64):
        for count in COUNTS:
            mine, rows = values(count, dtype, me), values(n * count, dtype, me).view(n, count)
            if dtype in DTYPES:
                checked += sums_as_gloo(group, mine, rows)
            joined = torch.empty(n, count, dtype=dtype)
            group.all_gather(mine, joined)
            assert torch.equal(joined, torch.stack([values(count, dtype, q) for q in range(n)])), (dtype, count)
            group.all_to_all(rows, joined)
            assert torch.equal(joined, torch.stack([values(n * count, dtype, q).view(n, count)[me] for q in range(n)]))
            root = count % n
            told = mine.clone()
            group.broadcast(told, root)
            assert torch.equal(told, values(count, dtype, root))
            checked += 3
    group.barrier()
    return checked


def sums_as_gloo(group: SharedGroup, mine: Tensor, rows: Tensor) -> int:
    for largest in (False, True):
        wanted, whole = mine.to(torch.float64, copy=True), rows.to(torch.float64, copy=True)
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(wanted, op=op)
        dist.all_reduce(whole, op=op)
        out, part = torch.empty_like(mine), torch.empty_like(rows[0])
        group.all_reduce(mine, out, largest=largest)
        assert torch.equal(out, wanted.to(mine.dtype)), (mine.dtype, len(mine), largest)
        again = mine.clone()
        group.all_reduce(again, again, largest=largest)
        assert torch.equal(again, out)
        group.reduce_scatter(rows, part, largest=largest)
        assert torch.equal(part, whole[group.rank].to(mine.dtype))
    return 6


def uneven(group: SharedGroup) -> None:
    """Rank i sends (i + 2j) % 3 · 700 rows to rank j; once nobody sends anything; once one rank alone, to the last."""
    n, me = group.size, group.rank
    ways: list[Callable[[int, int], int]] = [lambda i, j, each=each: (i + 2 * j) % 3 * each for each in (0, 1, 700)]
    for rows_of in (*ways, lambda i, j: 3000 * (i == 0 and j == n - 1)):
        give, take = [rows_of(me, j) for j in range(n)], [rows_of(i, me) for i in range(n)]
        rows = torch.tensor([[me, j] for j, count in enumerate(give) for _ in range(count)]).view(-1, 2)
        got = torch.empty(sum(take), 2, dtype=torch.int64)
        group.all_to_all(rows, got, give, take)
        assert got.tolist() == [[i, me] for i, count in enumerate(take) for _ in range(count)]


def messages(group: SharedGroup) -> None:
    """To every rank, longest first, received in another order; more than there is room for; of unequal lengths."""
    n, me = group.size, group.rank
    for turn in range(3):
        for to in range(n):
            for tag in range(5) if to != me else ():
                group.send(values(10 ** (5 - tag), torch.float32, me + turn), to, tag)
        for source in reversed(range(n)):
            for tag in (3, 0, 4, 1, 2) if source != me else ():
                got = torch.empty(10 ** (5 - tag))
                group.receive(got, source, tag)
                assert torch.equal(got, values(10 ** (5 - tag), torch.float32, source + turn))
        group.sent()
    after, before = (me + 1) % n, (me - 1) % n
    for i in range(600):
        group.send(torch.tensor([me, i]), after, 0)
        if i >= 200:
            got = torch.empty(2, dtype=torch.int64)
            group.receive(got, before, 0)
            assert got.tolist() == [before, i - 200]
    for _ in range(200):
        group.receive(torch.empty(2, dtype=torch.int64), before, 0)
    group.sent()
    group.send(torch.zeros(3), after, 1)
    with pytest.raises(RankError, match=f"rank {before} sent another number of bytes"):
        group.receive(torch.zeros(4), before, 1)


def halves(group: SharedGroup) -> None:
    """bfloat16 and float16 are added up in float32: 256 + 1 + 1 is 258, and not 256; NaN stays in a maximum."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        x = torch.full((5,), large if group.rank == 0 else 1.0, dtype=dtype)
        group.all_reduce(x, x)
        assert torch.equal(x, torch.full((5,), large + group.size - 1).to(dtype))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([float("nan") if group.rank == at else 1.0 for at in range(group.size)], dtype=dtype)
        group.all_reduce(x, x, largest=True)
        assert bool(x.isnan().all())
    numbers = torch.tensor([6e-8, -5e-5, 65504.0, 1e-3, float("inf"), 0.333]).half()
    x = numbers if group.rank == 0 else torch.zeros(6).half()
    group.all_reduce(x, x)
    assert torch.equal(x, numbers)


def later(group: SharedGroup) -> None:
    """Handles: in order, together with calls that wait, and of two groups at once."""
    store, n, me = default_store(), group.size, group.rank
    halves_of = [list(range(n // 2)), list(range(n // 2, n))]
    mine, _ = shared_group(store, next(h for h in halves_of if me in h), me, 60.0)
    assert mine is not None
    xs = [torch.full((5000,), float(i)) for i in range(6)]
    outs = [torch.empty(5000) for _ in xs]
    handles = []
    for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
        handle = (group if i % 2 else mine).all_reduce(x, out, later=True)
        assert handle is not None
        handles.append(handle)
    group.barrier()
    for i, (handle, out) in enumerate(zip(handles, outs, strict=True)):
        handle.wait()
        handle.wait()
        assert handle.done()
        assert torch.equal(out, torch.full((5000,), float(i * (n if i % 2 else mine.size))))
    mine.leave()


def all_of_it() -> int:
    checked = as_gloo()
    group = whole_group()
    for check in (uneven, messages, halves, later):
        check(group)
        group.barrier()
    return checked


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_collective(ranks: int) -> None:
    assert launch(all_of_it, ranks, timeout_s=100) == len(COUNTS) * (6 * len(DTYPES) + 3 * (len(DTYPES) + 1))


def carriers() -> list[dict[str, str]]:
    """Of two meshes, with shared memory left out on rank 1 for the second."""
    first = communicator(mesh(dp=2)).carriers
    os.environ["AUTOPAR_SHARED_MEMORY"] = "off" if dist.get_rank() == 1 else ""
    second = communicator(mesh(dp=2))
    assert second.all_reduce(torch.ones(3), "dp").tolist() == [2, 2, 2]
    second.send_to(torch.ones(1), 1 - second.rank, 4)
    assert second.receive_from((1,), torch.float32, 1 - second.rank, 4).item() == 1
    second.sent()
    return [first, second.carriers]


def test_the_communicator_says_what_carries() -> None:
    first, second = launch(carriers, 2, timeout_s=60)
    assert first == {"dp": "shared memory", EVERY: "shared memory"}
    why = "gloo (left out by AUTOPAR_SHARED_MEMORY)"
    assert second == {"dp": why, EVERY: why}


def one_is_killed() -> None:
    rt = communicator(mesh(dp=3))
    rt.barrier()
    if rt.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rt.barrier()


def test_the_first_failure_is_the_one_that_is_told() -> None:
    with pytest.raises(RankError, match="rank 1 of 3 was killed by SIGKILL"):
        launch(one_is_killed, 3, timeout_s=60)


RANK = """
    import sys, time, torch
    from torch.distributed import TCPStore
    from autopar.errors import LostRankError
    from autopar.runtime.shared import shared_group
    own, port = int(sys.argv[1]), int(sys.argv[2])
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    groups = [shared_group(store, m, own, 30.0)[0] if own in m else None for m in ([0, 1, 2], [0, 2, 3])]
    for group in groups:
        if group is not None:
            group.barrier()
    print("ready", flush=True)
    if own in (1, 3):
        time.sleep(600)
    for group in groups:
        for call in (lambda: group.all_reduce(torch.ones(9), torch.ones(9)), group.barrier):
            try:
                call()
            except LostRankError as error:
                print(error, flush=True)
    print(*[line.split()[-2:] for line in open("/proc/self/maps") if "memfd:autopar" in line][0], flush=True)
"""


@contextlib.contextmanager
def four_ranks() -> Iterator[list[subprocess.Popen[str]]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = textwrap.dedent(RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i), str(store.port)], stdout=subprocess.PIPE, text=True, env=env
        )
        for i in range(4)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def test_a_killed_and_a_stopped_rank_are_named() -> None:
    """Within 5 s, by all that wait, again by the next call; no file is left, since there never was one."""
    before = set(os.listdir("/dev/shm"))
    with four_ranks() as ranks:
        assert [line(r) for r in ranks] == ["ready"] * 4
        for victim, by, words in ((1, signal.SIGKILL, "has ended"), (3, signal.SIGSTOP, "was stopped by a signal")):
            start = time.monotonic()
            os.kill(ranks[victim].pid, by)
            for own in (0, 2):
                wanted = f"rank {victim} {words}; rank {own} waited for it in a group of 3 ranks"
                assert [line(ranks[own]), line(ranks[own])] == [wanted, wanted]
            assert time.monotonic() - start < 5
        assert line(ranks[0]) == "/memfd:autopar (deleted)"
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "autopar" in name]
