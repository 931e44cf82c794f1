"""A timeline as a Perfetto trace: Chrome's JSON, which ui.perfetto.dev and chrome://tracing open.

One process for each stage, one thread for each of its streams, one complete event ("X") for each span, in µs; of a
pipeline the actions are a thread of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopar.errors import UserError
from autopar.ir.timeline import Timeline

ACTIONS = "actions"


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The trace as plain data."""
    rows: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}

    def add(stage: int, stream: str, name: str, kind: str, start: float, end: float) -> None:
        thread = threads.setdefault((stage, stream), sum(s == stage for s, _ in threads) + 1)
        rows.append(
            {"name": name, "cat": kind, "ph": "X", "ts": start, "dur": end - start, "pid": stage, "tid": thread}
        )

    for stage, action, start, end in timeline.actions():
        add(stage, ACTIONS, str(action), action.kind.name.lower(), start, end)
    for span in timeline.spans():
        if span.end_us > span.start_us:
            add(span.stage, span.stream, span.name, span.kind, span.start_us, span.end_us)
    names: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": s, "args": {"name": f"stage {s}"}}
        for s in sorted({s for s, _ in threads})
    ]
    names += [
        {"name": "thread_name", "ph": "M", "pid": s, "tid": t, "args": {"name": stream}}
        for (s, stream), t in threads.items()
    ]
    other = {"step_us": timeline.step_us, "breakdown_us": dict(timeline.breakdown_us), "predicted": True}
    return {"traceEvents": [*names, *rows], "displayTimeUnit": "ms", "otherData": other}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace. Raises UserError where the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(trace_events(timeline)))
    except OSError as error:
        raise UserError(f"--trace {path}: cannot be written ({error.strerror})") from None
