"""Prints to the terminal: lines, tables, warnings, certificates, JSON and errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from privot.errors import PrivotError
from privot.io import to_jsonable
from privot.progress import round_up

# One of several processes that torchrun started, and not the first: it prints nothing.
IS_SECONDARY_PROCESS = os.environ.get("RANK", "0") != "0" and "LOCAL_RANK" in os.environ

BROKEN_EXIT_CODE = 3  # an attack or an audit refutes the certificate
NO_VERDICT_EXIT_CODE = 4  # the trials were not fair

# What a client certificate or a local one limits, instead of a membership attack.
ATTACKS_BY_NEIGHBOURS = {
    "local": "test whether a given record was sent",
    "client": "test whether a client holds given records",
}


class UserInterrupt(PrivotError):  # noqa: N818
    """The user pressed Ctrl-C."""


def _build_console(stderr: bool) -> Console:
    # File names come from outside, so markup and emoji codes in them have no effect. Lines are not
    # folded in a pipe.
    return Console(
        stderr=stderr,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
        quiet=IS_SECONDARY_PROCESS,
    )


out_console = _build_console(stderr=False)
err_console = _build_console(stderr=True)


@contextmanager
def explain_interrupt(folder: Path) -> Iterator[None]:
    """Add to an interrupt the folder in which the completed work is stored."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"The completed work is in {folder}. Run the same command again to resume."
        ) from None


def escape_unprintable(text: Any) -> str:
    """Escape control characters, so that a file name cannot break or style a line."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))


def print_line(text: str, console: Console = out_console, style: str | None = None) -> None:
    """Print one line of text.

    Args:
        text: The line.
        console: Where to print.
        style: Its style in Rich's terms, such as "red".
    """
    console.print(escape_unprintable(text), style=style)


def print_warning(text: str) -> None:
    """Print a warning as one yellow line to the error stream."""
    print_line(f"warning: {text}", err_console, "yellow")


def print_json(value: Any) -> None:
    """Print one JSON value."""
    if not IS_SECONDARY_PROCESS:
        sys.stdout.write(json.dumps(to_jsonable(value)) + "\n")


def exit_with_error(message: str, exit_code: int = 2) -> NoReturn:
    """Print an error as one red line, as JSON too with --json, and exit."""
    err_console.quiet = False  # the first process may not know this error
    print_line(f"privot: {message}", err_console, "red")
    if "--json" in sys.argv:
        print_json({"error": message})
    sys.exit(exit_code)


def exit_if_broken(is_broken: bool) -> None:
    """Print an error and exit if an attack or an audit refutes the certificate."""
    if is_broken:
        print_line(
            "privot: implementation broken: the attacks prove more than the certificate allows. "
            "Do not publish this release.",
            err_console,
            "red",
        )
        sys.exit(BROKEN_EXIT_CODE)


def format_guarantee_lines(guarantee: dict[str, Any]) -> list[str]:
    """Format a certificate as one or two lines of text."""
    if "reason" in guarantee:
        return [f"none: {guarantee['reason']}"]
    power = ", ".join(f"{round_up(tpr, 3)} at {fpr}" for fpr, tpr in guarantee["max_tpr"].items())
    neighbours = guarantee["neighbours"]
    unit = f"{guarantee['unit']}, {neighbours} neighbours ({guarantee['accountant']})"
    attack = ATTACKS_BY_NEIGHBOURS.get(neighbours, "membership attack")
    return [
        f"epsilon {round_up(guarantee['epsilon'])}, delta {round_up(guarantee['delta'])}, {unit}",
        f"no {attack} exceeds a true-positive rate of {power} (false-positive rate)",
    ]


def print_guarantee(guarantee: dict[str, Any]) -> None:
    """Print a certificate."""
    for number, line in enumerate(format_guarantee_lines(guarantee)):
        print_line(f"{'' if number else 'guarantee':<10} {line}")
