"""A cluster as a person describes it: devices, and the links between them as a tree of levels."""

from __future__ import annotations

import msgspec

from autopar.ir.profile import Profile


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device.

    Attributes:
        name: e.g. "H100-80-SXM5".
        memory_bytes: what a plan may use of it.
        peak_flops: dense peak per second by dtype name ("bfloat16", "float32", ...), flop/s.
        memory_bytes_per_us: device memory bandwidth.
        kernel_floor_us: least time of one kernel, launch included.
        matmul_efficiency, memory_efficiency: achieved part of the peaks on large sizes (0 to 1).
        source: where the figures come from, with date.
    """

    name: str
    memory_bytes: int
    peak_flops: dict[str, float]
    memory_bytes_per_us: float
    kernel_floor_us: float
    matmul_efficiency: float
    memory_efficiency: float
    source: str


class DeviceGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal devices, numbered after those of the groups before."""

    count: int
    device: Device


class LinkLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of the tree of links, innermost first.

    Attributes:
        name: e.g. "nvlink", "infiniband".
        size: how many units of the level below (devices, for the first) one unit of this level joins.
        latency_us: time of one message of no bytes between two members.
        bytes_per_us: what one device can send at this level while all devices do, one way.
        switch_bytes_per_us: the same, as bus bandwidth, of an all-reduce that its switches sum; 0 where they don't.
        source: where the figures come from, with date.
    """

    name: str
    size: int
    latency_us: float
    bytes_per_us: float
    source: str
    switch_bytes_per_us: float = 0.0


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The computer around the devices of one node. Zero where unknown: nothing is offloaded there then."""

    memory_bytes: int = 0
    link_bytes_per_us: float = 0.0
    nvme_bytes_per_us: float = 0.0


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices and links. `levels` sizes multiply to the number of devices. `backend` is "gloo" or "nccl".

    `profile`: times measured on it, which count before the figures of devices and levels.
    """

    name: str
    groups: tuple[DeviceGroup, ...]
    levels: tuple[LinkLevel, ...]
    host: Host = Host()
    backend: str = "nccl"
    date: str = ""
    profile: Profile | None = None

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(g.count for g in self.groups)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device."""
        return min(g.device.memory_bytes for g in self.groups)

    def level_of(self, size: int, stride: int) -> int:
        """Index of the link level that an axis of `size` neighbours, `stride` ranks apart, must cross."""
        span, inside = size * stride, 1
        for i, level in enumerate(self.levels):
            inside *= level.size
            if span <= inside and inside % span == 0:
                return i
        return len(self.levels) - 1
