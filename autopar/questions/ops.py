"""Why an op runs as it does: its chosen way excluded."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from autopar.candidates import Task, plan_of, price_mesh
from autopar.cost_model.places import Places, short
from autopar.cost_model.wiring import SlotKind
from autopar.ir.graph import Graph, Node
from autopar.ir.strategy import Strategy
from autopar.present.plan_diff import diff_plans
from autopar.present.words import group_name
from autopar.questions.answers import Binding, Explanation
from autopar.questions.on_mesh import ROUNDING, OnMesh, Other, is_choice, lifting, memory_or_objective, peak, standing


def find_ops(task: Task, name: str) -> list[tuple[Graph, Node]]:
    """Ops by key ("block: key" or the key alone), or by the module that they are in; the dearest kinds first."""
    places, found = Places.of(task.captured), []
    for graph in task.captured.graphs:
        for node in graph.nodes:
            if node.block is None and _names_op(name, graph, node, places.prefix[graph.name], task):
                found.append((graph, node))
    exact = [x for x in found if name in (x[1].key, f"{x[0].name}: {x[1].key}")]
    weigh = {id(n): sum(o.meta.numel for o in n.outputs if o is not None) for _, n in found}
    return exact or sorted(found, key=lambda x: -weigh[id(x[1])])


def _names_op(name: str, graph: Graph, node: Node, prefix: str, task: Task) -> bool:
    path, _, op = name.partition("/")
    if name in (node.key, f"{graph.name}: {node.key}"):
        return True
    if not path:
        return False
    under = [prefix] if graph is task.captured.top else [prefix, *task.captured.block(graph.name).instances]
    paths = [".".join(x for x in (p, node.module_path) if x) for p in under]
    here = any(p and (fnmatchcase(p, path) or fnmatchcase(p, f"{path}.*") or p == path) for p in paths)
    return here and (not op or op in (short(node.op), node.op, node.key.partition("/")[2]))


def more_ops(ops: list[tuple[Graph, Node]]) -> Iterator[str]:
    """That the name fits others too."""
    if len(ops) > 1:
        keys = ", ".join(f"{g.name}: {n.key}" for g, n in ops[1:4])
        more = f" and {len(ops) - 4} more" if len(ops) > 4 else ""
        yield f"{len(ops)} ops are called so, this is the one with the largest result; the others: {keys}{more}"


def explain_op(here: OnMesh, name: str, graph: Graph, node: Node) -> Explanation:
    """As for a parameter, with the op's chosen strategy excluded instead of another pinned."""
    slot = here.slot(SlotKind.OP, graph.name, node.name)
    picks = here.base.priced.options[slot]
    texts = [_strategy_words(s) for s in picks if isinstance(s, Strategy)]
    planned = here.plan.strategies[graph.name][node.key]
    chosen = words(tuple(planned.inputs), tuple(planned.outputs), tuple(planned.tags))
    here.progress(f"other ways to run {node.key}", 0.0)
    other = here.only(here.problem, slot, [i for i, text in enumerate(texts) if text != chosen])
    best = plan_of(here.task, here.base, other) if other is not None else None
    places = Places.of(here.task.captured)
    found = Other(texts[other.choice[slot]] if other else "", best)
    limits = _op_pins(here, slot, chosen) or memory_or_objective(here, slot, texts, chosen)
    single = len(set(texts)) == 1
    best_of = "nothing: it is the fastest of what a search considers on this mesh"
    nothing = "nothing: on this mesh it has one way to run" if single else best_of
    if other is None and not single:
        nothing = "the memory limit: no other way fits"
    return Explanation(
        name=name,
        subject=subject(places, graph, node),
        kind="op",
        covers=instances(here.task, graph),
        chosen=chosen,
        chosen_words="",
        next_best=found.text,
        next_best_words="",
        difference_us=best.solver.objective_us - here.optimum.objective_us if best else None,
        difference_bytes=peak(best) - peak(here.best) if best else None,
        binding=limits or Binding(kind="memory" if nothing.startswith("the memory") else "none", message=nothing),
        pins={},
        objective_us=here.optimum.objective_us,
        diff=diff_plans(here.best, best, ("as planned", "next best")) if best else None,
        notes=tuple(standing(here, found)),
    )


def subject(places: Places, graph: Graph, node: Node) -> str:
    """Where the op stands, for people, and its key."""
    return f"{places.node(graph.name, node)}, {graph.name}: {node.key}"


def instances(task: Task, graph: Graph) -> str:
    """What else an answer about an op of this graph holds for."""
    if graph is task.captured.top:
        return ""
    paths = task.captured.block(graph.name).instances
    return f"{group_name(paths, alone=False)}: {len(paths)} instances of one folded block"


def _op_pins(here: OnMesh, slot: int, chosen: str) -> Binding | None:
    """The plan's pins, if without them another way of this op would be better."""
    pins = {k: v for k, v in here.task.options.pins.items() if is_choice(k)}
    if not pins:
        return None
    free = price_mesh(here.task.pinned({k: v for k, v in here.task.options.pins.items() if k not in pins}), here.mesh)
    best = here.solve(free.problem)
    texts = [_strategy_words(s) for s in free.priced.options[slot] if isinstance(s, Strategy)]
    keeping = here.only(free.problem, slot, [i for i, text in enumerate(texts) if text == chosen])
    if best is None or (keeping and keeping.objective_us - best.objective_us <= ROUNDING * best.objective_us):
        return None
    return lifting(here, pins)


def _strategy_words(s: Strategy) -> str:
    return words(tuple(map(str, s.inputs)), tuple("" if x is None else str(x) for x in s.outputs), tuple(s.tags))


def words(inputs: tuple[str, ...], outputs: tuple[str, ...], tags: tuple[str, ...]) -> str:
    """A way to run an op: layouts in -> layouts out [tags]."""
    how = " ".join(dict.fromkeys(t for t in tags if t))
    return f"{', '.join(inputs) or 'nothing'} -> {', '.join(outputs)}" + (f" [{how}]" if how else "")
