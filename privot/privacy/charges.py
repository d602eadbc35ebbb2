"""What the runs that a ledger lists cost together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting as dpa

from privot.privacy import accounting
from privot.privacy.accounting import Neighbours, PrivacyCost
from privot.privacy.plan import Plan


@dataclass(frozen=True)
class Charge:
    """One reservation, as the sum of a ledger prices it.

    Attributes:
        plan: All that the run may query.
        seeded: Whether the noise came from a seed. Such a run has an infinite price.
        num_clients: Clients that the records were divided among.
    """

    plan: Plan
    seeded: bool = False
    num_clients: int = 1

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Charge:
        """Read the charge of a ``reserve`` entry."""
        return cls(
            Plan.from_json(entry["plan"]), entry.get("seeded", False), entry.get("num_clients", 1)
        )

    def cost(self) -> PrivacyCost:
        """Price this run on its own, under the relation of its plan."""
        return compute_total_cost([self])


def compute_total_cost(charges: Sequence[Charge]) -> PrivacyCost:
    """Price several runs together.

    privacy: if all runs have one relation, the sum holds for that relation. Otherwise it holds for
    replacing one record, and each plan is counted for that relation (`Plan.under_replace_one`):
    replacing a record is removing one and adding one; under ``local`` neighbours it changes the
    input of one channel, which is what those neighbours are; and it is one way to change what its
    client has. Several ``client`` runs on records that were divided among clients are counted for
    one record too: nothing says that the division was the same each time, and the records of two
    clients of different divisions may overlap.

    Args:
        charges: The runs, in any order.

    Returns:
        The cost, with the relation for which it holds in ``neighbours`` (None if there is no run).
    """
    plans = [charge.plan for charge in charges]
    relations = {plan.neighbours for plan in plans}
    is_divided = Neighbours.CLIENT in relations and any(
        charge.num_clients > 1 for charge in charges
    )
    if len(relations) > 1 or (is_divided and len(charges) > 1):
        plans = [plan.under_replace_one() for plan in plans]
    relation = plans[0].neighbours if plans else None
    events = [
        dpa.NonPrivateDpEvent() if charge.seeded else plan.event()
        for charge, plan in zip(charges, plans, strict=True)
    ]
    cost = accounting.compute_privacy_cost(
        dpa.ComposedDpEvent(events), relation or Neighbours.REPLACE
    )
    return dataclasses.replace(cost, neighbours=relation)
