"""One given way to train: degrees of parallelism, batch, schedule, precision. What `autopar predict` prices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from autopar.errors import UserError
from autopar.ir.transformer import Transformer

Precision = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["flash", "plain"]
Trains = Literal["all", "adapters", "adapters-everywhere"]

LATEST_SOFTWARE = 2026.5
"""Years with a fraction. Newer software than the newest measured is not taken to be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A configuration as training frameworks take it. Devices used: tp · pp · dp · cp.

    Attributes:
        tp, pp, dp, cp: tensor, pipeline, data and context parallel sizes.
        ep: expert parallel size, inside tp · dp · cp.
        zero: 0, or what is cut over dp · cp: 1 optimizer state, 2 gradients as well, 3 parameters as well.
        shard_group: of ZeRO, over so many neighbours instead of all (0: all).
        chunks: parts of the model that each pipeline stage holds (interleaved schedule where more than 1).
        schedule: "" takes "none", "1f1b" or "interleaved" by pp and chunks.
        micro_batch: sequences in one micro-batch of one data-parallel rank.
        precision: of the matrices' inputs; parameters' master copies and optimizer state are fp32 below fp32.
        sequence_parallel: norms and residuals cut over tp along the sequence.
        attention: fused kernel, or scores in memory.
        trains: all parameters, or low-rank adapters on frozen ones: beside the product that makes queries, keys and
            values alone, or beside every product of a layer.
        software: year of the software, with fraction: kernels of 2022 are not those of 2026.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1
    shard_group: int = 0
    chunks: int = 1
    schedule: str = ""
    micro_batch: int = 1
    global_batch: int = 1
    seq: int = 2048
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    attention: Attention = "flash"
    trains: Trains = "all"
    software: float = LATEST_SOFTWARE

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step; the last may be smaller than the others."""
        return max(1, math.ceil(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def schedule_name(self) -> str:
        """The schedule, or the usual one for these sizes."""
        return self.schedule or ("none" if self.pp == 1 else "interleaved" if self.chunks > 1 else "1f1b")

    @property
    def sharding_ranks(self) -> int:
        """Over how many ranks ZeRO cuts."""
        return min(self.shard_group or self.dp * self.cp, self.dp * self.cp)


def check_configuration(config: Configuration, model: Transformer, devices: int) -> None:
    """Raise UserError, in one line, where a configuration cannot be."""
    for name in ("tp", "pp", "dp", "cp", "ep", "chunks", "micro_batch", "global_batch", "seq"):
        if getattr(config, name) < 1:
            raise UserError(f"{name.replace('_', '-')} {getattr(config, name)}: wanted 1 or more")
    if config.devices != devices:
        sizes = f"tp {config.tp} × pp {config.pp} × dp {config.dp} × cp {config.cp}"
        raise UserError(f"{sizes} is {config.devices} devices, but the cluster has {devices}")
    if not 0 <= config.zero <= 3:
        raise UserError(f"zero {config.zero}: wanted 0, 1, 2 or 3")
    if config.zero == 3 and config.pp > 1:
        raise UserError(
            "zero 3 with pp: parameters would be gathered for every micro-batch of every stage; wanted pp 1"
        )
    if model.heads % config.tp:
        raise UserError(f"tp {config.tp} does not divide {model.heads} attention heads")
    if model.layers + 2 < config.pp * config.chunks:
        raise UserError(f"pp {config.pp} × chunks {config.chunks} is more than {model.layers} layers")
    if config.chunks > 1 and config.pp == 1:
        raise UserError(f"chunks {config.chunks} without pp: wanted a pipeline")
    _check_experts(config, model)
    if config.global_batch < config.dp:
        raise UserError(f"global-batch {config.global_batch} leaves some of dp {config.dp} without a sequence")
    if config.seq % config.cp:
        raise UserError(f"cp {config.cp} does not divide seq {config.seq}")


def _check_experts(config: Configuration, model: Transformer) -> None:
    if config.ep > 1 and model.experts is None:
        raise UserError(f"ep {config.ep}: {model.name} has no experts")
    ranks = config.tp * config.dp * config.cp
    if model.experts is not None and (model.experts.count % config.ep or ranks % config.ep):
        raise UserError(
            f"ep {config.ep}: wanted a divisor of {model.experts.count} experts and of tp × dp × cp = {ranks}"
        )
