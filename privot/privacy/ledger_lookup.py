"""Which ledgers count a run: the data set's own ledger, and another one if the user names it.

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

from privot.errors import SettingError
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Plan

UNNAMED_DATASET = (
    "No ledger counts this data set, because it has no name. Give it a name, or pass ledger=."
)


def ledger_path(name: str) -> Path:
    """Locate a data set's own ledger, in the folder PRIVOT_HOME or the user's state folder.

    Args:
        name: The name or path of the data set.

    Returns:
        The path of the file.

    Raises:
        SettingError: If there is no such folder.
    """
    state_home = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        # The XDG specification ignores a relative path.
        state = state_home if state_home.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        raise SettingError(
            "This account has no home folder for ledgers. Set PRIVOT_HOME to a folder."
        ) from None
    home = Path(os.environ.get("PRIVOT_HOME") or state / "privot")
    if not home.is_absolute():
        raise SettingError(
            f"PRIVOT_HOME={home}: an absolute path is needed. With a relative one, every working "
            "folder would have ledgers of its own."
        )
    label = re.sub(r"[^A-Za-z0-9]+", "-", Path(name).name).strip("-")[:40]
    return home / "ledgers" / f"{label}-{hashlib.sha256(name.encode()).hexdigest()[:12]}.jsonl"


class LinkedLedger(Ledger):
    """A ledger that is not the data set's own one, linked to it.

    Without ``part``, the own ledger is charged too if it has a limit. With ``part``, this is the
    ledger of one of several disjoint parts of the data set; then the own ledger is always charged,
    once for all parts of a run (`Ledger.reserve_part`).

    Args:
        path: The file of this ledger.
        dataset_ledger: The data set's own ledger.
        part: The number of the part, from 0, and the number of parts.
        clock: Gives the time in seconds.
    """

    def __init__(
        self,
        path: str | Path,
        dataset_ledger: Ledger,
        part: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        super().__init__(path, clock)
        self.dataset_ledger = dataset_ledger
        self.part = part

    @property
    def charges_dataset_ledger(self) -> bool:
        """Whether the next run is charged to the data set's own ledger too."""
        return self.part is not None or self.dataset_ledger.limit() is not None

    def require_writable(self) -> None:
        """Check that a run could be charged to all ledgers that count it."""
        super().require_writable()
        if self.charges_dataset_ledger:
            self.dataset_ledger.require_writable()

    def check_limit(
        self, plan: Plan, *, method: str = "", seeded: bool = False, num_clients: int = 1
    ) -> None:
        """Check that the limits of both ledgers allow the plan.

        Args:
            plan: The plan of the run.
            method: The name of the run.
            seeded: Whether the noise is seeded.
            num_clients: Clients that the records are divided among.

        Raises:
            BudgetError: If a limit does not allow it.
        """
        if self.part is not None:
            self.dataset_ledger.check_part_limit(plan, method, *self.part)
        else:
            self.dataset_ledger.check_limit(
                plan, method=method, seeded=seeded, num_clients=num_clients
            )
        super().check_limit(plan, method=method, seeded=seeded, num_clients=num_clients)

    def reserve(
        self, plan: Plan, method: str, *, seeded: bool = False, num_clients: int = 1
    ) -> int:
        """Charge the own ledger, then this one. A crash in between can only charge too much.

        Args:
            plan: All that the run may query.
            method: The name of the run.
            seeded: Whether the noise is seeded.
            num_clients: Clients that the records are divided among.

        Returns:
            The ticket of the reservation in this ledger.

        Raises:
            BudgetError: If a limit refuses the plan. Neither ledger is charged then.
        """
        self.check_limit(plan, method=method, seeded=seeded, num_clients=num_clients)
        if self.part is not None:
            self.dataset_ledger.reserve_part(plan, method, *self.part)
        elif self.charges_dataset_ledger:
            self.dataset_ledger.reserve(plan, method, seeded=seeded, num_clients=num_clients)
        return super().reserve(plan, method, seeded=seeded, num_clients=num_clients)


def open_ledger(name: str, ledger: Ledger | str | Path | None = None) -> Ledger:
    """Find the ledger that a run on a data set is charged to.

    Args:
        name: The name or path of the data set; empty if it has none, and so no ledger of its own.
        ledger: The ledger that the user names instead, if any.

    Returns:
        The data set's own ledger, or the named one, linked to the own ledger whose limit binds it.

    Raises:
        SettingError: If the data set has no name and no ledger is given.
    """
    if ledger is None:
        if not name:
            raise SettingError(UNNAMED_DATASET)
        return Ledger(ledger_path(name))
    named_ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    if not name or isinstance(named_ledger, LinkedLedger):
        return named_ledger
    own_ledger = Ledger(ledger_path(name))
    if os.path.realpath(own_ledger.path) == os.path.realpath(named_ledger.path):
        return named_ledger if isinstance(ledger, Ledger) else own_ledger
    return LinkedLedger(named_ledger.path, own_ledger, clock=named_ledger._clock)


def open_part_ledger(name: str, part: tuple[int, int], ledger: str | Path) -> LinkedLedger:
    """Open the ledger of one part of a data set, linked to the data set's own ledger.

    Args:
        name: The name or path of the whole data set.
        part: The number of the part, from 0, and the number of parts.
        ledger: The file of the part's ledger.

    Returns:
        The part's ledger.

    Raises:
        SettingError: If the file is the ledger of the whole data set.
    """
    own_ledger = Ledger(ledger_path(name))
    if os.path.realpath(own_ledger.path) == os.path.realpath(ledger):
        raise SettingError(
            f"--ledger {ledger} is the ledger of the whole data set. A part needs another file."
        )
    return LinkedLedger(ledger, own_ledger, part)


def record_internal_runs(
    names: Iterable[str], purpose: str, method: str, num_runs: int, plan: Plan, delta: float
) -> None:
    """List runs for an attack or an audit in the own ledger of each data set that they read.

    Args:
        names: The names or paths of the data sets.
        purpose: What the runs are for: ``audit`` or ``shadow``.
        method: The method that runs.
        num_runs: How many runs.
        plan: The plan of each run; a plan without stages is of a method without a mechanism.
        delta: The delta at which its price is stated.
    """
    epsilon = float(plan.cost().epsilon(delta)) if plan.stages else math.inf
    for name in dict.fromkeys(names):
        open_ledger(name).record_internal(purpose, method, num_runs, Budget(epsilon, delta))


def is_dataset_ledger(name: str, ledger: Ledger) -> bool:
    """Whether a ledger is the data set's own one, so that its sum is the sum of the data set."""
    return bool(name) and os.path.realpath(ledger_path(name)) == os.path.realpath(ledger.path)
