"""The command line: what it prints where, its exit codes, and one clear line for each bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from tests.plan_samples import sample_plan

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `autopar ARGUMENTS`, in this process."""
    code: Any = 0
    try:
        main(arguments)
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return int(code), out, err


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    return path


DGX = ("--cluster", "dgx-h100:1")

BAD: list[tuple[tuple[str, ...], str]] = [
    (("frobnicate",), 'Unknown command "frobnicate"'),
    (("search",), "requires an argument"),
    (("search", "gpt2"), "--cluster requires an argument"),
    (("search", "gpt2", *DGX, "--nonsense", "1"), "--nonsense"),
    (("search", "gtp2", *DGX), "unknown model 'gtp2'; closest: gpt2"),
    (("search", "no/such/folder", *DGX), "no such file or folder"),
    (("search", "gpt2", "-c", "dgx-h1000:1"), "closest: dgx-h100"),
    (("search", "gpt2", "-c", "dgx-h100:0"), "wanted a whole number of 1 or more"),
    (("search", "gpt2", "-c", "dgx-h100:-3"), "wanted a whole number of 1 or more"),
    (("search", "gpt2", "-c", "local:0"), "local:0"),
    (("search", "gpt2", "-c", "no-such.toml"), "cannot be read"),
    (("search", "gpt2", *DGX, "--pin", "xp=2"), "unknown axis 'xp'; closest: tp"),
    (("search", "gpt2", *DGX, "--pin", "tp=0"), "wanted a whole number of 1 or more"),
    (("search", "gpt2", *DGX, "--pin", "tp=two"), "wanted a whole number of 1 or more"),
    (("search", "gpt2", *DGX, "--pin", "zero=2"), "zero takes 0"),
    (("search", "gpt2", *DGX, "--pin", "tp"), "wanted NAME=SIZE or PATTERN=LAYOUT"),
    (("search", "gpt2", *DGX, "--slack", "0.1"), "goes with --objective memory"),
    (("search", "gpt2", *DGX, "--objective", "memory", "--slack", "-1"), "wanted a part of the fastest step"),
    (("search", "gpt2", *DGX, "--objective", "memory", "--slack", "much"), "such as 0.05, or any"),
    (("search", "gpt2", *DGX, "--forbid", "offload"), "no offload"),
    (("search", "gpt2", *DGX, "--forbid", "speed"), "wanted recompute"),
    (("search", "gpt2", *DGX, "--space", "tensors=1,2"), "closest: tensor"),
    (("search", "gpt2", *DGX, "--space", "tensor=1,x"), "wanted whole numbers"),
    (("search", "gpt2", *DGX, "--seq", "0"), "--seq 0: wanted 1 or more"),
    (("search", "gpt2", *DGX, "--seq", "foo"), 'unable to convert "foo" into int'),
    (("search", "gpt2", *DGX, "--seq", "5000"), "1024 learned positions"),
    (("search", "gpt2", *DGX, "--global-batch", "-1"), "--global-batch -1: wanted 1 or more"),
    (("search", "gpt2", *DGX, "--memory-limit", "lots"), "wanted a number of bytes"),
    (("search", "gpt2", *DGX, "--time-limit", "0"), "--time-limit 0.0: wanted more than 0"),
    (("search", "gpt2", *DGX, "--precision", "fp8"), "fp8"),
    (("search", "gpt2", *DGX, "-o", "/no/such/folder/plan.json"), "no folder /no/such/folder"),
    (("search", "torch.nn:Identity", *DGX), "no example inputs"),
    (("inspect", "no-such-plan.json"), "cannot be read"),
    (("verify", "gtp2"), "unknown model"),
    (("verify", "gpt2", "--ranks", "0"), "--ranks 0: wanted 1 or more"),
    (("verify", "gpt2", "--code", "no-such.py"), "--code no-such.py: cannot be read"),
    (("verify", "gpt2", "--code", "/dev/null"), "emitted code belongs to a plan"),
    (("verify", "gpt2", "--ranks", "-2"), "--ranks -2: wanted 1 or more"),
    (("doctor", "--ranks", "0"), "--ranks 0: wanted 1 or more"),
    (("profile",), "--output requires an argument"),
]


def check_one_line(code: int, out: str, err: str, words: str) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("autopar: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert words in err, err


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    check_one_line(*run(capsys, *arguments), words)
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("truncated", sample_plan().to_json()[:400].decode(), "not a whole JSON object"),
        ("version", sample_plan().to_json().decode().replace('"version": 1', '"version": 7'), "version 7"),
        ("format", '{"format": "other"}', "format is 'other'"),
        ("unknown key", sample_plan().to_json().decode().replace('"gap"', '"gapp"'), "gapp"),
        ("no JSON", "hello", "not a whole JSON object"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_bad_plan(capsys: Capture, tmp_path: Path, command: str, name: str, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    check_one_line(*run(capsys, command, str(path)), words)


def test_bad_cluster_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("name = 'x'\ngroups = [")
    check_one_line(*run(capsys, "search", "gpt2", "-c", str(path)), "malformed TOML")


def test_output_is_a_folder(capsys: Capture, tmp_path: Path) -> None:
    check_one_line(*run(capsys, "search", "gpt2", *DGX, "-o", str(tmp_path)), "is a folder")


def test_ranks_of_a_plan(capsys: Capture, plan_file: Path) -> None:
    check_one_line(*run(capsys, "verify", str(plan_file), "--ranks", "3"), "is for 4 ranks, not --ranks 3")
    check_one_line(*run(capsys, "verify", str(plan_file), "--pin", "tp=2"), "already decided")
    check_one_line(*run(capsys, "verify", str(plan_file)), "a model called sample-llama")


def test_plan_for_another_model(capsys: Capture, plan_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    code, out, err = run(capsys, "inspect", str(plan_file), "--code", str(folder), "--model", "gpt2-tiny")
    check_one_line(code, out, err, "the plan is for model sample-llama")
    assert not folder.exists()


def test_inspect(capsys: Capture, plan_file: Path) -> None:
    code, out, err = run(capsys, "inspect", str(plan_file))
    assert (code, err) == (0, "")
    assert "sample-llama" in out
    assert "ZeRO-3 + column" in out
    code, out, err = run(capsys, "inspect", str(plan_file), "--json")
    assert json.loads(out) == json.loads(plan_file.read_bytes())
    code, out, err = run(capsys, "inspect", str(plan_file), "--param", "model.layers.1.mlp.*")
    assert "up_proj" in out
    assert "o_proj" not in out
    code, out, err = run(capsys, "inspect", str(plan_file), "--param", "model.norm.weight", "--json")
    assert json.loads(out)["parameters"]["model.norm.weight"]["layout"] == "dp:R tp:R"
    check_one_line(
        *run(capsys, "inspect", str(plan_file), "--param", "model.layers.1.mlp.upp"), "closest: model.layers.1"
    )
    code, out, err = run(capsys, "inspect", str(plan_file), "--notes", "--json")
    assert len(json.loads(out)["notes"]) == 5


def test_catalogues(capsys: Capture) -> None:
    _, out, _ = run(capsys, "models", "--json")
    names = {row["name"] for row in json.loads(out)["models"]}
    assert {"gpt2", "llama3-70b", "deepseek-v3"} <= names
    _, out, _ = run(capsys, "models")
    assert all(name in out for name in names)
    _, out, _ = run(capsys, "clusters", "--json")
    presets = {row["name"] for row in json.loads(out)["clusters"]}
    assert {"dgx-a100-40g", "dgx-a100-80g", "dgx-h100", "h200", "b200", "rtx3090", "rtx4090"} <= presets
    _, out, _ = run(capsys, "clusters")
    assert all(name in out for name in presets)


@pytest.mark.parametrize("arguments", [("--help",), ("clusters",), ("models",), ("search", "gtp2", *DGX), ("search",)])
def test_answers_without_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from autopar.cli import main\n"
        f"try: main({list(arguments)!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'networkx', 'highspy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_as_a_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "search", "gtp2", *DGX],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    check_one_line(done.returncode, done.stdout, done.stderr, "unknown model")


TINY_SEARCH = ("search", "gpt2-tiny", "--cluster", "rtx4090:2")


def test_search_inspect_verify(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = run(capsys, *TINY_SEARCH, "--precision", "fp32", "-o", str(path))
    assert (code, err) == (0, "")
    assert "written to" in out
    assert "tiny config" in out
    code, out, err = run(capsys, "inspect", str(path), "--code", str(tmp_path / "code"))
    assert (code, err) == (0, "")
    assert "def forward(" in next((tmp_path / "code").glob("*.py")).read_text()
    code, out, err = run(capsys, "inspect", str(path), "--trace", str(tmp_path / "step.json"))
    assert (code, err) == (0, "")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace["otherData"]["step_us"] == pytest.approx(json.loads(path.read_bytes())["predicted"]["step_time_us"])
    code, out, err = run(capsys, "verify", str(path), "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["ranks"], report["first_difference"]) == (0, True, 2, None)
    check_one_line(*run(capsys, "verify", str(path), "--model", "opt-125m-tiny"), "the plan is for model gpt2-tiny")


def test_search_json(capsys: Capture) -> None:
    code, out, err = run(capsys, *TINY_SEARCH, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["format"] == "autopar-plan"


def test_nothing_fits(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = run(capsys, *TINY_SEARCH, "--memory-limit", "20KB", "-o", str(path))
    assert code == 3
    assert out == ""
    assert "--memory-limit" in err
    assert not path.exists()


BAD_ROW = ("gradient h.0.w", "tp:S(0)", 0.5, 1e-5)


@pytest.fixture
def wrong_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` finds one of 31 tensors wrong."""
    from autopar import api
    from autopar.ir.graph import Phase
    from autopar.verification import Row, VerifyReport
    from autopar.verification.bisect import Bisection, Difference

    first = Difference(
        phase=Phase.FORWARD, op="aten.mm.default", module_path="h.0", source="m.py:3", line=9, text="mm = x[0]",
        function="forward", value="mm", layout="tp:R", ranks=(0,), error=0.5, tolerance=1e-5, inputs=(),
        right_for_inputs=False,
    )  # fmt: skip
    rows = (Row("loss", "", 0.0, 1e-5), *(Row(f"w{k}", "tp:R", 1e-7, 1e-5) for k in range(28)), Row(*BAD_ROW),
            Row("counter", "", 0.0, 0.0))  # fmt: skip

    def verify(*args: Any, bisect: bool = False, **options: Any) -> VerifyReport:
        return VerifyReport(2, rows, Bisection(first=first, compared=40, drawn=0) if bisect else None)

    monkeypatch.setattr(api, "verify", verify)


def test_verify_says_what_differs(capsys: Capture, wrong_report: None) -> None:
    code, out, _ = run(capsys, "verify", "gpt2")
    assert code == 1
    assert "1 of 31 tensors differ" in out
    lines = [line for line in out.splitlines() if line.startswith(("ok ", "differs "))]
    assert len(lines) == 12
    assert lines[0].split() == ["differs", "5.0e-01", "1e-05", "gradient", "h.0.w", "tp:S(0)"]
    assert "tiny config of the same architecture" in out
    assert "first wrong op" not in out


def test_verify_shows_every_tensor(capsys: Capture, wrong_report: None) -> None:
    code, out, _ = run(capsys, "verify", "gpt2", "--all", "--bisect")
    names = [line.split()[3] for line in out.splitlines() if line.startswith(("ok ", "differs "))]
    assert names == ["loss", *(f"w{k}" for k in range(28)), "gradient", "counter"]
    assert "first wrong op: aten.mm.default in the forward of h.0" in out
    assert "emitted line  9 (forward): mm = x[0]" in out
    code, out, _ = run(capsys, "verify", "gpt2", "--bisect", "--json")
    data = json.loads(out)
    assert code == 1
    assert (len(data["rows"]), data["bisection"]["first"]["line"]) == (31, 9)


@pytest.mark.slow
def test_verify_bisects(capsys: Capture) -> None:
    code, out, err = run(capsys, "verify", "gpt2", "--pin", "tp=2", "--steps", "1", "--bisect")
    assert (code, err) == (0, "")
    assert "values of forward and backward compared: all as on one device" in " ".join(out.split())


def test_verify_edited_code(capsys: Capture, tmp_path: Path) -> None:
    """A plan, its code, an edit; verify runs the edited code and names the line."""
    path, folder = tmp_path / "plan.json", tmp_path / "code"
    pins = ("--pin", "dp=2", "--pin", "zero=0")
    assert run(capsys, *TINY_SEARCH, *pins, "--precision", "fp32", "-o", str(path))[0] == 0
    assert run(capsys, "inspect", str(path), "--code", str(folder))[0] == 0
    code = next(folder.glob("*.py"))
    assert run(capsys, "verify", str(path), "--code", str(code), "--steps", "1")[0] == 0
    rows = code.read_text().splitlines()
    at = next(k for k, row in enumerate(rows) if "aten.native_layer_norm.default(" in row)
    rows[at] = rows[at].replace("1e-05", "1e-02")
    code.write_text("\n".join(rows) + "\n")
    status, out, _ = run(capsys, "verify", str(path), "--code", str(code), "--steps", "1", "--bisect")
    assert status == 1
    assert "first wrong op: aten.native_layer_norm.default in the forward of" in " ".join(out.split())
    assert f"emitted line {at + 1} (" in " ".join(out.split())


REGION_MODEL = """
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x) if x.sum() > 0 else -self.lin(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(4, 4), Gate()

    def forward(self, x):
        return self.gate(self.first(x)).pow(2).sum()


def make():
    return Model(), {"x": torch.randn(8, 4)}
"""


def test_search_names_a_region_and_strict_refuses_it(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gated.py").write_text(REGION_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = run(capsys, "search", "gated:make", "--cluster", "rtx3090:2", "--precision", "fp32")
    assert code == 0 and "region" in out and "gated.py:12" in out
    (said,) = [r.getMessage() for r in caplog.records if r.name == "autopar"]
    assert said.startswith("region gate (gated.py:12): `x.")
    code, out, err = run(capsys, "search", "gated:make", "--cluster", "rtx3090:2", "--precision", "fp32", "--strict")
    assert code == 2 and out == "" and err.count("\n") == 1 and "gated.py:12" in err and "torch.where" in err
