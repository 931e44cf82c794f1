"""The C++ kernels under sanitizers; takes a compiler and a minute."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="no cmake or no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_nothing_is_found(sanitizer: str) -> None:
    script = Path(__file__).parents[1] / "scripts" / "sanitize"
    done = subprocess.run([script, sanitizer], capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{sanitizer}: ok\n"
