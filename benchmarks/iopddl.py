"""Large problems against the best costs known: `python benchmarks/iopddl.py [FILE NAME...] [--folder F]`.

Each file goes through the command in a process of its own, with its contest's time limit: what is timed is all of it.
The files are those of github.com/google/iopddl; best known costs are of the contest's solvers on 8 cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "iopddl"
BEST = {  # file: (best known cost, time limit in seconds)
    "B": (532_843, 60),
    "G": (217_039, 120),
    "A": (6_548_641_531, 60),
    "K": (2_274_276_676, 180),
    "P": (662_197_407_330, 240),
    "S": (1_534_613_444, 240),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BEST), help="of the files, without .json.gz (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--time-limit", type=float, help="instead of the contest's")
    given = parser.parse_args()
    print("file             cost       best known   to best            bound      gap  seconds  status")
    for name in given.names:
        best, limit = BEST.get(name, (None, 60))
        row(given.folder / f"{name}.json.gz", name, best, given.time_limit or limit)


def row(path: Path, name: str, best: int | None, limit_s: float) -> None:
    command = [sys.executable, "-m", "autopar.solver", str(path), "--json", "--time-limit", str(limit_s)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        print(f"{name:4} {done.stderr.strip().splitlines()[-1]} (exit {done.returncode}, {seconds:.1f} s)")
        return
    answer = json.loads(done.stdout)
    cost, bound = answer["cost"], answer["bound"]
    to_best = f"{(cost - best) / best:+9.4%}" if best else " " * 9
    gap = (cost - bound) / cost if cost else 0.0
    print(
        f"{name:4} {cost:>16} {best or '':>16} {to_best} {bound:>16} {gap:>8.4%} {seconds:>8.1f}  {answer['status']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
