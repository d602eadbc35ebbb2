"""What a ledger counts, as facts for a manifest and in words."""

from __future__ import annotations

from typing import Any

from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import LinkedLedger, is_dataset_ledger, ledger_path
from privot.progress import round_up


def summarize_spending(name: str, ledger: Ledger, delta: float) -> dict[str, Any]:
    """State what a ledger counts, and for which unit and relation.

    Args:
        name: The name or path of the data set.
        ledger: The ledger.
        delta: The delta of the epsilon.

    Returns:
        ``spent_epsilon``, ``neighbours`` and ``privacy_unit`` of the sum, and
        ``is_dataset_ledger``.
    """
    cost = ledger.compute_spent_cost()
    relation = cost.neighbours
    return {
        "spent_epsilon": float(cost.epsilon(delta)),
        "neighbours": str(relation) if relation else None,
        "privacy_unit": relation.privacy_unit if relation else None,
        "is_dataset_ledger": is_dataset_ledger(name, ledger),
    }


def describe_spending(name: str, ledger: Ledger, facts: dict[str, Any]) -> str:
    """Say in words what `summarize_spending` gave.

    Only the sum of a data set's own ledger is called the sum of the data set.

    Args:
        name: The name or path of the data set.
        ledger: The ledger.
        facts: What `summarize_spending` gave.

    Returns:
        The text.
    """
    spent = f"epsilon {round_up(float(facts['spent_epsilon']))}"
    if facts["privacy_unit"]:
        spent += f" for {facts['privacy_unit']} under {facts['neighbours']} neighbours"
    if facts["is_dataset_ledger"]:
        return f"this data set has spent {spent} in all, by {ledger.path}"
    if not name:
        return f"this ledger counts {spent}: {ledger.path}"
    own_path = ledger_path(name)
    note = ""
    if isinstance(ledger, LinkedLedger):
        own_path = ledger.dataset_ledger.path
        if ledger.charges_dataset_ledger:
            note = ", which was charged too"
    return (
        f"this ledger counts {spent}: {ledger.path}; the data set's own ledger is {own_path}{note}"
    )
