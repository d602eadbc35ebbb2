"""The command line: one verb a job, ``--json`` on every one, errors of one line with exit code 2."""

from __future__ import annotations

import re
import signal
import sys
import warnings
from importlib import import_module

import typer.core

from privot.cli.options import FOLLOWS, Stopped, Usage, app, refuse
from privot.errors import DataError, PrivotError

typer.core.HAS_RICH = (
    False  # its older versions put backslashes before the brackets of a help without markup
)

for part in (
    "synthesize",
    "privatize",
    "measure",
    "attack",
    "invert",
    "federate",
    "verify",
):  # each adds its verbs, in this order
    import_module(f"privot.cli.{part}")


def tidily() -> None:
    """A request to end, as of `kill` or a container that is stopped, is heard as Ctrl-C is: answers that are paid for are kept first.

    Not where interrupts are ignored, as they are in a shell's background, or where somebody else looks after such requests.
    """
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def main() -> None:
    """Run the command line; what a user can mend ends in one line and exit code 2."""
    tidily()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # Python's warnings are for developers
    try:
        code = app(standalone_mode=False, prog_name="privot")
    except Stopped as stop:
        refuse(str(stop), 130)
    except PrivotError as error:
        if FOLLOWS and not isinstance(
            error, DataError
        ):  # the first process says it, too; but what can be read may differ
            sys.exit(2)
        refuse(str(error))
    except Usage as error:
        said = re.sub(
            r"( Did you mean [^?]*\?)\1+", r"\1", " ".join(error.format_message().split())
        )  # typer and click both ask
        refuse(f"{said} (see {error.ctx.command_path if error.ctx else 'privot'} --help)")
    except OSError as error:
        refuse(
            f"{error.filename or 'a file'}: {error.strerror or type(error).__name__}; check the path, its rights and the free space"
        )
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        refuse(
            "not enough memory for these settings: ask for fewer samples, a smaller model, or fewer records at a time (--microbatch)"
        )
    if code:
        sys.exit(code)
