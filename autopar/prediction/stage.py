"""A pipeline stage's chunks as work for the simulator.

Layers are dealt to the P·v parts evenly, the fewer to the last parts, which hold the head, and to the first. Equal
layers of a part are one set of tasks, so many times as long. Parameters cut by ZeRO-3 are gathered beside the layer
before; gradients are reduced beside the last micro-batch's backward, and updated parameters gathered beside the next
step's first forward, but for the part that computation waits for (`rates.Exposed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.reshard import Collective
from autopar.ir.schedule import Schedule
from autopar.ir.work import COMPUTE, StageWork, Task
from autopar.prediction.layer import Amounts, LayerCost, head_cost, layer_cost
from autopar.prediction.memory import ChunkMemory, chunk_memory, end_bytes
from autopar.prediction.setting import Setting

EMBEDDING, LAYERS, ROUTED, HEAD = "embedding", "layers", "layers with experts", "head and loss"
TENSOR, CONTEXT, EXPERT, DATA, HOST = "comm:tp", "comm:cp", "comm:ep", "comm:dp", "host"


@dataclass(frozen=True, slots=True)
class Part:
    """What a part of the model holds: so many layers of each kind, and maybe an end of the model."""

    plain: int
    routed: int
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        return self.plain + self.routed


def parts_of(setting: Setting, schedule: Schedule) -> tuple[Part, ...]:
    """The model's layers in order over the parts.

    Where the layers don't divide but would with the embedding and the head counted as one each, these are.
    """
    model = setting.model
    counts = _counts(model.layers, schedule.parts)
    plain_left = model.layers - model.routed_layers
    found = []
    for part, count in enumerate(counts):
        plain = min(count, plain_left) if _leading(setting) else round(count * plain_left / model.layers)
        if _leading(setting):
            plain_left -= plain
        found.append(Part(plain, count - plain, part == 0, part == schedule.parts - 1))
    return tuple(found)


def _counts(layers: int, parts: int) -> list[int]:
    if layers % parts and (layers + 2) % parts == 0:
        whole = (layers + 2) // parts
        return [whole - (part in (0, parts - 1)) for part in range(parts)]
    least, more = divmod(layers, parts)
    # Of parts that hold one layer more, none is the last, and the first only if all others are.
    takes = [*range(1, parts - 1), 0][:more]
    return [least + (part in takes) for part in range(parts)]


def _leading(setting: Setting) -> bool:
    """True if plain layers come first; else they alternate with routed ones."""
    experts = setting.model.experts
    return experts is None or experts.every == 1


def stage_works(setting: Setting, schedule: Schedule) -> tuple[tuple[StageWork, ...], ...]:
    """The work of each stage's chunks. Parts alike share one record."""
    builder = _Builder(setting)
    parts = parts_of(setting, schedule)
    known: dict[tuple[Part, Part | None], StageWork] = {}
    rows = []
    for stage in range(schedule.stages):
        own = [parts[schedule.part(stage, chunk)] for chunk in range(schedule.chunks)]
        row = []
        for chunk, part in enumerate(own):
            key = (part, None if chunk else _whole(own))
            if key not in known:
                known[key] = builder.work(part, key[1])
            row.append(known[key])
        rows.append(tuple(row))
    return tuple(rows)


def stage_memories(setting: Setting, schedule: Schedule) -> tuple[tuple[ChunkMemory, ...], ...]:
    """What each stage's chunks hold."""
    parts = parts_of(setting, schedule)
    return tuple(
        tuple(_memory(setting, parts[schedule.part(stage, chunk)]) for chunk in range(schedule.chunks))
        for stage in range(schedule.stages)
    )


def _memory(setting: Setting, part: Part) -> ChunkMemory:
    return chunk_memory(setting, part.plain, part.routed, part.first, part.last)


def _whole(parts: Sequence[Part]) -> Part:
    """All parts of a stage as one: what its optimizer updates."""
    return Part(
        sum(p.plain for p in parts),
        sum(p.routed for p in parts),
        any(p.first for p in parts),
        any(p.last for p in parts),
    )


class _Builder:
    """Makes the work of one part after another; a layer's cost is worked out once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.plain = layer_cost(setting, routed=False)
        self.routed = layer_cost(setting, routed=True) if setting.model.routed_layers else None
        self.head = head_cost(setting)

    def work(self, part: Part, whole: Part | None) -> StageWork:
        """`whole`: of the stage's first chunk, all that the stage holds: its update is done there."""
        setting = self.setting
        rates = setting.speed.rates
        memory = _memory(setting, part)
        forward, backward = _Joined(), _Joined()
        looked_up = self._table(EMBEDDING, part)
        forward.add(_transfer("embedding, forward: gather parameters", "all-gather", looked_up[0]))
        for cost, count, name in self._groups(part):
            gather, reduce = self._table(HEAD, part) if name == HEAD else self._sharded(name, count)
            forward.add(_tasks(setting, cost.forward * count, f"{name}, forward", gather))
            again = cost.recomputed * count
            tasks = _tasks(setting, cost.backward * count + again, f"{name}, backward", gather, reduce)
            backward.add(tasks)
        # The gradient of what is looked up needs no table; frameworks gather all the same what a module owns.
        backward.add(_transfer("embedding, backward: gather parameters", "all-gather", looked_up[0]))
        backward.add(_transfer("embedding, backward: reduce gradients", "reduce-scatter", looked_up[1]))
        adding = setting.speed.memory_us(rates.accumulate_bytes * memory.trained)
        backward.add([Task(name="add gradients to their sums", kind="pointwise", us=adding)] if adding else [])
        reduced, gathered = self._synchronised(memory)
        exposed = rates.exposed.data
        half = tuple(replace(task, us=task.us / 2) for task in backward.tasks)
        output_bytes = setting.own_tokens * setting.model.hidden * setting.item_bytes
        return StageWork(
            forward=tuple(forward.tasks),
            backward=tuple(backward.tasks),
            backward_input=half,
            backward_weight=half,
            first_forward=_beside(forward.tasks, "gather updated parameters", "all-gather", gathered * (1 - exposed)),
            last_backward=_beside(backward.tasks, "reduce gradients", "reduce-scatter", reduced * (1 - exposed)),
            sync=_transfer("reduce gradients", "reduce-scatter", reduced * exposed),
            end=self._end(whole, gathered * exposed),
            send_us=setting.send_us(output_bytes),
            send_bytes=output_bytes,
            resident_bytes=memory.resident_bytes,
            held_bytes=memory.held_bytes,
            transient_bytes=memory.transient_bytes,
            end_bytes=end_bytes(setting, memory) if whole is not None else 0,
        )

    def _groups(self, part: Part) -> list[tuple[LayerCost, int, str]]:
        found = [(self.plain, part.plain, LAYERS)]
        if self.routed is not None:
            found.append((self.routed, part.routed, ROUTED))
        if part.last:
            found.append((self.head, 1, HEAD))
        return [group for group in found if group[1]]

    def _sharded(self, name: str, count: int) -> tuple[float, float]:
        """(gather, reduce-scatter) µs of so many layers' parameters under ZeRO-3, each way."""
        config, model = self.setting.config, self.setting.model
        routed = name == ROUTED
        own = model.attention_parameters + (model.shared_parameters if routed else model.dense_parameters)
        spread = model.expert_parameters / config.ep if routed else 0.0
        gather, reduce = self._cut(own / config.tp, spread, self.setting.gathered_bytes)
        return gather * count, reduce * count

    def _table(self, name: str, part: Part) -> tuple[float, float]:
        """The same of the embedding or the head, where the part holds it; one table where they are tied."""
        model = self.setting.model
        here = part.first if name == EMBEDDING else part.last and not (part.first and model.tied)
        own = model.embedding_parameters / self.setting.config.tp if here else 0.0
        return self._cut(own, 0.0, float(self.setting.item_bytes))

    def _cut(self, own: float, spread: float, gathered_bytes: float) -> tuple[float, float]:
        setting = self.setting
        config = setting.config
        if config.zero < 3:
            return 0.0, 0.0
        gather = reduce = 0.0
        for n, ranks, stride in self._held(own, spread, config.sharding_ranks):
            gather += setting.group_us(Collective.ALL_GATHER, n * gathered_bytes, ranks, stride)
            if config.trains == "all":
                reduce += setting.group_us(Collective.REDUCE_SCATTER, n * setting.gradient_bytes, ranks, stride)
        return gather, reduce

    def _held(self, own: float, spread: float, ranks: int) -> list[tuple[float, int, int]]:
        """(parameters, ranks that hold them alike, stride): those cut over tp, and experts' cut over ep."""
        config = self.setting.config
        whole = config.tp * config.dp * config.cp
        return [(own, ranks, config.tp), (spread, max(1, min(ranks, whole // config.ep)), config.ep)]

    def _synchronised(self, memory: ChunkMemory) -> tuple[float, float]:
        """(reduction of gradients, gathering of updated parameters) µs once a step."""
        setting = self.setting
        config = setting.config
        if config.zero == 3 or config.trains != "all":
            return 0.0, 0.0
        reduced = gathered = 0.0
        for n, ranks, stride in self._held(memory.own, memory.experts, config.dp * config.cp):
            collective = Collective.REDUCE_SCATTER if config.zero else Collective.ALL_REDUCE
            reduced += setting.group_us(collective, n * setting.gradient_bytes, ranks, stride)
        if config.zero:
            for n, ranks, stride in self._held(memory.own, memory.experts, config.sharding_ranks):
                gathered += setting.group_us(Collective.ALL_GATHER, n * setting.item_bytes, ranks, stride)
        return reduced, gathered

    def _end(self, whole: Part | None, gathered_us: float) -> tuple[Task, ...]:
        """The stage's update, and what is spent once a step."""
        gather = _transfer("gather updated parameters", "all-gather", gathered_us)
        if whole is None:
            return gather
        setting = self.setting
        rates = setting.speed.rates
        memory = _memory(setting, whole)
        update = setting.speed.memory_us(rates.optimizer_bytes * memory.updated)
        once = Task(name="data, norms, launches, logging", kind="launch", us=rates.step_us)
        return (Task(name="optimizer", kind="optimizer", us=update), once, *gather)


def _tasks(setting: Setting, amounts: Amounts, name: str, gather: float = 0.0, reduce: float = 0.0) -> list[Task]:
    """In the order of a layer. Transfers go beside computation but for the part that it waits for."""
    exposed = setting.speed.rates.exposed
    tensor = _exposed_tensor(setting)
    found: list[Task] = []

    def add(what: str, kind: str, us: float, stream: str = COMPUTE, after: tuple[int, ...] = ()) -> tuple[int, ...]:
        if us <= 0:
            return ()
        found.append(Task(name=f"{name}: {what}", kind=kind, us=us, stream=stream, after=after))
        return (len(found) - 1,)

    add("gather parameters", "all-gather", gather, DATA)
    add("launches and waits of the host", "launch", amounts.host, HOST)
    ring = add("keys and values around the ring", "send", amounts.context, CONTEXT)
    add("launches", "launch", amounts.launches)
    add("norms, residuals, activations", "pointwise", amounts.pointwise)
    add("conversions to low precision", "cast", amounts.casts)
    core = add("attention", "attention", amounts.attention)
    waits = add("tensor parallel, exposed", "all-gather", amounts.tensor * tensor, TENSOR, core)
    sent = add("tokens to experts, exposed", "all-to-all", amounts.experts * exposed.experts, EXPERT, (*core, *waits))
    add("matrices", "matmul", amounts.matrices, after=(*waits, *sent, *ring))
    add("tensor parallel, hidden", "all-gather", amounts.tensor * max(0.0, 1 - tensor), TENSOR)
    add("tokens to experts, hidden", "all-to-all", amounts.experts * (1 - exposed.experts), EXPERT)
    add("reduce gradients", "reduce-scatter", reduce, DATA)
    return found


def _exposed_tensor(setting: Setting) -> float:
    """Part of the transfers over tp that computation waits for.

    A gather or a scatter goes beside the pieces of the product that it feeds or takes from; an all-reduce, without
    sequence parallelism, has to wait for all of the product, and what is next for all of it.
    """
    exposed, config = setting.speed.rates.exposed, setting.config
    if config.software < exposed.overlap_since:
        return exposed.tensor_before_overlap
    return exposed.tensor if config.sequence_parallel else 1.0


class _Joined:
    """Lists one after the other in one: what a list transfers waits for all of the list before."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.before: tuple[int, ...] = ()

    def add(self, tasks: Sequence[Task]) -> None:
        """Append a list."""
        offset = len(self.tasks)
        for task in tasks:
            after = tuple(offset + i for i in task.after) or self.before
            self.tasks.append(replace(task, after=after))
        if tasks:
            self.before = tuple(range(offset, len(self.tasks)))


def _transfer(name: str, kind: str, us: float) -> tuple[Task, ...]:
    return (Task(name=name, kind=kind, us=us, stream=DATA),) if us > 0 else ()


def _beside(tasks: Sequence[Task], name: str, kind: str, us: float) -> tuple[Task, ...]:
    """The tasks, and a transfer that begins with them and that nothing waits for; () if there is none."""
    return (*tasks, Task(name=name, kind=kind, us=us, stream=DATA, late=True)) if us > 0 else ()
