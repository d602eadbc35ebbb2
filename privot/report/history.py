"""What a data set's ledger holds, for its owner."""

from __future__ import annotations

from typing import Any

from privot.privacy.ledger import Ledger
from privot.privacy.plan import Plan
from privot.report.words import clean
from privot.show import jsonable

MOST = 200  # lines on a page


def history(ledger: Ledger, delta: float, head: str) -> dict[str, Any]:
    """Runs and limits, the number of answers, what is spent in all, and whether ``head`` (of a release) is in the chain."""
    entries = ledger.entries()
    lines = []
    for each in entries:
        if each["kind"] == "reserve":
            plan = Plan.from_json(each["plan"])
            said = {"what": clean(each["method"], 60), "neighbours": str(plan.neighbours), "events": clean(str(plan.event()), 300)}
            lines.append({"line": each["n"], "when": clean(each["time"], 30), **said})
        elif each["kind"] == "budget":
            said = {"what": f"the owner sets a limit of epsilon {each['epsilon']:g}", "neighbours": "", "events": ""}
            lines.append({"line": each["n"], "when": "", **said})
    asks = sum(each["last"] - each["first"] + 1 for each in entries if each["kind"] == "ask")
    wall, heads = ledger.wall(), {each["prev"] for each in entries} | {ledger.head}
    return jsonable(
        {
            "lines": lines[-MOST:],
            "left_out": max(0, len(lines) - MOST),
            "asks": asks,
            "commits": sum(each["kind"] == "commit" for each in entries),
            "spent_epsilon": float(ledger.spent().epsilon(delta)),
            "delta": delta,
            "limit": wall.epsilon if wall else None,
            "holds_head": head in heads,
        }
    )
