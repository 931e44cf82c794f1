"""What a run was predicted to take and what it took: one record, printed as a table, written as JSON for `--refit`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autopar.errors import PlanError, UserError
from autopar.ir.profile import Fingerprint

RUN_FORMAT, RUN_VERSION = "autopar-run", 1
OUTSIDE, FREES = "module around the program", "unpacking and freeing"
BETWEEN, TIMER = "outside module and optimizer", "difference to untimed steps"
"""Rows that no price stands for: arguments, wrapping and Python's own time in the module; lines that only take or drop
names; autograd, the loss and clipping; and by how much steps with the timer on took longer (below 0) or shorter."""
KINDS = ("op", "collective", "optimizer", "other")
WITH_COLLECTIVE = "with collective"
"""Ending of the class of ops that talk to other ranks inside."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One class of ops or one collective in a step. `kind`: of `KINDS`. `measured_us` of what is left over may be below
    0."""

    kind: str
    what: str
    calls: int
    predicted_us: float
    measured_us: float


class RunReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted against measured, this rank's medians over `steps` steps.

    Attributes:
        profile: digest of the one that priced the plan, "" without one; `factors`: its corrections at that time.
        measured_us: of one step, from the module's call to the end of the optimizer's step; the rows' times add up to
            it. `between_us`: from one step's start to the next's, 0 where only one was measured. `timed_us`: as
            `measured_us`, with the lines' timer on.
        measured_bytes: peak of live tensors; 0 where it was not measured.
    """

    format: str = RUN_FORMAT
    version: int = RUN_VERSION
    model: str
    cluster: str
    ranks: int
    rank: int
    date: str
    torch: str
    hardware: Fingerprint | None = None
    profile: str = ""
    factors: dict[str, float] = {}
    steps: int
    predicted_us: float
    measured_us: float
    timed_us: float
    between_us: float
    predicted_bytes: int
    measured_bytes: int
    rows: tuple[Row, ...] = ()

    def save(self, path: str | Path) -> None:
        """As JSON."""
        _write(self, path)

    @classmethod
    def load(cls, path: str | Path) -> RunReport:
        """Raises PlanError for what is no such file."""
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as error:
            raise PlanError(f"run {path}: cannot be read ({error.strerror})") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PlanError(
                f"run {path}: is not what module.report(path) writes ({' '.join(str(error).split())})"
            ) from None
        if (found.format, found.version) != (RUN_FORMAT, RUN_VERSION):
            raise PlanError(f"run {path}: format {found.format} {found.version}; wanted {RUN_FORMAT} {RUN_VERSION}")
        return found

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.cluster}, rank {self.rank} of {self.ranks}, median of {self.steps} steps",
            _line("", "calls", "predicted ms", "measured ms", "measured/predicted"),
            _figures("step", "", self.predicted_us, self.measured_us),
        ]
        if self.measured_bytes:
            ratio = f"{self.measured_bytes / self.predicted_bytes:.2f}" if self.predicted_bytes else "-"
            predicted, measured = (f"{b / 2**20:.1f} MiB" for b in (self.predicted_bytes, self.measured_bytes))
            lines.append(_line("peak memory", "", predicted, measured, ratio))
        else:
            lines.append("peak memory: not measured yet; train on and report again")
        for kind in KINDS:
            rows = sorted((r for r in self.rows if r.kind == kind), key=lambda r: -r.measured_us)
            if rows:
                lines.append("")
                lines += [_figures(r.what, str(r.calls or ""), r.predicted_us, r.measured_us) for r in rows]
        if not self.rows:
            lines.append("classes of ops and collectives: not measured yet; train on and report again")
        else:
            total = sum(r.predicted_us for r in self.rows), sum(r.measured_us for r in self.rows)
            lines += ["", _figures("together", "", *total)]
        if self.between_us:
            lines.append(f"from one step's start to the next: {self.between_us / 1e3:.3f} ms")
        if self.timed_us:
            lines.append(f"rows are of steps with the timer on: {self.timed_us / 1e3:.3f} ms each")
        return "\n".join(lines)


class StageRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage does in a step: all calls of one action ("F0": forward of chunk 0, "B0", "I0", "W0"), "before" and
    "after" them, what it "waits" for other stages, and the whole "step" but for the optimizer."""

    stage: int
    what: str
    calls: int
    predicted_us: float
    measured_us: float


class StagesReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted against measured of a plan with stages or micro-batches: medians over `steps` steps."""

    model: str
    cluster: str
    ranks: int
    rank: int
    schedule: str
    steps: int
    rows: tuple[StageRow, ...]

    def save(self, path: str | Path) -> None:
        """As JSON."""
        _write(self, path)

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.cluster}, {self.ranks} ranks, median of {self.steps} steps: {self.schedule}",
            _line("", "calls", "predicted ms", "measured ms", "measured/predicted"),
        ]
        for row in self.rows:
            calls = str(row.calls) if row.what[1:].isdigit() else ""
            lines.append(_figures(f"stage {row.stage} {row.what}", calls, row.predicted_us, row.measured_us))
        return "\n".join(lines)


def _write(record: msgspec.Struct, path: str | Path) -> None:
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except OSError as error:
        raise UserError(f"report: {path} cannot be written ({error.strerror})") from None


def _figures(what: str, calls: str, predicted: float, measured: float) -> str:
    ratio = f"{measured / predicted:.2f}" if predicted else "-"
    return _line(what, calls, f"{predicted / 1e3:.3f}", f"{measured / 1e3:.3f}", ratio)


def _line(what: str, calls: str, predicted: str, measured: str, ratio: str) -> str:
    return f"{what:36.36}{calls:>7}{predicted:>16}{measured:>16}{ratio:>20}".rstrip()
