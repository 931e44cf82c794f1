"""The certificate: no false alarm on emitted programs, and each planted fault named with its two lines."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from textwrap import dedent

import pytest
import torch

from autopar import api, codegen
from autopar.cost_model.clusters import load_cluster
from autopar.errors import CertificateError, RankError
from autopar.ir.options import Options
from autopar.ir.plan import mesh_of
from autopar.runtime import certificate
from autopar.runtime.certificate import Call, Where, certify, trace_of, traces_of
from tests.codegen.hand import Chain, chain, mesh, named_plan
from tests.models import NAMES
from tests.test_verify import DEFAULT, KINDS, captured

# Emitted programs -----------------------------------------------------------------------------------------------------


def emitted(name: str, kind: str, ranks: int):
    _, _, graph = captured(name, "fp32")
    plan = api.plan_captured(graph, load_cluster(f"rtx3090:{ranks}"), options=Options(pins=KINDS[kind](ranks)))
    return codegen.lower(graph, plan, mesh_of(plan))


def check_emitted(name: str, kind: str, ranks: int) -> None:
    """No alarm, and the text says what the program says: kinds, axes, shapes, dtypes, in order."""
    program = emitted(name, kind, ranks)
    text = codegen.emit(program).text
    found = certify(text, program.mesh)
    assert (found.ranks, found.roles) == (ranks, 1)
    own = [c for c in traces_of(text, program.mesh)[0] if re.search(r"= rt\.\w+\(", c.where.text)]
    said = [(c.kind, c.axis, c.shape, c.dtype) for c in own]
    assert said == [(c.kind, c.axis, c.shape, c.dtype) for c in trace_of(program)]
    assert said or ranks == 1


@pytest.mark.parametrize("kind", DEFAULT)
@pytest.mark.parametrize("name", ["mlp", "tower", "convnet", "llama"])
def test_no_false_alarm(name: str, kind: str) -> None:
    check_emitted(name, kind, DEFAULT[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEFAULT)
@pytest.mark.parametrize("name", NAMES)
def test_no_false_alarm_anywhere(name: str, kind: str) -> None:
    check_emitted(name, kind, DEFAULT[kind])


# Programs by hand -----------------------------------------------------------------------------------------------------

STEPS = """
def forward(rt, parameters, buffers, constants, inputs):
    x = inputs[0]  # float32[8, 6] dp:S(0)
    a = rt.all_reduce(x, "dp")
    b = rt.all_gather(a, "tp", 1)
    c = rt.reduce_scatter(b, "dp", 0)
    d = rt.all_to_all(c, "tp", 0, 1)
    e = rt.all_reduce_max(d, "dp")
    return [e], [], []
"""
ON = mesh(dp=2, tp=2)


def line_of(text: str, part: str) -> int:
    return 1 + next(i for i, row in enumerate(text.splitlines()) if part in row)


def refused(programs, on, *lines: int, match: str | None = None) -> str:
    with pytest.raises(CertificateError, match=match) as caught:
        certify(programs, on)
    message = str(caught.value)
    for line in lines:
        assert re.search(rf"line {line}\b", message), message
    return message


def test_steps_agree() -> None:
    assert certify(STEPS, ON).calls == (5,)
    shapes = [(c.kind, c.axis, c.shape) for c in traces_of(STEPS, ON)[3]]
    assert shapes == [
        ("all_reduce", "dp", (8, 6)), ("all_gather", "tp", (8, 6)), ("reduce_scatter", "dp", (2, 4, 12)),
        ("all_to_all", "tp", (2, 4, 6)), ("all_reduce_max", "dp", (8, 6)),
    ]  # fmt: skip


FAULTS = {
    "swapped": (
        'a = rt.all_reduce(x, "dp")\n    b = rt.all_gather(a, "tp", 1)\n    c = rt.reduce_scatter(b, "dp", 0)',
        'b = rt.all_gather(x, "tp", 1)\n    c = rt.reduce_scatter(b, "dp", 0)\n    a = rt.all_reduce(x, "dp")',
        "all_reduce(x", "c = rt.reduce_scatter",
    ),
    "dropped": ('a = rt.all_reduce(x, "dp")', "a = x", "all_reduce(x", "reduce_scatter"),
    "dropped last": ('e = rt.all_reduce_max(d, "dp")', "e = d", "all_reduce_max", ""),
    "another dtype": ('a = rt.all_reduce(x, "dp")', 'a = rt.all_reduce(x.double(), "dp")', "all_reduce(x", "x.double"),
    "another shape": ('a = rt.all_reduce(x, "dp")', 'a = rt.all_reduce(x[:4], "dp")', "all_reduce(x", "x[:4]"),
    "another group": ('a = rt.all_reduce(x, "dp")', 'a = rt.all_reduce(x, "tp")', "all_reduce(x", "reduce_scatter"),
    "another op": ('a = rt.all_reduce(x, "dp")', 'a = rt.all_reduce_max(x, "dp")', "all_reduce(x", "all_reduce_max(x"),
}  # fmt: skip


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_names_both_lines(fault: str, rank: int) -> None:
    before, after, good, bad = FAULTS[fault]
    assert before in STEPS
    wrong = STEPS.replace(before, after)
    others = tuple(r for r in range(4) if r != rank)
    lines = [line_of(STEPS, good)] + ([line_of(wrong, bad)] if bad else [])
    message = refused({others: STEPS, rank: wrong}, ON)
    named = {int(n) for n in re.findall(r"line (\d+)", message)}
    if fault == "another group":
        assert named & set(lines) or "all_reduce" in message, message
    else:
        assert set(lines) <= named, message
    assert f"rank {rank}" in message


def ends(rows: list[list[str]]) -> bool:
    """Whether four ranks on 2 × 2, each waiting in every call for its group, come to their ends: tried step by step."""
    at = [0] * 4

    def heads(group: tuple[int, ...], axis: str) -> bool:
        return all(at[r] < len(rows[r]) and f'"{axis}"' in rows[r][at[r]] for r in group)

    moved = True
    while moved:
        moved = False
        for axis in ON.names:
            for group in ON.groups(axis):
                if heads(group, axis):
                    moved = True
                    for r in group:
                        at[r] += 1
    return all(at[r] == len(rows[r]) for r in range(4))


@pytest.mark.parametrize("seed", range(30))
def test_any_fault_in_any_program(seed: int) -> None:
    """Random sequences of collectives, one of them swapped with the next, dropped, or with another tensor."""
    draw = random.Random(seed)
    rows = [
        f'rt.all_reduce({draw.choice(["x", "y"])}, "{draw.choice(["dp", "tp"])}")  # {k}' for k in range(12)
    ]  # fmt: skip
    head = ["def forward(rt, parameters, buffers, constants, inputs):", "    x = inputs[0]  # float32[4, 6]",
            "    y = inputs[1]  # bfloat16[3]"]  # fmt: skip
    at = draw.randrange(11)
    wrong = list(rows)
    match draw.choice(["swap", "drop", "tensor", "axis"]):
        case "swap":
            wrong[at], wrong[at + 1] = wrong[at + 1], wrong[at]
        case "drop":
            del wrong[at]
        case "tensor":
            wrong[at] = wrong[at].translate(str.maketrans("xy", "yx"))
        case "axis":
            wrong[at] = wrong[at].replace('"dp"', '"?"').replace('"tp"', '"dp"').replace('"?"', '"tp"')
    good_text, bad_text = ("\n".join([*head, *(f"    {r}" for r in rs)]) for rs in (rows, wrong))
    certify(good_text, ON)
    kinds = [[r.split("  #")[0] for r in rs] for rs in (rows, wrong)]
    along = [[[r for r in rs if axis in r] for axis in ('"dp"', '"tp"')] for rs in kinds]
    order_matters = kinds[0] != kinds[1]
    rank = draw.randrange(4)
    programs = {tuple(r for r in range(4) if r != rank): good_text, rank: bad_text}
    if not order_matters:
        certify(programs, ON)
    elif along[0] == along[1]:
        # Each group agrees, but one rank takes two groups' turns in another order: some of these wait in a circle.
        if ends([kinds[r == rank] for r in range(4)]):
            certify(programs, ON)
        else:
            refused(programs, ON, match="circle")
    else:
        message = refused(programs, ON, match="do not issue the same")
        assert len(re.findall(r"line \d+|nothing", message)) == 2


# Branches -------------------------------------------------------------------------------------------------------------


def forward_of(body: str) -> str:
    rows = dedent(body).strip().splitlines()
    head = ["def forward(rt, parameters, buffers, constants, inputs):", "    x = inputs[0]  # float32[8, 6]"]
    return "\n".join([*head, *(f"    {row}" for row in rows)])


def test_a_collective_under_a_rank() -> None:
    text = forward_of('if rt.rank == 0:\n    x = rt.all_reduce(x, "dp")\nx = rt.all_gather(x, "dp", 0)')
    message = refused(text, mesh(dp=3), 4, 5, match="do not issue the same")
    assert "under line 3: if rt.rank == 0" in message


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_branch_that_splits_no_group_is_fine(axis: str) -> None:
    """Whole groups may do more than others; members of one group may not."""
    text = forward_of(f'if rt.index("tp") == 0:\n    x = rt.all_reduce(x, "{axis}")')
    if axis == "dp":
        assert certify(text, ON).roles == 2
    else:
        refused(text, ON, 4)


def test_both_ways_may_meet() -> None:
    text = forward_of('if rt.rank % 2:\n    rt.all_reduce(x, "dp")\nelse:\n    rt.all_reduce(x * 2, "dp")')
    certify(text, mesh(dp=2))


@pytest.mark.parametrize(
    "body",
    [
        'if x.sum() > 0:\n    x = rt.all_reduce(x, "dp")',
        'if x.sum().item() > 0:\n    x = rt.all_reduce(x, "dp")',
        'while x.sum() > 0:\n    x = rt.all_reduce(x, "dp")',
        'for k in range(int(x.sum())):\n    x = rt.all_reduce(x, "dp")',
        'y = rt.all_reduce(x, "dp") if x.sum() > 0 else x',
        'if unknown():\n    return [x], [], []\nx = rt.all_reduce(x, "dp")',
        'try:\n    y = x + 1\nexcept ValueError:\n    x = rt.all_reduce(x, "dp")',
    ],
)
def test_a_collective_under_data(body: str) -> None:
    message = refused(forward_of(body), mesh(dp=2), 3, match="cannot be known before the run")
    if "return" not in body:
        assert 'rt.all_reduce(x, "dp")' in message.split("collective in it")[1]


def test_data_may_decide_what_others_do_not_see() -> None:
    certify(forward_of('if x.sum() > 0:\n    x = x * 2\nx = rt.all_reduce(x, "dp")'), mesh(dp=2))


def test_a_shape_from_data_or_rank() -> None:
    refused(forward_of('y = x[x > 0]\ny = rt.all_reduce(y, "dp")'), mesh(dp=2), 3, 4, match="shape")
    text = forward_of('y = x[: rt.index("dp") + 1]\ny = rt.all_reduce(y, "dp")')
    message = refused(text, mesh(dp=2), 4, match="do not issue the same")
    assert "float32[1, 6]" in message and "float32[2, 6]" in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import torch.distributed as dist\ndist.all_reduce(x)", "does not go through rt"),
        ("helper(rt, x)", "cannot be read"),
        ("rt.all_reduced(x, 'dp')", "rt has no all_reduced"),
        ('rt.all_reduce(x, "pp")', "does not take this"),
        ('rt.reduce_scatter(x, "dp", 2)', "does not take this"),
    ],
)
def test_what_cannot_be_certified(body: str, words: str) -> None:
    refused(forward_of(body), mesh(dp=4), match=words)


def test_functions_are_read_too() -> None:
    text = 'def both(rt, x, n):\n    for k in range(n):\n        x = rt.all_reduce(x, "dp")\n    return x\n\n\n'
    text += forward_of("x = both(rt, x, 3)\nx = both(rt, x, n=2)\nx = both(rt, x, rt.index('dp'))")
    assert [len(t) for t in traces_of(text, mesh(dp=1))] == [0]
    message = refused(text, mesh(dp=2), 3)
    assert "number 6 of the group" in message and "nothing: its program ends here" in message


# Stages ---------------------------------------------------------------------------------------------------------------

FIRST = forward_of('x = rt.all_reduce(x, "dp")\nrt.send(x, rt.rank + 2)')
LAST = forward_of("x = rt.receive([8, 6], torch.float32, rt.rank - 2)\nx = rt.all_reduce(x, 'dp')")
LAST = f"import torch\n\n\n{LAST}"
STAGES = mesh(pp=2, dp=2)


def test_two_stages() -> None:
    found = certify({(0, 1): FIRST, (2, 3): LAST}, STAGES)
    assert found.calls == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("first", "last", "words", "lines"),
    [
        (FIRST.replace("\n    rt.send(x, rt.rank + 2)", ""), LAST, "a receive has no send", [6]),
        (FIRST + "\n    rt.send(x, rt.rank + 2)", LAST, "a send has no receive", [5, 6]),
        (FIRST, LAST.replace("[8, 6]", "[8, 3]"), "do not fit", [4, 6]),
        (FIRST, LAST.replace("float32,", "bfloat16,"), "do not fit", [4, 6]),
        (FIRST.replace("rt.rank + 2", "rt.rank"), LAST, "no such rank", [4]),
        (FIRST.replace("rt.rank + 2", "rt.rank + 9"), LAST, "no such rank", [4]),
    ],
)
def test_stages_that_do_not_fit(first: str, last: str, words: str, lines: list[int]) -> None:
    refused({(0, 1): first, (2, 3): last}, STAGES, *lines, match=words)


def ring(n: int, order: str) -> str:
    send, take = f"rt.send(x, (rt.rank + 1) % {n})", f"rt.receive([8, 6], torch.float32, (rt.rank - 1) % {n})"
    both = f"{send}\n{take}" if order == "send first" else f"{take}\n{send}"
    even = both if order != "even first" else f"if rt.rank % 2:\n    {take}\n    {send}\nelse:\n    {send}\n    {take}"
    return f"import torch\n\n\n{forward_of(even)}"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_circle_of_sends(n: int) -> None:
    """All send first and none receives: with calls that wait for the other side, nobody goes on."""
    message = refused(ring(n, "send first"), mesh(pp=n), 6, match="wait for each other in a circle")
    assert all(f"rank {r}: send" in message for r in range(n))
    refused(ring(n, "receive first"), mesh(pp=n), 6, match="circle")
    if n != 3:
        certify(ring(n, "even first"), mesh(pp=n))


def test_a_circle_of_collectives() -> None:
    """Each group sees the same calls, but two ranks enter two groups in turns."""
    text = forward_of(
        'if rt.index("dp") == rt.index("tp"):\n    rt.all_reduce(x, "dp")\n    rt.all_reduce(x, "tp")\n'
        'else:\n    rt.all_reduce(x, "tp")\n    rt.all_reduce(x, "dp")'
    )
    refused(text, ON, 4, 7, match="circle")


def test_traces_by_hand() -> None:
    here = Where(line=1, function="stage", text="send")
    send = Call(kind="send", peer=1, shape=(2,), dtype="float32", where=here)
    take = replace(send, kind="receive", peer=0)
    certify({0: (send,), 1: (take,)}, mesh(pp=2))
    refused({0: (send, send), 1: (take,)}, mesh(pp=2), 1, match="send has no receive")


# Cost and place -------------------------------------------------------------------------------------------------------


def test_equal_ranks_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = []
    whole = certificate.read
    monkeypatch.setattr(certificate, "read", lambda *a: readings.append(a) or whole(*a))
    assert certify(STEPS.replace("8, 6", "64, 64"), mesh(dp=32, tp=32)).ranks == 1024
    assert len(readings) == 1


def test_pieces_of_unequal_length() -> None:
    """Ranks given other shapes are read apart; what travels must still be alike."""
    text = forward_of('rt.all_reduce(x.sum(0), "dp")')
    on = mesh(dp=3)

    def given(rank: int) -> certificate.Arguments:
        return certificate.Arguments(inputs=(("float32", (3 - rank, 6)),))

    assert certificate.certified(text, on, given, {}).calls == (1,)
    with pytest.raises(CertificateError, match="do not issue the same"):
        certificate.certified(text.replace("x.sum(0)", "x"), on, given, {})


def test_pieces_that_know_their_length() -> None:
    """7 rows on 3 ranks are 3 3 1: they travel padded and are cut again. A branch on a length is one on the rank."""
    on = mesh(dp=3)

    def given(rank: int) -> certificate.Arguments:
        return certificate.Arguments(inputs=(("float32", ((3, 3, 1)[rank], 6)),))

    body = 'y = rt.all_gather(x, "dp", 0, length=7)\ny = rt.reduce_scatter(y, "dp", 0)\n'
    text = forward_of(body + 'z = y.new_zeros((rt.piece(7, "dp").length, 6))\nrt.all_gather(y + z, "dp", 0, length=7)')
    assert len(set(certificate.certified(text, on, given, {}).calls)) == 1
    shapes = [c.shape for c in traces_of(text, on, given)[2]]
    assert shapes == [(3, 6), (3, 3, 6), (3, 6)]
    with pytest.raises(CertificateError, match="do not issue the same"):
        certificate.certified(text.replace('x, "dp", 0, length=7', 'x, "dp", 0'), on, given, {})
    branch = forward_of('if rt.piece(7, "dp").length > 2:\n    x = rt.all_reduce(x.sum(0), "dp")')
    with pytest.raises(CertificateError, match=r"under line \d+: if rt.piece"):
        certificate.certified(branch, on, given, {})


@pytest.mark.parametrize(
    "piece",
    [
        'rt.slice(x, "tp", 1)',
        'rt.reduce_scatter(x, "tp", 1)',
        'local_ops.uniform(rt, None, 0.0, 1.0, "draw", [8, 7], [(), ("tp",)], dtype=torch.float32)',
    ],
    ids=["slice", "sum", "draw"],
)
@pytest.mark.parametrize("talk", ['rt.all_gather(y, "dp", 0)', 'local_ops.softmax(rt, y, 0, ("dp",), torch.float32)'])
@pytest.mark.parametrize("own", ["tp", "dp"])
def test_a_length_of_the_ranks_own_hangs_on_its_axis_only(piece: str, talk: str, own: str) -> None:
    """7 columns on tp=2 are 4 3: members of a group along dp have equal lengths, those of one along tp don't.

    Seen to fail: rank 1, whose piece is as long as the last rank's, stood for rank 2; draws and local forms unmarked.
    """
    head = "import torch\nfrom autopar.runtime import local_ops\n\n"
    made, said = piece.replace('"tp"', f'"{own}"'), talk.replace("rt.all_gather(y", "rt.all_gather(y * 2")
    text = head + forward_of(f"y = {made}\n{said}").replace("[8, 6]", "[8, 7]")
    on = mesh(dp=2, tp=2)
    if own == "dp":
        refused(text, on, 7, 7, match="do not issue the same")
        return
    certify(text, on)
    lengths = [trace[-1].shape[-1] for trace in traces_of(text, on)]
    assert lengths == [4, 3, 4, 3]


def test_blocks_are_read_once() -> None:
    """80 instances of a block say 80 times what one says, from one reading."""
    graph = chain(80)
    program = codegen.lower(graph, named_plan(graph, "dp", 2))
    text = certificate.Text(codegen.emit(program).text)
    trace = certificate.read(text, program.mesh, 0, None).trace
    assert len(trace) == len(trace_of(program)) == 83
    assert len(text.known) == 2


def test_at_load() -> None:
    """An edited program is refused before any rank talks."""
    graph = chain()
    plan = named_plan(graph, "dp", 2)
    source = api.emit_captured(graph, plan)
    line = '    loss_dpR = rt.all_reduce(loss, "dp")'
    assert line in source.text
    wrong = source.text.replace(line, f"    loss_dpR = loss\n    if rt.rank == 0:\n    {line}")
    batch = {"x": torch.randn(12, 12, dtype=torch.float64)}
    assert api.verify_source(graph, plan, source, Chain(), batch).ok
    with pytest.raises(RankError, match=r"do not issue the same collectives(.|\n)*hand.py:1"):
        api.verify_source(graph, plan, replace(source, text=wrong), Chain(), batch)
