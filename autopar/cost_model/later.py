"""What the backward finds of the forward: kept, or made again (section 2 of the formulation), as nodes of the problem.

Every forward tensor that the backward reads, or that such a tensor can be made again from, gets a choice of its own:

    none     nobody asks for it in the backward
    keep q   the version in layout q waits from the forward to the backward: its bytes count there
    again s  its op runs once more in the backward, under the strategy s that it ran under: costs the op's µs (with the
             collectives inside it), and asks in the backward for the op's inputs, in the layouts that s reads

and a value of its own, made by this choice and read by the readers in the backward, whose conversions are paid there.
So a conversion before a tensor that is made again is paid again as well. No new kind of node, value or moment is
needed: the solver, its reductions and the referee know nothing of recomputation.

Inputs of the model, buffers and constants are always at hand, parameters as stored. What enters a block is kept or not,
never made again: the chain of what is made again ends at the block's edge. Ops with several outputs that are asked for
have one node for running again, and one choice for each output. A region (code that was not captured) runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from autopar.cost_model.wiring import Reader, SlotKind, Wire, Wiring, stays
from autopar.ir.graph import REGION, Phase
from autopar.ir.layout import Layout
from autopar.ir.problem import INFINITY, Consumer, ProblemNode, ProblemValue
from autopar.ir.strategy import Strategy

Choices = Sequence[tuple[Strategy, ...] | tuple[Layout, ...]]


class Mode(Enum):
    NONE = "none"
    KEEP = "keep"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Later:
    """One choice. `layout`: of the version kept or made; `strategy`: index of the op's, where this runs it again."""

    mode: Mode
    layout: Layout | None = None
    strategy: int = -1

    def __str__(self) -> str:
        return self.mode.value if self.layout is None else f"{self.mode.value} {self.layout}"


NOTHING = Later(Mode.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterNode:
    """A node of the problem beyond the slots. `wire`: whose tensor it is; None: the node that runs `slot` again.

    Per choice, in bytes per device: `kept_bytes` wait for the backward, `made_bytes` are made again in a block's.
    """

    node: int
    slot: int
    wire: int | None
    choices: tuple[Later, ...]
    kept_bytes: tuple[int, ...] = ()
    made_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterValue:
    """A value that backward readers read: `wire`'s tensor, in these layouts (None: nothing there, nothing asked)."""

    value: int
    wire: int
    layouts: tuple[Layout | None, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A reader that may ask for a value or not: per strategy of `node`, the layout or None."""

    node: int
    wants: tuple[Layout | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterPart:
    """What is added to a problem; `asked`: per wire, who reads its own value besides the wiring's readers."""

    nodes: tuple[ProblemNode, ...] = ()
    values: tuple[ProblemValue, ...] = ()
    choices: tuple[LaterNode, ...] = ()
    read: tuple[LaterValue, ...] = ()
    asked: Mapping[int, tuple[Asked, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterPrices:
    """What the choices cost.

    Attributes:
        again_us: slot, strategy -> µs of running it once more, all instances.
        convert_us: wire, from, to -> µs of the conversion, all instances.
        kept_bytes: wire, layout -> bytes of all copies that wait.
        made_bytes: wire, layout -> bytes of one copy made again: one block's are there at a time.
    """

    again_us: Callable[[int, int], float]
    convert_us: Callable[[int, Layout, Layout], float]
    kept_bytes: Callable[[int, Layout], int]
    made_bytes: Callable[[int, Layout], int]


def add_later(
    wiring: Wiring,
    choices: Choices,
    late: Mapping[int, tuple[int, ...]],
    prices: LaterPrices,
    lasting: frozenset[int] = frozenset(),
    *,
    again: bool = True,
) -> LaterPart:
    """The nodes and values behind those of the wiring. `late`: per wire, positions of its readers in the backward.

    `lasting`: wires whose tensors are there all through the step; what is asked of them is only named. `again`: tensors
    may be made again; else all that is asked for is kept.
    """
    return _Builder(wiring, choices, late, prices, _wire_of_name(wiring), lasting, again).build()


def _wire_of_name(wiring: Wiring) -> dict[tuple[str, str], int]:
    """(graph, value) -> its wire; of a parameter the one that the backward reads, if it reads it."""
    found: dict[tuple[str, str], int] = {}
    for index, wire in enumerate(wiring.wires):
        for name in wire.names:
            if name not in found or wire.readers[0].phase is Phase.BACKWARD:
                found[name] = index
    return found


@dataclass
class _Builder:
    wiring: Wiring
    choices: Choices
    late: Mapping[int, tuple[int, ...]]
    prices: LaterPrices
    wire_of: Mapping[tuple[str, str], int]
    lasting: frozenset[int]
    again: bool
    nodes: list[ProblemNode] = field(default_factory=list)
    values: list[ProblemValue] = field(default_factory=list)
    found: list[LaterNode] = field(default_factory=list)
    read: list[LaterValue] = field(default_factory=list)
    asked: dict[int, list[Asked]] = field(default_factory=dict)  # wire -> who may ask for it in the backward
    forward: dict[int, Asked] = field(default_factory=dict)  # wire -> what its keeping asks for in the forward

    def build(self) -> LaterPart:
        by_slot: dict[int, list[int]] = {}
        wires = self._wires()
        for index in wires:
            by_slot.setdefault(self.wiring.wires[index].producer, []).append(index)
        for slot, mine in by_slot.items():
            again = [i for i in mine if self._can_run_again(self.wiring.wires[i])]
            runner = self._runner(slot) if len(again) > 1 else None
            for index in mine:
                self._tensor(slot, index, runner, again=index in again)
        nodes = {c.wire: c for c in self.found if c.wire is not None}
        for index in wires:
            self._value(index, nodes[index])
        asked: dict[int, tuple[Asked, ...]] = {i: (kept,) for i, kept in self.forward.items()}
        for index, askers in self.asked.items():
            wire = self.wiring.wires[index]
            if index in self.forward:
                continue
            if index not in self.lasting and wire.of_parameter and wire.readers[0].phase is Phase.FORWARD:
                self._value(index, None)  # the backward doesn't read it otherwise: converted there from storage
            else:
                asked[index] = tuple(askers)  # read where it is
        return LaterPart(
            nodes=tuple(self.nodes), values=tuple(self.values), choices=tuple(self.found), read=tuple(self.read),
            asked=asked,
        )  # fmt: skip

    def _wires(self) -> tuple[int, ...]:
        """Wires that get a choice: those with late readers, and what these can be made again from, back to the edge."""
        found = set(self.late)
        todo = list(found)
        while todo:
            wire = self.wiring.wires[todo.pop()]
            if not self._can_run_again(wire):
                continue
            slot = self.wiring.slots[wire.producer]
            assert slot.node is not None
            for index in {self.wire_of[(slot.graph, ref)] for ref in slot.node.refs} - found:
                if index not in self.lasting and not stays(self.wiring, self.wiring.wires[index]):
                    found.add(index)
                    todo.append(index)
        return tuple(sorted(found))

    def _can_run_again(self, wire: Wire) -> bool:
        """True of what a captured forward op makes for readers in its own graph."""
        slot = self.wiring.slots[wire.producer]
        if slot.kind is not SlotKind.OP or slot.node is None or slot.node.phase is not Phase.FORWARD:
            return False
        return self.again and slot.node.op != REGION and wire.names[0][0] == slot.graph

    def _add(self, name: str, slot: int, wire: int | None, choices: tuple[Later, ...], cost: Sequence[float]) -> int:
        node = len(self.wiring.slots) + len(self.nodes)
        self.nodes.append(ProblemNode(name=name, cost_us=tuple(cost)))
        kept = made = (0,) * len(choices)
        if wire is not None:
            kept = tuple(
                self.prices.kept_bytes(wire, c.layout) if c.layout and c.mode is Mode.KEEP else 0 for c in choices
            )
            made = tuple(
                self.prices.made_bytes(wire, c.layout) if c.layout and c.mode is Mode.AGAIN else 0 for c in choices
            )
        self.found.append(LaterNode(node=node, slot=slot, wire=wire, choices=choices, kept_bytes=kept, made_bytes=made))
        return node

    def _strategies(self, slot: int) -> list[Strategy]:
        return [pick for pick in self.choices[slot] if isinstance(pick, Strategy)]

    def _runner(self, slot: int) -> int:
        """The node that runs an op of several outputs again."""
        strategies = self._strategies(slot)
        choices = (NOTHING, *(Later(Mode.AGAIN, None, s) for s in range(len(strategies))))
        cost = [0.0, *(self.prices.again_us(slot, s) for s in range(len(strategies)))]
        node = self._add(f"again:{self.wiring.slots[slot]}", slot, None, choices, cost)
        self._tie(slot, node, choices)
        self._ask_inputs(slot, node, choices)
        return node

    def _tensor(self, slot: int, index: int, runner: int | None, *, again: bool) -> None:
        """The choice of one tensor."""
        wire = self.wiring.wires[index]
        kept = self._layouts(index)
        choices: list[Later] = [NOTHING, *(Later(Mode.KEEP, q) for q in kept)]
        cost = [0.0] * len(choices)
        if again and runner is not None:
            made = dict.fromkeys(s.outputs[wire.position] for s in self._strategies(slot))
            choices += [Later(Mode.AGAIN, p) for p in made if p is not None]
            cost += [0.0] * (len(choices) - len(cost))
        elif again:
            for s, strategy in enumerate(self._strategies(slot)):
                if (made_here := strategy.outputs[wire.position]) is not None:
                    choices.append(Later(Mode.AGAIN, made_here, s))
                    cost.append(self.prices.again_us(slot, s))
        graph, name = wire.names[0]
        node = self._add(f"later:{graph}:{name}:{index}", slot, index, tuple(choices), cost)
        self.forward[index] = Asked(node, tuple(c.layout if c.mode is Mode.KEEP else None for c in choices))
        if again and runner is not None:
            self._link(index, runner, node, tuple(choices))
        elif again:
            self._tie(slot, node, tuple(choices))
            self._ask_inputs(slot, node, tuple(choices))

    def _layouts(self, index: int) -> tuple[Layout, ...]:
        """Layouts in which the tensor is made, or read anywhere."""
        wire = self.wiring.wires[index]
        made = [_layout(pick, wire.position, output=True) for pick in self.choices[wire.producer]]
        read = [_layout(pick, r.position, output=False) for r in wire.readers for pick in self.choices[r.slot]]
        return tuple(x for x in dict.fromkeys([*made, *read]) if x is not None)

    def _tie(self, slot: int, node: int, choices: tuple[Later, ...]) -> None:
        """What is run again runs under the op's own strategy."""
        count = len(self.choices[slot])
        table = [[0.0 if p == q or q == count else INFINITY for q in range(count + 1)] for p in range(count + 1)]
        wants = tuple(c.strategy if c.mode is Mode.AGAIN else count for c in choices)
        self.values.append(
            ProblemValue(
                name=f"strategy:{self.wiring.slots[slot]}:{node}", producer=slot, made=tuple(range(count)),
                consumers=(Consumer(node=node, wants=wants),), reshard_us=tuple(map(tuple, table)),
            )
        )  # fmt: skip

    def _link(self, index: int, runner: int, node: int, choices: tuple[Later, ...]) -> None:
        """A tensor made again is one that the runner makes."""
        wire = self.wiring.wires[index]
        made = [None, *(s.outputs[wire.position] for s in self._strategies(wire.producer))]
        names = tuple(dict.fromkeys([None, *made]))
        at = {layout: i for i, layout in enumerate(names)}
        table = [[0.0 if p == q or q == 0 else INFINITY for q in range(len(names))] for p in range(len(names))]
        wants = tuple(at[c.layout] if c.mode is Mode.AGAIN else 0 for c in choices)
        graph, name = wire.names[0]
        self.values.append(
            ProblemValue(
                name=f"again:{graph}:{name}:{index}", producer=runner, made=tuple(at[p] for p in made),
                consumers=(Consumer(node=node, wants=wants),), reshard_us=tuple(map(tuple, table)),
            )
        )  # fmt: skip

    def _ask_inputs(self, slot: int, node: int, choices: tuple[Later, ...]) -> None:
        """What runs again reads its inputs in the backward."""
        op, strategies = self.wiring.slots[slot].node, self._strategies(slot)
        assert op is not None
        for position, ref in enumerate(op.refs):
            index = self.wire_of[(self.wiring.slots[slot].graph, ref)]
            wants = tuple(
                strategies[c.strategy].inputs[position] if c.mode is Mode.AGAIN and c.strategy >= 0 else None
                for c in choices
            )
            self.asked.setdefault(index, []).append(Asked(node, wants))

    def _value(self, index: int, own: LaterNode | None) -> None:
        """What the readers in the backward read: made by the tensor's choice, or there as a parameter is stored."""
        wire = self.wiring.wires[index]
        readers = [Asked(r.slot, _wants(r, self.choices)) for r in (wire.readers[i] for i in self.late.get(index, ()))]
        readers += self.asked.get(index, [])
        made: list[Layout | None]
        producer = wire.producer if own is None else own.node
        if own is None:
            made = [_layout(pick, wire.position, output=True) for pick in self.choices[wire.producer]]
        else:
            made = [c.layout for c in own.choices]
        names = tuple(dict.fromkeys([None, *made, *(q for r in readers for q in r.wants)]))
        at = {layout: i for i, layout in enumerate(names)}
        wanted = {q for r in readers for q in r.wants if q is not None}
        table = [[0.0 if p == q else INFINITY for q in names] for p in names]
        for p in dict.fromkeys(made):
            if p is not None:
                table[at[p]][0] = 0.0
                for q in wanted - {p}:
                    table[at[p]][at[q]] = self.prices.convert_us(index, p, q)
        graph, name = wire.names[0]
        self.read.append(LaterValue(value=len(self.wiring.wires) + len(self.values), wire=index, layouts=names))
        self.values.append(
            ProblemValue(
                name=f"later:{graph}:{name}:{index}", producer=producer, made=tuple(at[p] for p in made),
                consumers=tuple(Consumer(node=r.node, wants=tuple(at[q] for q in r.wants)) for r in readers),
                reshard_us=tuple(map(tuple, table)),
            )
        )  # fmt: skip


def _layout(pick: Strategy | Layout, position: int, *, output: bool) -> Layout | None:
    if isinstance(pick, Layout):
        return pick
    return pick.outputs[position] if output else pick.inputs[position]


def _wants(reader: Reader, choices: Choices) -> tuple[Layout | None, ...]:
    return tuple(_layout(pick, reader.position, output=False) for pick in choices[reader.slot])
