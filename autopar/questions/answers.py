"""The answers, as data and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from autopar.ir.plan import Plan
from autopar.present.plan_diff import PlanDiff
from autopar.present.words import bytes_words, change_words, time_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What keeps the chosen layout from being another.

    Attributes:
        kind: "memory" (the limit), "pin", "objective" (least memory was asked for), or "none".
        price_us: what a step would save without it.
    """

    kind: str
    message: str
    price_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why something is laid out as it is.

    Attributes:
        name: as asked. `subject`: what that is in the model; `covers`: what else the answer holds for.
        kind: "parameter", "module" or "op".
        chosen, next_best: as layout text, which a pin takes; of an op its layouts as `inputs -> outputs`. `next_best`
            is the cheapest other one on this mesh, "" if there is none that fits. `*words`: the same in words.
        difference_us: step time that forcing `next_best` adds; below 0 where a pin forced the chosen one. None where
            there is no next best. `difference_bytes`: peak memory per device that it adds.
        binding: see `Binding`.
        pins: what to give to a search, or as --pin, to get `next_best`. Empty for an op: it follows its tensors.
        objective_us: of the best plan on this mesh, to which the difference is.
        diff: from that plan to the one with `next_best`.
        parts: of a module whose parameters belong to several modules: each of those; the rest is then of the part that
            is cheapest to change.
    """

    name: str
    subject: str
    kind: str
    covers: str
    chosen: str
    chosen_words: str
    next_best: str
    next_best_words: str
    difference_us: float | None
    difference_bytes: int | None
    binding: Binding
    pins: Mapping[str, str | int]
    objective_us: float
    diff: PlanDiff | None
    notes: tuple[str, ...] = ()
    parts: tuple[Explanation, ...] = ()

    def __str__(self) -> str:
        rows = [("chosen", _with_words(self.chosen, self.chosen_words))]
        if self.next_best:
            assert self.difference_us is not None and self.difference_bytes is not None
            part = f" ({self.difference_us / self.objective_us:+.2%})" if self.objective_us else ""
            memory = change_words(self.difference_bytes, bytes_words)
            rows += [
                ("next best", _with_words(self.next_best, self.next_best_words)),
                ("costs", f"{_change_us(self.difference_us)} a step{part}, {memory} of memory per device"),
                *_shifts(self.diff),
            ]
        else:
            rows.append(("next best", "none on this mesh"))
        rows.append(("bound by", self.binding.message))
        if self.next_best and self.pins:
            rows.append(("force it", " ".join(f"--pin {_quoted(f'{k}={v}')}" for k, v in self.pins.items())))
        rows += [("holds for", self.covers)] if self.covers else []
        rows += [("note", note) for note in self.notes]
        width = max(len(what) for what, _ in rows) + 2
        text = [f"{self.subject} ({self.kind})", *(f"  {what:{width}}{words}" for what, words in rows)]
        return "\n".join([*text, *("\n" + str(part) for part in self.parts if part.subject != self.subject)])

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """What another way would cost, or why it can't be.

    Attributes:
        verdict: "slower", "same" or "faster" where there is an alternative; "memory" where nothing fits, "impossible"
            where there is no such mesh or pins contradict each other.
        difference_us, difference_bytes: what the alternative adds to this plan's step and peak memory.
        short_bytes: with "memory", how many more bytes per device the least demanding plan would need.
    """

    asked: str
    verdict: str
    message: str
    difference_us: float | None = None
    difference_bytes: int | None = None
    short_bytes: int = 0
    alternative: Plan | None = None
    diff: PlanDiff | None = None

    def __str__(self) -> str:
        text = f"{self.asked}: {self.message}"
        return f"{text}\n\n{self.diff}" if self.diff is not None and self.verdict != "same" else text

    def to_json(self) -> dict[str, Any]:
        """As plain data; of the alternative its mesh, pins and prediction."""
        found: dict[str, Any] = msgspec.to_builtins(replace(self, alternative=None))
        if self.alternative is not None:
            kept = ("mesh", "pins", "predicted", "solver")
            found["alternative"] = {name: msgspec.to_builtins(getattr(self.alternative, name)) for name in kept}
        return found


def _with_words(layout: str, words: str) -> str:
    return f"{layout}  ({words})" if words else layout


def _change_us(us: float) -> str:
    return change_words(us, time_words)


def _quoted(text: str) -> str:
    return f"'{text}'" if any(c in text for c in " *()") else text


def _shifts(diff: PlanDiff | None) -> Iterator[tuple[str, str]]:
    """Where the difference comes from, the largest first."""
    parts = [a for a in (diff.amounts if diff else ()) if a.part and a.unit == "us" and a.matters]
    if parts:
        parts.sort(key=lambda a: -abs(a.after - a.before))
        yield "of which", ", ".join(f"{a.what} {_change_us(a.after - a.before)}" for a in parts[:3])
