"""What the README tells a newcomer to run, runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.ranks
def test_quickstart_trains_on_two_ranks():
    done = subprocess.run(
        [sys.executable, "examples/quickstart.py"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(x) for x in re.findall(r"\d+\.\d+", done.stdout.split("loss", 1)[1])]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5


def test_readme_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    links = re.findall(r"\]\(([^)h][^)]*)\)", text) + re.findall(r"`((?:docs|examples|tests|scripts)/[\w./-]+)`", text)
    assert len(links) >= 6
    for link in (x for x in links if "NNNN" not in x):
        assert (ROOT / link).exists(), link
