"""The linear solvers that `solve` can ask, by name. Each takes arrays and gives a `LinearAnswer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.solver import highs, modelling
from autopar.solver.linear import LinearAnswer, LinearModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """`lp(model, time_limit_s)` relaxes; `mip(model, time_limit_s, gap)` does not. `name` is for people."""

    name: str
    lp: Callable[[LinearModel, float | None], LinearAnswer]
    mip: Callable[[LinearModel, float | None, float], LinearAnswer]


def backend_named(name: str) -> Backend:
    """ "highs", or "pulp-cbc" or "pulp-highs" through the modelling layer."""
    if name == "highs":
        return Backend(name=highs.version(), lp=_highs_lp, mip=_highs_mip)
    if name in modelling.SOLVERS:
        return Backend(
            name=modelling.version(name),
            lp=lambda model, limit: modelling.solve_lp(model, name, time_limit_s=limit),
            mip=lambda model, limit, gap: modelling.solve_mip(model, name, time_limit_s=limit),
        )
    raise ValueError(f"unknown solver backend {name!r}; choose one of: {', '.join(('highs', *modelling.SOLVERS))}")


def _highs_lp(model: LinearModel, time_limit_s: float | None) -> LinearAnswer:
    return highs.solve_lp(model, time_limit_s=time_limit_s)


def _highs_mip(model: LinearModel, time_limit_s: float | None, gap: float) -> LinearAnswer:
    return highs.solve_mip(model, time_limit_s=time_limit_s, gap=gap)
