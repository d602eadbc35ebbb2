"""Which ledgers count a run: the data set's own ledger, and another ledger if the user names one.

The own ledger of a data set follows from its name or path (`ledger_path`). If it has a limit, the
limit binds every run on the data set: a run that names another ledger is charged to both ledgers,
the own ledger first, or refused. If the own ledger has no limit, such a run is charged to the named
ledger alone, and nobody may call its sum the sum of the data set.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from privot.errors import SettingError
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Plan
from privot.progress import round_up

UNNAMED = "say which ledger counts this data: give the box a name, or pass ledger="


def ledger_path(name: str) -> Path:
    """Where the own ledger of a data set lies: under PRIVOT_HOME or the user's state folder."""
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        state = (
            named if named.is_absolute() else Path.home() / ".local" / "state"
        )  # as its specification says
    except RuntimeError:
        raise SettingError(
            "this account has no home folder for ledgers: set PRIVOT_HOME to a folder"
        ) from None
    home = Path(os.environ.get("PRIVOT_HOME") or state / "privot")
    if not home.is_absolute():
        raise SettingError(
            f"PRIVOT_HOME={home}: a whole path is needed, or every folder would have ledgers of its own"
        )
    word = re.sub(r"[^A-Za-z0-9]+", "-", Path(name).name).strip("-")[:40]
    return home / "ledgers" / f"{word}-{hashlib.sha256(name.encode()).hexdigest()[:12]}.jsonl"


class LinkedLedger(Ledger):
    """A ledger that is not the data set's own one, linked to it.

    Without ``part`` the own ledger is charged too if it has a limit. With ``part`` this is the
    ledger of one of several disjoint parts of the data set; then the own ledger is always charged,
    once for all parts of a run (`Ledger.reserve_part`).

    Args:
        path: The file of this ledger.
        own: The data set's own ledger.
        part: The number of the part, from 0, and the number of parts.
        clock: Gives the time in seconds.
    """

    def __init__(
        self,
        path: str | Path,
        own: Ledger,
        part: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        super().__init__(path, clock)
        self.own = own
        self.part = part

    @property
    def charges_own(self) -> bool:
        """Whether the next run is charged to the data set's own ledger too."""
        return self.part is not None or self.own.wall() is not None

    def ready(self) -> None:
        """Raise unless a run could be charged to all ledgers that count it."""
        super().ready()
        if self.charges_own:
            self.own.ready()

    def check(self, plan: Plan, *, method: str = "", seeded: bool = False, owners: int = 1) -> None:
        """Raise BudgetError if the limit of either ledger does not allow the plan."""
        if self.part is not None:
            self.own.check_part(plan, method, *self.part)
        else:
            self.own.check(plan, method=method, seeded=seeded, owners=owners)
        super().check(plan, method=method, seeded=seeded, owners=owners)

    def reserve(self, plan: Plan, method: str, *, seeded: bool = False, owners: int = 1) -> int:
        """Charge the own ledger, then this one. A crash in between can only charge too much."""
        self.check(
            plan, method=method, seeded=seeded, owners=owners
        )  # refused by one, it is charged to none
        if self.part is not None:
            self.own.reserve_part(plan, method, *self.part)
        elif self.charges_own:
            self.own.reserve(plan, method, seeded=seeded, owners=owners)
        return super().reserve(plan, method, seeded=seeded, owners=owners)


def open_ledger(name: str, ledger: Ledger | str | Path | None = None) -> Ledger:
    """Find the ledger that a run on a data set is charged to.

    Args:
        name: The name or path of the data set; empty if it has none, and so no ledger of its own.
        ledger: The ledger that the user names instead, if any.

    Returns:
        The data set's own ledger, or the named one; that one is linked to the own ledger, whose
        limit binds it.
    """
    if ledger is None:
        if not name:
            raise SettingError(UNNAMED)
        return Ledger(ledger_path(name))
    named = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    if not name or isinstance(named, LinkedLedger):
        return named
    own = Ledger(ledger_path(name))
    if os.path.realpath(own.path) == os.path.realpath(named.path):
        return named if isinstance(ledger, Ledger) else own
    return LinkedLedger(named.path, own, clock=named._clock)


def open_part_ledger(name: str, part: tuple[int, int], ledger: str | Path) -> LinkedLedger:
    """Find the ledger of one part of a data set, linked to the data set's own ledger.

    Args:
        name: The name or path of the whole data set.
        part: The number of the part, from 0, and the number of parts.
        ledger: The file of the part's ledger.

    Returns:
        The part's ledger.
    """
    own = Ledger(ledger_path(name))
    if os.path.realpath(own.path) == os.path.realpath(ledger):
        raise SettingError(
            f"--ledger {ledger}: this is the ledger of the whole data set; a part needs another file"
        )
    return LinkedLedger(ledger, own, part)


def record_internal(
    names: Iterable[str], purpose: str, method: str, runs: int, plan: Plan, delta: float
) -> None:
    """List runs for an attack or an audit in the own ledger of each data set that they read.

    Args:
        names: The names or paths of the data sets.
        purpose: What the runs are for: ``audit`` or ``shadow``.
        method: The method that runs.
        runs: How many runs.
        plan: The plan of each run; a plan without stages stands for a method that opens the gate.
        delta: The delta at which its price is stated.
    """
    epsilon = float(plan.cost().epsilon(delta)) if plan.stages else math.inf
    for name in dict.fromkeys(names):
        open_ledger(name).record_internal(purpose, method, runs, Budget(epsilon, delta))


def is_own_ledger(name: str, ledger: Ledger) -> bool:
    """Whether a ledger is the data set's own one, so that its sum is the sum of the data set."""
    return bool(name) and os.path.realpath(ledger_path(name)) == os.path.realpath(ledger.path)


def spending(name: str, ledger: Ledger, delta: float) -> dict[str, Any]:
    """State what a ledger counts, and for which unit and relation.

    Args:
        name: The name or path of the data set.
        ledger: The ledger.
        delta: The delta of the epsilon.

    Returns:
        ``spent_epsilon``, ``neighbours`` and ``unit`` of the sum, and whether this is the data
        set's ``own`` ledger.
    """
    cost = ledger.spent()
    relation = cost.neighbours
    return {
        "spent_epsilon": float(cost.epsilon(delta)),
        "neighbours": str(relation) if relation else None,
        "unit": relation.unit if relation else None,
        "own": is_own_ledger(name, ledger),
    }


def spending_sentence(name: str, ledger: Ledger, facts: dict[str, Any]) -> str:
    """Say in words what `spending` found.

    Only the sum of a data set's own ledger is called the sum of the data set.
    """
    unit = f" for {facts['unit']} under {facts['neighbours']} neighbours" if facts["unit"] else ""
    spent = f"epsilon {round_up(float(facts['spent_epsilon']))}{unit}"
    if facts["own"]:
        return f"this data set has spent {spent} in all, by {ledger.path}"
    if not name:
        return f"this ledger counts {spent}: {ledger.path}"
    charged = (
        ", which was charged too" if isinstance(ledger, LinkedLedger) and ledger.charges_own else ""
    )
    own = ledger.own.path if isinstance(ledger, LinkedLedger) else ledger_path(name)
    return f"this ledger counts {spent}: {ledger.path}; the data set's own ledger is {own}{charged}"
