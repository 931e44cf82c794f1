"""What prices and bytes of a problem are worked out from, for the parts of the builder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from autopar.cost_model.wiring import Slot, Wire
from autopar.ir.graph import CapturedGraph, Node, TensorMeta
from autopar.ir.layout import Kind, Layout, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.options import Options
from autopar.ir.problem import INFINITY
from autopar.ir.strategy import Strategy, StrategyTable

Choices = tuple[tuple[Strategy, ...] | tuple[Layout, ...], ...]
"""Per slot what may be chosen."""


class Prices(Protocol):
    """What the builder asks of the cost model, on one cluster and mesh. Metas are local, but for `reshard_us`."""

    def op_us(
        self, node: Node, strategy: Strategy, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...]
    ) -> tuple[float, float]:
        """(computation µs, communication inside the op µs)."""

    def reshard_us(self, meta: TensorMeta, before: Layout, after: Layout, stays: bool = False) -> float:
        """µs to convert a tensor of global `meta`, which `stays` anyway or goes; inf if impossible."""

    def steps_us(self, meta: TensorMeta, before: Layout, after: Layout, stays: bool = False) -> list[float]:
        """`reshard_us` by step."""

    def copy_us(self, nbytes: int) -> float:
        """µs to copy so many bytes on the device."""

    @property
    def updates_at_once(self) -> bool:
        """True if the optimizer updates all parameters together, not one after the other."""

    def optimizer_us(self, numel: int, dtype: str, state_bytes_per_parameter: int) -> float:
        """µs to update `numel` parameters."""

    def is_view(self, node: Node) -> bool:
        """True if the op's output shares its first input's storage."""


@dataclass(frozen=True, slots=True)
class Context:
    """What prices and bytes of one problem are worked out from.

    Attributes:
        mesh: of the devices; `table.mesh` cuts micro-batches too.
        lasting, lasting_wires: what is made once a step (`cost_model.lasting`), gradients' own wires with it.
        once_prices: on the devices' mesh, for what micro-batches don't cut.
        stays: wires whose tensors are there throughout.
        alone: wires of what each micro-batch makes by itself: no others are there to join it with.
    """

    captured: CapturedGraph
    table: StrategyTable
    prices: Prices
    options: Options
    metas: Mapping[str, Mapping[str, TensorMeta]]
    pieces: dict[tuple[TensorMeta, Layout], TensorMeta]
    mesh: Mesh
    lasting: frozenset[int]
    lasting_wires: frozenset[int]
    once_prices: Prices
    stays: frozenset[int]
    alone: frozenset[int] = frozenset()

    def convert_us(self, index: int, wire: Wire, before: Layout, after: Layout, *, once: bool) -> float:
        """A conversion of all instances. What micro-batches don't cut is priced on the devices' own mesh."""
        lasts = index in self.lasting_wires or once
        if not lasts and index in self.alone and _joins(before, after):
            return INFINITY
        prices = self.once_prices if lasts else self.prices
        return prices.reshard_us(wire.meta, before, after, index in self.stays) * wire.count

    def piece(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        """Local meta of the device with the largest piece."""
        key = (meta, layout)
        found = self.pieces.get(key)
        if found is None:
            found = self.pieces[key] = TensorMeta(
                local_shape(meta.shape, layout, self.table.mesh, meta.units), meta.dtype
            )
        return found

    def stored(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        """Local meta of a parameter: micro-batches don't cut it."""
        return TensorMeta(local_shape(meta.shape, layout, self.mesh, meta.units), meta.dtype)


def _joins(before: Layout, after: Layout) -> bool:
    """True if ranks along `dp`, and so micro-batches, give each other what they made."""
    if "dp" not in before.axes:
        return False
    at = before.on("dp")
    return at.kind is not Kind.REPLICATE and at != after.on("dp")


def trainable(slot: Slot, context: Context) -> bool:
    """True of parameters that an optimizer updates."""
    return any(p.requires_grad for p in context.captured.parameters if p.name in slot.parameters)
