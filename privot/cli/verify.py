"""Verbs that prove: verify, ledger, cite."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from privot.cli.options import (
    AllowLargeDelta,
    Data,
    Json,
    LedgerFile,
    app,
    emit,
    out_console,
    plain,
    say,
    say_caution,
    say_guarantee,
)
from privot.progress import round_down, round_up


@app.command()
def verify(
    release: Annotated[Path, typer.Argument(help="Folder of a release, or a privatized file.")],
    as_json: Json = False,
) -> None:
    """Recompute epsilon from the recorded events, or a channel's parameters, and check every digest; needs no data."""
    from privot.local.dataset import is_privatized
    from privot.local.privatize import verified
    from privot.release import verify as check

    result = verified(release) if is_privatized(release) else check(release)
    if as_json:
        return emit(result)
    say("digests    ok")
    say_guarantee(result["guarantee"])
    if "epsilon_from_events" in result:
        say(
            f"recomputed epsilon {round_up(result['epsilon_from_events'], 6)} from the recorded events: agrees"
        )


@app.command()
def ledger(
    data: Data,
    limit: Annotated[
        float | None, typer.Option(help="Set the owner's budget of the whole data set.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Of the epsilons; else that of the limit, or 1e-5.")
    ] = None,
    file: LedgerFile = None,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """What this data set has spent, ever: each run with its epsilon, and the sum with the neighbours for which it holds."""
    from privot.data import catalogue
    from privot.data.loading import existing
    from privot.privacy.ledger import Charge, Ledger
    from privot.privacy.ledger_lookup import ledger_path, spending
    from privot.privacy.plan import Budget
    from privot.privacy.shard_checkpoint import notices, vaults
    from privot.synthesis.preflight import check_delta

    given = Budget(math.inf if limit is None else limit, 1e-5 if delta is None else delta)
    known = (
        data.removesuffix("/test") in catalogue()
    )  # a test split has a ledger of its own, for what was bought of it
    name = data if known else str(Path(data).resolve())
    book = Ledger(file or ledger_path(name))
    if not known and not book.path.exists():
        existing(data)  # or a slip of the pen would read as a data set that has spent nothing
    delta = wall.delta if (wall := book.wall()) and delta is None else given.delta
    if limit is not None:
        check_delta(delta, allowed=allow_large_delta)
        book.limit(Budget(limit, delta))
        wall = book.wall()
    entries = book.entries()
    runs = [each for each in entries if each["kind"] == "reserve"]
    internal = [each for each in entries if each["kind"] == "internal"]
    charges = [Charge.from_entry(each) for each in runs]
    prices = {charge: float(charge.cost().epsilon(delta)) for charge in set(charges)}
    facts = spending(name, book, delta)
    if as_json:
        told = [
            {**each, "epsilon": prices[charge], "neighbours": str(charge.plan.neighbours)}
            for each, charge in zip(runs, charges, strict=True)
        ]
        return emit(
            {
                "ledger": str(book.path),
                "limit": wall.epsilon if wall else None,
                "limit_delta": wall.delta if wall else None,
                **facts,
                "delta": delta,
                "runs": told,
                "internal": internal,
                "vaults": [str(each) for each in vaults(book).values()],
            }
        )
    table = Table("run", "when", "method", "neighbours", "epsilon", "answers and noise")
    for each, charge in zip(runs, charges, strict=True):
        stages = charge.plan.stages
        asked = "; ".join(
            f"{stage.name} {round_down(stage.noise, 3)}{f' x {stage.steps}' if stage.steps > 1 else ''}"
            for stage in stages
        )
        price = round_up(prices[charge]) + (" (seeded)" if charge.seeded else "")
        table.add_row(
            *(
                plain(text)
                for text in (
                    each["n"],
                    each["time"],
                    each["method"],
                    charge.plan.neighbours,
                    price,
                    asked,
                )
            )
        )
    out_console.print(table, soft_wrap=False)
    for each in internal:
        price = (
            "no guarantee" if each["epsilon"] is None else f"epsilon {round_up(each['epsilon'])}"
        )
        what = f"{each['runs']} runs of {each['method']} ({each['purpose']}), {each['time']}"
        say(
            f"internal: {what}: not in the sum, and nothing of them may leave; {price} each if it did"
        )
    other = f" at delta {wall.delta:g}" if wall and wall.delta != delta else ""
    limited = f" of {wall.epsilon:g}{other}" if wall else ", no limit set"
    whole = "spent in all" if facts["own"] else "this ledger counts"
    unit = f"; for {facts['unit']} under {facts['neighbours']} neighbours" if facts["unit"] else ""
    say(f"{whole}: epsilon {round_up(facts['spent_epsilon'])} at delta {delta:g}{limited}{unit}")
    say(
        f"{book.path}"
        if facts["own"]
        else f"{book.path}; the data set's own ledger is {ledger_path(name)}"
    )
    for text in notices(book):
        say_caution(text)
    if wall and not wall.allows(book.spent()):
        say_caution(
            "more than the limit is spent already: what is spent stays spent, and no further run is allowed"
        )


@app.command()
def cite(
    method: Annotated[str, typer.Argument(help="Name of a method.")], as_json: Json = False
) -> None:
    """The BibTeX entry of a method's paper."""
    from privot.methods import make

    text = make(method).citation
    emit({"method": method, "citation": text}) if as_json else sys.stdout.write(text + "\n")
