"""What each rank executes: graph and plan -> Program -> Python source."""

from autopar.codegen.check import check_program
from autopar.codegen.emit import emit
from autopar.codegen.lower import lower

__all__ = ["check_program", "emit", "lower"]
