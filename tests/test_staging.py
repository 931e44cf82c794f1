"""Plans with pipeline stages and micro-batches run: every number is one device's, and what can't be so is refused."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from torch import nn

import autopar
from autopar import api, staging
from autopar.cost_model.clusters import load_cluster
from autopar.errors import InfeasibleError, InputError, PlanError, UserError
from autopar.ir.graph import InputKind, OutputKind, Phase
from autopar.ir.options import Options
from autopar.ir.plan import all_ranks
from autopar.ir.staged import MICRO
from autopar.runtime.comm import View
from autopar.runtime.pipeline_step import Step
from autopar.runtime.threads import run_threads
from tests.models import tiny

SMALL = {"pp": 2, "dp": 1, "tp": 1}


class Layer(nn.Module):
    """Two products, a norm, and its input added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Skip(nn.Module):
    """Layers whose inputs are also read far behind them; the loss is a sum over valid rows by their number, and the
    square of its logarithm."""

    def __init__(self, layers: int = 6, *, squared: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(8, 12)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.out = nn.Linear(12, 5)
        self.squared = squared

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = h = self.into(x)
        for k, layer in enumerate(self.layers):
            h = layer(h)
            if k == 1:
                kept = h
        found = self.out(h * kept + first)
        loss = nn.functional.cross_entropy(found, y, ignore_index=-100)
        return loss.log() ** 2 if self.squared else loss


def skip(**more: object) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    y = torch.randint(0, 5, (12,))
    y[[0, 1, 2, 5]] = -100
    return Skip(**more).double(), {"x": torch.randn(12, 8, dtype=torch.float64), "y": y}


@lru_cache(maxsize=8)
def made(name: str):
    if name == "skip":
        return skip()
    if name == "tied":
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=96, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        ids = torch.randint(0, 96, (12, 8))
        labels = ids.masked_fill(torch.rand(12, 8) < 0.5, -100)
        return LlamaForCausalLM(config).double(), {"input_ids": ids, "labels": labels}
    model, inputs = tiny(name)
    model = model.double()
    return model, {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}


def planned(name: str, pins: dict, micro_batches: int | None, **options: object):
    model, inputs = made(name)
    chosen = Options(precision="fp64", pins=pins, micro_batches=micro_batches, **options)
    captured = api.capture(model, inputs, options=chosen)
    devices = 1
    for axis in ("pp", "dp", "cp", "tp"):
        devices *= pins.get(axis, 1)
    return captured, api.plan_captured(captured, load_cluster(f"rtx4090:{devices}"), options=chosen)


def verified(name: str, pins: dict, micro_batches: int | None, **options: object):
    captured, plan = planned(name, pins, micro_batches, **options)
    model, inputs = made(name)
    return plan, api.verify(model, inputs, plan=plan, captured=captured, options=Options(precision="fp64"), steps=2)


@pytest.mark.parametrize(
    ("name", "pins", "micro_batches", "schedule"),
    [
        ("tied", SMALL, 4, "interleaved"),
        ("tied", {"pp": 2, "dp": 2, "tp": 1}, 3, "interleaved"),
        ("tied", {"pp": 1, "dp": 3, "tp": 1}, 2, "accumulate"),
        ("tied", {"pp": 4, "dp": 1, "tp": 2}, 2, "1f1b"),
        ("tied", {"pp": 3, "dp": 1, "tp": 1}, 6, "1f1b"),
        ("tied", {**SMALL, "stages": "3,1"}, 12, "1f1b"),
        ("tied", {"pp": 2, "dp": 2, "tp": 1, "*weight": "dp:S(0)"}, 2, "interleaved"),
        ("tied", {"pp": 2, "dp": 1, "cp": 2, "tp": 1}, 4, "interleaved"),
        ("tied", {"pp": 1, "dp": 2, "cp": 3, "tp": 1}, 2, "accumulate"),
        ("skip", {"pp": 3, "dp": 1, "tp": 1}, 4, "1f1b"),
        ("skip", {"pp": 2, "dp": 3, "tp": 1}, 1, "1f1b"),
        ("gpt2", SMALL, 3, "1f1b"),
        ("t5", SMALL, 4, "1f1b"),
        ("bert", {"pp": 2, "dp": 1, "tp": 2}, 2, "1f1b"),
    ],
)
def test_all_numbers_equal_one_devices(name, pins, micro_batches, schedule):
    plan, report = verified(name, pins, micro_batches)
    assert report.ok, report
    assert ("cp" in pins) == any("ring" in s.tags for ops in plan.strategies.values() for s in ops.values())
    assert plan.schedule.name == schedule
    assert plan.schedule.micro_batches == micro_batches


def test_dropout_draws_what_one_device_draws():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=24, n_head=2, vocab_size=64, n_positions=8, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 64, (8, 8))
    model, inputs = GPT2LMHeadModel(config).double(), {"input_ids": ids, "labels": ids, "use_cache": False}
    options = Options(precision="fp64", pins={"pp": 2, "dp": 2, "tp": 1}, micro_batches=2)
    plan = api.search(model, load_cluster("rtx4090:4"), example_inputs=inputs, options=options)
    report = api.verify(model, inputs, plan=plan, options=options)
    assert report.ok and report.note, report


def test_a_loss_that_the_backward_asks_for_is_not_cut():
    """The square of the logarithm of the mean: no backward can begin before all forwards have ended."""
    model, inputs = skip(squared=True)
    options = Options(precision="fp64", pins=SMALL, micro_batches=2)
    with pytest.raises(InfeasibleError, match="micro-batches 1"):
        api.search(model, load_cluster("rtx4090:2"), example_inputs=inputs, options=options)
    whole = Options(precision="fp64", pins=SMALL, micro_batches=1)
    plan = api.search(model, load_cluster("rtx4090:2"), example_inputs=inputs, options=whole)
    assert plan.schedule.micro_batches == 1
    assert api.verify(model, inputs, plan=plan, options=whole).ok


def test_a_table_of_positions_is_rounded_after_its_sum():
    """In bf16 the gradient of positions is summed over rows in float32, then rounded: once, at the end of a step."""
    model, inputs = tiny("gpt2")
    options = Options(precision="bf16", pins={"pp": 2, "dp": 2, "tp": 1}, micro_batches=3)
    captured = api.capture(model, inputs, options=options)
    plan = api.plan_captured(captured, load_cluster("rtx4090:4"), options=options)
    program = staging.staged(captured, plan).program
    assert [len(part.summed) for part in program.parts] == [1, 0]
    assert program.parts[0].after is not None and program.parts[1].after is None
    report = api.verify(model, inputs, plan=plan, captured=captured, options=options)
    one = api.plan_captured(captured, load_cluster("rtx4090:1"), options=Options(precision="bf16"))
    alone = api.verify(model, inputs, plan=one, captured=captured, options=options)
    assert worst(report) <= 2 * worst(alone)


def worst(report) -> float:
    """The largest error of a gradient of positions, or of a loss."""
    return max(row.error for row in report.rows if "wpe" in row.name or row.name.startswith("loss"))


def test_batch_statistics_are_not_cut():
    model, inputs = tiny("resnet")
    with pytest.raises(InfeasibleError, match="batch norm"):
        api.search(model, load_cluster("rtx4090:1"), example_inputs=inputs, options=Options(micro_batches=2))


def add_nothing(self, key, gradient, summed):
    self.sums[key] = gradient


def own_sum_only(self, name, parts, number):
    return next(self.sums[p, name] for p in parts if (p, name) in self.sums)


def another_micro_batch(self, micro_batch):
    self.pipeline.micro.place({MICRO: 0})


@pytest.mark.parametrize(
    ("method", "wrong", "tensor"),
    [
        ("_add", add_nothing, "gradient of model."),
        ("_over_stages", own_sum_only, "gradient of model.embed_tokens.weight"),
        ("_at", another_micro_batch, "loss of step 1"),
    ],
)
def test_a_wrong_step_is_seen(monkeypatch, method, wrong, tensor):
    captured, plan = planned("tied", SMALL, 4)
    model, inputs = made("tied")
    monkeypatch.setattr(Step, method, wrong)
    report = api.verify(model, inputs, plan=plan, captured=captured, options=Options(precision="fp64"), steps=1)
    assert not report.ok
    assert report.first_difference is not None and report.first_difference.name.startswith(tensor)


def test_what_is_priced_is_what_runs(monkeypatch):
    """ZeRO-1: weights are gathered, and gradients joined over ranks, once for six micro-batches."""
    captured, plan = planned("tied", {"pp": 1, "dp": 2, "tp": 1, "*.mlp.*": "dp:S(0)"}, 6, memory_limit=2**33)
    roles = {name: p.role for name, p in plan.parameters.items() if "dp:S" in p.layout}
    assert roles and set(roles.values()) == {"ZeRO-1"}
    staged = staging.staged(captured, plan)
    model, inputs = made("tied")
    found: list[str] = []
    for collective in ("_gather", "_scatter", "_reduce"):
        real = getattr(View, collective)

        def counted(self, x, axis, *more, real=real, collective=collective):
            if self.base.rank == 0:
                found.append(collective)
            return real(self, x, axis, *more)

        monkeypatch.setattr(View, collective, counted)
    run_threads(all_ranks(plan), lambda rt: staged.module(model, rt)(**inputs).loss.backward())
    priced = [step.partition("(")[0] for c in plan.conversions for step in c.steps for _ in range(c.count)]
    assert found.count("_gather") == priced.count("all_gather")
    assert found.count("_scatter") == priced.count("reduce_scatter")
    numbers = 2  # the loss and the number of labels are priced in every micro-batch, and joined once
    assert found.count("_reduce") == priced.count("all_reduce") - numbers * 6 + numbers


def test_parts_put_together_are_the_model():
    """Every op is on one part, but for those that many parts make; values go forwards in the forward only."""
    captured, plan = planned("tied", {"pp": 4, "dp": 1, "tp": 1}, 4)
    program = staging.staged(captured, plan).program
    assert len(program.parts) == 4
    for passed in program.passed:
        up = passed.phase is Phase.FORWARD
        assert all((target > passed.source) is up for target in passed.targets)
    assert program.shared == {"model.embed_tokens.weight": (0, 3)}
    gradients = [name for part in program.parts for name in part.sums]
    parameters = {i.target for i in captured.top.inputs if i.kind is InputKind.PARAMETER}
    assert set(gradients) == parameters and len(gradients) == len(parameters) + 1
    assert sum(o.kind is OutputKind.OUTPUT for o in captured.top.outputs) == len(program.last.outputs)


def on_ranks(run, name: str = "tied", pins: dict = SMALL, micro_batches: int = 4):
    captured, plan = planned(name, pins, micro_batches)
    staged = staging.staged(captured, plan)
    model, inputs = made(name)
    return run_threads(all_ranks(plan), lambda rt: run(staged.module(model, rt), inputs))


def test_both_forms_of_a_step():
    """The loss may be scaled; `step` is forward and backward in one; without gradients only the forward runs."""

    def run(module, inputs):
        out = module(**inputs)
        (3.0 * out.loss).backward()
        tripled = {n: p.grad.clone() for n, p in module.named_parameters()}
        module.zero_grad()
        loss = module.step(**inputs)
        once = {n: p.grad.clone() for n, p in module.named_parameters()}
        module.step(**inputs)
        twice = {n: p.grad for n, p in module.named_parameters()}
        with torch.no_grad():
            quiet = module(**inputs)
        return out.loss.detach(), loss, quiet.loss, tripled, once, twice, out.logits, module.stage

    for first, loss, quiet, tripled, once, twice, logits, stage in on_ranks(run):
        assert first == loss == quiet
        assert once and all(
            torch.allclose(tripled[n], 3 * g) and torch.allclose(twice[n], 2 * g) for n, g in once.items()
        )
        assert logits.is_meta is (stage == 0)
        assert logits.shape == (12, 8, 96)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_the_norm_of_gradients_is_that_of_all_stages(order):
    """A tied parameter, held by two stages, counts once."""

    def run(module, inputs):
        module.step(**inputs)
        norm = module.clip_grad_norm_(0.05, order)
        return norm, {n: p.grad for n, p in module.named_parameters()}

    model, inputs = made("tied")
    plain = tiny_copy(model)
    plain(**inputs).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, order)
    for norm, gradients in on_ranks(run):
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
        for name, p in plain.named_parameters():
            if name in gradients:
                assert torch.allclose(gradients[name], p.grad, rtol=1e-4, atol=1e-7), name


def tiny_copy(model: nn.Module) -> nn.Module:
    found = copy.deepcopy(model)
    found.zero_grad()
    return found


def test_what_it_can_not_do_is_said():
    def run(module, inputs):
        with pytest.raises(InputError, match="captured as"):
            module(input_ids=inputs["input_ids"][:6], labels=inputs["labels"][:6])
        with pytest.raises(InputError, match=r"make it by compile\(\)"):
            module.eval()(**inputs)
        loss = module.train()(**inputs).loss
        loss.backward(retain_graph=True)
        with pytest.raises(InputError, match="second time"):
            loss.backward()
        with pytest.raises(UserError, match="pickled"):
            module.__reduce_ex__(4)
        return True

    assert all(on_ranks(run))
    plan = planned("tied", SMALL, 4)[1]
    model, inputs = made("skip")
    with pytest.raises(PlanError, match="is for model"):
        api.compile_on(model, nobody, None, (), inputs, plan=plan, options=Options(precision="fp64"))


def nobody(plan, source):
    raise AssertionError("no rank is asked for")


def short(inputs: dict, rows: int, length: int | None = None) -> dict:
    """The first rows, of so many tokens each."""
    return {k: v[:rows, :length] if torch.is_tensor(v) else v for k, v in inputs.items()}


def train(pins: dict, micro_batches: int):
    model, inputs = tiny("llama")
    options = Options(pins=pins, micro_batches=micro_batches)
    module = autopar.compile(model, load_cluster("rtx4090:2"), example_inputs=inputs, options=options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for given in (inputs, short(inputs, 3)):
        loss = module(**given).loss
        loss.backward()
        with pytest.raises(UserError, match=r"module\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        module.clip_grad_norm_(0.5)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(module.eval()(**short(inputs, 2, 7)).loss.item())
    return losses, module.full_state_dict()


@pytest.mark.ranks
def test_two_processes_train_as_one():
    losses, state = autopar.launch(train, ranks=2, args=(SMALL, 4))
    model, inputs = tiny("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    *trained, evaluated = losses
    for expected, given in zip(trained, (inputs, short(inputs, 3)), strict=True):
        loss = model(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert model.eval()(**short(inputs, 2, 7)).loss.item() == pytest.approx(evaluated, rel=1e-5)
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-5), name
