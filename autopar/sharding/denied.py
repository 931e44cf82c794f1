"""Rules of DTensor that fail against truth: never used. Each row has a test that names it (tests/sharding)."""

from __future__ import annotations

from autopar.ir.layout import P
from autopar.ir.strategy import Rule

DENIED: dict[str, str] = {}
"""Op -> a placement pattern, as `str(rule)` has it, or "sum" for every rule with a partial sum in it."""


def denied(op: str, rule: Rule) -> bool:
    """True if the rule is in the table."""
    pattern = DENIED.get(op)
    if pattern is None:
        return False
    if pattern == "sum":
        return P in rule.inputs or P in rule.outputs
    return str(rule) == pattern
