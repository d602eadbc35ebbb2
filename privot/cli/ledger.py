"""The command that shows and limits what a dataset has spent: ledger."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from privot.cli.app import app
from privot.cli.console import (
    escape_unprintable,
    out_console,
    print_json,
    print_line,
    print_warning,
)
from privot.cli.options import AllowLargeDelta, Data, Json, LedgerFile
from privot.progress import round_down, round_up

if TYPE_CHECKING:
    from privot.privacy.charges import Charge
    from privot.privacy.ledger import Ledger
    from privot.privacy.plan import Budget

DEFAULT_DELTA = 1e-5


@app.command("ledger")
def _ledger_command(
    source: Data,
    limit: Annotated[
        float | None, typer.Option(help="Set the total epsilon of this dataset, for all runs.")
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Delta of all epsilons; by default that of the limit, or 1e-5."),
    ] = None,
    ledger_file: LedgerFile = None,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """Show what all runs on a dataset have spent."""
    from privot.privacy.charges import Charge
    from privot.privacy.guarantee import check_delta
    from privot.privacy.plan import Budget
    from privot.privacy.shard_checkpoint import list_shard_checkpoints
    from privot.release.ledger_summary import summarize_spending

    # Also checks the values before the ledger is opened.
    new_limit = Budget(
        math.inf if limit is None else limit, DEFAULT_DELTA if delta is None else delta
    )
    name, ledger = _open_existing_ledger(source, ledger_file)
    old_limit = ledger.limit()
    delta = old_limit.delta if old_limit and delta is None else new_limit.delta
    if limit is not None:
        check_delta(delta, allow_large_delta=allow_large_delta)
        ledger.set_limit(Budget(limit, delta))
    entries = ledger.entries()
    runs = [entry for entry in entries if entry["kind"] == "reserve"]
    internal_runs = [entry for entry in entries if entry["kind"] == "internal"]
    charges = [Charge.from_entry(entry) for entry in runs]
    epsilons = {charge: float(charge.cost().epsilon(delta)) for charge in set(charges)}
    current_limit = ledger.limit()
    facts = {
        "ledger": str(ledger.path),
        "limit": current_limit.epsilon if current_limit else None,
        "limit_delta": current_limit.delta if current_limit else None,
        **summarize_spending(name, ledger, delta),
        "delta": delta,
        "runs": [
            {**entry, "epsilon": epsilons[charge], "neighbours": str(charge.plan.neighbours)}
            for entry, charge in zip(runs, charges, strict=True)
        ],
        "internal": internal_runs,
        "checkpoints": [str(path) for path in list_shard_checkpoints(ledger).values()],
    }
    if as_json:
        return print_json(facts)
    _print_runs(facts["runs"], charges)
    for entry in internal_runs:
        _print_internal_run(entry)
    _print_sum(facts, name, ledger, current_limit)


def _open_existing_ledger(source: str, ledger_file: Path | None) -> tuple[str, Ledger]:
    """Open the ledger of a dataset.

    Args:
        source: Name or path of the dataset.
        ledger_file: The ledger that the user named, if any.

    Returns:
        The full name of the dataset and its ledger.
    """
    from privot.data import load_catalog
    from privot.data.catalog import require_existing_path
    from privot.privacy.ledger import Ledger
    from privot.privacy.ledger_lookup import ledger_path

    # A test split has its own ledger, for private accuracies.
    is_builtin = source.removesuffix("/test") in load_catalog()
    name = source if is_builtin else str(Path(source).resolve())
    ledger = Ledger(ledger_file or ledger_path(name))
    if not is_builtin and not ledger.path.exists():
        # A misspelled path would look like a dataset that has spent nothing.
        require_existing_path(source)
    return name, ledger


def _print_runs(runs: list[dict[str, Any]], charges: list[Charge]) -> None:
    """Print a table of the charged runs."""
    table = Table("run", "when", "method", "neighbours", "epsilon", "queries and noise multipliers")
    for entry, charge in zip(runs, charges, strict=True):
        stages = [
            f"{stage.name} {round_down(stage.noise_multiplier, 3)}"
            + (f" x {stage.steps}" if stage.steps > 1 else "")
            for stage in charge.plan.stages
        ]
        cells = (
            entry["n"],
            entry["time"],
            entry["method"],
            charge.plan.neighbours,
            round_up(entry["epsilon"]) + (" (seeded)" if charge.seeded else ""),
            "; ".join(stages),
        )
        table.add_row(*map(escape_unprintable, cells))
    out_console.print(table, soft_wrap=False)


def _print_internal_run(entry: dict[str, Any]) -> None:
    """Print runs whose output stays with the data owner."""
    epsilon = entry["epsilon"]
    cost = "no guarantee" if epsilon is None else f"epsilon {round_up(epsilon)}"
    print_line(
        f"internal: {entry['runs']} runs of {entry['method']} ({entry['purpose']}), "
        f"{entry['time']}. They are not in the sum, and nothing of them may be published: "
        f"each would cost {cost}."
    )


def _print_sum(facts: dict[str, Any], name: str, ledger: Ledger, limit: Budget | None) -> None:
    """Print the sum of all charges, the limit and the files.

    Args:
        facts: The facts of the JSON output.
        name: Full name of the dataset.
        ledger: The ledger.
        limit: Its limit, if it has one.
    """
    from privot.privacy.ledger_lookup import ledger_path
    from privot.privacy.shard_checkpoint import describe_leftover_checkpoints

    delta = facts["delta"]
    limit_delta = f" at delta {limit.delta:g}" if limit and limit.delta != delta else ""
    limit_text = f" of {limit.epsilon:g}{limit_delta}" if limit else ", no limit set"
    subject = "spent in all" if facts["is_dataset_ledger"] else "this ledger counts"
    unit = facts["privacy_unit"]
    unit_text = f"; for {unit} under {facts['neighbours']} neighbours" if unit else ""
    epsilon = round_up(facts["spent_epsilon"])
    print_line(f"{subject}: epsilon {epsilon} at delta {delta:g}{limit_text}{unit_text}")
    is_own = facts["is_dataset_ledger"]
    own_path = "" if is_own else f"; the dataset's own ledger is {ledger_path(name)}"
    print_line(f"{ledger.path}{own_path}")
    for text in describe_leftover_checkpoints(ledger):
        print_warning(text)
    if limit and not limit.allows(ledger.compute_spent_cost()):
        print_warning(
            "The dataset has spent more than the limit. Charges are never undone, and no further "
            "run is allowed."
        )
