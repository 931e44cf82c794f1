"""Ranks as processes: results, failures, kills, time limits, orphans, scripts and notebooks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import RankError, UserError
from autopar.runtime.entry_point import _notebook
from autopar.runtime.launch import launch

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(90)]
ROOT = Path(__file__).parents[2]


def total(x: float) -> tuple[float, int]:
    value = torch.full((3,), x * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return float(value[0]), torch.get_num_threads()


def test_returns_rank_0s_result() -> None:
    assert launch(total, 3, (2.0,), timeout_s=60) == (12.0, int(os.environ.get("OMP_NUM_THREADS", "1")))


def raises(folder: str) -> None:
    Path(folder, f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the data is bad")
    dist.all_reduce(torch.zeros(1))


def killed(folder: str) -> None:
    Path(folder, f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def exits(folder: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(7)
    time.sleep(60)


def sleeps(folder: str) -> None:
    Path(folder, f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(60)


def _alive(folder: Path) -> list[int]:
    pids = [int(p.read_text()) for p in folder.glob("pid*")]
    return [p for p in pids if Path(f"/proc/{p}").exists() and " Z " not in Path(f"/proc/{p}/stat").read_text()]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (raises, ("rank 1 of 2 failed", "ValueError: the data is bad", "in raises")),
        (killed, ("rank 1 of 2 was killed by SIGKILL",)),
        (exits, ("rank 0 of 2 exited with code 7",)),
    ],
)
def test_one_failing_rank_ends_all(fn: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(fn, 2, (str(tmp_path),), timeout_s=60)
    assert time.monotonic() - start < 30
    for word in words:
        assert word in str(caught.value)
    assert _alive(tmp_path) == []


def test_time_limit(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ranks 0, 1 of 2 did not end in 8 s"):
        launch(sleeps, 2, (str(tmp_path),), timeout_s=8)
    assert _alive(tmp_path) == []


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    code = f"""
        import sys; sys.path.insert(0, {str(ROOT)!r})
        from tests.runtime.test_launch import sleeps
        from autopar.runtime.launch import launch
        launch(sleeps, 2, ({str(tmp_path)!r},))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    end = time.monotonic() + 40
    while len(list(tmp_path.glob("pid*"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(_alive(tmp_path)) == 2
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while _alive(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert _alive(tmp_path) == []


SCRIPT = """
    import torch, torch.distributed as dist
    from autopar.runtime.launch import launch

    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

    def work(pair):
        x = torch.tensor([float(pair.a)]); dist.all_reduce(x)
        print("hello from", dist.get_rank())
        return Pair(x.item(), pair.b)

    {guard}found = launch(work, 2, (Pair(3, "b"),), timeout_s=60)
    {guard}print("found", found.a, found.b)
"""


@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__": '])
def test_a_script_with_and_without_a_guard(guard: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(guard=guard)))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=80, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "found 6.0 b" in done.stdout
    assert "[rank 1] hello from 1" in done.stdout and "\nhello from 0" in "\n" + done.stdout


NOTEBOOK = """
    import sys; sys.path.insert(0, {root!r})
    cells = ["import torch, torch.distributed as dist", "class Scale(torch.nn.Module):\\n    by = 3",
             "def work(x):\\n    y = torch.tensor([x * Scale.by])\\n    dist.all_reduce(y)\\n    return y.item()"]
    In = ["", *cells, "print('never again')"]
    for cell in cells:
        exec(cell, globals())
    from autopar.runtime.launch import launch
    print("found", launch(work, 2, (2.0,), timeout_s=60))
"""


def test_a_notebooks_function() -> None:
    """A main module without a file, but with cells, as IPython has."""
    code = textwrap.dedent(NOTEBOOK.format(root=str(ROOT)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "found 12.0\n"


def test_a_notebook_gives_its_definitions() -> None:
    main = types.ModuleType("main")
    main.In = ["", "import os\nx = 3\nprint('ran')", "%magic", "def f():\n    return x\nbig = f()"]  # type: ignore[attr-defined]
    text = _notebook(main)
    assert text == "import os\nx = 3\ndef f():\n    return x"


def test_what_has_no_name_is_refused() -> None:
    with pytest.raises(UserError, match="no name that a rank can find"):
        launch(lambda: None, 2)


TRAIN = """
    import sys, time, torch, torch.distributed as dist
    from autopar.runtime.groups import init_ranks
    init_ranks()
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("bad")
    dist.all_reduce(torch.zeros(1))
"""


def test_under_torchrun_a_failing_rank_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    start = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=env, check=False)
    assert done.returncode != 0 and "ValueError: bad" in done.stderr
    assert time.monotonic() - start < 50
