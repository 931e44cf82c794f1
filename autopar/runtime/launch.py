"""Start ranks on this machine from a script or notebook, as torchrun does from a shell.

Each rank is a fresh Python process in its own process group, with the environment of torchrun (RANK, WORLD_SIZE,
MASTER_ADDR, ...) and a gloo process group. The function goes by name: a function of a module is imported; one of the
running script is found by running the script again in the rank up to its own call of `launch` (so a guard
`if __name__ == "__main__"` is good to have but not needed); one of a notebook by its imports, functions, classes and
constants, taken from the cells that ran. Arguments and the result are pickled.

A rank that raises, exits or is killed takes the others down. Results are handed over before the process groups are torn
down, since gloo's teardown can hang.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from torch._C._distributed_c10d import TCPStore

from autopar.errors import RankError, UserError
from autopar.runtime.entry_point import STACK_SIGNAL, in_rank, locate, stop_or_refuse

STACK_LINES = 4
"""Of each rank that is late, so many of the innermost lines are shown."""
GRACE_S = 1.0
"""After the first failure: how long other ranks may take to report theirs, to find which came first."""
STACK_S = 2.0
"""After the time limit: how long ranks may take to say where they are."""
LEAVE_S = 5.0
"""After the results are there: how long ranks may take to end by themselves."""


@dataclass
class _Rank:
    """One process."""

    index: int
    process: subprocess.Popen[bytes]
    folder: Path
    lifeline: int
    readers: tuple[threading.Thread, ...]

    @property
    def result(self) -> Path:
        return self.folder / f"{self.index}.result"

    @property
    def error(self) -> Path:
        return self.folder / f"{self.index}.error"

    @property
    def stack(self) -> Path:
        return self.folder / f"{self.index}.stack"

    def at(self) -> str:
        """The innermost lines of its main thread, "" before it has told them."""
        text = self.stack.read_text() if self.stack.exists() else ""
        return "\n".join(text.splitlines()[1 : 1 + STACK_LINES])

    def failed(self) -> bool:
        """True if it raised, was killed, or exited without a result."""
        return self.error.exists() or (self.process.poll() is not None and not self.result.exists())

    def done(self) -> bool:
        """True if its result is there."""
        return self.result.exists()


def launch(
    fn: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...] = (),
    *,
    timeout_s: float | None = None,
) -> Any:
    """Run `fn(*args)` on `ranks` processes and return rank 0's result. Each has one thread, or OMP_NUM_THREADS if set.

    Raises:
        RankError: a rank failed, or they did not end in `timeout_s`; names the rank and carries its traceback.
        UserError: `fn` is not reachable by name, or `ranks` is below 1.
    """
    if in_rank():
        stop_or_refuse()
    if ranks < 1:
        raise UserError(f"launch with {ranks} ranks; wanted 1 or more")
    task = locate(fn, args)
    folder = Path(tempfile.mkdtemp(prefix="autopar-launch-"))
    (folder / "task").write_bytes(pickle.dumps(task))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    started: list[_Rank] = []
    try:
        for index in range(ranks):
            started.append(_start(index, ranks, folder, store.port))
        _wait(started, timeout_s)
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
        return pickle.loads(started[0].result.read_bytes())
    finally:
        _end(started)
        shutil.rmtree(folder, ignore_errors=True)
        del store


def _start(index: int, ranks: int, folder: Path, port: int) -> _Rank:
    """One rank, in its own process group. It ends when the read end of its lifeline sees the parent gone."""
    reading, writing = os.pipe()
    env = dict(os.environ)
    env |= {
        "RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "AUTOPAR_LAUNCH": str(folder), "AUTOPAR_LIFELINE": str(reading), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", "from autopar.runtime.entry_point import main; main()"],
        env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(reading,),
        start_new_session=True, cwd=os.getcwd(),
    )  # fmt: skip
    os.close(reading)
    label = "" if index == 0 else f"[rank {index}] "
    readers = tuple(
        threading.Thread(target=_forward, args=(stream, sink, label), daemon=True)
        for stream, sink in ((process.stdout, "stdout"), (process.stderr, "stderr"))
    )
    for reader in readers:
        reader.start()
    return _Rank(index=index, process=process, folder=folder, lifeline=writing, readers=readers)


def _forward(stream: IO[bytes], sink: str, label: str) -> None:
    """Lines of a rank to this process's own output (a notebook's cell, too)."""
    for line in stream:
        out = getattr(sys, sink)
        try:
            out.write(label + line.decode(errors="replace"))
            out.flush()
        except ValueError:
            return


def _wait(ranks: list[_Rank], timeout_s: float | None) -> None:
    """Until all have handed in a result. RankError at the first failure or at the time limit."""
    end = time.monotonic() + timeout_s if timeout_s is not None else None
    while True:
        if any(r.failed() for r in ranks):
            raise _failure(ranks)
        if all(r.done() for r in ranks):
            return
        if end is not None and time.monotonic() > end:
            late = [r for r in ranks if not r.done()]
            names = ", ".join(str(r.index) for r in late)
            raise RankError(
                f"ranks {names} of {len(ranks)} did not end in {timeout_s:g} s; all were stopped{_where(late)}"
            )
        time.sleep(0.02)


def _where(ranks: list[_Rank]) -> str:
    """The innermost Python lines that ranks are at, so that one sees who waits and who is waited for."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            if rank.stack.exists():  # else it does not listen for the signal yet, which would end it
                os.kill(rank.process.pid, STACK_SIGNAL)
    end = time.monotonic() + STACK_S
    while time.monotonic() < end and not all(r.at() for r in ranks):
        time.sleep(0.02)
    return "".join(f"\nrank {r.index} is at\n{r.at() or '  an unknown place: it has not started yet'}" for r in ranks)


def _failure(ranks: list[_Rank]) -> RankError:
    """One error for the rank that failed first. A lost connection is a consequence: it counts last."""
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and not all(r.failed() for r in ranks):
        time.sleep(0.02)
    reports = [r for rank in ranks if rank.failed() and (r := _report(rank, len(ranks)))]
    _, _, message = min(reports)
    return RankError(message)


def _report(rank: _Rank, n: int) -> tuple[tuple[int, float], int, str]:
    """((kind, time), rank, message) of one failed rank."""
    if rank.error.exists():
        failed_at, summary, trace, lost = pickle.loads(rank.error.read_bytes())
        return (2 if lost else 0, failed_at), rank.index, f"rank {rank.index} of {n} failed: {summary}\n{trace}"
    code = rank.process.returncode
    if code < 0:
        name = signal.Signals(-code).name
        return (1, 0.0), rank.index, f"rank {rank.index} of {n} was killed by {name}"
    return (1, 0.0), rank.index, f"rank {rank.index} of {n} exited with code {code} before it returned"


def _end(ranks: list[_Rank]) -> None:
    """End every process that is left, with all that it started."""
    if all(r.done() for r in ranks):
        end = time.monotonic() + LEAVE_S
        while time.monotonic() < end and any(r.process.poll() is None for r in ranks):
            time.sleep(0.01)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()
        os.close(rank.lifeline)
        for reader in rank.readers:
            reader.join(1.0)
