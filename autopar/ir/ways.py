"""Which block call of a model with stages is in which part, and in which of a plan's ways it runs."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Phase
from autopar.ir.plan import Plan


def blocks_of_parts(top: Graph, plan: Plan) -> tuple[int, ...]:
    """Block calls of each part of the model, in forward order. PlanError where the plan is of another model."""
    held = [sum(count for _, count in stage.blocks) for stage in plan.stages]
    chunks = plan.schedule.chunks
    calls = len(_calls(top))
    if sum(held) != calls or len(held) != plan.mesh.pipeline or any(n % chunks for n in held):
        raise PlanError(
            f"plan for {plan.model.name}: its stages hold {held} blocks in {chunks} chunks, the model has {calls}"
        )
    return tuple(n // chunks for _ in range(chunks) for n in held)


def block_ways(top: Graph, plan: Plan) -> dict[str, str]:
    """Module path of each block's instance -> its way: of a stage's instances the first run in the first of its ways.

    Raises PlanError where a stage says of no way to run one.
    """
    counts = blocks_of_parts(top, plan)
    stages = [part % plan.mesh.pipeline for part, count in enumerate(counts) for _ in range(count)]
    left = {s.index: dict(sorted(s.columns.items())) for s in plan.stages}
    found = {}
    for (key, instance), stage in zip(_calls(top), stages, strict=True):
        mine = [w for w, n in left[stage].items() if w.partition("#")[0] == key and n]
        if not mine:
            raise PlanError(f"plan for {plan.model.name}: stage {stage} says of no way to run {instance}")
        left[stage][mine[0]] -= 1
        found[instance] = mine[0]
    return found


def _calls(top: Graph) -> list[tuple[str, str]]:
    """(block, instance) of the forward's calls, in order."""
    return [(n.block.key, n.block.instance) for n in top.nodes if n.block is not None and n.phase is Phase.FORWARD]
