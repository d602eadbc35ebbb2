"""What a data set's ledger holds, for its owner."""

from __future__ import annotations

from typing import Any

from privot.privacy.ledger import Charge, Ledger
from privot.progress import jsonable, round_up
from privot.report.formatting import clean

MOST = 200  # lines on a page


def history(ledger: Ledger, delta: float, head: str) -> dict[str, Any]:
    """Runs and limits, the number of answers, what this ledger counts, and whether ``head`` (of a release) is in the chain."""
    entries = ledger.entries()
    lines = []
    for each in entries:
        if each["kind"] == "reserve":
            charge = Charge.from_entry(each)
            events = (
                "no privacy: the noise was seeded"
                if charge.seeded
                else clean(str(charge.plan.event()), 300)
            )
            said = {
                "what": clean(each["method"], 60),
                "neighbours": str(charge.plan.neighbours),
                "events": events,
            }
            lines.append({"line": each["n"], "when": clean(each["time"], 30), **said})
        elif each["kind"] == "budget":
            said = {
                "what": f"the owner sets a limit of epsilon {each['epsilon']:g}",
                "neighbours": "",
                "events": "",
            }
            lines.append({"line": each["n"], "when": "", **said})
        elif each["kind"] == "internal":
            price = (
                "no guarantee"
                if each["epsilon"] is None
                else f"epsilon {round_up(each['epsilon'])}"
            )
            what = f"{each['runs']} runs of {clean(each['method'], 60)} for the owner alone ({clean(each['purpose'], 20)})"
            said = {
                "what": what,
                "neighbours": "",
                "events": f"not in the sum; {price} each if it left",
            }
            lines.append({"line": each["n"], "when": clean(each["time"], 30), **said})
    asks = sum(each["last"] - each["first"] + 1 for each in entries if each["kind"] == "ask")
    wall = ledger.wall()
    heads = {each["prev"] for each in entries} | {ledger.head}
    spent = ledger.spent()
    relation = spent.neighbours
    return jsonable(
        {
            "lines": lines[-MOST:],
            "left_out": max(0, len(lines) - MOST),
            "asks": asks,
            "commits": sum(each["kind"] == "commit" for each in entries),
            "spent_epsilon": float(spent.epsilon(delta)),
            "neighbours": str(relation) if relation else None,
            "unit": relation.unit if relation else None,
            "delta": delta,
            "limit": wall.epsilon if wall else None,
            "holds_head": head in heads,
        }
    )
