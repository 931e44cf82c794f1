"""What all parts of a prediction share: the model, the configuration, the device's speed, the links between groups."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from autopar.cost_model.groups import Levels, group_levels, group_us, send_us
from autopar.ir.cluster import ClusterSpec, LinkLevel
from autopar.ir.configuration import Configuration
from autopar.ir.reshard import Collective
from autopar.ir.transformer import Transformer
from autopar.prediction.rates import LOW, Speed

ACTIVATION_BYTES = 2
"""Of one element of an activation or of a parameter as it is used, below fp32."""
LOW_GATHERS_SINCE = 2024.9


@dataclass(frozen=True, slots=True)
class Setting:
    """Ranks go tp, cp, dp, pp from the fastest to the slowest, so that tensor parallel ones are nearest."""

    model: Transformer
    config: Configuration
    speed: Speed
    cluster: ClusterSpec

    @property
    def item_bytes(self) -> int:
        """Of one element of an activation or of a parameter as it is used."""
        return 4 if self.config.precision == "fp32" else ACTIVATION_BYTES

    @property
    def gradient_bytes(self) -> float:
        """Of one element of a gradient as it is reduced."""
        return 4.0 if self.config.precision == "fp32" else self.speed.rates.gradient_bytes

    @property
    def gathered_bytes(self) -> float:
        """Of one element of a parameter as ZeRO-3 gathers it: recent software gathers in the precision of products."""
        low = self.config.precision in LOW and self.config.software >= LOW_GATHERS_SINCE
        return 1.0 if low else float(self.item_bytes)

    @property
    def tokens(self) -> float:
        """Of one micro-batch on one device."""
        return self.config.micro_batch * self.config.seq / self.config.cp

    @property
    def own_tokens(self) -> float:
        """Of these, those whose hidden states a tensor rank holds between matrices."""
        return self.tokens / (self.config.tp if self.config.sequence_parallel else 1)

    def group_us(self, collective: Collective, nbytes: float, size: int, stride: int) -> float:
        """µs of a collective among `size` devices, `stride` ranks apart; `nbytes` on its larger side."""
        if size == 1 or nbytes == 0:
            return 0.0
        return group_us(collective, nbytes, self._achieved(group_levels(size, stride, self.cluster)))

    def exchange_us(self, nbytes: float, copies: int, size: int) -> float:
        """µs to bring each of a device's tokens, `nbytes` of them, to `copies` of `size` neighbours picked at random.

        A token crosses to another node once for all that want it there, and is spread inside that node.
        """
        if size == 1:
            return 0.0
        near, *far = self._achieved(group_levels(size, 1, self.cluster))
        if near[0] == size or not far:
            return group_us(Collective.ALL_TO_ALL, nbytes * copies, (near, *far))
        units = size // near[0]
        wanted = units * (1 - (1 - 1 / units) ** copies)
        across = group_us(Collective.ALL_TO_ALL, nbytes * wanted, tuple(far))
        return max(across, group_us(Collective.ALL_TO_ALL, nbytes * copies, (near,)))

    def send_us(self, nbytes: float) -> float:
        """µs from a stage to the next."""
        config = self.config
        stride = config.tp * config.cp * config.dp
        return send_us(nbytes, self._achieved(group_levels(config.pp, stride, self.cluster)))

    def _achieved(self, levels: Levels) -> Levels:
        """With the bandwidth that training achieves: `link` of the level inside nodes, `fabric` between them."""
        rates, inside = self.speed.rates, self.cluster.levels[0]
        fast = {x.name for x in self.cluster.levels if x.bytes_per_us >= inside.bytes_per_us}
        return tuple((n, _scaled(link, rates.link if link.name in fast else rates.fabric)) for n, link in levels)


def _scaled(link: LinkLevel, part: float) -> LinkLevel:
    return msgspec.structs.replace(
        link, bytes_per_us=link.bytes_per_us * part, switch_bytes_per_us=link.switch_bytes_per_us * part
    )
