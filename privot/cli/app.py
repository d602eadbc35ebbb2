"""The root command, to which every file of this package adds its commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from privot import __version__
from privot.cli.console import UserInterrupt, print_line

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}
# Click's UsageError, whether or not typer brings its own copy of click.
UsageError: Any = typer.BadParameter.__mro__[1]

# With Rich, older versions of typer print backslashes before brackets in help texts.
typer.core.HAS_RICH = False


class CommandGroup(typer.core.TyperGroup):
    """All commands; what an interrupt reports reaches the user."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            notes = [*map(str, interrupt.args), *getattr(interrupt, "__notes__", [])]
            raise UserInterrupt(" ".join(["Stopped.", *notes])) from None


app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT_SETTINGS,
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print_line(f"privot {__version__}")
        raise typer.Exit


@app.callback()
def _run_root_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Private synthetic data: train or condense, certify, measure and verify."""
