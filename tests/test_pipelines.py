"""Search over stages, micro-batches and schedules: nothing of a problem is lost on the way to stages, the answer is the
best of all trials, and plans, refusals and constraints say what they should."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import lru_cache

import msgspec
import pytest
import torch

from autopar import api, pipelines, sharding
from autopar.candidates import Task, solve_problem
from autopar.cost_model.build import build_problem
from autopar.cost_model.clusters import load_cluster
from autopar.cost_model.pipeline import Parts, stage_problem
from autopar.cost_model.prices import MeshPrices
from autopar.errors import InfeasibleError, PlanError, UserError
from autopar.ir.load import Load
from autopar.ir.options import RECOMPUTE, Options
from autopar.ir.plan import Plan
from autopar.ir.problem import evaluate
from autopar.ir.stages import Assignment, evaluate_stages, even_split
from autopar.pipelines import Trial, best_of, solve_trial, tightened, trials
from autopar.present.plan_text import plan_text
from autopar.solver import sweep
from autopar.solver.priced import Relaxation
from tests.solver.problems import random_problem

LAYERS = 6
BOTH = {"transformer.h.*.mlp.c_fc.weight": "dp:S(0) tp:S(0)"}


@lru_cache(maxsize=1)
def captured():
    """A GPT-2 of six layers whose head is large beside a layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=64, n_head=4, vocab_size=256, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (24, 16))
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return api.capture(GPT2LMHeadModel(config), batch, options=Options(precision="bf16"), model_name="gpt2")


def cluster(devices: int = 4, memory: int = 0):
    spec = load_cluster("dgx-a100-40g:1")
    group = spec.groups[0]
    device = msgspec.structs.replace(group.device, memory_bytes=memory or group.device.memory_bytes)
    return msgspec.structs.replace(
        spec, groups=(msgspec.structs.replace(group, count=devices, device=device),),
        levels=tuple(msgspec.structs.replace(level, size=devices) for level in spec.levels[:1]),
    )  # fmt: skip


def task_of(devices: int = 4, memory: int = 0, **options) -> Task:
    made = Options(**{"precision": "bf16", "stages": True, "gap": 0.0, **options})
    return Task.of(captured(), cluster(devices, memory), made)


def quiet(what: str, part: float) -> None:
    assert what and 0 <= part <= 1


def priced(task: Task, load: Load, data: int, tensor: int, allow: tuple[str, ...], limit: int = 0):
    from autopar.cost_model.search_space import stage_mesh

    mesh = stage_mesh(data, tensor, task.cluster)
    trial = Trial(load=load, mesh=mesh, rows=24 // data // load.micro_batches)
    table = sharding.build_table(task.captured, trial.pieces, task.options, rules=task.rules)
    return trial, build_problem(
        task.captured, task.wiring, table, MeshPrices(task.cluster, mesh, trial.pieces),
        replace(task.options, allow=allow), limit, load=load, mesh=mesh, once_prices=MeshPrices(task.cluster, mesh),
    )  # fmt: skip


def tied(found) -> int:
    """The slot of the embedding, which is the head's weight too."""
    return found.wiring.storage_of["transformer.wte.weight"]


@pytest.mark.parametrize("allow", [(), (RECOMPUTE,)])
@pytest.mark.parametrize(
    ("stages", "micro_batches", "data", "tensor"), [(1, 1, 2, 2), (1, 6, 2, 2), (2, 3, 2, 1), (3, 6, 1, 2)]
)
def test_nothing_of_a_problem_is_lost_on_the_way_to_parts(allow, stages, micro_batches, data, tensor):
    """A problem's objective is what `Load` pays of the sums over parts, and its bytes are theirs, for any choice."""
    task = task_of(stages * data * tensor)
    load = Load(stages=stages, micro_batches=micro_batches)
    _, found = priced(task, load, data, tensor, allow, limit=2**40)
    parts = Parts.of(task.captured, found)
    rng = random.Random(7)
    free = replace(found.problem, moments=())
    start = solve_problem(free, task.options, gap=0.0, cutoff_us=None)
    assert start is not None
    tried = 0
    for _ in range(400):
        choice = list(start.choice)
        for node in rng.sample(range(len(choice)), 3):
            choice[node] = rng.randrange(len(found.problem.nodes[node].cost_us))
        cost = evaluate(found.problem, tuple(choice))
        if cost.objective_us == float("inf"):
            continue
        tried += 1
        columns = parts.columns(tuple(choice), "0")
        counts = dict(parts.runs)
        busy = sum(n * columns[part].busy_us for part, n in counts.items())
        finish = sum(n * columns[part].finish_us for part, n in counts.items())
        total = load.runs * busy + load.once * finish
        if stages == 1:
            assert total == pytest.approx(cost.objective_us, rel=1e-9)
        else:  # a tied embedding is on both ends, and its update is paid on both
            update = found.problem.nodes[tied(found)].cost_us[choice[tied(found)]]
            assert total == pytest.approx(cost.objective_us + update, rel=1e-9)
            continue  # bytes: the problem sums them by stage
        held = sum(n * (columns[part].resident_bytes + columns[part].saved_bytes) for part, n in counts.items())
        fixed = sum(b.meta.nbytes for b in task.captured.buffers)
        remade = sum(c.made_bytes[choice[c.node]] for c in found.later if c.wire is not None)
        working = max(sizes[choice[node]] for node, sizes in found.whole_bytes.working)
        rounding = 2 * LAYERS  # of bytes of all instances to those of one
        assert max(cost.used_bytes) == pytest.approx(fixed + held + remade + working, abs=rounding)
    assert tried >= 20


def test_what_lasts_is_paid_once():
    """Conversions to what stays all through the step cost the same for any number of micro-batches, and of weights that
    don't stay, as often as there are micro-batches."""
    task = task_of(4)
    tables: dict[int, dict[str, dict[tuple[str, str], float]]] = {}
    for micro_batches in (2, 6):
        _, found = priced(task, Load(micro_batches=micro_batches), 4, 1, ())
        tables[micro_batches] = {
            value.name: {
                (f"{i} {p}" if p == q else str(p), str(q)): us
                for i, p in enumerate(names) for j, q in enumerate(names)
                if 0 < (us := value.reshard_us[i][j]) < math.inf
            }
            for value, names in zip(found.problem.values, found.layouts, strict=True)
            if "held:" in value.name
        }  # fmt: skip
    times = {"to held:": 1, "held:": 3}
    for kind, more in times.items():
        shared = [
            (tables[6][name][key], us)
            for name, table in tables[2].items() if name.startswith(kind)
            for key, us in table.items() if key in tables[6].get(name, {}) and "gradient" not in name
        ]  # fmt: skip
        weights = [pair for pair in shared if pair[0] != pair[1]] if kind == "held:" else shared
        assert len(weights) > 10
        if kind == "held:":
            assert all(many == pytest.approx(more * few) for many, few in weights) and len(weights) == len(shared)
        else:  # beside weights, sums of gradients that are joined in every micro-batch
            assert {round(many / few, 6) for many, few in weights} <= {1.0, 3.0}
            assert sum(many == pytest.approx(few) for many, few in weights) > 10


def test_the_answer_is_the_best_of_all_trials():
    """No trial, solved to the end with all kept and cut as well as it can be, beats what the search found."""
    task = task_of(4, allow=())
    found = best_of(task, quiet)
    assert found.best is not None
    assert found.bound_us <= found.best.step_us
    others = []
    for trial in trials(task):
        tight = tightened(task, trial)
        assert trial.bound_us <= tight.trial.bound_us
        solution = solve_problem(tight.priced.problem, task.options, gap=0.0, cutoff_us=None)
        assert solution is not None
        assert tight.relaxation.bound_us <= solution.objective_us * (1 + 1e-9)
        parts = Parts.of(task.captured, tight.priced)
        for chunks in pipelines.chunk_counts(task, trial.load.stages, trial.load.micro_batches):
            problem = stage_problem(parts, [solution.choice], task.cluster, trial.pieces, task.limit_bytes, chunks)
            answer = pipelines.solve_stages(problem)
            assert answer is not None
            if answer.assignment is None:
                continue
            others.append((answer.step_us, str(trial), chunks))
            assert tight.relaxation.bound_us <= answer.step_us * (1 + 1e-9)
    assert found.best.step_us <= min(others)[0] * (1 + 1e-9)
    assert len({name for _, name, _ in others}) == len(found.trials) > 10


@pytest.mark.parametrize("part", [0.9, 0.6, 0.4])
def test_less_memory_never_helps_and_is_kept_to(part: float):
    task = task_of(4, pins={"pp": 2, "tp": 1}, micro_batches=3)
    free = best_of(task, quiet).best
    assert free is not None and free.assignment.evaluation is not None
    limit = int(free.assignment.evaluation.peak_bytes * part)
    tight = best_of(task_of(4, limit, pins={"pp": 2, "tp": 1}, micro_batches=3), quiet).best
    if tight is None:
        pytest.skip("nothing fits")
    assert tight.assignment.evaluation is not None
    assert tight.assignment.evaluation.peak_bytes <= limit
    assert tight.step_us >= free.step_us * (1 - 1e-9)


def test_a_plan_says_who_runs_what_and_survives_its_file(tmp_path):
    plan = pipelines.staged(task_of(4, pins={"pp": 2}, micro_batches=6), quiet)
    assert plan.mesh.pipeline == len(plan.stages) == 2
    assert 2 * plan.stages[0].devices == 4
    assert sum(n for s in plan.stages for _, n in s.blocks) == LAYERS
    assert plan.schedule.micro_batches == 6 and plan.schedule.name in ("1f1b", "interleaved")
    assert sum(plan.predicted.breakdown_us.values()) == pytest.approx(plan.predicted.step_time_us)
    assert sum(plan.predicted.breakdown_bytes.values()) == plan.predicted.peak_memory_bytes
    assert max(s.peak_memory_bytes for s in plan.stages) == plan.predicted.peak_memory_bytes
    by_stage = {s.index: sum(p.stage == s.index for p in plan.parameters.values()) for s in plan.stages}
    assert all(by_stage.values())
    assert plan.parameters["transformer.wte.weight"].stage == 0
    assert plan.parameters["transformer.ln_f.weight"].stage == 1
    assert {name for s in plan.stages for name in s.columns} == set(plan.strategies)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    text = plan_text(plan, 100)
    assert "2 stages" in text and "6 micro-batches" in text and "does not run them" in text
    again = pipelines.staged(task_of(4, pins={"pp": 2}, micro_batches=6), quiet)
    same = msgspec.structs.replace(again, solver=msgspec.structs.replace(again.solver, time_s=plan.solver.time_s))
    assert same.to_json() == plan.to_json()


def test_blocks_of_an_interleaved_plan_are_where_its_chunks_are():
    task = task_of(2, pins={"pp": 2, "tp": 1, "dp": 1}, micro_batches=4)
    trial = trials(task)[0]
    tight = tightened(task, trial)
    parts = Parts.of(task.captured, tight.priced)
    choice = sweep(tight.relaxation, ()).choices[0]
    problem = stage_problem(parts, [choice], task.cluster, trial.pieces, task.limit_bytes, 3)
    split = even_split(problem)
    assert split is not None
    answer = pipelines.solve_stages(problem)
    assert answer is not None and answer.assignment is not None and answer.evaluation is not None
    from autopar.cost_model.staged import Cut, _stage_of_blocks

    cut = Cut(parts, (choice,), problem, answer.assignment, answer.evaluation)
    assert _stage_of_blocks(cut) == {f"transformer.h.{i}": i % 2 for i in range(LAYERS)}


def test_a_stage_of_faster_devices_holds_more():
    slow = cluster(1).groups[0]
    fast = msgspec.structs.replace(
        slow,
        device=msgspec.structs.replace(
            slow.device, peak_flops={k: 4 * v for k, v in slow.device.peak_flops.items()},
            memory_bytes=2 * slow.device.memory_bytes,
        ),
    )  # fmt: skip
    both = msgspec.structs.replace(cluster(2), groups=(slow, fast))
    options = Options(precision="bf16", pins={"pp": 2}, micro_batches=12)
    plan = pipelines.staged(Task.of(captured(), both, options), quiet)
    counts = [sum(n for _, n in s.blocks) for s in plan.stages]
    assert counts[1] > counts[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pins": {"pp": 3}}, ["pp=3", "4 devices"]),
        ({"micro_batches": 7}, ["7 micro-batches", "24 rows"]),
        ({"search_space": {"pipeline": (8,)}}, ["pipeline in [8]"]),
        ({"pins": {"pp": 2, "tp": 4}}, ["pp=2", "tp=4"]),
        ({"pins": {"cp": 2}}, ["axis cp"]),
        ({"pins": {"dp": 2, "tp": 2, **BOTH}}, ["c_fc.weight", "can't cut"]),
    ],
)
def test_what_cannot_be_is_said(options, words):
    with pytest.raises(UserError) as caught:
        pipelines.staged(task_of(4, **options), quiet)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["stages", "pins", "space", "micro"])
def test_pins_and_space_are_kept_to(name):
    options = {
        "stages": {"search_space": {"pipeline": (1, 2), "tensor": (2,)}}, "pins": {"pins": {"pp": 2, "dp": 2}},
        "space": {"search_space": {"pipeline": (3,)}}, "micro": {"micro_batches": 4},
    }[name]  # fmt: skip
    for trial in trials(task_of(12 if name == "space" else 4, **options)):
        data = next(a.size for a in trial.mesh.axes if a.name == "dp")
        assert name != "stages" or (trial.load.stages in (1, 2) and trial.tensor == 2)
        assert name != "pins" or (trial.load.stages, data) == (2, 2)
        assert name != "space" or trial.load.stages == 3
        assert name != "micro" or trial.load.micro_batches == 4
        assert trial.rows * trial.load.micro_batches * data == 24


def test_trials_that_cannot_hold_a_layout_are_left_out():
    """A dim isn't cut over two axes, so one of them has no ranks."""
    found = best_of(task_of(4, pins=BOTH, micro_batches=3), quiet)
    assert found.best is not None and len(found.best.trial.mesh.axes) == 1
    assert {(t.tensor, t.load.stages) for t in found.trials} > {(2, 1)}


def test_storage_cut_over_data_is_kept_to():
    plan = pipelines.staged(task_of(4, pins={"pp": 2, "dp": 2, "zero": 3}, micro_batches=3), quiet)
    assert all("dp:S" in plan.parameters[f"transformer.h.{i}.mlp.c_fc.weight"].layout for i in range(LAYERS))


def test_time_and_gap_are_kept_to():
    """No time: one line. A wide gap: no more solved, and the plan is within it."""
    with pytest.raises(InfeasibleError, match="--time-limit"):
        pipelines.staged(task_of(4, time_limit_s=1e-9), quiet)
    exact, wide = best_of(task_of(4), quiet), best_of(task_of(4, gap=0.9), quiet)
    assert wide.solved <= exact.solved
    assert wide.best is not None and wide.best.step_us * (1 - 0.9) <= wide.bound_us <= wide.best.step_us


def test_an_objective_that_stages_lack_is_one_line(capsys):
    from autopar.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["search", "gpt2-tiny", "-c", "dgx-h100:1", "--stages", "--objective", "memory"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().splitlines() == [
        "autopar: objective 'memory' with stages or micro-batches: this version knows time only"
    ]


def test_too_little_memory_says_what_would_do():
    with pytest.raises(InfeasibleError) as caught:
        pipelines.staged(task_of(4, 2**20, micro_batches=6), quiet)
    assert caught.value.needed_bytes > 2**20
    enough = task_of(4, int(caught.value.needed_bytes * 1.3), micro_batches=6)
    assert best_of(enough, quiet).best is not None


def test_such_plans_are_not_run_yet():
    task = task_of(4, pins={"pp": 2})
    plan = api.Plan.found(pipelines.staged(task, quiet), task)
    with pytest.raises(PlanError, match="one stage and one micro-batch"):
        api.emit_captured(captured(), plan)
    with pytest.raises(UserError, match="explains plans of one stage"):
        plan.explain("transformer.wte.weight")


@pytest.mark.parametrize("seed", range(30))
def test_swept_choices_are_points_of_the_hull(seed: int):
    """Each choice is what its price of memory asks for, and with the limit left out none is below the bound."""
    problem = random_problem(seed)
    problem = replace(problem, moments=tuple(replace(m, versions=()) for m in problem.moments))
    relaxation = Relaxation.of(problem)
    found = sweep(relaxation, (0.5, 0.99, 1.01, 2.0))
    for choice in found.choices:
        cost = evaluate(problem, choice)
        if cost.feasible:
            assert cost.objective_us >= found.bound_us * (1 - 1e-9) - 1e-6


def test_a_worse_cut_costs_more():
    """The referee prices another cut of the same columns higher, or it doesn't fit."""
    best = best_of(task_of(4, pins={"pp": 2, "tp": 1}, micro_batches=6), quiet).best
    assert best is not None and best.assignment.assignment is not None
    if best.stages.chunks > 1:
        best = solve_trial(
            task_of(4, pins={"pp": 2, "tp": 1}, micro_batches=6), tightened(task_of(4), best.trial), 1e18
        )
    counts = [list(map(list, stage)) for stage in best.assignment.assignment.counts]
    for a, b in ((0, 1), (1, 0)):
        moved = [[list(c) for c in stage] for stage in counts]
        run = next(r for r, x in enumerate(best.stages.runs) if x.count == LAYERS)
        column = next((c for c, n in enumerate(moved[a][run]) if n), None)
        if column is None or best.stages.chunks > 1:
            continue
        moved[a][run][column] -= 1
        moved[b][run][column] += 1
        other = Assignment(counts=tuple(tuple(map(tuple, stage)) for stage in moved))
        cost = evaluate_stages(best.stages, other)
        assert not cost.feasible or cost.step_us >= best.step_us * (1 - 1e-9)
