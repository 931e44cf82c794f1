"""A cluster with round figures, so that sums can be done in the head."""

from __future__ import annotations

from autopar.ir.cluster import ClusterSpec, Device, DeviceGroup, LinkLevel
from autopar.ir.graph import Node, Phase, TensorMeta, Value
from autopar.ir.mesh import Axis, Mesh


def device(**changes: object) -> Device:
    """1e6 flops per µs in float32 (2e6 in bfloat16), 1000 bytes per µs of memory, 2 µs a kernel."""
    given = {
        "name": "round",
        "memory_bytes": 2**30,
        "peak_flops": {"float32": 2e12, "bfloat16": 4e12},
        "memory_bytes_per_us": 2000.0,
        "kernel_floor_us": 2.0,
        "matmul_efficiency": 0.5,
        "memory_efficiency": 0.5,
        "source": "made up",
    }
    return Device(**{**given, **changes})  # type: ignore[arg-type]


def cluster(*levels: tuple[int, float, float], **changes: object) -> ClusterSpec:
    """Levels (size, latency µs, bytes per µs), innermost first."""
    links = tuple(
        LinkLevel(name=f"level{i}", size=size, latency_us=latency, bytes_per_us=rate, source="made up")
        for i, (size, latency, rate) in enumerate(levels)
    )
    count = 1
    for size, _, _ in levels:
        count *= size
    return ClusterSpec(
        name="round", groups=(DeviceGroup(count=count, device=device(**changes)),), levels=links, backend="gloo"
    )


def mesh(spec: ClusterSpec, **sizes: int) -> Mesh:
    """Axes in the order given, each with the level that the cluster says."""
    axes, stride = [], 1
    for name, size in reversed(sizes.items()):
        axes.append(Axis(name=name, size=size, level=spec.level_of(size, stride)))
        stride *= size
    return Mesh(axes=tuple(reversed(axes)))


def node(op: str = "aten.mm.default", *args: object, name: str = "n") -> Node:
    """A node with one float32 output."""
    return Node(
        name=name, op=op, args=args, outputs=(Value("o", TensorMeta((1,), "float32")),), phase=Phase.FORWARD, key=name
    )
