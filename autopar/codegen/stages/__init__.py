"""Plans with pipeline stages or micro-batches: which part runs what, and the programs of the parts."""

from autopar.codegen.stages.lower import emit_stages, lower_stages

__all__ = ["emit_stages", "lower_stages"]
