"""What the README and the manual tell a newcomer to run, runs (USE-14), and what they name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cyclopts import CycloptsError, MissingArgumentError
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import launch
from autopar.cli import app
from autopar.runtime.module import ParallelModule
from autopar.runtime.staged import StagedModule

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "arguments", [(), ("1",), *(pytest.param((n,), marks=pytest.mark.slow) for n in ("3", "4"))], ids=str
)
def test_use14_the_quickstart_trains(arguments: tuple[str, ...]) -> None:
    """As it is: two ranks; and on other counts, three of which divide nothing in it."""
    done = subprocess.run(
        [sys.executable, "examples/quickstart.py", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(x) for x in re.findall(r"\d+\.\d+", done.stdout.split("loss", 1)[1])]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5


def readme_block(ranks: int) -> list[float]:
    """Losses of the README's own lines, three times over, on so many devices."""
    block = re.search(r"\n((?:    .*\n|\n)*    import autopar\n(?:    .*\n|\n)*)", (ROOT / "README.md").read_text())
    assert block is not None
    lines = [line[4:] for line in block[1].strip("\n").splitlines()]
    code = "\n".join(lines).replace('"dgx-h100:4"', f'"rtx3090:{ranks}"')
    assert str(ranks) in code
    before, _, step = code.partition("loss = ")
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=24, n_head=2, vocab_size=48, n_positions=12, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    ids = torch.randint(0, 48, (6, 12))
    given: dict[str, Any] = {
        "model": GPT2LMHeadModel(config),
        "batch": {"input_ids": ids, "labels": ids},
        "torch": torch,
    }
    exec(before, given)
    losses = []
    for _ in range(3):
        exec("loss = " + step, given)
        losses.append(given["loss"].item())
    return losses


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_use14_the_lines_of_the_readme_run() -> None:
    one = readme_block(1)
    assert one[2] < one[0]
    assert launch(readme_block, 2, (2,), timeout_s=100) == pytest.approx(one, rel=1e-4)


def test_use14_names_in_the_manual_exist() -> None:
    """Seen to fail: a method renamed."""
    owners = {"autopar": autopar, "plan": autopar.Plan, "module": ParallelModule}
    named = {
        (owner, name)
        for page in PAGES
        for owner, name in re.findall(r"(?<![\w/.-])(autopar|plan|module)\.([a-z]\w+)(?=[(\s`=.])", page.read_text())
        if name not in ("json", "html", "toml", "py")
    }
    assert len(named) > 15
    fields = set(autopar.Plan.__struct_fields__)
    staged = {("module", n) for n in dir(StagedModule)}
    known = {(o, n) for o, n in named if hasattr(owners[o], n) or n in fields} | staged
    missing = [f"{o}.{n}" for o, n in sorted(named - known)]
    assert not [m for m in missing if not (ROOT / "autopar" / m.removeprefix("autopar.")).exists()], missing


def commands() -> list[str]:
    """Whole `autopar ...` command lines of the pages: from indented lines and tables, without brackets and comments."""
    found = []
    for page in PAGES:
        fenced = False
        for line in page.read_text().splitlines():
            fenced ^= line.startswith("```")
            shown = re.match(r"\s*(?:\$ |torchrun .*-m |\.venv/bin/)?(autopar [a-z].*)", line)
            block = shown is not None and (fenced or line.startswith("    "))
            for text in [shown[1]] if shown and block else re.findall(r"`(autopar [a-z][^`]*)`", line):
                text = re.sub(r"\s+#.*", "", text).replace("[", "").replace("]", "").replace(" N ", " 2 ").strip()
                if len(text.split()) > 2:
                    found.append(text)
    return sorted(set(found))


def test_use14_commands_in_the_manual_are_commands() -> None:
    """Parsed, not run. Seen to fail: an option renamed."""
    found = commands()
    assert len(found) > 12
    for text in found:
        tokens = [token.strip("'\"") for token in text.split()[1:]]
        try:
            app.parse_args(tokens, exit_on_error=False, print_error=False)
        except MissingArgumentError:
            continue  # a mention: "autopar inspect --html"
        except CycloptsError as error:
            pytest.fail(f"{text}: {error}")


def test_readme_names_only_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    links = re.findall(r"\]\(([^)h][^)]*)\)", text) + re.findall(r"`((?:docs|examples|tests|scripts)/[\w./-]+)`", text)
    assert len(links) >= 6
    for link in (x for x in links if "NNNN" not in x):
        assert (ROOT / link).exists(), link
