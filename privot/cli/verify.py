"""The command that checks a release: verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privot.cli.app import app
from privot.cli.console import print_guarantee, print_json, print_line
from privot.cli.options import Json
from privot.progress import round_up


@app.command("verify")
def _verify_command(
    release: Annotated[Path, typer.Argument(help="Folder of a release, or a privatized file.")],
    as_json: Json = False,
) -> None:
    """Recompute epsilon and check every digest; needs no data."""
    from privot.local.dataset import is_privatized
    from privot.local.privatize import verify_privatized
    from privot.release.verify import verify as verify_release

    facts = verify_privatized(release) if is_privatized(release) else verify_release(release)
    if as_json:
        return print_json(facts)
    print_line("digests    ok")
    print_guarantee(facts["guarantee"])
    if "epsilon_from_events" in facts:
        epsilon = round_up(facts["epsilon_from_events"], 6)
        print_line(f"recomputed epsilon {epsilon} from the recorded events: agrees")
