"""What of a model's top graph runs micro-batch by micro-batch, and what waits for all of them.

A *join* is a value that every micro-batch makes a piece or a summand of, read as a whole: the number of labels that
count, the sum of their losses. Where the backward asks for a join it must be there before any backward runs, so what
makes it runs first, on the whole batch, and may not be what stages compute: labels and masks. What only the outputs
ask for is joined at the end of the step, and so is what only gradients of parameters need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, OutputKind, Phase
from autopar.ir.places import Places, tail_nodes

Joins = Callable[[Node, int], bool]
"""(reader, position among its refs) -> True if the reader asks for more than its micro-batch's own piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Names of nodes and values.

    Attributes:
        main: nodes that run in every micro-batch.
        post: nodes that run once at the end.
        collected: values that `post`, or the outputs, take of all micro-batches.
        tails: nodes of the backward that run once at the end, on `summed`: values that micro-batches make summands of.
    """

    main: frozenset[str]
    post: frozenset[str]
    collected: tuple[str, ...]
    tails: frozenset[str]
    summed: tuple[str, ...]


def find_live(top: Graph, places: Places, joins: Joins, leaves: Iterable[str]) -> Live:
    """Sort the nodes. `leaves`: the values that gradients are made of.

    Raises PlanError for a model whose stages need what other micro-batches compute.
    """
    work = _Finder(top, places, joins)
    for leaf in leaves:
        work.visit_gradient(leaf)
    outputs = [o.value for o in top.outputs if o.kind is OutputKind.OUTPUT and o.value is not None]
    updates = [o.value for o in top.outputs if o.kind is OutputKind.BUFFER_UPDATE and o.value is not None]
    for value in outputs:
        work.visit_output(value)
    for value in updates:
        work.visit_main(value)
    for node in top.nodes:
        if not node.outputs and node.phase is Phase.FORWARD:  # checks values
            work.take(node)
    for value in work.joined:
        work.check_first(value)
    return Live(
        main=frozenset(work.main),
        post=frozenset(work.post), collected=tuple(work.collected), tails=frozenset(work.tails),
        summed=tuple(work.summed),
    )  # fmt: skip


@dataclass
class _Finder:
    top: Graph
    places: Places
    joins: Joins
    main: set[str] = field(default_factory=set)
    post: set[str] = field(default_factory=set)
    joined: dict[str, str] = field(default_factory=dict)
    collected: dict[str, None] = field(default_factory=dict)
    tails: set[str] = field(default_factory=set)
    summed: dict[str, None] = field(default_factory=dict)
    _late: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._may_wait = tail_nodes(self.top)

    def visit_gradient(self, value: str) -> None:
        """A gradient: of a micro-batch, or at the end, where ops on it read the sum of all micro-batches."""
        node = self.places.maker.get(value)
        if node is None or node.name not in self._may_wait or not self._waits(value):
            self.visit_main(value)
            return
        self.tails.add(node.name)
        for ref in node.refs:
            if self._floats(ref):
                self._tail_reads(ref)
            elif self._waits(ref):
                self.visit_gradient(ref)
            else:  # what micro-batches make summands of, or all make alike
                self.summed[ref] = None
                self.visit_main(ref)

    def _tail_reads(self, value: str) -> None:
        node = self.places.maker.get(value)
        if node is not None and node.name not in self.tails:
            self.tails.add(node.name)
            for ref in node.refs:
                self._tail_reads(ref)

    def _waits(self, value: str) -> bool:
        """True if ops of the backward read a value joined on the way to this gradient."""
        node = self.places.maker.get(value)
        if node is None or node.name not in self._may_wait:
            return False
        return any(not self._floats(r) and (self.joins(node, p) or self._waits(r)) for p, r in enumerate(node.refs))

    def visit_main(self, value: str) -> None:
        """What a value of a micro-batch is made of."""
        todo = [value]
        while todo:
            node = self.places.maker.get(todo.pop())
            if node is not None and node.name not in self.main:
                todo += self.take(node)

    def take(self, node: Node) -> list[str]:
        """A node of every micro-batch; what else that takes."""
        self.main.add(node.name)
        read = []
        for position, ref in enumerate(node.refs):
            if self.joins(node, position):
                self.joined.setdefault(ref, node.key)
            else:
                read.append(ref)
        return read

    def check_first(self, value: str) -> None:
        """PlanError unless a value that others read joined can be made before any stage runs."""
        node = self.places.maker.get(value)
        if not self._floats(value) and node is not None:
            raise PlanError(
                f"{self.joined[value]} of every micro-batch needs {value}, which all micro-batches together "
                f"compute ({node.key}): this model can't be cut into micro-batches with the same numbers; search "
                f"with --micro-batches 1"
            )

    def visit_output(self, value: str) -> None:
        """An output: at the end of the step where it needs a join, else collected from micro-batches."""
        if not self.late(value):
            self._collect(value)
            return
        node = self.places.maker[value]
        if node.name in self.post:
            return
        self.post.add(node.name)
        for position, ref in enumerate(node.refs):
            if self.joins(node, position):
                self._collect(ref)
            elif self.late(ref):
                self.visit_output(ref)
            else:
                self._float(ref)

    def _float(self, value: str) -> None:
        """What an op at the end reads: made there, or taken of the micro-batches."""
        node = self.places.maker.get(value)
        if node is None:
            return
        if node.name not in self.places.floating:
            self._collect(value)
            return
        self.post.add(node.name)
        for ref in node.refs:
            self._float(ref)

    def _collect(self, value: str) -> None:
        self.collected[value] = None
        self.visit_main(value)

    def late(self, value: str) -> bool:
        """True if a value of the forward depends on a join of what stages compute."""
        node = self.places.maker.get(value)
        if node is None:
            return False
        if node.name not in self._late:
            self._late[node.name] = False
            self._late[node.name] = any(
                self.late(r) or (self.joins(node, p) and not self._floats(r)) for p, r in enumerate(node.refs)
            )
        return self._late[node.name]

    def _floats(self, value: str) -> bool:
        """True of an input, and of what can be made, and joined, before all stages."""
        node = self.places.maker.get(value)
        return node is None or node.name in self.places.floating
