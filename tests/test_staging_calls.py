"""Modules of plans with stages called otherwise than they were planned for: other batches, lengths, outputs, modes."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from autopar import api, sharding, staging
from autopar.cost_model.clusters import load_cluster
from autopar.errors import AutoparError, InputError, PlanError, UserError
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import S
from autopar.ir.options import Options
from autopar.ir.plan import Plan, all_ranks, decode_plan
from autopar.ir.strategy import Rule
from autopar.ops.entry import Pieces
from autopar.runtime.pipeline_step import Step
from autopar.runtime.threads import run_threads
from autopar.sharding import carry
from autopar.sharding.expand import cuts_alike
from tests.test_staging import SMALL, made, planned, short

FP64 = Options(precision="fp64")


def of_size(inputs: dict, rows: int, length: int | None = None) -> dict:
    """The inputs again and again, so many rows of so many tokens."""
    found = {}
    for key, value in inputs.items():
        if torch.is_tensor(value):
            value = torch.cat([value] * 3)[:rows]
            value = torch.cat([value] * 2, 1)[:, :length].contiguous() if length else value
        found[key] = value
    return found


def compiled_on(everyone, plan, model, inputs):
    return api.compile_on(copy.deepcopy(model), lambda *_: everyone, None, (), inputs, plan=plan, options=FP64)


@pytest.mark.parametrize(
    ("name", "pins", "micro_batches", "rows", "length", "taken"),
    [
        ("tied", SMALL, 4, 7, None, 3),  # of 3 rows at most, as planned
        ("tied", SMALL, 4, 2, 5, 1),  # fewer rows than micro-batches
        ("tied", SMALL, 4, 30, 11, 10),
        ("tied", {"pp": 2, "dp": 2, "tp": 1}, 3, 7, None, 2),  # ranks have 4 and 3 rows
        ("tied", {"pp": 2, "dp": 2, "tp": 1}, 6, 5, None, 2),  # 3 and 2 rows: 2 1 and 1 1
        ("tied", {"pp": 2, "dp": 2, "tp": 1}, 3, 1, None, 1),  # fewer rows than ranks
        ("tied", {"pp": 2, "dp": 2, "tp": 1, "*weight": "dp:S(0)"}, 2, 7, None, 2),
        ("tied", {"pp": 2, "dp": 1, "tp": 2}, 2, 7, 5, 2),
        ("tied", {"pp": 1, "dp": 3, "tp": 1}, 2, 2, None, 1),
        ("skip", {"pp": 2, "dp": 3, "tp": 1}, 1, 7, None, 1),
        ("t5", SMALL, 4, 4, 7, 2),
    ],
)
def test_a_plan_for_another_batch_has_one_devices_numbers(name, pins, micro_batches, rows, length, taken):
    plan = api.Plan.found(planned(name, pins, micro_batches)[1], None)
    model, inputs = made(name)
    given = of_size(inputs, rows, length)
    again = plan.again(model, given)
    assert again.schedule.micro_batches == taken
    assert again.parameters == plan.parameters and again.mesh == plan.mesh
    assert again.notes[0].kind == "again" and f"{taken} micro-batches" in again.notes[0].message
    report = api.verify(model, given, plan=again, options=FP64, steps=2)
    assert report.ok, report
    read = decode_plan(again.to_json(), "read back", Plan)
    assert api.Plan.found(read, None).again(model, given) is not None


def test_dropout_of_a_short_batch_draws_what_one_device_draws():
    model, inputs = with_dropout()
    options = Options(precision="fp64", pins={"pp": 2, "dp": 2, "tp": 1}, micro_batches=2)
    plan = api.search(model, load_cluster("rtx4090:4"), example_inputs=inputs, options=options)
    few = short(inputs, 5, 6)
    report = api.verify(model, few, plan=plan.again(model, few), options=options)
    assert report.ok and report.note, report


def with_dropout() -> tuple[nn.Module, dict]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=24, n_head=2, vocab_size=64, n_positions=8, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 64, (8, 8))
    return GPT2LMHeadModel(config).double(), {"input_ids": ids, "labels": ids, "use_cache": False}


def test_evaluation_and_training_in_turn(monkeypatch):
    """Without gradients only forwards run, and nothing waits; what no labels are given to has no loss."""
    model, inputs = with_dropout()
    few, unlabelled = short(inputs, 5, 6), {"input_ids": inputs["input_ids"][:3], "use_cache": False}
    options = Options(precision="fp64", pins={"pp": 2, "dp": 1, "tp": 1}, micro_batches=4)
    plan = api.search(model, load_cluster("rtx4090:2"), example_inputs=inputs, options=options)
    waited: dict[int, list[int]] = {0: [], 1: []}
    forward = Step._forward

    def watched(self, action):
        forward(self, action)
        waited[self.pipeline.everyone.rank].append(len(self.saved))

    monkeypatch.setattr(Step, "_forward", watched)

    def rank(everyone):
        module = compiled_on(everyone, plan, model, inputs)
        module(**inputs).loss.backward()
        mine = waited[everyone.rank]
        assert max(mine) > 0
        mine.clear()
        module.eval()
        with torch.no_grad():
            quiet = [module(**inputs).loss, module(**few).loss]
            logits = module(**unlabelled).logits
        assert len(mine) == len(module._autopar.pipeline.parts) * (4 + 3 + 2) and not any(mine)
        drawn = module.get_rng_state()
        loss = module(**inputs).loss
        loss.backward()
        found = {n: p.grad.clone() for n, p in module.named_parameters()}
        assert drawn == module.get_rng_state() == {"seed": 0, "step": 1}
        module.train()(**inputs)
        assert (module.replans, len(module.plans), module.get_rng_state()["step"]) == (3, 4, 2)
        return quiet, logits, loss.detach(), found

    ranks = run_threads(all_ranks(plan), rank)
    plain = copy.deepcopy(model)
    trained = plain.eval()(**inputs).loss
    with torch.no_grad():
        expected, logits = [plain(**inputs).loss, plain(**few).loss], plain(**unlabelled).logits
    for quiet, mine, loss, _ in ranks:
        assert [*map(float, quiet), float(loss)] == pytest.approx([*map(float, expected), trained.item()], rel=1e-6)
        assert mine.is_meta or torch.allclose(mine, logits)
    assert [mine.is_meta for _, mine, _, _ in ranks] == [True, False]
    for _, _, _, gradients in ranks:
        assert gradients and all(torch.isfinite(g).all() for g in gradients.values())


def test_a_call_that_is_refused_leaves_the_module_whole():
    """No rank began a step, so none waits for another: the next call runs."""
    plan = planned("tied", SMALL, 4)[1]
    model, inputs = made("tied")

    def rank(everyone):
        module = compiled_on(everyone, plan, model, inputs)
        with pytest.raises(UserError, match="must return its loss"):
            module(input_ids=inputs["input_ids"], use_cache=False)
        return float(module.step(**inputs))

    assert len(set(run_threads(all_ranks(plan), rank, timeout_s=120))) == 1


def test_hng04_the_last_batch_is_smaller():
    """Batches of 8, 8 and 3 on two stages: a training of three steps is one device's."""
    model, inputs = made("tied")
    model = copy.deepcopy(model).double()
    batches = [of_size(inputs, rows) for rows in (8, 8, 3)]
    options = Options(precision="fp64", pins={"pp": 2, "dp": 1, "tp": 1}, micro_batches=4)
    plan = api.search(model, load_cluster("rtx4090:2"), example_inputs=batches[0], options=options)

    def trained(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for batch in batches:
            out = module(**batch)
            loss = out if torch.is_tensor(out) else out.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def rank(everyone):
        module = compiled_on(everyone, plan, model, batches[0])
        return trained(module), module.full_state_dict()

    plain = copy.deepcopy(model)
    expected = trained(plain)
    for losses, state in run_threads(all_ranks(plan), rank, timeout_s=120):
        assert losses == pytest.approx(expected, rel=1e-6)  # the plain model takes its loss in float32
        assert all(torch.allclose(state[n], x, rtol=1e-5, atol=1e-7) for n, x in plain.state_dict().items())


def test_a_plan_compiled_with_other_inputs_than_its_own():
    plan = planned("tied", SMALL, 4)[1]
    model, inputs = made("tied")
    few = short(inputs, 5)

    def rank(everyone):
        module = compiled_on(everyone, plan, model, few)
        return module.step(**few), module.plan.schedule.micro_batches, module.step(**inputs), module.replans

    for loss, taken, whole, replans in run_threads(all_ranks(plan), rank):
        assert float(loss) == pytest.approx(model(**few).loss.item(), rel=1e-6)
        assert float(whole) == pytest.approx(model(**inputs).loss.item(), rel=1e-6)
        assert (taken, replans) == (2, 1)


def test_what_can_not_be_carried_is_said():
    plan = planned("tied", SMALL, 4)[1]
    model, inputs = made("tied")
    other = made("skip")

    def rank(everyone):
        module = compiled_on(everyone, plan, model, inputs)
        with pytest.raises(InputError, match="no gradients of inputs"):
            module(
                inputs_embeds=torch.randn(12, 8, 32, dtype=torch.float64, requires_grad=True), labels=inputs["labels"]
            )
        return True

    assert all(run_threads(all_ranks(plan), rank))
    with pytest.raises(PlanError, match="is for model"):
        api.plan_again(plan, api.capture(*other, options=FP64), load_cluster("rtx4090:2"), FP64)


@pytest.mark.parametrize(
    ("rows", "sizes", "alike"),
    [
        (4, (2, 2), True),
        (5, (2, 2), True),  # 2 1, 1 1 rows, and 16 8, 8 8 of their tokens
        (3, (2, 2), False),  # 1 1, 1 0 rows, but 8 8, 4 4 of their tokens
        (2, (3,), False),  # 1 1 0, but 6 6 4
    ],
)
def test_dims_are_cut_alike_by_ranks_and_micro_batches(rows, sizes, alike):
    merges = Rule((S(0),), (S(0),))
    metas = TensorMeta((rows, 8, 4), "float32"), TensorMeta((rows * 8, 4), "float32", (8, 1))
    assert cuts_alike(merges, metas[:1], metas[1:], sizes, Pieces.ANY) is alike
    assert not cuts_alike(merges, metas[:1], metas[1:], sizes, Pieces.EQUAL) or rows == 4


def verified(model, inputs, plan) -> bool:
    """False too where the wrong pieces don't even meet."""
    try:
        return api.verify(model, inputs, plan=plan, options=FP64, steps=1).ok
    except AutoparError:
        return False


def test_rules_of_an_op_decide_what_is_carried(monkeypatch):
    """The strategy of another op, under the same key, is not taken."""
    plan = planned("tied", SMALL, 4)[1]
    model, inputs = made("tied")
    few = short(inputs, 5)
    captured, rules = api.capture(model, few, options=FP64), sharding.RuleCache()
    block = next(b.graph.name for b in captured.blocks)
    shifted = {way: shift(rows) if "#" not in way and way != "top" else rows for way, rows in plan.strategies.items()}
    other = staging.carried_on(api.replace_fields(plan, strategies=shifted), captured, rules)
    right = staging.carried_on(plan, captured, rules)
    assert other.strategies[block] != right.strategies[block]
    assert verified(model, few, other) and verified(model, few, right)
    monkeypatch.setattr(carry._Carrier, "_rule", lambda self, work, node, axis, planned: planned)
    (micro_batches, cut), *_ = sharding.cuts_of(plan, captured, rules)
    wrong = sharding.carried(api.replace_fields(plan, strategies=shifted), captured, micro_batches, cut, rules)
    assert not verified(model, few, wrong)


def shift(rows: dict) -> dict:
    """Each op's strategy under the key of the one before it, of those with as many arguments."""
    keys = list(rows)
    found = dict(rows)
    for one, other in pairwise(keys):
        if len(rows[one].inputs) == len(rows[other].inputs) and len(rows[one].outputs) == len(rows[other].outputs):
            found[one] = rows[other]
    return found
