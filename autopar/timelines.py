"""The predicted step of a plan over time: every op and collective of what is emitted, as it is priced."""

from __future__ import annotations

from dataclasses import replace

from autopar import codegen, staging
from autopar.candidates import step_memory
from autopar.cost_model.live import ROUND, ROUND_CPU, save_memory
from autopar.cost_model.prices import MeshPrices
from autopar.cost_model.replay import replay
from autopar.cost_model.simulate import simulate
from autopar.cost_model.stage_work import stage_works
from autopar.cost_model.tasks import Overlap
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import CapturedGraph
from autopar.ir.plan import Plan, is_staged, mesh_of, options_of
from autopar.ir.schedules import build_schedule
from autopar.ir.staged import schedule_of
from autopar.ir.timeline import Timeline


def predicted(captured: CapturedGraph, plan: Plan) -> Timeline:
    """Of the model that the plan is for. PlanError where its file does not describe its cluster."""
    if plan.cluster.spec is None:
        raise PlanError(f"the plan's file says of its cluster only the name, {plan.cluster.name}: search again")
    if is_staged(plan):
        return _with_stages(captured, plan, plan.cluster.spec)
    mesh = mesh_of(plan)
    program = codegen.lower(captured, plan, mesh)
    state = options_of(plan).optimizer_bytes_per_parameter
    work = replay(captured, program, plan, MeshPrices(plan.cluster.spec, mesh), state)
    schedule = build_schedule("none", micro_batches=plan.schedule.micro_batches)
    profile = plan.cluster.spec.profile
    found = simulate(schedule, [[work]], overlap=Overlap(**profile.overlap) if profile is not None else None)
    rounding = ROUND if plan.cluster.spec.backend == "nccl" else ROUND_CPU
    memory = step_memory(captured, program, plan), save_memory(captured, program, state, rounding=rounding)
    return replace(found, memory=memory)


def _with_stages(captured: CapturedGraph, plan: Plan, cluster: ClusterSpec) -> Timeline:
    """Stages wait for what they send, as in the plan's price; the optimizer waits for all gradients."""
    program = staging.staged(captured, plan).program
    state = options_of(plan).optimizer_bytes_per_parameter
    works = stage_works(captured, program, plan, cluster, state)
    overlap = Overlap(**cluster.profile.overlap) if cluster.profile is not None else None
    found = simulate(
        schedule_of(program), works, overlap=overlap, overlap_sends=False, overlap_sync=False, joint_end=True
    )
    return replace(found, memory=())
