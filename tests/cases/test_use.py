"""Field cases of usability, by id."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Options, launch, meshes
from autopar.ir.solution import Solution, Status
from autopar.runtime.groups import ranks_started
from tests.cases.run import same, strategies, unequal

ROUNDING = 1e-9


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Classifier(nn.Module):
    def __init__(self, width: int = 48, classes: int = 12) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


def search(ranks: int, **options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    batch = {"x": torch.randn(24, 48), "y": torch.randint(0, 12, (24,))}
    cluster = autopar.ClusterSpec.load(f"rtx3090:{ranks}")
    return autopar.search(Classifier(), cluster, example_inputs=batch, options=Options(**options))


@pytest.mark.parametrize(("ranks", "layout"), [(2, "tp:S(0)"), (2, "tp:S(1)"), (2, "tp:R"), (4, "dp:S(0) tp:S(1)")])
def test_use_03_a_constraint_on_the_head_is_in_the_plan(tmp_path: Path, ranks: int, layout: str) -> None:
    plan = search(ranks, pins={"tp": 2, "head": layout})
    plan.save(tmp_path / "plan.json")
    entry = json.loads((tmp_path / "plan.json").read_text())["parameters"]["head.weight"]
    wanted = {term for term in layout.split() if ranks == 4 or term.startswith("tp")}
    assert wanted <= set(entry["layout"].split())
    cuts = sum(term.endswith(")") for term in wanted)
    assert entry["bytes_per_device"] == 12 * 48 * 4 // 2**cuts


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"tp": 4, "head": "tp:S(2)"}, "head.weight has shape [12, 48]"),
        ({"tp": 4, "hed": "tp:S(0)"}, "did you mean head"),
        ({"tp": 4, "head": "tp:P"}, "can't be stored as a sum"),
        ({"dp": 2, "tp": 2, "head": "dp:S(0) tp:S(0)"}, "can't cut so"),
    ],
)
def test_use_03_a_violated_constraint_raises(pins: dict[str, Any], words: str) -> None:
    with pytest.raises(autopar.UserError) as error:
        search(4, pins=pins)
    assert words in str(error.value)


def test_use_03_a_constraint_that_one_mesh_cannot_hold_leaves_the_others() -> None:
    """Both axes can't cut one dim, but each alone can."""
    plan = search(8, pins={"head": "dp:S(0) tp:S(0)"})
    assert 1 in (plan.mesh.axes.get("dp", 1), plan.mesh.axes.get("tp", 1))


NAMES = ["blocks.0.mlp.up", "blocks.2.mlp.down.weight", "head", "stem.weight", "blocks.1.norm"]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (4, {"pins": {"dp": 2, "tp": 2}}),
        (4, {"pins": {"tp": 1}, "memory_limit": 360_000}),
        (3, {"pins": {"zero": 3, "dp": 3}}),
        (4, {"pins": {"dp": 2, "tp": 2, "blocks.*.mlp.up": "dp:R tp:S(1)"}}),
    ],
    ids=["free", "dp2tp2", "memory", "zero", "pinned"],
)
def test_use_05_the_next_best_costs_exactly_what_is_said(ranks: int, options: dict[str, Any]) -> None:
    plan = search(ranks, gap=0.0, **options)
    for name in NAMES:
        answer = plan.explain(name)
        assert answer.chosen and answer.binding.message
        if not answer.next_best:
            assert answer.difference_us is None
            continue
        asked = {k: v for k, v in options.items() if k != "pins"}
        forced = search(ranks, pins=answer.pins, gap=0.0, **asked)
        assert forced.solver.status == "optimal"
        whole = plan.solver.objective_us
        assert answer.difference_us == pytest.approx(forced.solver.objective_us - whole, abs=ROUNDING * whole)
        largest = max((n for n in forced.parameters if n == name or n.startswith(name + ".")), key=_size(forced))
        assert forced.parameters[largest].layout == answer.next_best != answer.chosen == plan.parameters[largest].layout


def _size(plan: autopar.Plan) -> Any:
    return lambda name: plan.parameters[name].optimizer_bytes_per_device


def test_use_05_next_best_is_best() -> None:
    """Against all layouts that a pin can write, but those that a search leaves out."""
    plan = search(4, pins={"dp": 2, "tp": 2})
    answer = plan.explain("blocks.0.mlp.up")
    prices = {}
    for dp in ("R", "S(0)", "S(1)"):
        for tp in ("S(0)", "S(1)"):
            if dp != tp and f"dp:{dp} tp:{tp}" != answer.chosen:
                pins = {"dp": 2, "tp": 2, "blocks.0.mlp.up": f"dp:{dp} tp:{tp}"}
                prices[f"dp:{dp} tp:{tp}"] = search(4, pins=pins).solver.objective_us
    assert answer.next_best == min(prices, key=lambda text: prices[text])


def test_use_05_binding_constraint() -> None:
    free = search(2, pins={"dp": 2})
    assert free.explain("head").binding.kind == "none"
    tight = search(2, pins={"dp": 2}, memory_limit=_half_way(free), allow=())
    bound = tight.explain("blocks.0.mlp.up").binding
    assert tight.parameters["blocks.0.mlp.up.weight"].layout == "dp:S(0)"
    assert bound.kind == "memory"
    assert "without it this would be dp:R" in bound.message
    assert bound.price_us == pytest.approx(tight.solver.objective_us - free.solver.objective_us)
    pinned = search(2, pins={"dp": 2, "head": "dp:S(0)"})
    answer = pinned.explain("head")
    assert answer.binding.kind == "pin"
    assert "pin head=dp:S(0)" in answer.binding.message
    assert answer.binding.price_us == pytest.approx(pinned.solver.objective_us - free.solver.objective_us)
    assert answer.next_best == "dp:R"
    assert answer.difference_us is not None
    assert answer.difference_us < 0


def _half_way(plan: autopar.Plan) -> int:
    """A limit between what the fastest and the smallest plan need."""
    least = search(2, pins={"dp": 2}, objective="memory", memory_slack=None)
    return (plan.solver.memory_bytes + least.solver.memory_bytes) // 2


def test_use_05_an_unknown_name_gives_the_closest() -> None:
    with pytest.raises(autopar.UserError, match=r"'blocks.0.mpl.up' is no parameter.*did you mean blocks.0.mlp.up"):
        search(2).explain("blocks.0.mpl.up")


@pytest.mark.parametrize("found", ["2.12.1", "2.14.0a0+git1", "3.13.0"])
@pytest.mark.parametrize("first", ["torch", "autopar"])
def test_use_08_another_torch_is_named_with_the_one_that_is_supported(found: str, first: str) -> None:
    """Whether torch was loaded before autopar or by it. Seen to fail: no check."""
    patch = f"import torch; torch.__version__ = {found!r}"
    use = "import autopar" if first == "torch" else "import autopar\n" + patch + "\nautopar.search"
    code = (patch + "\n" if first == "torch" else "") + use
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: autopar supports torch 2.13") and found in last


def test_a_search_that_time_ended_does_not_say_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: "no plan exists under these pins" whatever ended the search."""
    stopped = Solution(
        status=Status.TIME_LIMIT, choice=(), objective_us=math.inf, bound_us=0.0, time_s=2.0, solver="none"
    )
    monkeypatch.setattr(meshes, "solve_mesh", lambda *_, **__: stopped)
    with pytest.raises(autopar.InfeasibleError, match=r"no plan was found in 2 s \(on mesh dp=2\)"):
        search(2, pins={"dp": 2}, time_limit_s=2.0)


def test_no_choice_names_the_cuts_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: no reason."""
    monkeypatch.setattr(meshes, "solve_mesh", lambda *_, **__: None)
    monkeypatch.setattr(meshes, "minimise_memory", lambda *_, **__: None)
    with pytest.raises(autopar.InfeasibleError, match=r"no plan exists under these pins on mesh tp=32: .*cut 32 ways"):
        search(32, pins={"tp": 32})  # 12 classes


# ---- USE-01: ops without a split rule


@torch.library.custom_op("autopar_test_use::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    """Of nobody's rules."""
    return x * 3 + x.sum()


odd.register_fake(torch.empty_like)
odd.register_autograd(lambda ctx, g: g * 3 + g.sum())

HARD: dict[str, Any] = {
    "svd": lambda x: x * torch.linalg.svd(x)[1].sum(),
    "unfold": lambda x: x.unfold(1, 2, 2).sum(-1).repeat(1, 2),
    "nonzero": lambda x: x * len((x.detach() > 0).nonzero()),
    "odd": odd,
}


class Hard(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.q, self.name = nn.Linear(6, 6), name

    def forward(self, x: Tensor) -> Tensor:
        return HARD[self.name](self.q(x))


class Holds(nn.Module):
    """`blocks.1.attn` has the op."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": m}) for m in (nn.Linear(6, 6), Hard(name)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["attn"](x)
        return x.pow(2).mean()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", HARD)
def test_use01_an_op_without_a_rule_runs_whole_and_is_listed_once(name: str, ranks: int) -> None:
    """With op, module path and line, and right. Seen to fail: no notes."""
    torch.manual_seed(0)
    plan = same(Holds(name), (unequal(6, 6),), ranks, pins={"dp": ranks, "zero": 0})
    whole = [n for n in plan.notes if n.kind in ("replicated", "region") and name in f"{n.message} {n.where}"]
    ops = [n.message.split()[0] for n in whole]
    assert whole and len(set(ops)) == len(ops), plan.notes
    first = Hard.forward if name == "odd" else HARD[name]
    line = first.__code__.co_firstlineno + (name == "odd")
    for note in whole:
        text = f"{note.where} {note.message}"
        assert "blocks.1.attn" in text and re.search(rf"test_use\.py:{line}\b", text), text


# ---- USE-09, USE-11 on processes: what a user's own script does with a compiled module


class Results(nn.Module):
    """Returns an object with `.loss` and `.logits`, as published models do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.down(torch.tanh(self.up(x)))
        return SimpleResult(F.mse_loss(logits, y), logits)


class SimpleResult(dict):  # type: ignore[type-arg]
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        super().__init__(loss=loss, logits=logits)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def loops(module: nn.Module) -> dict[str, list[float]]:
    """Losses of plain loops, one after the other on the same module."""
    x, y = unequal(6, 4), unequal(6, 6, seed=4)
    found: dict[str, list[float]] = {}

    def closing(optimizer: torch.optim.Optimizer) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(x, y).loss
            loss.backward()
            return loss

        return closure

    for name, search in (("LBFGS", None), ("line search", "strong_wolfe")):
        steps = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4, line_search_fn=search)
        found[name] = [steps.step(closing(steps)).item() for _ in range(2)]
    for name, none in (("set to none", True), ("set to zero", False)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
        found[name] = []
        for _ in range(2):
            optimizer.zero_grad(set_to_none=none)
            loss = module(x, y).loss
            loss.backward()
            optimizer.step()
            found[name].append(loss.item())
    outside = F.mse_loss(module(x, y).logits.pow(2), y)
    module.zero_grad()
    outside.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    found["loss outside"] = [outside.item(), float(norm)]
    return found


def read(module: nn.Module) -> dict[str, Any]:
    """What a person reads of a module, and a copy of it."""
    average = copy.deepcopy(module)
    with torch.no_grad():
        for mine in average.parameters():
            mine.mul_(0.5)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    return {
        "numbers": sum(p.numel() for p in module.parameters()),
        "shapes": [tuple(p.shape) for p in module.parameters()],
        "norms": [p.norm().item() for p in module.parameters()],
        "of the copy": [p.norm().item() for p in average.parameters()],
        "bytes": saved.tell() > 0,
    }


def used_there(strategy: str) -> list[Any]:
    """(loops, reading) of the compiled module and of the plain one."""
    torch.manual_seed(0)
    plain = Results().double()
    ranks = ranks_started()
    options = Options(precision="fp64", pins=strategies(ranks)[strategy], differentiable="all")
    batch = (unequal(6, 4), unequal(6, 6, seed=4))
    module = autopar.compile(plain, autopar.ClusterSpec.load(f"rtx3090:{ranks}"), example_inputs=batch, options=options)
    found = [loops(module), read(module)]
    return [*found, loops(plain), read(plain)]


@pytest.mark.ranks
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "tp"),
        (3, "zero3"),
        pytest.param(2, "dp", marks=pytest.mark.slow),
        pytest.param(4, "dp2tp2", marks=pytest.mark.slow),
    ],
)
def test_use09_11_a_users_script_on_processes(ranks: int, strategy: str) -> None:
    """LBFGS, which asks for dot products of all gradients, among the loops."""
    mine, seen, plain, wanted = launch(used_there, ranks, (strategy,), timeout_s=100)
    for loop, losses in plain.items():
        assert mine[loop] == pytest.approx(losses, rel=1e-9), loop
    for what, value in wanted.items():
        assert seen[what] == (value if what == "shapes" else pytest.approx(value, rel=1e-9)), what
