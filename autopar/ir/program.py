"""What each rank executes: local ops and explicit collectives in order, one function per distinct block and phase.

A `Local` is one version of a value: the value in one layout, under the Python name that the emitted code gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.cuts import Own
from autopar.ir.graph import Phase, TensorMeta
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import ReshardStep


@dataclass(frozen=True, slots=True)
class Local:
    """This rank's piece of `value` in `layout`. `meta` is local: of the largest piece, where pieces aren't equal."""

    name: str
    value: str
    layout: Layout
    meta: TensorMeta

    def __str__(self) -> str:
        return f"{self.name}: {self.meta} {self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a step comes from: node key, module path and "file.py:123" of the user's line ("" if unknown)."""

    key: str
    module_path: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A call on local tensors. `args` and `kwargs` hold `Ref`s to names of `Local`s, `TorchConst`s, literals, and `Own`
    numbers.

    `wants` has the layout that the strategy asks of each of `inputs`, the tensor arguments in `Node.refs` order.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[Local, ...]
    wants: tuple[Layout, ...]
    outputs: tuple[Local | None, ...]
    place: Place

    def __str__(self) -> str:
        outs = ", ".join("_" if o is None else str(o) for o in self.outputs)
        return f"{outs} = {self.function}({', '.join(i.name for i in self.inputs)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One step of a conversion, from `before` (a name) to `after`.

    `sizes` says what pieces that aren't equal don't say themselves: "length" (of the joined dim), "unit" of it, and
    "cut_unit" (of an all-to-all, of the dim cut afterwards). `view`, of a slice: it copies nothing, since what it is
    cut from is there as long as it is anyway.
    """

    step: ReshardStep
    before: str
    after: Local
    sizes: tuple[tuple[str, int | Own], ...] = ()
    view: bool = False

    def __str__(self) -> str:
        return f"{self.after} = {self.step} {self.before}{' as a view' if self.view else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """A value from the layout it was made in to another; priced as one."""

    before: Local
    after: Local
    steps: tuple[Collective, ...]
    place: Place

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What waits, for the backward or for the end of the step, copied out of a larger storage, which can go. The name
    stays. `whole`: the name of what made the larger storage."""

    local: Local
    whole: str
    place: Place

    def __str__(self) -> str:
        return f"keep {self.local.name} apart from {self.whole}"


@dataclass(frozen=True, slots=True)
class Free:
    """Names that nothing reads any more."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"free {', '.join(self.names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """Run a block's function.

    Attributes:
        block: key of the distinct block; `index` counts its calls in forward order.
        function: name of the function called.
        parameters: positions in the top graph's parameters, in the order of the block's parameters.
        inputs: other arguments: forward, the block's non-parameter inputs; backward, its tangents.
        wants: layout that the block asks of each of `inputs`.
        outputs: forward, the OUTPUT outputs; backward, the gradients of non-parameters. None: nothing there, or unread.
        gradients: backward, the gradients of parameters, None where none.
        weights: the second half of a backward: of `gradients`; the first gives `outputs` alone.
    """

    block: str
    index: int
    function: str
    phase: Phase
    parameters: tuple[int, ...]
    inputs: tuple[Local, ...]
    wants: tuple[Layout, ...]
    outputs: tuple[Local | None, ...]
    gradients: tuple[Local | None, ...]
    place: Place
    weights: bool = False

    def __str__(self) -> str:
        outs = ", ".join("_" if o is None else str(o) for o in (*self.outputs, *self.gradients))
        return f"{outs} = {self.function}[{self.index}]({', '.join(i.name for i in self.inputs)})"


Step = Compute | Convert | Keep | Free | CallBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One phase of one graph.

    Attributes:
        block: key of the block, "" of the top graph.
        parameters: the graph's parameters in storage layout.
        buffers, constants, inputs, tangents: the graph's other inputs, in order (a backward has tangents only; of the
            forward of a block, `inputs` holds its buffers and constants too, in the order of the block's inputs).
        saved: made by the forward, read by the backward; the same tuple in both.
        outputs: forward, the OUTPUT outputs; backward, the gradients of non-parameters.
        updates: forward of the top graph, new values of buffers.
        gradients: backward, one per parameter, None where none.
        weights: the second half of a backward in halves: it gives what the first doesn't need for its outputs.
        waits: of the first half, what it leaves to the second, whose `saved` that is.
    """

    name: str
    graph: str
    block: str
    phase: Phase
    parameters: tuple[Local, ...]
    buffers: tuple[Local, ...] = ()
    constants: tuple[Local, ...] = ()
    inputs: tuple[Local, ...] = ()
    tangents: tuple[Local, ...] = ()
    saved: tuple[Local, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Local | None, ...] = ()
    updates: tuple[Local, ...] = ()
    gradients: tuple[Local | None, ...] = ()
    weights: bool = False
    waits: tuple[Local, ...] = ()

    @property
    def left(self) -> tuple[Local, ...]:
        """What the function after it takes over."""
        return self.saved if self.phase is Phase.FORWARD else self.waits

    def converts(self) -> Iterator[Convert]:
        """The conversions in order."""
        return (s for s in self.steps if isinstance(s, Convert))

    def __str__(self) -> str:
        lines = [f"function {self.name}"]
        for kind in ("parameters", "buffers", "constants", "inputs", "tangents", "saved", "waits"):
            lines += [f"  {kind} {local}" for local in getattr(self, kind)]
        lines += [f"  {step}" for step in self.steps]
        for kind in ("outputs", "updates", "gradients"):
            names = ", ".join("None" if o is None else o.name for o in getattr(self, kind))
            lines += [f"  {kind}: {names}"] if names else []
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The whole step of one rank, equal on all ranks.

    Attributes:
        functions: forward and backward of each distinct block, then of the top graph.
        calls: block key -> instance (module path) of each call, in forward order.
        block_parameters: block key -> per call, positions in the top graph's parameters of the block's parameters.
        parameters, buffers, constants, inputs, outputs, tangents: name or target -> layout, in the order in which the
            top functions take or give them. `updates`: names of the buffers that the forward gives new values of;
            `differentiated`: inputs whose gradients the backward gives, whole, after those of the parameters.
        metas: graph name -> value name -> global meta.
        sums: gradients leave as their sums over micro-batches stay, not as parameters are stored.
        halves: backwards are in two halves, gradients of inputs and, later, those of parameters.
    """

    model_name: str
    graph_hash: str
    mesh: Mesh
    functions: tuple[Function, ...]
    calls: Mapping[str, tuple[str, ...]]
    block_parameters: Mapping[str, tuple[tuple[int, ...], ...]]
    parameters: Mapping[str, Layout]
    buffers: Mapping[str, Layout]
    constants: Mapping[str, Layout]
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    tangents: Mapping[str, Layout]
    updates: tuple[str, ...]
    differentiated: tuple[str, ...] = ()
    metas: Mapping[str, Mapping[str, TensorMeta]]
    sums: bool = False
    halves: bool = False

    def function(self, graph: str, phase: Phase, weights: bool = False) -> Function:
        """The function of one graph and phase; `weights`: the second half of its backward."""
        return next(f for f in self.functions if f.graph == graph and f.phase is phase and f.weights is weights)

    def __str__(self) -> str:
        head = f"program {self.model_name} on {self.mesh}"
        return "\n".join([head, *map(str, self.functions)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one run of a line works on: versions of values by position, None where nothing is kept. `key`: of the op."""

    key: str
    inputs: tuple[Local | None, ...]
    outputs: tuple[Local | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a line of an emitted function makes.

    Attributes:
        function: name of the function; `op`: the op, or the step of a conversion.
        reads, names: the variables that the line reads and sets, in the order of each turn's inputs and outputs.
        turns: one for each turn of the loop that the line is in; one, outside.
        graph: of the function. `called`: the line calls a block's function.
        converts: (value, layout before, layout after) of the conversion that a collective is step number `part` of, one
            for each turn; none for ops.
    """

    function: str
    op: str
    reads: tuple[str, ...]
    names: tuple[str, ...]
    turns: tuple[Turn, ...]
    graph: str = ""
    called: bool = False
    converts: tuple[tuple[str, str, str], ...] = ()
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Emitted Python. `lines` maps line numbers (from 1) to where the line comes from, `made` to what it makes."""

    text: str
    lines: Mapping[int, Place]
    made: Mapping[int, Made] = field(default_factory=dict)
