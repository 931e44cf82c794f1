"""A row more: the cut that excludes a choice which a solver's tolerance let through by a few bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.solver.model import ProblemModel


def without_choice(model: ProblemModel, nodes: list[int], choice: tuple[int, ...]) -> ProblemModel:
    """Σ over `nodes` of x[n, choice[n]] <= number of nodes - 1: at least one of them takes another strategy."""
    linear = model.linear
    columns = np.array([model.node_start[n] + choice[n] for n in nodes], dtype=np.int64)
    ends = linear.start[columns + 1]
    grown = np.zeros(linear.columns + 1, dtype=np.int64)
    grown[columns + 1] = 1
    return replace(
        model,
        linear=replace(
            linear,
            start=linear.start + np.cumsum(grown),
            index=np.insert(linear.index, ends, linear.rows),
            value=np.insert(linear.value, ends, 1.0),
            row_lower=np.append(linear.row_lower, -np.inf),
            row_upper=np.append(linear.row_upper, len(nodes) - 1.0),
        ),
    )
