"""Philox 4x32-10 in plain Python, in PyTorch and in C++ for each target: published answers, and the same bits."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autopar import native
from autopar.runtime import draw, philox
from autopar.runtime.philox import Space, Stream, space

CPU = torch.device("cpu")
ALL = 0xFFFFFFFF

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip
"""Counter, key -> words, as published with Random123 (philox4x32, 10 rounds)."""

STREAM = Stream(0x0123456789ABCDEF, 0xFEDCBA9876543210)

PIECES = {
    "whole": space((5, 1000), (0, 0), (5, 1000)),
    "rows": space((6, 1000), (3, 0), (3, 1000)),
    "columns": space((6, 999), (0, 333), (6, 333)),
    "short runs": space((700, 6), (0, 1), (700, 3)),
    "one column": space((300, 7), (0, 2), (300, 1)),
    "four dims": space((4, 6, 5, 8), (2, 0, 0, 4), (2, 3, 5, 4)),
    "one": space((), (), ()),
    "none": space((4, 8), (0, 0), (0, 8)),
    "above 32 bits": space((2**20, 2**13), (2**20 - 3, 5), (3, 2000)),
    "many": space((100_003,), (1,), (100_001,)),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _signed(words: tuple[int, ...]) -> list[int]:
    return [w - 2**32 if w >= 2**31 else w for w in words]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert native.philox(counter, key) == words
    low, high = counter[0] | counter[1] << 32, counter[2] | counter[3] << 32
    block = torch.tensor([low - 2**64 if low >= 2**63 else low])
    found = philox.rounds(block, Stream(key[0] | key[1] << 32, high))
    assert tuple(int(w) for w in found) == words


def test_words_are_those_of_their_elements() -> None:
    """Element i of a draw of w words has words i·w ..: by plain Python, element by element."""
    whole, starts, shape = (4, 6), (1, 2), (2, 3)
    piece = space(whole, starts, shape)
    key = (STREAM.key & ALL, STREAM.key >> 32)
    step = (STREAM.step & ALL, STREAM.step >> 32)
    for width in (1, 2, 4):
        wanted = []
        for i in range(shape[0]):
            for j in range(shape[1]):
                element = (starts[0] + i) * whole[1] + starts[1] + j
                wanted += [
                    native.philox((q // 4, 0, *step), key)[q % 4] for q in range(element * width, (element + 1) * width)
                ]
        assert philox.words(STREAM, piece, width, CPU).tolist() == _signed(tuple(wanted))


def _targets() -> Iterator[native.Kernels]:
    found = native.kernels()
    if found is None:
        return
    for target in ("generic", "avx2", "avx512"):
        try:
            yield native.opened(found.path, target)
        except ValueError:
            continue


TARGETS = {k.target: k for k in _targets()}
needs_kernels = pytest.mark.skipif(not TARGETS, reason=f"no kernels here: {native.found().reason}")


@pytest.fixture(params=sorted(TARGETS) or ["none"])
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draws are made by the kernels of one target."""
    if not TARGETS:
        pytest.skip(f"no kernels here: {native.found().reason}")
    monkeypatch.setattr(draw, "_kernels", lambda device: TARGETS[request.param])
    yield


def _pairs(monkeypatch: pytest.MonkeyPatch, make: object) -> tuple[object, object]:
    """(by the kernels in use, by PyTorch)."""
    by_kernel = make()  # type: ignore[operator]
    with monkeypatch.context() as without:
        without.setattr(draw, "_kernels", lambda device: None)
        return by_kernel, make()  # type: ignore[operator]


@needs_kernels
@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_kernels_give_the_same_bits(use: None, monkeypatch: pytest.MonkeyPatch, piece: Space) -> None:
    for width in (1, 2, 4):
        mine, theirs = _pairs(monkeypatch, lambda w=width: draw.words(STREAM, piece, w, CPU))
        assert torch.equal(mine, theirs)  # type: ignore[arg-type]
    for dtype in DTYPES:
        for make in (draw.uniform, draw.normal):
            mine, theirs = _pairs(monkeypatch, lambda m=make, d=dtype: m(STREAM, piece, d, CPU))
            assert mine.dtype == dtype and mine.shape == piece.shape  # type: ignore[attr-defined]
            assert torch.equal(mine, theirs)  # type: ignore[arg-type]


@needs_kernels
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_kernels_give_the_same_bits(
    use: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, p: float
) -> None:
    for piece in PIECES.values():
        x = torch.randn(piece.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        mine, theirs = _pairs(monkeypatch, lambda given=x, of=piece: draw.dropout(STREAM, of, given, p))
        for a, b in zip(mine, theirs, strict=True):  # type: ignore[call-overload]
            assert a.dtype == b.dtype and torch.equal(a, b)
        mask = mine[1]  # type: ignore[index]
        mine, theirs = _pairs(monkeypatch, lambda given=x, m=mask: draw.dropout_backward(given, m, draw.scale_of(p)))
        assert torch.equal(mine, theirs)  # type: ignore[arg-type]


@needs_kernels
def test_threads_change_nothing(use: None) -> None:
    piece, before = PIECES["many"], torch.get_num_threads()
    kernels = draw._kernels(CPU)
    assert kernels is not None
    made = []
    for threads in (1, 2, 5):
        out = torch.empty(piece.count * 4, dtype=torch.int32)
        kernels("words", out.data_ptr(), 4, *draw.as_argument(piece), STREAM.key, STREAM.step, threads)
        made.append(out)
    assert all(torch.equal(m, made[0]) for m in made)
    assert torch.get_num_threads() == before


@needs_kernels
def test_a_kernel_that_draws_wrong_is_not_used() -> None:
    """One word that is off by one bit is seen before the library is used."""
    kernels = next(iter(TARGETS.values()))
    real = kernels.functions["words"]

    def wrong(out: int, width: int, *rest: object) -> int:
        status: int = real(out, width, *rest)
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint32))[17] ^= 1
        return status

    assert native.draws_right(kernels)
    broken = native.Kernels(kernels.path, kernels.target, {**kernels.functions, "words": wrong})
    assert not native.draws_right(broken)


@needs_kernels
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "source_digest", lambda: "0" * 64)
    with pytest.raises(ValueError, match="built from other sources"):
        native.opened(next(iter(TARGETS.values())).path)


def test_without_kernels_it_says_why() -> None:
    """A process of its own: what is found is found once."""
    done = subprocess.run(
        [sys.executable, "-c", "from autopar import native; print(native.found())"],
        env={**os.environ, "AUTOPAR_NATIVE": "off"}, cwd=Path(__file__).parents[2], capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert "kernels=None" in done.stdout and "AUTOPAR_NATIVE" in done.stdout


def test_numbers_have_their_distribution() -> None:
    """Means, spreads and the share below a point, within 5 standard errors of 200 000 draws."""
    n = 200_000
    piece = space((n,), (0,), (n,))
    u = draw.uniform(STREAM, piece, torch.float64, CPU)
    z = draw.normal(STREAM, piece, torch.float64, CPU)
    error = 5 / n**0.5
    assert abs(float(u.mean()) - 0.5) < error * 0.289 and float(u.min()) >= 0 and float(u.max()) < 1
    assert abs(float(z.mean())) < error and abs(float(z.var()) - 1) < error * 2**0.5
    assert abs(float((z < 1).double().mean()) - 0.841345) < error * 0.366
    assert abs(float((z.abs() > 3).double().mean()) - 0.0027) < error * 0.052
    kept = draw.dropout(STREAM, piece, torch.ones(n), 0.3)[1].double()
    assert abs(float(kept.mean()) - 0.7) < error * 0.459
    assert float(philox.log(torch.linspace(1e-16, 1, 999, dtype=torch.float64)).sub(
        torch.linspace(1e-16, 1, 999, dtype=torch.float64).log()).abs().max()) < 1e-14  # fmt: skip
