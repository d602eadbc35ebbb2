"""One ledger per data set: every query on it, and what it costs.

Kinds of entries, beside what `privot.privacy.ledger_file` says of each line: ``budget`` (the limit
that the data owner sets), ``reserve`` (a whole plan, spent for ever), ``ask`` (written before a
query result is computed), ``commit`` (its digest, written after), ``part`` (a part of the data set
that a reservation covers) and ``internal`` (runs for attacks and audits).

A ``reserve`` entry with ``"seeded": true`` is of a run whose noise came from a seed. Anyone who
knows the seed can subtract that noise, so the sum prices the run as infinite, whatever its plan
says.
``"num_clients"`` is the number of clients that the records were divided among, if there are
several. ``"parts"`` says that the reservation covers that many disjoint parts of the data set, each
of them once; a ``part`` entry names each part that was queried under it.

An ``internal`` entry lists runs whose output must stay with the data owner, and what each would
cost if it left (``"epsilon"`` is null where there is no guarantee). It does not add to the sum, and
no limit refuses it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from privot.errors import BudgetError, LedgerError
from privot.privacy.accounting import PrivacyCost
from privot.privacy.charges import Charge, compute_total_cost
from privot.privacy.ledger_file import LedgerFile
from privot.privacy.plan import Budget, Plan
from privot.progress import round_up


class Ledger(LedgerFile):
    """The ledger of a data set, in one file.

    Args:
        path: The file.
        clock: Gives the time in seconds.

    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "scans.jsonl")
    >>> ledger.entries()
    []
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time):
        super().__init__(path)
        self._clock = clock

    def compute_spent_cost(
        self, extra_plan: Plan | None = None, *, seeded: bool = False, num_clients: int = 1
    ) -> PrivacyCost:
        """Price all reservations together, those of crashed runs included.

        Args:
            extra_plan: A plan to count on top of them.
            seeded: Whether the noise of that plan is seeded.
            num_clients: Clients that the records of that plan are divided among.

        Returns:
            The cost; its ``neighbours`` names the relation for which the sum holds (see
            `compute_total_cost`).
        """
        charges = [
            Charge.from_entry(entry) for entry in self.entries() if entry["kind"] == "reserve"
        ]
        if extra_plan:
            charges.append(Charge(extra_plan, seeded, num_clients))
        return compute_total_cost(charges)

    def set_limit(self, budget: Budget) -> None:
        """Set the limit of the whole data set, for the data owner; the newest one counts."""
        with self._hold_lock():
            self._append("budget", epsilon=budget.epsilon, delta=budget.delta)

    def limit(self) -> Budget | None:
        """Give the limit of the whole data set, if there is one."""
        limits = [
            Budget(entry["epsilon"], entry["delta"])
            for entry in self.entries()
            if entry["kind"] == "budget"
        ]
        return limits[-1] if limits else None

    def check_limit(
        self, plan: Plan, *, method: str = "", seeded: bool = False, num_clients: int = 1
    ) -> None:
        """Check that the limit allows one more plan. Charges nothing.

        Args:
            plan: The plan of the run.
            method: The name of the run. A ledger of a part of a data set looks it up.
            seeded: Whether the noise is seeded.
            num_clients: Clients that the records are divided among.

        Raises:
            BudgetError: If the limit does not allow it.
        """
        limit = self.limit()
        if limit is None:
            return
        total = self.compute_spent_cost(plan, seeded=seeded, num_clients=num_clients)
        if not limit.allows(total):
            raise BudgetError(
                f"The data set's budget of epsilon {limit.epsilon:g} does not allow this run: "
                f"the total would come to {round_up(float(total.epsilon(limit.delta)))}. "
                "Choose a smaller epsilon, or let the data owner raise the limit "
                "(privot ledger DATA --limit)."
            )

    def reserve(
        self, plan: Plan, method: str, *, seeded: bool = False, num_clients: int = 1
    ) -> int:
        """Charge a whole plan, for ever.

        Args:
            plan: All that the run may query.
            method: The name of the run.
            seeded: Whether the noise is seeded; then the run is charged as infinite.
            num_clients: Clients that the records are divided among.

        Returns:
            The ticket of the reservation.

        Raises:
            BudgetError: If the limit does not allow it. Nothing is charged then.
        """
        return self._append_reservation(plan, method, seeded, num_clients, {})

    def check_part_limit(self, plan: Plan, method: str, part_index: int, num_parts: int) -> None:
        """Check for `reserve_part`, with its arguments, what `check_limit` checks for `reserve`.

        Args:
            plan: The plan of each part.
            method: The name of the run.
            part_index: The number of the part, from 0.
            num_parts: The number of parts.
        """
        with self._hold_lock():
            if self._find_covering_ticket(plan, method, part_index, num_parts) is None:
                self.check_limit(plan, method=method, num_clients=num_parts)

    def reserve_part(self, plan: Plan, method: str, part_index: int, num_parts: int) -> int:
        """Charge a run on disjoint parts of this data set, once for all parts.

        privacy: a record is in one part, so replacing it changes the input of the queries of one
        part only. Replacing all that one client has changes one part only. So the plan of one part
        bounds the whole run (parallel composition). This needs parts of one division, each queried
        once: a part that is queried a second time, or a part of another division, is charged anew.

        Args:
            plan: The plan of each part.
            method: The name of the run, which all its parts share.
            part_index: The number of the part, from 0.
            num_parts: The number of parts.

        Returns:
            The ticket of the reservation that covers the part.
        """
        with self._hold_lock():
            ticket = self._find_covering_ticket(plan, method, part_index, num_parts)
            if ticket is None:
                ticket = self._append_reservation(
                    plan, method, False, num_parts, {"parts": num_parts}
                )
            self._append("part", ticket=ticket, part=part_index)
            return ticket

    def record_internal(self, purpose: str, method: str, num_runs: int, budget: Budget) -> None:
        """List runs whose output stays with the data owner, before they start.

        Args:
            purpose: What they are for: ``audit`` or ``shadow``.
            method: The method that runs.
            num_runs: How many runs.
            budget: What each run would cost if its output left.
        """
        epsilon = None if budget.epsilon == math.inf else budget.epsilon
        with self._hold_lock():
            self._append(
                "internal",
                purpose=purpose,
                method=method,
                runs=num_runs,
                epsilon=epsilon,
                delta=budget.delta,
                time=self._timestamp(),
            )

    def _append_reservation(
        self, plan: Plan, method: str, seeded: bool, num_clients: int, extra_fields: dict[str, Any]
    ) -> int:
        """Append a ``reserve`` entry unless the limit refuses it; see `reserve`."""
        with self._hold_lock():
            Ledger.check_limit(self, plan, method=method, seeded=seeded, num_clients=num_clients)
            optional_fields: dict[str, Any] = {}
            if seeded:
                optional_fields["seeded"] = True
            if num_clients > 1:
                optional_fields["num_clients"] = num_clients
            return self._append(
                "reserve",
                method=method,
                plan=plan.to_json(),
                time=self._timestamp(),
                **optional_fields,
                **extra_fields,
            )

    def _find_covering_ticket(
        self, plan: Plan, method: str, part_index: int, num_parts: int
    ) -> int | None:
        """Find a reservation that covers this part and was not used for it.

        See `reserve_part` for the arguments.
        """
        for entry in self._select_entries(
            kind="reserve", method=method, plan=plan.to_json(), parts=num_parts
        ):
            ticket: int = entry["n"]
            if not self._select_entries(kind="part", ticket=ticket, part=part_index):
                return ticket
        return None

    def _timestamp(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))

    def mark_asked(self, ticket: int, stage: str, first: int, last: int) -> None:
        """Mark queries of a stage as used, before any record is read for them.

        Args:
            ticket: The reservation.
            stage: The name of the stage.
            first: The first query.
            last: The last query.

        Raises:
            LedgerError: If one of them was marked before.
        """
        with self._hold_lock():
            if first < self.asked_count(ticket, stage):
                raise LedgerError(
                    f"Queries {first} to {last} of stage {stage} were used before: no query result "
                    "is given twice."
                )
            self._append("ask", ticket=ticket, stage=stage, first=first, last=last)

    def commit(self, ticket: int, stage: str, step: int, digest: str) -> None:
        """Record the digest of a query result.

        Args:
            ticket: The reservation.
            stage: The name of the stage.
            step: The number of the query.
            digest: The SHA-256 of its result.

        Raises:
            LedgerError: If the query was not marked, or has another digest.
        """
        with self._hold_lock():
            recorded = self.find_digest(ticket, stage, step)
            if recorded not in (None, digest) or step >= self.asked_count(ticket, stage):
                raise LedgerError(
                    f"Query {step} of stage {stage} was never marked, or has another digest."
                )
            if recorded is None:
                self._append("commit", ticket=ticket, stage=stage, step=step, digest=digest)

    def asked_count(self, ticket: int, stage: str) -> int:
        """Count the queries of a stage that were marked under a ticket.

        Raises:
            LedgerError: If there is no such reservation.
        """
        with self._hold_lock():
            if not self._select_entries(kind="reserve", n=ticket):
                raise LedgerError(
                    f"{self.path}: no reservation has the ticket {ticket}, so the run was charged "
                    "to another ledger. Name that ledger."
                )
            marks = self._select_entries(kind="ask", ticket=ticket, stage=stage)
            return max((mark["last"] + 1 for mark in marks), default=0)

    def find_digest(self, ticket: int, stage: str, step: int) -> str | None:
        """Find the recorded digest of a query result.

        Args:
            ticket: The reservation.
            stage: The name of the stage.
            step: The number of the query.

        Returns:
            The digest, if there is one.
        """
        with self._hold_lock():
            entries = self._select_entries(kind="commit", ticket=ticket, stage=stage, step=step)
            return entries[0]["digest"] if entries else None

    def covers(self, ticket: int, plan: Plan, method: str, *, seeded: bool = False) -> bool:
        """Whether a ticket is of a reservation of exactly this run.

        Args:
            ticket: The ticket.
            plan: The plan of the run.
            method: The name of the run.
            seeded: Whether the noise is seeded.

        Returns:
            Whether the reservation is in this ledger.
        """
        with self._hold_lock():
            entries = self._select_entries(
                kind="reserve", n=ticket, method=method, plan=plan.to_json()
            )
            return any(entry.get("seeded", False) is seeded for entry in entries)
