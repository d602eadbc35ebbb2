"""The command that prints a citation: cite."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from privot.cli.app import app
from privot.cli.console import print_json
from privot.cli.options import Json


@app.command("cite")
def _cite_command(
    method: Annotated[str, typer.Argument(help="Name of a method.")], as_json: Json = False
) -> None:
    """Print the BibTeX entry of a method's paper."""
    from privot.methods import make_method

    citation = make_method(method).citation
    if as_json:
        print_json({"method": method, "citation": citation})
    else:
        sys.stdout.write(citation + "\n")
