"""The build backend: scikit-build-core, but for editable installs.

scikit-build-core's own editable installs put a finder before everything on sys.path, so that a source tree named by
PYTHONPATH, another clone say, would be passed over without a word. Here an editable install is the ordinary wheel
without the Python files and with one .pth line that names this source tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scikit_build_core.build import (
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Name of the wheel made."""
    root = Path(__file__).parents[1]
    line = root / "build" / "autopar_source.pth"
    line.parent.mkdir(exist_ok=True)
    line.write_text(f"{root}\n")
    settings = {**(config_settings or {}), "wheel.packages": [], f"wheel.force-include.{line}": line.name}
    return build_wheel(wheel_directory, settings, metadata_directory)
