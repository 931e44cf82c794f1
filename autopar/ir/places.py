"""Which part of a pipeline runs which node of the top graph.

A model cut into parts has so many of its blocks' calls on each, in order. Of what is not in a block, a forward node is
where it is first read, so that its gradient is made where it is; what the outputs alone read is on the last part. What
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
        readers: parameter's value -> parts that read it.
    """

    parts: int
    maker: dict[str, Node]
    part: dict[str, int]
    floating: frozenset[str]
    summands: dict[str, tuple[tuple[int, str], ...]]
    sums: dict[str, Node]
    readers: dict[str, frozenset[int]]


def place_nodes(top: Graph, blocks: Sequence[int]) -> Places:
    """Places for parts of so many block calls each. Raises PlanError for a model whose gradients flow both ways."""
    floating, _ = floating_nodes(top)
    work = _Placer(top, blocks, floating)
    work.forward()
    work.backward()
    sums: dict[str, Node] = {}
    summands = {}
    readers = work.parameter_readers()
    for out in top.outputs:
        if out.kind is OutputKind.GRADIENT and out.value is not None and out.target in work.parameters:
            inner: dict[str, Node] = {}
            leaves = work.leaves(out.value, inner)
            placed = tuple(sorted((work.part_of(leaf), leaf) for leaf in leaves))
            strays = {part for part, _ in placed} - readers.get(out.target, frozenset())
            if strays and len(blocks) > 1:
                raise PlanError(f"a gradient of {out.target} is made on part {min(strays)}, which does not read it")
            if len({part for part, _ in placed}) > 1:
                sums |= inner
                summands[out.target] = placed
            else:
                summands[out.target] = ((placed[0][0], out.value),)
    return Places(
        parts=len(blocks), maker=work.maker, part=work.part, floating=floating, summands=summands,
        sums=sums, readers=readers,
    )  # fmt: skip


def floating_nodes(top: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """(nodes that only parameters, or only other inputs, decide, and in the backward those that such nodes decide;
    values that only inputs which are no parameters decide, these inputs among them)."""
    plain, lasting = set(), set()
    for own in top.inputs:
        if own.kind is InputKind.PARAMETER:
            lasting.add(own.value.name)
        elif own.kind is not InputKind.TANGENT:
            plain.add(own.value.name)
    found = set()
    for node in top.nodes:
        if node.block is not None or node.op == REGION:
            continue
        if all(r in plain for r in node.refs):
            into = plain
        elif all(r in lasting for r in node.refs) or (
            node.phase is Phase.BACKWARD and all(r in plain or r in lasting for r in node.refs)
        ):
            into = lasting
        else:
            continue
        into |= {o.name for o in node.outputs if o is not None}
        found.add(node.name)
    return frozenset(found), frozenset(plain)


def joinable_values(top: Graph) -> frozenset[str]:
    """Values that may be joined over micro-batches: those that inputs alone decide, which can all be made first, and
    those that only the model's outputs need joined, which can wait for the end."""
    _, plain = floating_nodes(top)
    maker = {o.name: n for n in top.nodes for o in n.outputs if o is not None}
    needed = {n.name for n in top.nodes if n.phase is Phase.BACKWARD or n.block is not None}
    todo = [n for n in top.nodes if n.name in needed]
    while todo:
        for ref in todo.pop().refs:
            made = maker.get(ref)
            if made is not None and made.name not in needed:
                needed.add(made.name)
                todo.append(made)
    read = {r for n in top.nodes if n.name in needed for r in n.refs}
    late = {o.name for n in top.nodes if n.phase is Phase.FORWARD for o in n.outputs if o is not None} - read
    return plain | frozenset(late) | _into_tails(top)


def tail_nodes(top: Graph) -> frozenset[str]:
    """Nodes of the backward that only gradients of parameters need, and that read nothing of the forward but what
    floats: they can run on the sums of all micro-batches."""
    floating, plain = floating_nodes(top)
    parameters = {i.value.name for i in top.inputs if i.kind is InputKind.PARAMETER}
    free = plain | parameters | {o.name for n in top.nodes if n.name in floating for o in n.outputs if o is not None}
    backward = {o.name for n in top.nodes if n.phase is Phase.BACKWARD for o in n.outputs if o is not None}
    elsewhere: set[str] = set()  # what others than tails read
    found: set[str] = set()
    for node in reversed(top.nodes):
        if node.phase is not Phase.BACKWARD or node.name in floating:
            continue
        own = all(r in free or r in backward for r in node.refs)
        if node.block is None and own and not any(o is not None and o.name in elsewhere for o in node.outputs):
            found.add(node.name)
        else:
            elsewhere.update(node.refs)
    return frozenset(found)


def _into_tails(top: Graph) -> frozenset[str]:
    """Values of the backward that only tails read."""
    tails = tail_nodes(top)
    made = {o.name for n in top.nodes if n.phase is Phase.BACKWARD for o in n.outputs if o is not None}
    read = {r for n in top.nodes if n.name in tails for r in n.refs}
    return frozenset((made & read) - {r for n in top.nodes if n.name not in tails for r in n.refs})


@dataclass
class _Placer:
    top: Graph
    blocks: Sequence[int]
    floating: frozenset[str]
    maker: dict[str, Node] = field(default_factory=dict)
    readers: dict[str, list[Node]] = field(default_factory=dict)
    part: dict[str, int] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.parameters = {i.value.name for i in self.top.inputs if i.kind is InputKind.PARAMETER}
        for node in self.top.nodes:
            self.maker.update({o.name: node for o in node.outputs if o is not None})
            for ref in set(node.refs):
                self.readers.setdefault(ref, []).append(node)
        self.last = len(self.blocks) - 1

    def forward(self) -> None:
        """Parts of the forward's nodes."""
        calls = iter([part for part, count in enumerate(self.blocks) for _ in range(count)])
        nodes = [n for n in self.top.nodes if n.phase is Phase.FORWARD and n.name not in self.floating]
        for node in nodes:
            if node.block is not None:
                self.part[node.name] = next(calls)
        given = {o.value for o in self.top.outputs if o.kind is OutputKind.OUTPUT}
        for node in reversed(nodes):
            if node.name not in self.part:
                asked = self._parts_reading(node, Phase.FORWARD)
                if asked:
                    self.part[node.name] = min(asked)
                elif any(o is not None and o.name in given for o in node.outputs):
                    self.part[node.name] = self.last
        for node in nodes:
            if node.name not in self.part:  # only the backward, or nothing, reads it
                self.part[node.name] = max(self._parts_read(node, Phase.FORWARD), default=self.last)
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
                self.part[node.name] = max(self._parts_reading(node, Phase.BACKWARD), default=self.last)

    def _parts_read(self, node: Node, phase: Phase) -> list[int]:
        made = [self.maker[r] for r in node.refs if r in self.maker]
        return [self.part[n.name] for n in made if n.phase is phase and n.name in self.part]

    def _parts_reading(self, node: Node, phase: Phase) -> list[int]:
        readers = [r for o in node.outputs if o is not None for r in self.readers.get(o.name, ())]
        return [self.part[r.name] for r in readers if r.phase is phase and r.name in self.part]

    def _part_made(self, value: str) -> int | None:
        node = self.maker.get(value)
        return None if node is None else self.part.get(node.name)

    def part_of(self, value: str) -> int:
        """Of what makes a value; of what floats, the last."""
        found = self._part_made(value)
        return self.last if found is None else found

    def parameter_readers(self) -> dict[str, frozenset[int]]:
        """Parts that read each parameter, also through what floats."""
        found: dict[str, set[int]] = {p: set() for p in self.parameters}
        through: dict[str, frozenset[str]] = {p: frozenset({p}) for p in self.parameters}
        for node in self.top.nodes:
            of = frozenset().union(*(through.get(r, frozenset()) for r in node.refs))
            if node.name in self.floating:
                through.update({o.name: of for o in node.outputs if o is not None})
            elif node.name in self.part:
                for parameter in of:
                    found[parameter].add(self.part[node.name])
        return {p: frozenset(parts) for p, parts in found.items() if parts}

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
