"""Verbs that prove: verify, ledger, cite."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from privot.cli.terminal import Data, Json, LedgerFile, app, emit, out_console, plain, say, say_caution, say_guarantee
from privot.show import round_down, round_up


@app.command()
def verify(release: Annotated[Path, typer.Argument(help="Folder of a release, or a privatized file.")], as_json: Json = False) -> None:
    """Recompute epsilon from the recorded events, or a channel's parameters, and check every digest; needs no data."""
    from privot.data.privatized import is_privatized
    from privot.local import verified
    from privot.release import verify as check

    result = verified(release) if is_privatized(release) else check(release)
    if as_json:
        return emit(result)
    say("digests    ok")
    say_guarantee(result["guarantee"])
    if "epsilon_from_events" in result:
        say(f"recomputed epsilon {round_up(result['epsilon_from_events'], 6)} from the recorded events: agrees")


@app.command()
def ledger(
    data: Data,
    limit: Annotated[float | None, typer.Option(help="Set the owner's budget of the whole data set.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of the epsilons; else that of the limit, or 1e-5.")] = None,
    file: LedgerFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """What this data set has spent, ever."""
    from privot.data import catalogue
    from privot.data.load import existing
    from privot.privacy.ledger import Ledger
    from privot.privacy.plan import Budget, Plan
    from privot.privacy.vault import notices, vaults
    from privot.synthesis import ledger_path

    given = Budget(math.inf if limit is None else limit, 1e-5 if delta is None else delta)
    known = data.removesuffix("/test") in catalogue()  # a test split has a ledger of its own, for what was bought of it
    book = Ledger(file or ledger_path(data if known else str(Path(data).resolve())))
    if not known and not book.path.exists():
        existing(data)  # or a slip of the pen would read as a data set that has spent nothing
    delta = wall.delta if (wall := book.wall()) and delta is None else given.delta
    if limit is not None:
        book.limit(Budget(limit, delta))
        wall = book.wall()
    runs = [each for each in book.entries() if each["kind"] == "reserve"]
    spent = float(book.spent().epsilon(delta))
    if as_json:
        return emit(
            {"ledger": str(book.path), "limit": wall.epsilon if wall else None, "limit_delta": wall.delta if wall else None,
             "spent_epsilon": spent, "delta": delta, "runs": runs, "vaults": [str(each) for each in vaults(book).values()]}
        )  # fmt: skip
    table = Table("run", "when", "method", "neighbours", "answers and noise")
    for each in runs:
        plan = Plan.from_json(each["plan"])
        asked = "; ".join(
            f"{stage.name} {round_down(stage.noise, 3)}" + (f" x {stage.steps}" if stage.steps > 1 else "") for stage in plan.stages
        )
        table.add_row(*(plain(text) for text in (each["n"], each["time"], each["method"], plan.neighbours, asked)))
    out_console.print(table, soft_wrap=False)
    other = f" at delta {wall.delta:g}" if wall and wall.delta != delta else ""
    say(f"spent in all: epsilon {round_up(spent)} at delta {delta:g}" + (f" of {wall.epsilon:g}{other}" if wall else ", no limit set"))
    say(f"{book.path}")
    for text in notices(book):
        say_caution(text)
    if wall and not wall.allows(book.spent()):
        say_caution("more than the limit is spent already: what is spent stays spent, and no further run is allowed")


@app.command()
def cite(method: Annotated[str, typer.Argument(help="Name of a method.")], as_json: Json = False) -> None:
    """The BibTeX entry of a method's paper."""
    from privot.methods import make

    text = make(method).citation
    emit({"method": method, "citation": text}) if as_json else sys.stdout.write(text + "\n")
