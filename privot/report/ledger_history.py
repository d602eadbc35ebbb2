"""The history of a dataset's ledger, for the data owner."""

from __future__ import annotations

from typing import Any

from privot.io import to_jsonable
from privot.privacy.charges import Charge
from privot.privacy.ledger import Ledger
from privot.progress import round_up
from privot.report.formatting import clean_text

MAX_HISTORY_LINES = 200  # on a page


def summarize_ledger(ledger: Ledger, delta: float, head: str) -> dict[str, Any]:
    """Summarise the entries of a ledger.

    Args:
        ledger: The ledger.
        delta: Delta at which the spent epsilon is computed.
        head: The ledger head that a release recorded.

    Returns:
        ``lines`` of runs and limits, numbers of query results, the spent epsilon, and
        ``contains_head``: whether the head is in this ledger.
    """
    entries = ledger.entries()
    lines = [line for line in map(_describe_entry, entries) if line is not None]
    num_asked = sum(
        entry["last"] - entry["first"] + 1 for entry in entries if entry["kind"] == "ask"
    )
    limit = ledger.limit()
    heads = {entry["prev"] for entry in entries} | {ledger.head}
    spent_cost = ledger.compute_spent_cost()
    neighbours = spent_cost.neighbours
    return to_jsonable(
        {
            "lines": lines[-MAX_HISTORY_LINES:],
            "num_left_out": max(0, len(lines) - MAX_HISTORY_LINES),
            "num_asked": num_asked,
            "num_committed": sum(entry["kind"] == "commit" for entry in entries),
            "spent_epsilon": float(spent_cost.epsilon(delta)),
            "neighbours": str(neighbours) if neighbours else None,
            "privacy_unit": neighbours.privacy_unit if neighbours else None,
            "delta": delta,
            "limit": limit.epsilon if limit else None,
            "contains_head": head in heads,
        }
    )


def _describe_entry(entry: dict[str, Any]) -> dict[str, Any] | None:
    """Describe a run or a limit for the page; None for every other entry."""
    when = ""
    neighbours = ""
    events = ""
    if entry["kind"] == "reserve":
        charge = Charge.from_entry(entry)
        what = clean_text(entry["method"], 60)
        when = clean_text(entry["time"], 30)
        neighbours = str(charge.plan.neighbours)
        events = clean_text(str(charge.plan.event()), 300)
        if charge.seeded:
            events = "no privacy: the noise was seeded"
    elif entry["kind"] == "budget":
        what = f"the owner sets a limit of epsilon {entry['epsilon']:g}"
    elif entry["kind"] == "internal":
        method = clean_text(entry["method"], 60)
        purpose = clean_text(entry["purpose"], 20)
        what = f"{entry['runs']} runs of {method} for the owner alone ({purpose})"
        when = clean_text(entry["time"], 30)
        cost = "no guarantee"
        if entry["epsilon"] is not None:
            cost = f"epsilon {round_up(entry['epsilon'])}"
        events = f"not in the sum; {cost} each if released"
    else:
        return None
    return {
        "line": entry["n"],
        "when": when,
        "what": what,
        "neighbours": neighbours,
        "events": events,
    }
