"""Large problems: against brute force on tiny ones, and what the command says of good and bad files."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import UserError
from autopar.ir.solution import Status
from autopar.solver.__main__ import main
from autopar.solver.pairwise import PairwiseProblem, parse_problem, price_choice, read_problem, solve_pairwise
from autopar.solver.pairwise import solve as solving
from autopar.solver.pairwise.native import library, reduced
from autopar.solver.pairwise.problem import FORBIDDEN

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pairwise.json"
needs_native = pytest.mark.skipif(library() is None, reason="the C++ library is not built")


def random_file(seed: int, *, nodes: int = 5, arity: int = 2, slack: float = 0.3) -> dict[str, Any]:
    """A problem of a few nodes, some edges twice, some costs forbidden, its limit between least and most usage."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, nodes)
    intervals = [[int(a), int(a + rng.integers(0, 6))] for a in rng.integers(0, 10, nodes)]
    costs = [[forbid(rng, 0.05, int(c)) for c in rng.integers(0, 30, k)] for k in sizes]
    usages = [[int(u) for u in rng.integers(0, 20, k)] for k in sizes]
    edges, tables = [], []
    for _ in range(int(rng.integers(0, 2 * nodes + 1))):
        ends = [int(n) for n in rng.integers(0, nodes, arity if rng.random() < 0.3 else 2)]
        edges.append(ends)
        count = int(np.prod(sizes[ends]))
        tables.append([forbid(rng, 0.3, int(c)) for c in rng.integers(0, 40, count)])
    least, most = (peak(intervals, [f(u) for u in usages]) for f in (min, max))
    return {
        "problem": {
            "name": f"random {seed}",
            "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
            "edges": {"nodes": edges, "costs": tables},
            "usage_limit": int(least + slack * (most - least)),
        }
    }


def forbid(rng: np.random.Generator, share: float, cost: int) -> int:
    return FORBIDDEN if rng.random() < share else cost


def peak(intervals: list[list[int]], used: list[int]) -> int:
    """Usage at every single time, the slow way."""
    times = range(min(a for a, _ in intervals), max(b for _, b in intervals) + 1)
    return max(sum(u for (a, b), u in zip(intervals, used, strict=True) if a <= t < b) for t in times)


def price(file: dict[str, Any], choice: tuple[int, ...]) -> tuple[int, int]:
    """(cost, peak usage), from the file's own lists."""
    nodes, edges = file["problem"]["nodes"], file["problem"]["edges"]
    cost = sum(c[x] for c, x in zip(nodes["costs"], choice, strict=True))
    for ends, table in zip(edges["nodes"], edges["costs"], strict=True):
        at = 0
        for n in ends:
            at = at * len(nodes["costs"][n]) + choice[n]
        cost += table[at]
    return cost, peak(nodes["intervals"], [u[x] for u, x in zip(nodes["usages"], choice, strict=True)])


def cheapest(file: dict[str, Any]) -> int | None:
    """The optimum by trying everything, or None."""
    limit = file["problem"]["usage_limit"]
    every = itertools.product(*(range(len(c)) for c in file["problem"]["nodes"]["costs"]))
    fitting = [cost for cost, used in (price(file, c) for c in every) if used <= limit and cost < FORBIDDEN]
    return min(fitting, default=None)


def problem_of(file: dict[str, Any]) -> PairwiseProblem:
    return parse_problem(json.dumps(file).encode())


def check_against_brute_force(file: dict[str, Any], *, native: bool) -> None:
    best = cheapest(file)
    answer = solve_pairwise(problem_of(file), native=native, time_limit_s=30)
    if best is None:
        assert answer.status is Status.INFEASIBLE and answer.choice == () and answer.bound is None
        return
    assert answer.cost == best and answer.status is Status.OPTIMAL and answer.bound == best
    cost, used = price(file, answer.choice)
    assert cost == answer.cost and used <= file["problem"]["usage_limit"]
    priced = price_choice(problem_of(file), answer.choice)
    assert (priced.cost, priced.peak_usage, priced.fits, priced.allowed) == (cost, used, True, True)


@needs_native
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), nodes=st.integers(1, 6), slack=st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_the_answer_is_brute_forces(seed: int, nodes: int, slack: float):
    check_against_brute_force(random_file(seed, nodes=nodes, slack=slack), native=True)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**9), nodes=st.integers(1, 5), slack=st.sampled_from([0.0, 0.2, 1.0]))
def test_so_is_the_answer_without_the_library(seed: int, nodes: int, slack: float):
    check_against_brute_force(random_file(seed, nodes=nodes, slack=slack), native=False)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_edges_over_more_nodes_or_one(seed: int):
    file = random_file(seed, nodes=4, arity=1 + seed % 4)
    check_against_brute_force(file, native=library() is not None)


@needs_native
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9), slack=st.sampled_from([0.0, 0.1, 0.4]))
def test_reductions_keep_the_optimum(seed: int, slack: float):
    """What is left, by brute force over its arrays, and lifted, costs what the whole does."""
    file = random_file(seed, nodes=6, slack=slack)
    file["problem"]["edges"] = without_loops(file)
    best = cheapest(file)
    with reduced(problem_of(file)) as small:
        if small.impossible:
            assert best is None
            return
        model = small.model()
        costs = (
            [
                (model.constant + model.cost_of(picked), tuple(int(x) for x in picked))
                for picked in map(np.array, itertools.product(*(range(int(k)) for k in np.diff(model.start))))
                if not (model.used(picked.astype(np.int64)) > model.room).any()
            ]
            if model.nodes
            else [(float(model.constant), ())]
        )
        costs = [c for c in costs if np.isfinite(c[0])]
        if best is None:
            assert not costs
            return
        cost, picked = min(costs)
        lifted = price(file, tuple(small.lift(np.array(picked, dtype=np.int64)).tolist()))
        assert cost == best and lifted[0] == best and lifted[1] <= file["problem"]["usage_limit"]


def without_loops(file: dict[str, Any]) -> dict[str, Any]:
    edges = file["problem"]["edges"]
    kept = [k for k, (a, b) in enumerate(edges["nodes"]) if a != b]
    return {key: [edges[key][k] for k in kept] for key in ("nodes", "costs")}


@needs_native
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), slack=st.sampled_from([0.1, 0.4]))
def test_the_search_alone_fits_and_its_bound_holds(seed: int, slack: float):
    """Without a MIP: the native search may fall short, but never says more than is so."""
    file = random_file(seed, nodes=6, slack=slack)
    file["problem"]["edges"] = without_loops(file)
    best = cheapest(file)
    with reduced(problem_of(file)) as small:
        if small.impossible:
            return
        walked = small.search(5.0, 40, 1, lambda *_: False)
        if best is None:
            assert walked.choice is None
            return
        assert walked.bound <= best
        if walked.choice is not None:
            cost, used = price(file, tuple(walked.choice.tolist()))
            assert cost == walked.cost >= best and used <= file["problem"]["usage_limit"]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_message_passing_in_numpy_fits_and_its_bound_holds(seed: int):
    file = random_file(seed, nodes=5, slack=0.4)
    best = cheapest(file)
    problem = solving.as_pairs(problem_of(file))
    model = solving.model_of(problem)
    choice, bound, _ = solving.pass_messages(model, 5.0, 60, lambda *_: False)
    if best is not None:
        assert bound <= best + 1e-6
        if choice is not None and np.isfinite(model.cost_of(choice)):
            cost, used = price(file, tuple(choice[: len(file["problem"]["nodes"]["costs"])].tolist()))
            assert cost >= best and used <= file["problem"]["usage_limit"]


def larger_file(seed: int, nodes: int = 300) -> dict[str, Any]:
    """A chain with branches, so large that the search does it: a memory limit that binds all along."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 9, nodes)
    usages = [sorted((int(u) for u in rng.integers(1, 1000, k)), reverse=True) for k in sizes]
    costs = [sorted(int(c) for c in rng.integers(0, 1000, k)) for k in sizes]
    ends = [[n - 1 - int(rng.integers(0, min(n, 5))), n] for n in range(1, nodes) for _ in range(2)]
    tables = [[int(c) for c in rng.integers(0, 800, sizes[a] * sizes[b])] for a, b in ends]
    intervals = [[n, n + int(rng.integers(2, 40))] for n in range(nodes)]
    least, most = (peak(intervals, [f(u) for u in usages]) for f in (min, max))
    return {
        "problem": {
            "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
            "edges": {"nodes": ends, "costs": tables},
            "usage_limit": int(least + 0.15 * (most - least)),
        }
    }


@needs_native
def test_one_thread_or_two_give_the_same():
    problem = problem_of(larger_file(1))
    with reduced(problem) as small:
        assert small.entries > solving.SMALL_ENTRIES
    answers = [solve_pairwise(problem, rounds=25, threads=t, time_limit_s=120) for t in (1, 2, 2)]
    assert answers[0].cost is not None and answers[0].bound is not None
    assert len({(a.cost, a.bound, a.choice) for a in answers}) == 1
    assert 0 < answers[0].bound <= answers[0].cost


@needs_native
def test_the_search_beats_the_slower_one():
    problem = problem_of(larger_file(2, nodes=120))
    fast = solve_pairwise(problem, rounds=40, time_limit_s=120)
    choice, bound, _ = solving.pass_messages(solving.model_of(problem), 60.0, 100, lambda *_: False)
    assert fast.cost is not None and fast.bound is not None and choice is not None
    slow = price_choice(problem, choice.tolist())
    assert slow.fits and fast.cost <= slow.cost and fast.bound <= slow.cost and bound <= fast.cost


def test_costs_beyond_64_bits_in_sum():
    file = random_file(3, nodes=4, slack=1.0)
    file["problem"]["edges"] = {"nodes": [], "costs": []}
    file["problem"]["nodes"]["costs"] = [
        [FORBIDDEN - 1 - k for k in range(len(u))] for u in file["problem"]["nodes"]["usages"]
    ]
    answer = solve_pairwise(problem_of(file))
    assert answer.cost is not None and answer.bound is not None and answer.notes
    assert answer.bound <= (cheapest_large(file) or 0) <= answer.cost <= answer.bound * (1 + 1e-5)


def cheapest_large(file: dict[str, Any]) -> int:
    return sum(min(c) for c in file["problem"]["nodes"]["costs"])


def test_the_example_plain_and_gzip(tmp_path: Path):
    zipped = tmp_path / "example.json.gz"
    zipped.write_bytes(gzip.compress(EXAMPLE.read_bytes()))
    one, two = read_problem(EXAMPLE), read_problem(zipped)
    assert str(one) == str(two) and (one.tables == two.tables).all()


def run(*arguments: str, hash_seed: str = "0", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autopar.solver", *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, **env},
    )  # fmt: skip


def test_command_prints_json_and_the_same_each_time():
    done = [run(str(EXAMPLE), "--json", "--time-limit", "20", hash_seed=s) for s in ("1", "2")]
    assert [d.returncode for d in done] == [0, 0] and done[0].stdout == done[1].stdout
    answer = json.loads(done[0].stdout)
    assert set(answer) == {"cost", "bound", "status", "choice"} and answer["status"] == "optimal"
    priced = price_choice(read_problem(EXAMPLE), answer["choice"])
    assert priced.cost == answer["cost"] == answer["bound"] == cheapest(json.loads(EXAMPLE.read_text()))
    assert done[0].stderr == ""


def test_command_in_words_and_without_the_library():
    done = run(str(EXAMPLE), AUTOPAR_NATIVE="off")
    assert done.returncode == 0 and "status   optimal" in done.stdout
    assert "note     the native search is not there (left out by AUTOPAR_NATIVE)" in done.stdout


def test_no_choice_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = json.loads(EXAMPLE.read_text())
    file["problem"]["usage_limit"] = 10
    path = tmp_path / "tight.json"
    path.write_text(json.dumps(file))
    assert main([str(path), "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"cost": None, "bound": None, "status": "infeasible", "choice": []}
    assert err.count("\n") == 1 and "no choice without a forbidden cost fits" in err
    assert main([str(path)]) == 3
    assert "bound    none: no choice" in capsys.readouterr().out


def broken(change: Any) -> bytes:
    file = json.loads(EXAMPLE.read_text())
    change(file["problem"])
    return json.dumps(file).encode()


BAD = {
    "no file": (None, "cannot be read"),
    "empty": (b"", "not a problem"),
    "truncated": (EXAMPLE.read_bytes()[:200], "not a problem"),
    "truncated gzip": (gzip.compress(EXAMPLE.read_bytes())[:80], "cannot be read"),
    "damaged gzip": (b"\x1f\x8b" + b"\xff" * 50, "cannot be read"),
    "not text": (b"\xff\xfe\x00", "not a problem"),
    "another JSON": (b"[1, 2]", "not a problem"),
    "words for numbers": (broken(lambda p: p["nodes"]["costs"].__setitem__(0, ["a"])), "not a problem"),
    "no strategies": (broken(lambda p: p["nodes"]["costs"].__setitem__(0, [])), "node 0"),
    "a usage too few": (broken(lambda p: p["nodes"]["usages"][1].pop()), "node 1"),
    "an interval too few": (broken(lambda p: p["nodes"]["intervals"].pop()), "there must be one each"),
    "half an interval": (broken(lambda p: p["nodes"]["intervals"][2].pop()), "node 2"),
    "an edge to nowhere": (broken(lambda p: p["edges"]["nodes"].__setitem__(1, [0, 99])), "edge 1: no node 99"),
    "a table too short": (broken(lambda p: p["edges"]["costs"][3].pop()), "edge 3"),
    "a table too few": (broken(lambda p: p["edges"]["costs"].pop()), "tables of edge costs"),
    "a negative cost": (broken(lambda p: p["nodes"]["costs"].__setitem__(0, [-1, 3])), "negative"),
    "a negative limit": (broken(lambda p: p.__setitem__("usage_limit", -5)), "negative"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_one_clear_line(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data, words = BAD[what]
    path = tmp_path / "problem.json"
    if data is not None:
        path.write_bytes(data)
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err and str(path) in err


def test_a_time_limit_must_be_more_than_nothing(capsys: pytest.CaptureFixture[str]):
    assert main([str(EXAMPLE), "--time-limit", "0"]) == 2
    assert "more than 0" in capsys.readouterr().err


def test_the_referee_refuses_what_is_no_choice():
    with pytest.raises(ValueError, match="not a choice"):
        price_choice(read_problem(EXAMPLE), [0])
    with pytest.raises(UserError, match="combinations"):
        solve_pairwise(problem_of(too_wide()))


def too_wide() -> dict[str, Any]:
    return {
        "problem": {
            "nodes": {"intervals": [[0, 1]] * 3, "costs": [[0] * 50] * 3, "usages": [[0] * 50] * 3},
            "edges": {"nodes": [[0, 1, 2]], "costs": [[0] * 50**3]},
        }
    }
