"""How long does a whole cold search take? python benchmarks/search_cold.py

Each command runs in a new process: import, capture, solve, print. Prints wall time, peak memory and the mesh found.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

CASES = (("llama3-8b", "dgx-h100:1"), ("llama3-70b", "dgx-h100:8"), ("gpt3-175b", "dgx-a100-80g:128"))


def main() -> None:
    """Print one line a case."""
    for model, cluster in (sys.argv[1:] and [tuple(a.split("@")) for a in sys.argv[1:]]) or CASES:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "autopar", "search", model, "--cluster", cluster, "--json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        wall_s = time.perf_counter() - start
        peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        if done.returncode:
            print(f"{model} on {cluster}: exit {done.returncode} after {wall_s:.1f} s: {done.stderr.strip()[-300:]}")
            continue
        plan = json.loads(done.stdout)
        print(
            f"{model} on {cluster}: {wall_s:.1f} s, peak so far {peak_gib:.2f} GiB, mesh {plan['mesh']['axes']}, "
            f"step {plan['predicted']['step_time_us'] / 1e3:.1f} ms, {plan['solver']['status']}, "
            f"gap {plan['solver']['gap']:.2%}"
        )


if __name__ == "__main__":
    main()
