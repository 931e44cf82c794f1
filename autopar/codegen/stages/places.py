"""Which part of a pipeline runs which node of the top graph.

A model cut into parts has so many of its blocks' calls on each, in order. Of what is not in a block, a forward node is
where what it reads is made, or, where it reads nothing that a part makes (the embedding), where it is first read. What
inputs, buffers or parameters alone decide *floats*: every part that reads it makes it (masks, positions, casts of
weights). A backward node is where the gradient that it reads comes from, so that gradients flow down only. The gradient
of a parameter that several parts read is a sum: each part makes its own summand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.ir.graph import REGION, Graph, InputKind, Node, OutputKind, Phase, Ref

SUM = "aten.add.Tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Parts by name of node.

    Attributes:
        maker: value -> the node that makes it.
        part: node -> its part; none for nodes in `floating`.
        summands: parameter's value -> (part, summand of its gradient), in order of parts.
        sums: nodes that only add summands of different parts.
    """

    parts: int
    maker: dict[str, Node]
    part: dict[str, int]
    floating: frozenset[str]
    summands: dict[str, tuple[tuple[int, str], ...]]
    sums: dict[str, Node]


def place_nodes(top: Graph, blocks: Sequence[int]) -> Places:
    """Places for parts of so many block calls each. Raises PlanError for a model whose gradients flow both ways."""
    work = _Placer(top, blocks)
    work.float()
    work.forward()
    work.backward()
    sums: dict[str, Node] = {}
    summands = {}
    for out in top.outputs:
        if out.kind is OutputKind.GRADIENT and out.value is not None and out.target in work.parameters:
            inner: dict[str, Node] = {}
            leaves = work.leaves(out.value, inner)
            placed = tuple(sorted((work.part_of(leaf), leaf) for leaf in leaves))
            if len({part for part, _ in placed}) > 1:
                sums |= inner
                summands[out.target] = placed
            else:
                summands[out.target] = ((placed[0][0], out.value),)
    return Places(
        parts=len(blocks), maker=work.maker, part=work.part, floating=frozenset(work.floating), summands=summands,
        sums=sums,
    )  # fmt: skip


@dataclass
class _Placer:
    top: Graph
    blocks: Sequence[int]
    maker: dict[str, Node] = field(default_factory=dict)
    readers: dict[str, list[Node]] = field(default_factory=dict)
    part: dict[str, int] = field(default_factory=dict)
    floating: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for own in self.top.inputs:
            if own.kind is InputKind.PARAMETER:
                self.parameters.add(own.value.name)
            elif own.kind is not InputKind.TANGENT:
                self.given.add(own.value.name)
        for node in self.top.nodes:
            self.maker.update({o.name: node for o in node.outputs if o is not None})
            for ref in set(node.refs):
                self.readers.setdefault(ref, []).append(node)
        self.last = len(self.blocks) - 1

    def float(self) -> None:
        """Nodes that only parameters, or only other inputs, decide; in the backward, those that such nodes decide."""
        plain, lasting = set(self.given), set(self.parameters)
        for node in self.top.nodes:
            if node.block is not None or node.op == REGION:
                continue
            names = {o.name for o in node.outputs if o is not None}
            if all(r in plain for r in node.refs):
                plain |= names
            elif all(r in lasting for r in node.refs):
                lasting |= names
            elif node.phase is not Phase.BACKWARD or not all(r in plain or r in lasting for r in node.refs):
                continue
            else:
                lasting |= names
            self.floating.add(node.name)

    def forward(self) -> None:
        """Parts of the forward's nodes."""
        calls = iter([part for part, count in enumerate(self.blocks) for _ in range(count)])
        nodes = [n for n in self.top.nodes if n.phase is Phase.FORWARD and n.name not in self.floating]
        for node in nodes:
            if node.block is not None:
                self.part[node.name] = next(calls)
                continue
            read = self._parts_read(node, Phase.FORWARD)
            if read:
                self.part[node.name] = max(read)
        for node in reversed(nodes):
            if node.name not in self.part:
                asked = [
                    self.part[r.name]
                    for o in node.outputs if o is not None
                    for r in self.readers.get(o.name, ()) if r.phase is Phase.FORWARD and r.name in self.part
                ]  # fmt: skip
                self.part[node.name] = min(asked, default=self.last)
        for node in nodes:
            here = self.part[node.name]
            late = [r for r in node.refs if (made := self._part_made(r)) is not None and made > here]
            if late:
                raise PlanError(f"{node.key} is on a stage before that which makes {late[0]}: search without stages")

    def backward(self) -> None:
        """Parts of the backward's nodes: never above that of a gradient that they read."""
        instances = {n.block.instance: self.part[n.name] for n in self.top.nodes
                     if n.block is not None and n.phase is Phase.FORWARD}  # fmt: skip
        nodes = [n for n in self.top.nodes if n.phase is Phase.BACKWARD and n.name not in self.floating]
        tangents = {i.value.name for i in self.top.inputs if i.kind is InputKind.TANGENT}
        for node in nodes:
            read = self._parts_read(node, Phase.BACKWARD) + [self.last for r in node.refs if r in tangents]
            if node.block is not None:
                self.part[node.name] = part = instances[node.block.instance]
                if any(at < part for at in read):
                    raise PlanError(f"{node.key} reads a gradient of an earlier stage: search without stages")
            elif read:
                self.part[node.name] = min(read)
        for node in reversed(nodes):
            if node.name not in self.part:
                asked = [self.part[r.name] for o in node.outputs if o is not None
                         for r in self.readers.get(o.name, ()) if r.name in self.part]  # fmt: skip
                self.part[node.name] = max(asked, default=self.last)

    def _parts_read(self, node: Node, phase: Phase) -> list[int]:
        made = [self.maker[r] for r in node.refs if r in self.maker]
        return [self.part[n.name] for n in made if n.phase is phase and n.name in self.part]

    def _part_made(self, value: str) -> int | None:
        node = self.maker.get(value)
        return None if node is None else self.part.get(node.name)

    def part_of(self, value: str) -> int:
        """Of what makes a value; of what floats, the last."""
        found = self._part_made(value)
        return self.last if found is None else found

    def leaves(self, value: str, inner: dict[str, Node]) -> list[str]:
        """The summands of a gradient; `inner` gets the nodes that add them."""
        node = self.maker.get(value)
        if node is None or not _adds(node) or len(self.readers.get(value, ())) > 1:
            return [value]
        inner[node.name] = node
        return [leaf for ref in node.refs for leaf in self.leaves(ref, inner)]


def _adds(node: Node) -> bool:
    """True of a plain sum of two tensors in the backward."""
    plain = node.op == SUM and node.phase is Phase.BACKWARD and not node.kwargs
    return plain and len(node.args) == 2 and all(isinstance(a, Ref) for a in node.args)
