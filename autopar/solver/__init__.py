"""Which choice is best, and how sure are we: `Problem` in, `Solution` out, plain numbers only."""

from __future__ import annotations

from autopar.solver.api import relaxed, solve
from autopar.solver.bound import lower_bound_us
from autopar.solver.dump import dump_problem, load_problem
from autopar.solver.even_cut import even_share, unchosen, with_memory
from autopar.solver.memory import LeastMemory, largest_terms, minimise_memory
from autopar.solver.model import build_model
from autopar.solver.modelling import write_lp, write_mps
from autopar.solver.parts import Held, PartsModel, PriceBound
from autopar.solver.reduce import reduce_problem
from autopar.solver.reduction import keep_strategies
from autopar.solver.stage_bound import least_of, least_step_us, once_weight
from autopar.solver.stages import least_peak_bytes, solve_stages, stages_bound_us
from autopar.solver.whole import WholeSearch

__all__ = [
    "Held",
    "LeastMemory",
    "PartsModel",
    "PriceBound",
    "WholeSearch",
    "build_model",
    "dump_problem",
    "even_share",
    "keep_strategies",
    "largest_terms",
    "least_of",
    "least_peak_bytes",
    "least_step_us",
    "load_problem",
    "lower_bound_us",
    "minimise_memory",
    "once_weight",
    "reduce_problem",
    "relaxed",
    "solve",
    "solve_stages",
    "stages_bound_us",
    "unchosen",
    "with_memory",
    "write_lp",
    "write_mps",
]
