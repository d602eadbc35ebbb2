"""The command line: one command for each task, ``--json`` on every one.

Errors that a user can mend are one line with exit code 2.
"""

from __future__ import annotations

import re
import signal
import sys
import warnings
from importlib import import_module
from typing import Any

from privot.cli.app import UsageError, app
from privot.cli.console import IS_SECONDARY_PROCESS, UserInterrupt, exit_with_error
from privot.errors import DataError, PrivotError

# Each module adds its commands, in this order.
COMMAND_MODULES = (
    "plan",
    "synthesize",
    "sample",
    "privatize",
    "measure",
    "compare",
    "report",
    "attack",
    "audit",
    "invert",
    "federate_simulate",
    "federate_server",
    "federate_client",
    "federate_keys",
    "verify",
    "ledger",
    "cite",
)
for module_name in COMMAND_MODULES:
    import_module(f"privot.cli.{module_name}")

INTERRUPT_EXIT_CODE = 130
# PyTorch reports a lack of CPU memory as a RuntimeError without a type of its own. Only the name of
# the allocator in its text tells this error from a bug.


def treat_sigterm_as_sigint() -> None:
    """Handle SIGTERM as Ctrl-C, so that a charged query result is stored first.

    `kill` and a container that stops send SIGTERM. Nothing changes if interrupts are ignored, as
    for a background job of a shell, or if another handler is installed.
    """
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def main() -> None:
    """Run the command line. An error that the user can mend is one line with exit code 2."""
    treat_sigterm_as_sigint()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # Python's warnings are for developers
    try:
        exit_code = app(standalone_mode=False, prog_name="privot")
    except UserInterrupt as interrupt:
        exit_with_error(str(interrupt), INTERRUPT_EXIT_CODE)
    except PrivotError as error:
        # The first process reports the same error, except for data that only this one reads.
        if IS_SECONDARY_PROCESS and not isinstance(error, DataError):
            sys.exit(2)
        exit_with_error(str(error))
    except UsageError as error:
        exit_with_error(_format_usage_error(error))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        exit_with_error(
            f"{error.filename or 'A file'}: {reason}. Check the path, its permissions and the "
            "free disk space."
        )
    except (MemoryError, RuntimeError) as error:
        from privot.runtime.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        exit_with_error(
            "Not enough memory for these settings. Use fewer samples, a smaller model or a smaller "
            "--microbatch."
        )
    if exit_code:
        sys.exit(exit_code)


def _format_usage_error(error: Any) -> str:
    """Format an error of typer as one line."""
    text = " ".join(error.format_message().split())
    # Typer and click both append the same suggestion.
    text = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", text)
    command = error.ctx.command_path if error.ctx else "privot"
    return f"{text} (see {command} --help)"
