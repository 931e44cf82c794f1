"""`autopar predict` in a shell: one JSON object, a table, one line and exit 2 for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cli import main

LLAMA = "predict llama3-8b --cluster dgx-h100:1 --seq 4096 --global-batch 16"


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(f"{LLAMA} --tp 2 --pp 2 --chunks 2 --micro-batch 1 --precision bf16 --json", capsys)
    found = json.loads(out)
    assert code == 0
    assert found["devices"] == 8 and found["configuration"]["dp"] == 2
    assert found["step_time_us"] == pytest.approx(found["step_time_s"] * 1e6)
    assert found["tokens_per_s"] == pytest.approx(16 * 4096 / found["step_time_s"])
    assert 0 < found["mfu"] < found["mfu_full_attention"] < 1
    assert found["peak_memory_bytes"] == sum(found["breakdown_bytes"].values())
    assert found["fits"] is (found["peak_memory_bytes"] <= found["memory_limit_bytes"])
    assert "causal attention" in found["flops_counted"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(f"{LLAMA} --zero 3", capsys)
    assert code == 0
    for words in ("step time", "MFU", "peak memory", "matmul", "optimizer state", "costs: calibrated"):
        assert words in out


def test_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    code, _, _ = run(f"{LLAMA} --pp 4 --dp 2 --trace {file}", capsys)
    events = json.loads(file.read_text())["traceEvents"]
    assert code == 0
    assert any("layers, backward: attention" in str(event.get("name")) for event in events)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{LLAMA} --tp 3", "tp 3"),
        (f"{LLAMA} --dp 3", "but the cluster has 8"),
        ("predict resnet50 --cluster dgx-h100:1", "doesn't know the layers of model type 'resnet'"),
        ("predict llama3-9b --cluster dgx-h100:1", "unknown model"),
        ("predict llama3-8b --cluster dgx-h900:1", "no such preset"),
        (f"{LLAMA} --precision int3", "precision"),
        ("predict llama3-8b --cluster dgx-h100:1 --seq 0", "seq 0: wanted 1 or more"),
    ],
)
def test_bad_input_is_one_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(line, capsys)
    assert code == 2 and not out
    assert words in err and len(err.strip().splitlines()) == 1
