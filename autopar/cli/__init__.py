"""`autopar ...`: what `api` does, from a shell.

Torch is imported inside the commands that need it, after their arguments are checked: the rest answers at once.
Results go to stdout, everything else to stderr. Exit: 0 done, 1 verification found a difference or the doctor something
missing, 2 bad input, 3 no plan fits, 4 a rank failed.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from cyclopts import CycloptsError

from autopar.cli import machines, plans, running, searching
from autopar.cli.shared import app
from autopar.errors import AutoparError, CompilerError, UserError

__all__ = ["app", "machines", "main", "plans", "running", "searching"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    # Nearly all of a command's many small records live to its end: collecting garbage took 2 of a search's 18 seconds.
    gc.set_threshold(200_000, 20, 20)
    try:
        app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _fail(_usage(error), 2)
    except CompilerError as error:
        import traceback

        traceback.print_exc()
        _fail(f"a bug in autopar: {error}", error.exit_code)
    except UserError as error:
        _fail(" ".join(str(error).split()), error.exit_code)
    except AutoparError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _usage(error: CycloptsError) -> str:
    return f"{' '.join(str(error).split())} See `autopar --help`."


def _fail(message: str, code: int) -> None:
    print(f"autopar: {message}", file=sys.stderr)
    raise SystemExit(code) from None
