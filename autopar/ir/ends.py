"""Which nodes of the top graph come before the model's blocks."""

from __future__ import annotations

from autopar.ir.graph import Node, Phase


def before_blocks(nodes: tuple[Node, ...]) -> frozenset[str]:
    """Names of the top graph's nodes that blocks read from, and in the backward of those that read what the last call
    of a block's backward has made.

    Where nodes stand in a graph isn't where they are needed: casts of the head's weights come before the blocks.
    """
    calls = {phase: [i for i, n in enumerate(nodes) if n.block is not None and n.phase is phase] for phase in Phase}
    begin = min(calls[Phase.FORWARD], default=0)
    end = max(calls[Phase.BACKWARD], default=len(nodes))
    maker = {out.name: n for n in nodes for out in n.outputs if out is not None}
    found: set[str] = set()
    for call in calls[Phase.FORWARD]:
        found |= _before(nodes[call], maker, nodes[:begin])
    after = {out.name for i in calls[Phase.BACKWARD] for out in nodes[i].outputs if out is not None}
    for n in nodes[end + 1 :]:
        if after & set(n.refs):
            found.add(n.name)
            after |= {out.name for out in n.outputs if out is not None}
    return frozenset(found)


def _before(call: Node, maker: dict[str, Node], earlier: tuple[Node, ...]) -> set[str]:
    """Names of the earlier nodes that a call reads from, directly or not."""
    allowed = {n.name for n in earlier if n.block is None}
    found: set[str] = set()
    todo = [call]
    while todo:
        for ref in todo.pop().refs:
            made = maker.get(ref)
            if made is not None and made.name in allowed and made.name not in found:
                found.add(made.name)
                todo.append(made)
    return found
