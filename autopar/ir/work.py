"""What a device does in one micro-batch and once a step, as tasks on streams: what the simulator runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

COMPUTE = "compute"
"""The stream of kernels. Others: "comm:" and a mesh axis or link level, "host", "nvme"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One op, or one transfer.

    Attributes:
        name: for people: module path and op.
        kind: class of op: "matmul", "attention", "norm", "pointwise", "embedding", "loss", "optimizer", "all-reduce",
            "all-gather", "reduce-scatter", "all-to-all", "send", "copy", ...
        stream: tasks of one stream run one after the other in the order of their list.
        us: when it has its device and its link for itself.
        after: places in the same list of earlier tasks that must have ended.
        late: what follows the list doesn't wait for it: reduction of gradients, prefetch.
        flops, bytes: of this device; of a transfer, the bytes that it sends.
        source: of `us`: "measured", "calibrated", "analytic", "estimated".
    """

    name: str
    kind: str
    us: float
    stream: str = COMPUTE
    after: tuple[int, ...] = ()
    late: bool = False
    flops: float = 0.0
    bytes: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.us >= 0 and math.isfinite(self.us)):
            raise ValueError(f"task {self.name}: {self.us} µs: wanted a finite number, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A list that runs by itself: after all that stands before it, before all that stands after. `tasks` may be shared.

    Equal blocks whose communication doesn't reach over their ends are one list and many sections.
    """

    name: str
    tasks: Tasks


Tasks = tuple[Task | Section, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One chunk of one stage.

    Attributes:
        forward, backward: of one micro-batch. `backward_input` and `backward_weight`: its two halves, for schedules
            that run them apart.
        first_forward, last_backward: in the place of `forward` for the first micro-batch and of `backward` (or of
            `backward_weight`, where halves run apart) for the last one: with the gathering of updated parameters, with
            the reduction of gradients. Empty: like the others.
        begin: once a step, before anything else.
        sync: once a step, after the last backward of the chunk: reduction of gradients.
        end: once a step, after all of the stage's `sync`: optimizer, gathering of parameters.
        send_us, send_bytes: its output to the stage of the next part, and the gradient of it back.
        resident_bytes: held throughout: parameters, gradients, optimizer state, buffers.
        held_bytes: of one micro-batch from its forward to its backward. `held_for_weights_bytes`: what of it is left
            between the two halves of the backward; None: all of it.
        transient_bytes: needed beside that while an action of the chunk runs.
        end_bytes: needed beside `resident_bytes` during `end`.
    """

    forward: Tasks
    backward: Tasks
    backward_input: Tasks = ()
    backward_weight: Tasks = ()
    first_forward: Tasks = ()
    last_backward: Tasks = ()
    begin: Tasks = ()
    sync: Tasks = ()
    end: Tasks = ()
    send_us: float = 0.0
    send_bytes: float = 0.0
    resident_bytes: int = 0
    held_bytes: int = 0
    held_for_weights_bytes: int | None = None
    transient_bytes: int = 0
    end_bytes: int = 0
