"""What lasts for a whole step of several micro-batches: weights as the ops read them, and sums of gradients.

*Lasting* is what parameters alone decide: a parameter, a cast or a view of one. It is made once a step, and what the
other ops read of it stays for all micro-batches. In which layout it stays is a choice, a node of the problem between
the maker and those readers:

    own p    the stored parameter itself, in its layout: no more bytes. What ops want otherwise is converted in the
             forward and again in the backward of every micro-batch (ZeRO-3).
    copy q   made once a step, and kept beside the stored one (ZeRO-1 and 2 where q is whole).

The sum of a parameter's gradients over micro-batches is held as well, between the op that makes the gradient and the
optimizer:

    sum g    in the layout that the backward makes, joined over ranks once a step (ZeRO-1)
    each p   in the layout of the optimizer's state: joined in every micro-batch, and cut (ZeRO-2 and 3)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.later import Asked
from autopar.cost_model.wiring import SlotKind, Wire, Wiring
from autopar.ir.graph import REGION, Phase
from autopar.ir.layout import Layout
from autopar.ir.problem import INFINITY, Consumer, ProblemNode, ProblemValue
from autopar.ir.strategy import Strategy
from autopar.ops.lowering import is_random

Choices = Sequence[tuple[Strategy, ...] | tuple[Layout, ...]]
Place = tuple[int, int]
"""(slot, position) of what is made."""


@dataclass(frozen=True, slots=True)
class Held:
    """One choice. `own`: what is there anyway."""

    layout: Layout
    own: bool

    def __str__(self) -> str:
        return f"{'own' if self.own else 'copy'} {self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNode:
    """A node beyond the slots. `slot`: whose bytes it holds."""

    node: int
    slot: int
    wire: int
    gradient: bool
    choices: tuple[Held, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldValue:
    """A value to or from a held node. `once`: its conversions are paid once a step, not by micro-batch."""

    value: int
    wire: int
    layouts: tuple[Layout | None, ...]
    once: bool
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """What is added to a problem. `through`: per wire, positions of its readers that read a held node instead."""

    nodes: tuple[ProblemNode, ...] = ()
    values: tuple[ProblemValue, ...] = ()
    choices: tuple[HeldNode, ...] = ()
    read: tuple[HeldValue, ...] = ()
    through: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPrices:
    """`convert_us`: wire, from, to, once a step or not -> µs, all instances."""

    convert_us: Callable[[int, Layout, Layout, bool], float]


def lasting_slots(wiring: Wiring) -> frozenset[int]:
    """Parameters, and captured forward ops that read nothing else (or nothing that is read later)."""
    feeds: dict[int, list[int]] = {}
    for wire in wiring.wires:
        for reader in wire.readers:
            feeds.setdefault(reader.slot, []).append(wire.producer)
    found = {i for i, s in enumerate(wiring.slots) if s.kind is SlotKind.STORAGE}
    for i, slot in enumerate(wiring.slots):  # slots of a graph are in the order of its nodes
        node = slot.node
        if slot.kind is SlotKind.OP and node is not None and node.phase is Phase.FORWARD and node.op != REGION:
            read = feeds.get(i, [])
            if read and all(p in found for p in read) and not is_random(node.op):
                found.add(i)
    return frozenset(found)


def gradient_wires(wiring: Wiring) -> tuple[int, ...]:
    """Wires that only the optimizer reads. What a block hands on of its gradients is the same tensor once more."""
    return tuple(
        i
        for i, w in enumerate(wiring.wires)
        if w.phase is Phase.BACKWARD
        and wiring.slots[w.producer].kind is not SlotKind.STORAGE
        and all(wiring.slots[r.slot].kind is SlotKind.STORAGE for r in w.readers)
    )


def lasting_wires(wiring: Wiring, lasting: frozenset[int]) -> frozenset[int]:
    """Wires that parameters alone decide."""
    return frozenset(i for i, w in enumerate(wiring.wires) if w.producer in lasting and w.phase is Phase.FORWARD)


def add_held(
    wiring: Wiring,
    choices: Choices,
    lasting: frozenset[int],
    asked: Mapping[int, tuple[Asked, ...]],
    prices: HeldPrices,
    *,
    nodes: int,
    values: int,
) -> HeldPart:
    """The nodes and values behind the `nodes` and `values` that there are.

    `asked`: per wire, who reads it besides the wiring's readers, and in which layouts.
    """
    work = _Builder(wiring, choices, lasting, asked, prices, nodes, values)
    by_place: dict[Place, list[int]] = {}
    for index in sorted(lasting_wires(wiring, lasting)):
        wire = wiring.wires[index]
        by_place.setdefault((wire.producer, wire.position), []).append(index)
    for place, wires in by_place.items():
        work.weight(place, wires)
    for index in gradient_wires(wiring):
        work.gradient(index)
    return HeldPart(
        nodes=tuple(work.nodes), values=tuple(work.values), choices=tuple(work.found), read=tuple(work.read),
        through=work.through,
    )  # fmt: skip


@dataclass
class _Builder:
    wiring: Wiring
    choices: Choices
    lasting: frozenset[int]
    asked: Mapping[int, tuple[Asked, ...]]
    prices: HeldPrices
    first_node: int
    first_value: int
    nodes: list[ProblemNode] = field(default_factory=list)
    values: list[ProblemValue] = field(default_factory=list)
    found: list[HeldNode] = field(default_factory=list)
    read: list[HeldValue] = field(default_factory=list)
    through: dict[int, frozenset[int]] = field(default_factory=dict)

    def weight(self, place: Place, wires: list[int]) -> None:
        """One node for all that is read of a lasting tensor, if something that isn't lasting reads it."""
        readers: list[tuple[int, Phase, Asked]] = []
        for index in wires:
            wire = self.wiring.wires[index]
            late = {i for i, r in enumerate(wire.readers) if r.slot not in self.lasting}
            self.through[index] = frozenset(late)
            readers += [(index, wire.readers[i].phase, self._asked(wire, i)) for i in sorted(late)]
            readers += [(index, Phase.BACKWARD, a) for a in self.asked.get(index, ())]
        if not readers:
            return
        slot, position = place
        made = [_made(pick, position) for pick in self.choices[slot]]
        wanted = [q for _, _, a in readers for q in a.wants if q is not None]
        own = self.wiring.slots[slot].kind is SlotKind.STORAGE
        kinds = [Held(p, own=True) for p in dict.fromkeys(made)] if own else []
        kinds += [Held(q, own=False) for q in dict.fromkeys([*wanted, *(() if own else made)])]
        node = self._node(f"held:{self.wiring.slots[slot]}:{position}", slot, wires[0], kinds, gradient=False)
        self._to_held(wires[0], slot, made, node, kinds, once=True, phase=Phase.FORWARD)
        for phase in Phase:
            mine = [a for _, of, a in readers if of is phase]
            if mine:
                index = next(i for i, of, _ in readers if of is phase)
                self._from_held(index, node, kinds, mine, phase)

    def gradient(self, index: int) -> None:
        """The sum over micro-batches of one gradient, if several instances of it aren't read by several optimizers."""
        wire = self.wiring.wires[index]
        made = [_made(pick, wire.position) for pick in self.choices[wire.producer]]
        stored = [self._asked(wire, i) for i in range(len(wire.readers))]
        self.through[index] = frozenset(range(len(wire.readers)))
        kinds = [Held(g, own=True) for g in dict.fromkeys(made)]
        kinds += [Held(p, own=False) for p in dict.fromkeys(p for a in stored for p in a.wants if p is not None)]
        home = wire.readers[0].slot
        graph, name = wire.names[0]
        node = self._node(f"sum:{graph}:{name}:{index}", home, index, kinds, gradient=True)
        self._to_held(index, wire.producer, made, node, kinds, once=False, phase=Phase.BACKWARD)
        names = tuple(dict.fromkeys(p for a in stored for p in a.wants if p is not None))
        at = {p: len(kinds) + i for i, p in enumerate(names)}
        size = len(kinds) + len(names)
        table = [[0.0 if i == j else INFINITY for j in range(size)] for i in range(size)]
        for i, kind in enumerate(kinds):
            for p in names:
                table[i][at[p]] = self._joined(index, kind, p)
        self._value(
            f"summed:{graph}:{name}:{index}", node, tuple(range(len(kinds))),
            [(a.node, tuple(at[p] for p in a.wants if p is not None)) for a in stored], table,
            HeldValue(
                value=self.first_value + len(self.values), wire=index,
                layouts=(*(k.layout for k in kinds), *names), once=True, phase=Phase.BACKWARD,
            ),
        )  # fmt: skip

    def _joined(self, index: int, kind: Held, p: Layout) -> float:
        """From a sum to what the optimizer reads: a sum that is cut already stays as it is."""
        if kind.layout == p:
            return 0.0
        return self.prices.convert_us(index, kind.layout, p, True) if kind.own else INFINITY

    def _asked(self, wire: Wire, at: int) -> Asked:
        reader = wire.readers[at]
        return Asked(reader.slot, tuple(_read(pick, reader.position) for pick in self.choices[reader.slot]))

    def _node(self, name: str, slot: int, wire: int, kinds: list[Held], *, gradient: bool) -> int:
        node = self.first_node + len(self.nodes)
        self.nodes.append(ProblemNode(name=name, cost_us=(0.0,) * len(kinds)))
        self.found.append(HeldNode(node=node, slot=slot, wire=wire, gradient=gradient, choices=tuple(kinds)))
        return node

    def _to_held(
        self, index: int, producer: int, made: list[Layout], node: int, kinds: list[Held], *, once: bool, phase: Phase
    ) -> None:
        """An own version is the one that is made; any other is converted to."""
        names = tuple(dict.fromkeys(made))
        at = {p: i for i, p in enumerate(names)}
        size = len(names) + len(kinds)
        table = [[0.0 if i == j else INFINITY for j in range(size)] for i in range(size)]
        for p in names:
            for j, kind in enumerate(kinds):
                if not kind.own:
                    same = p == kind.layout
                    price = 0.0 if same else self.prices.convert_us(index, p, kind.layout, once)
                    table[at[p]][len(names) + j] = price
        wants = tuple(at[k.layout] if k.own else len(names) + j for j, k in enumerate(kinds))
        graph, name = self.wiring.wires[index].names[0]
        self._value(
            f"to held:{graph}:{name}:{index}", producer, tuple(at[p] for p in made), [(node, wants)], table,
            HeldValue(
                value=self.first_value + len(self.values), wire=index,
                layouts=(*names, *(k.layout for k in kinds)), once=once, phase=phase,
            ),
        )  # fmt: skip

    def _from_held(self, index: int, node: int, kinds: list[Held], readers: list[Asked], phase: Phase) -> None:
        """What ops read of what is held, converted in every micro-batch."""
        names = tuple(dict.fromkeys([*(k.layout for k in kinds), *(q for a in readers for q in a.wants)]))
        at: dict[Layout | None, int] = {q: i for i, q in enumerate(names)}
        table = [[0.0 if i == j else INFINITY for j in range(len(names))] for i in range(len(names))]
        wanted = {q for a in readers for q in a.wants}
        for p in dict.fromkeys(k.layout for k in kinds):
            for q in wanted - {p}:
                table[at[p]][at[q]] = 0.0 if q is None else self.prices.convert_us(index, p, q, False)
        graph, name = self.wiring.wires[index].names[0]
        self._value(
            f"held:{graph}:{name}:{phase.value}:{index}", node, tuple(at[k.layout] for k in kinds),
            [(a.node, tuple(at[q] for q in a.wants)) for a in readers], table,
            HeldValue(
                value=self.first_value + len(self.values), wire=index, layouts=names, once=False, phase=phase
            ),
        )  # fmt: skip

    def _value(
        self, name: str, producer: int, made: tuple[int, ...], readers: list[tuple[int, tuple[int, ...]]],
        table: list[list[float]], meaning: HeldValue,
    ) -> None:  # fmt: skip
        consumers = tuple(Consumer(node=n, wants=w) for n, w in readers)
        self.values.append(
            ProblemValue(
                name=name, producer=producer, made=made, consumers=consumers, reshard_us=tuple(map(tuple, table))
            )
        )
        self.read.append(meaning)


def _made(pick: Strategy | Layout, position: int) -> Layout:
    layout = pick if isinstance(pick, Layout) else pick.outputs[position]
    assert layout is not None
    return layout


def _read(pick: Strategy | Layout, position: int) -> Layout | None:
    return pick if isinstance(pick, Layout) else pick.inputs[position]
