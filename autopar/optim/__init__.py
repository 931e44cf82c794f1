"""AdamW and SGD in one pass over memory, with torch's results and state (docs/kernels.md)."""

from autopar.optim.optimizers import SGD, AdamW

__all__ = ["SGD", "AdamW"]
