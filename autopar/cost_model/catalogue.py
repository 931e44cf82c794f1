"""The catalogue of presets: TOML files with the figures of one computer of a kind, their source and date."""

from __future__ import annotations

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Literal

import msgspec

from autopar.errors import ClusterError
from autopar.ir.cluster import ClusterSpec, Device, DeviceGroup, Host, LinkLevel


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device has and what is kept from plans: context, communicator buffers, allocator reserve (`note`)."""

    total_bytes: int
    held_back_bytes: int
    note: str


class PresetDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `Device` whose usable memory is written as total less held back."""

    name: str
    memory: Memory
    peak_flops: dict[str, float]
    memory_bytes_per_us: float
    kernel_floor_us: float
    matmul_efficiency: float
    memory_efficiency: float
    source: str


class PresetLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `LinkLevel` without its size."""

    name: str
    latency_us: float
    bytes_per_us: float
    source: str
    switch_bytes_per_us: float = 0.0


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One computer of a kind and the network between such computers.

    Attributes:
        unit: what "name:N" counts, whole nodes or single cards.
        devices_per_node: of a "card" preset, the most cards in one computer.
        nodes_per_domain: the most nodes that the link inside reaches (a rack of switches); as many as divide the nodes.
        inside, between: links inside a node and between nodes.
        matches: last words of the names that CUDA gives to this device.
    """

    name: str
    date: str
    unit: Literal["node", "card"]
    devices_per_node: int
    device: PresetDevice
    inside: PresetLink
    between: PresetLink
    host: Host = Host()
    nodes_per_domain: int = 1
    matches: tuple[str, ...] = ()


def preset_names() -> tuple[str, ...]:
    """Names of the presets, in order."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _folder().iterdir() if f.name.endswith(".toml")))


def _folder() -> Traversable:
    return resources.files("autopar.cost_model") / "presets"


def read_preset(name: str) -> Preset:
    """The preset of this name, which must exist."""
    text = (_folder() / f"{name}.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), Preset)


def list_presets() -> tuple[Preset, ...]:
    """Every preset, for `autopar clusters`."""
    return tuple(map(read_preset, preset_names()))


def expand(preset: Preset, units: int) -> ClusterSpec:
    """`units` nodes or cards of a preset. Cards beyond one computer must fill further computers."""
    per_node, nodes = preset.devices_per_node, units
    if preset.unit == "card":
        if units > per_node and units % per_node:
            raise ClusterError(
                f"cluster '{preset.name}:{units}': one computer holds up to {per_node} cards; wanted at most "
                f"{per_node}, or a multiple of {per_node}; describe another machine in TOML"
            )
        per_node, nodes = min(units, per_node), max(1, units // per_node)
    domain = max(n for n in range(1, preset.nodes_per_domain + 1) if nodes % n == 0)
    levels = [_level(preset.inside, per_node * domain)]
    if preset.unit == "node" or nodes > 1:
        levels.append(_level(preset.between, nodes // domain))
    return ClusterSpec(
        name=f"{preset.name}:{units}",
        groups=(DeviceGroup(count=per_node * nodes, device=device_of(preset)),),
        levels=tuple(levels),
        host=preset.host,
        backend="nccl",
        date=preset.date,
    )


def device_of(preset: Preset) -> Device:
    """The preset's device with its usable memory."""
    given = preset.device
    memory = given.memory
    return Device(
        name=given.name,
        memory_bytes=memory.total_bytes - memory.held_back_bytes,
        peak_flops=given.peak_flops,
        memory_bytes_per_us=given.memory_bytes_per_us,
        kernel_floor_us=given.kernel_floor_us,
        matmul_efficiency=given.matmul_efficiency,
        memory_efficiency=given.memory_efficiency,
        source=f"{given.source}; {memory.held_back_bytes} bytes held back: {memory.note}",
    )


def _level(link: PresetLink, size: int) -> LinkLevel:
    return LinkLevel(
        name=link.name,
        size=size,
        latency_us=link.latency_us,
        bytes_per_us=link.bytes_per_us,
        source=link.source,
        switch_bytes_per_us=link.switch_bytes_per_us,
    )
