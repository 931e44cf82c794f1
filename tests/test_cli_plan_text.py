"""How a plan reads."""

from __future__ import annotations

import json

import msgspec
import pytest

from autopar.ir.plan import Plan, PlanNote, decode_plan
from autopar.present.plan_text import plan_text
from autopar.present.words import bar, bytes_words, count_words, group_name, pattern_of, ranges, time_words
from tests.plan_samples import sample_plan


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_fits_the_width(width: int) -> None:
    assert max(map(len, plan_text(sample_plan(), width).splitlines())) <= width


def test_says_what_a_person_asks() -> None:
    text = plan_text(sample_plan(), 120)
    for words in (
        "sample-llama (123 M parameters), bf16",
        "batch    32 × 1024 (input_ids, labels)",
        "model.layers.*.self_attn (add) and 1 more",
        "dgx-h100:1 (4 devices)",
        "dp=2 over infiniband × tp=2 over nvlink4",
        "130.0 ms, 252 K tokens/s, MFU 41.3%",
        "3.06 GiB of 5.00 GiB (61%) per device",
        "optimal, gap 0.08%",
        "one more GiB per device would save 1.07 ms a step",  # 1e-6 µs a byte × 2**30 bytes
        "ZeRO-3 + column",
        "all_reduce(tp)",
        "16.0 ms    12.3%",  # 2 values × 4 layers × 2 ms of 130 ms
        "and 3 more places",
        "pins     tp=2",
    ):
        assert words in text, f"{words!r} not in\n{text}"


def test_a_plan_of_before_these_fields_prints() -> None:
    data = json.loads(sample_plan().to_json())
    for table, name in ((data, "request"), (data["cluster"], "spec"), *((c, "where") for c in data["conversions"])):
        del table[name]
    text = plan_text(decode_plan(json.dumps(data).encode(), "old", Plan), 120)
    assert "dp=2 over link level 1 × tp=2 over link level 0" in text
    assert "3.06 GiB per device" in text


def test_layers_are_folded_unless_they_differ() -> None:
    plan = sample_plan()
    assert sum("up_proj" in line for line in plan_text(plan, 120).splitlines()) == 2  # one group, one conversion
    other = msgspec.structs.replace(
        plan.parameters["model.layers.3.mlp.up_proj.weight"], layout="dp:R tp:R", role="whole"
    )
    changed = msgspec.structs.replace(plan, parameters=plan.parameters | {"model.layers.3.mlp.up_proj.weight": other})
    text = plan_text(changed, 120)
    assert "model.layers.{0-2}" in text
    assert "model.layers.3.mlp.up_proj.weight" in text


def test_many_notes_are_cut_short() -> None:
    notes = [PlanNote(kind="whole", where=f"p{i}", message=f"reason {i}") for i in range(20)]
    text = plan_text(msgspec.structs.replace(sample_plan(), notes=notes), 120)
    assert "12 more notes" in text


def test_words() -> None:
    assert [bytes_words(n) for n in (12, 1536, 3 * 2**30)] == ["12 B", "1.50 KiB", "3.00 GiB"]
    assert [time_words(t) for t in (3.21, 4100, 41_000, 1_250_000, 126e6)] == [
        "3.2 µs", "4.10 ms", "41.0 ms", "1.25 s", "2.1 min",
    ]  # fmt: skip
    assert [count_words(n) for n in (950, 124e6, 8.03e9)] == ["950", "124 M", "8.03 B"]
    assert [bar(p, 4) for p in (0, 1e-9, 0.5, 1, 2)] == ["", "▏", "██", "████", "████"]
    assert pattern_of("a.0.b2.13") == "a.*.b2.*"
    assert ranges([3, 0, 1, 7]) == "0-1,3,7"
    assert group_name(["h.0.w", "h.1.w"], alone=True) == "h.*.w"
    assert group_name(["h.0.w", "h.1.w", "h.4.w"], alone=False) == "h.{0-1,4}.w"
