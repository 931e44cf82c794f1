"""Models and clusters of the analytic tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from autopar.cost_model.clusters import load_cluster
from autopar.ir.cluster import ClusterSpec, Device, DeviceGroup, LinkLevel
from autopar.ir.configuration import Configuration
from autopar.ir.transformer import Experts, Transformer
from autopar.prediction.rates import read_rates, speed_of
from autopar.prediction.setting import Setting


def gpt(layers: int, hidden: int, heads: int, **more: Any) -> Transformer:
    """A GPT of Korthikanti et al. (arXiv 2205.05198): width 4·hidden, dropout, vocabulary 51200."""
    return Transformer(
        name="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        head_size=hidden // heads,
        width=4 * hidden,
        gated=False,
        vocabulary=51200,
        dropout=True,
        **more,
    )


SMALL = gpt(8, 1024, 16)
ROUTED = gpt(8, 1024, 16, experts=Experts(count=8, top_k=2, width=512))


def setting(model: Transformer, cluster: ClusterSpec | None = None, **config: Any) -> Setting:
    """A setting on enough H100, or on `cluster`."""
    found = Configuration(**config)
    spec = cluster or plain_cluster(found.devices)
    return Setting(model, found, speed_of(spec.groups[0].device, found, read_rates()), spec)


def described_links(of: Setting) -> Setting:
    """The same where links achieve what the cluster says of them."""
    rates = msgspec.structs.replace(of.speed.rates, link=1.0, fabric=1.0)
    return replace(of, speed=replace(of.speed, rates=rates))


def plain_cluster(devices: int, bytes_per_us: float = 100_000.0, latency_us: float = 0.0) -> ClusterSpec:
    """H100 on one level of equal links."""
    device = load_cluster("dgx-h100:1").groups[0].device
    level = LinkLevel(name="wire", size=devices, latency_us=latency_us, bytes_per_us=bytes_per_us, source="test")
    return ClusterSpec(name="plain", groups=(DeviceGroup(count=devices, device=device),), levels=(level,))


def other_device(**changes: Any) -> Device:
    """A device that the rates don't name."""
    figures: dict[str, Any] = {
        "name": "unheard-of",
        "memory_bytes": 10**11,
        "peak_flops": {"bfloat16": 5e14, "float32": 5e13},
        "memory_bytes_per_us": 2e6,
        "kernel_floor_us": 5.0,
        "matmul_efficiency": 0.7,
        "memory_efficiency": 0.9,
        "source": "test",
    }
    return Device(**(figures | changes))
