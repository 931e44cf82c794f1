"""For one op on one mesh: input layouts -> output layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.layout import Layout, Placement
from autopar.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to split an op over one mesh axis of any size.

    `inputs` has one placement per tensor argument (`Node.refs` order), `outputs` one per output (None where None).
    `tag` names the lowering if the local op is not simply the same op on the pieces ("" if it is).
    """

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement, ...]
    tag: str = ""

    def __str__(self) -> str:
        ins, outs = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"{ins} -> {outs}" + (f" [{self.tag}]" if self.tag else "")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to split an op over the mesh: the product of one rule per axis.

    `tags` has one entry per mesh axis: the `Rule.tag` used on it.
    """

    outputs: tuple[Layout | None, ...]
    inputs: tuple[Layout, ...]
    tags: tuple[str, ...] = ()

    def __str__(self) -> str:
        ins, outs = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        tags = ",".join(self.tags)
        return f"{ins} -> {outs}" + (f" [{tags}]" if tags.strip(",") else "")


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a person should know: kind ("replicated", "indivisible", "estimate", ...), where, message."""

    kind: str
    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTable:
    """Every choice on one mesh.

    Attributes:
        nodes: graph name -> node name -> strategies (block calls of the top graph have none: their block's graph has).
        inputs: graph name -> input value name -> layouts it may arrive in. Parameters are not here.
        storage: parameter name -> layouts in which it may be stored (and its gradient and optimizer state with it).
        outputs: graph name -> position in `Graph.outputs` -> layouts in which an OUTPUT or BUFFER_UPDATE may leave.
            Gradients of parameters are handed over in the parameter's storage layout.
    """

    mesh: Mesh
    nodes: Mapping[str, Mapping[str, tuple[Strategy, ...]]]
    inputs: Mapping[str, Mapping[str, tuple[Layout, ...]]]
    storage: Mapping[str, tuple[Layout, ...]]
    outputs: Mapping[str, Mapping[int, tuple[Layout, ...]]]
    notes: tuple[Note, ...] = field(default=())
