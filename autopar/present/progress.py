"""Progress on stderr, for people only: nothing where stderr is a file or a pipe, so that an error stays one line."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator

Progress = Callable[[str, float], None]
"""Called with (what is being done, part done 0..1)."""


@contextlib.contextmanager
def working(title: str) -> Iterator[Progress]:
    """A bar that goes away at the end; stdout is kept for the result, and libraries' warnings are kept away."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr), _bar(title) as progress:
        warnings.simplefilter("ignore")
        yield progress


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield lambda what, part: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda what, part: bar.update(task, description=f"{title}: {what}", completed=part)
