"""One ledger per data set: what was ever asked of it. Append-only, chained by SHA-256, locked, durable before any record is read.

Lines are JSON objects with ``n``, ``kind`` and ``prev`` (the digest of the line before). Kinds: ``budget`` (the owner's wall),
``reserve`` (a whole plan, spent for ever), ``ask`` (written before an answer is computed),
``commit`` (its digest, after), ``part`` (a part of the data set that a reservation covers) and
``internal`` (runs for attacks and audits). Beside it lies ``<ledger>.head`` with the number of
lines and the last digest, so that a ledger that was cut short is noticed.

A ``reserve`` line with ``"seeded": true`` is of a run whose noise came from a seed. Anyone who
knows the seed can subtract that noise, so the sum prices the run as infinite, whatever its plan
says. ``"owners"`` is the number of owners that the records were divided among, if there are
several. ``"parts"`` says that the reservation covers that many disjoint parts of the data set, each
of them once; a ``part`` line names each part that was asked under it.

An ``internal`` line lists runs whose output must stay with the data owner, and what each would cost
if it left (``"epsilon"`` is null where there is no guarantee). It does not add to the sum, and no
limit refuses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import dp_accounting as dpa

from privot.errors import BudgetError, LedgerError
from privot.privacy import accounting
from privot.privacy.accounting import Cost, Neighbours
from privot.privacy.plan import Budget, Plan
from privot.progress import round_up

START = hashlib.sha256(b"privot ledger 2").hexdigest()


@dataclass(frozen=True)
class Charge:
    """One reservation, as the sum of a ledger prices it.

    Attributes:
        plan: All that the run may ask.
        seeded: Whether the noise came from a seed. Such a run has an infinite price.
        owners: How many owners the records were divided among.
    """

    plan: Plan
    seeded: bool = False
    owners: int = 1

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Charge:
        """Read the charge of a ``reserve`` line."""
        return cls(
            Plan.from_json(entry["plan"]), entry.get("seeded", False), entry.get("owners", 1)
        )

    def cost(self) -> Cost:
        """The price of this run alone, under the relation of its own plan."""
        return total_cost([self])


def total_cost(charges: Sequence[Charge]) -> Cost:
    """Price several runs together.

    privacy: if all runs have one relation, the sum holds for that relation. Otherwise it holds for
    replacing one record, and each plan is counted for that relation (`Plan.replaced`): replacing a
    record is removing one and adding one; under ``local`` neighbours it changes the input of one
    channel, which is what those neighbours are; and it is one way to change what its owner holds.
    Several ``client`` runs on records that were divided among owners are counted for one record
    too: nothing says that the owners were the same each time, and the records that two of them hold
    may overlap.

    Args:
        charges: The runs, in any order.

    Returns:
        The cost, with the relation for which it holds in ``neighbours`` (None if there is no run).
    """
    plans = [charge.plan for charge in charges]
    relations = {plan.neighbours for plan in plans}
    divided = Neighbours.CLIENT in relations and any(charge.owners > 1 for charge in charges)
    if len(relations) > 1 or (divided and len(charges) > 1):
        plans = [plan.replaced() for plan in plans]
    relation = plans[0].neighbours if plans else None
    events = [
        dpa.NonPrivateDpEvent() if charge.seeded else plan.event()
        for charge, plan in zip(charges, plans, strict=True)
    ]
    cost = accounting.cost(dpa.ComposedDpEvent(events), relation or Neighbours.REPLACE)
    return dataclasses.replace(cost, neighbours=relation)


class Ledger:
    """The ledger in one file; several processes and threads may hold it at once.

    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "scans.jsonl")
    >>> ledger.entries()
    []
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time):
        self.path = Path(path)
        self._clock = clock
        if not self.path.name:  # "." or "/"
            raise LedgerError(f"{path}: a folder cannot be a ledger; name a file with --ledger")
        self._headfile = self.path.with_name(self.path.name + ".head")
        self._entries: list[dict[str, Any]] = []
        self._head = START
        self._offset = 0
        self._mutex = threading.RLock()
        self._held = False
        self._own = False

    @property
    def head(self) -> str:
        """The digest of the last line."""
        with self._locked():
            return self._head

    def ready(self) -> None:
        """Raise unless a run could be charged here: said before the work."""
        with self._locked():
            self._writable()

    def entries(self) -> list[dict[str, Any]]:
        """Every line, oldest first, after the chain was checked. A ledger that is not there yet has none."""
        with contextlib.suppress(OSError):  # told on opening, below
            if not (self._entries or self.path.exists() or self._headfile.exists()):
                return []
        with self._locked():
            return list(self._entries)

    def spent(self, also: Plan | None = None, *, seeded: bool = False, owners: int = 1) -> Cost:
        """Price all reservations together, crashed runs included.

        Args:
            also: A plan to count on top of them.
            seeded: Whether the noise of that plan is seeded.
            owners: How many owners that plan's records are divided among.

        Returns:
            The cost; its ``neighbours`` names the relation for which the sum holds (see
            `total_cost`).
        """
        charges = [Charge.from_entry(each) for each in self.entries() if each["kind"] == "reserve"]
        return total_cost([*charges, *([Charge(also, seeded, owners)] if also else [])])

    def limit(self, budget: Budget) -> None:
        """The owner sets the wall of the whole data set; the newest line counts."""
        with self._locked():
            self._append("budget", epsilon=budget.epsilon, delta=budget.delta)

    def wall(self) -> Budget | None:
        lines = [
            Budget(each["epsilon"], each["delta"])
            for each in self.entries()
            if each["kind"] == "budget"
        ]
        return lines[-1] if lines else None

    def check(self, plan: Plan, *, method: str = "", seeded: bool = False, owners: int = 1) -> None:
        """Raise BudgetError if the owner's limit does not allow one more plan. Charge nothing.

        Args:
            plan: The plan of the run.
            method: The name of the run. A ledger for parts of a data set looks it up.
            seeded: Whether the noise is seeded.
            owners: How many owners the records are divided among.
        """
        wall = self.wall()
        if wall and not wall.allows(total := self.spent(also=plan, seeded=seeded, owners=owners)):
            raise BudgetError(
                f"the data set's budget of epsilon {wall.epsilon:g} does not allow this run: it would come to "
                f"{round_up(float(total.epsilon(wall.delta)))}; ask for less, or let the owner raise it (privot ledger DATA --limit)"
            )

    def reserve(self, plan: Plan, method: str, *, seeded: bool = False, owners: int = 1) -> int:
        """Charge a whole plan, for ever; raise and charge nothing if it would pass the limit.

        Args:
            plan: All that the run may ask.
            method: The name of the run.
            seeded: Whether the noise is seeded; then the run is charged as infinite.
            owners: How many owners the records are divided among.

        Returns:
            The ticket of the reservation.
        """
        return self._reserve(plan, method, seeded, owners, {})

    def check_part(self, plan: Plan, method: str, part: int, owners: int) -> None:
        """Do for `reserve_part` what `check` does for `reserve`."""
        with self._locked():
            if self._covering(plan, method, part, owners) is None:
                self.check(plan, method=method, owners=owners)

    def reserve_part(self, plan: Plan, method: str, part: int, owners: int) -> int:
        """Charge a run on disjoint parts of this data set, once for all parts.

        privacy: a record lies in one part, so replacing it changes the input of one part's answers
        alone, and replacing all that one owner holds changes one part alone: one part's plan bounds
        the whole run (parallel composition). This needs parts of one and the same division, each
        asked once: a part that is asked a second time, or one of another division, is charged anew.

        Args:
            plan: The plan of each part.
            method: The name of the run, which all its parts share.
            part: The number of the part, from 0.
            owners: The number of parts.

        Returns:
            The ticket of the reservation that covers the part.
        """
        with self._locked():
            ticket = self._covering(plan, method, part, owners)
            if ticket is None:
                ticket = self._reserve(plan, method, False, owners, {"parts": owners})
            self._append("part", ticket=ticket, part=part)
            return ticket

    def record_internal(self, purpose: str, method: str, runs: int, budget: Budget) -> None:
        """List runs whose output stays with the data owner, before they begin.

        Args:
            purpose: What they are for: ``audit`` or ``shadow``.
            method: The method that runs.
            runs: How many runs.
            budget: What each run would cost if its output left.
        """
        facts = {
            "epsilon": None if budget.epsilon == math.inf else budget.epsilon,
            "delta": budget.delta,
        }
        with self._locked():
            self._append(
                "internal", purpose=purpose, method=method, runs=runs, **facts, time=self._time()
            )

    def _reserve(
        self, plan: Plan, method: str, seeded: bool, owners: int, facts: dict[str, Any]
    ) -> int:
        with self._locked():
            Ledger.check(self, plan, method=method, seeded=seeded, owners=owners)
            more = (
                ({"seeded": True} if seeded else {})
                | ({"owners": owners} if owners > 1 else {})
                | facts
            )
            return self._append(
                "reserve", method=method, plan=plan.to_json(), time=self._time(), **more
            )

    def _covering(self, plan: Plan, method: str, part: int, owners: int) -> int | None:
        """The ticket of a reservation that covers this part and was not used for it."""
        for each in self._lines(kind="reserve", method=method, plan=plan.to_json(), parts=owners):
            if not self._lines(kind="part", ticket=each["n"], part=part):
                ticket: int = each["n"]
                return ticket
        return None

    def _time(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))

    def ask(self, ticket: int, stage: str, first: int, last: int) -> None:
        """Mark answers ``first`` to ``last`` of a stage as taken, before any record is read for them."""
        with self._locked():
            if first < self.taken(ticket, stage):
                raise LedgerError(
                    f"answers {first} to {last} of stage {stage} were taken before: no answer is given twice"
                )
            self._append("ask", ticket=ticket, stage=stage, first=first, last=last)

    def commit(self, ticket: int, stage: str, step: int, digest: str) -> None:
        """Record what answer ``step`` was; a second, different answer to the same ask is refused."""
        with self._locked():
            known = self.digest(ticket, stage, step)
            if known not in (None, digest) or step >= self.taken(ticket, stage):
                raise LedgerError(
                    f"answer {step} of stage {stage} was never asked for, or already has another digest"
                )
            if known is None:
                self._append("commit", ticket=ticket, stage=stage, step=step, digest=digest)

    def taken(self, ticket: int, stage: str) -> int:
        """How many answers of the stage were asked for under this ticket."""
        with self._locked():
            if not self._lines(kind="reserve", n=ticket):
                raise LedgerError(
                    f"{self.path}: no reservation has the ticket {ticket}: the run was charged to another ledger"
                )
            return max(
                (each["last"] + 1 for each in self._lines(kind="ask", ticket=ticket, stage=stage)),
                default=0,
            )

    def digest(self, ticket: int, stage: str, step: int) -> str | None:
        """The committed digest of an answer, if there is one."""
        with self._locked():
            return next(
                (
                    each["digest"]
                    for each in self._lines(kind="commit", ticket=ticket, stage=stage, step=step)
                ),
                None,
            )

    def covers(self, ticket: int, plan: Plan, method: str, *, seeded: bool = False) -> bool:
        """Whether the ticket is of a reservation of this very plan, made here, with such noise."""
        with self._locked():
            lines = self._lines(kind="reserve", n=ticket, method=method, plan=plan.to_json())
            return any(each.get("seeded", False) is seeded for each in lines)

    def _lines(self, **want: Any) -> list[dict[str, Any]]:
        return [each for each in self._entries if want.items() <= each.items()]

    # The file itself

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex, contextlib.ExitStack() as stack:
            if self._held:
                yield
                return
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._own = self._lock(stack)
                self._read()
            except OSError as error:
                raise LedgerError(
                    f"{self.path}: the ledger cannot be opened ({error.strerror}); name another with --ledger"
                ) from None
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _lock(self, stack: contextlib.ExitStack) -> bool:
        """Whether nobody else writes until ``stack`` closes. Who may not write at all may still read: a torn tail is left out."""
        try:
            lock = stack.enter_context(open(self.path.with_name(self.path.name + ".lock"), "a"))  # noqa: SIM115
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and self.path.exists():
                return False
            raise
        fcntl.flock(lock, fcntl.LOCK_EX)
        return True

    def _read(self) -> None:
        """Take in what other writers added; refuse a chain that does not hold."""
        size = 0
        data = b""
        head = None
        with contextlib.suppress(
            FileNotFoundError
        ):  # first: who reads without the lock may find more lines than it knows of, never fewer
            head = self._headfile.read_text(errors="replace")
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(self._offset)
            data = file.read()
        if size < self._offset:
            raise LedgerError(f"{self.path}: the ledger was cut short; restore it from its backup")
        for line in data.split(b"\n")[
            :-1
        ]:  # what follows the last newline was torn by a crash: that call never returned
            number = len(self._entries)
            try:
                entry = json.loads(line)
                sound = (
                    entry["n"] == number
                    and entry["prev"] == self._head
                    and isinstance(entry["kind"], str)
                )
            except (ValueError, KeyError, TypeError, RecursionError):
                sound = False
            if not sound:
                raise LedgerError(
                    f"{self.path}: line {number + 1} was altered; restore the ledger from its backup"
                )
            self._entries.append(entry)
            self._head = hashlib.sha256(line).hexdigest()
            self._offset = self._offset + len(line) + 1
        if (
            head is None and len(self._entries) > 1
        ):  # only the very first line can be older than its head
            raise LedgerError(f"{self._headfile} is missing; restore it from its backup")
        try:
            count, digest = f"0 {START}".split() if head is None else head.split()
            here = (
                self._head
                if int(count) == len(self._entries)
                else self._entries[int(count)]["prev"]
            )
        except (ValueError, IndexError):
            raise LedgerError(
                f"{self.path}: the ledger does not reach its recorded head; restore it from its backup"
            ) from None
        if here != digest:
            raise LedgerError(
                f"{self.path}: the ledger does not match its recorded head; restore it from its backup"
            )

    def _writable(self) -> None:
        if not self._own:
            raise LedgerError(
                f"{self.path}: the ledger may be read here, not written; no record is read without it"
            )

    def _append(self, kind: str, **fields: Any) -> int:
        self._writable()
        number = len(self._entries)
        entry = {"n": number, "kind": kind, **fields, "prev": self._head}
        line = json.dumps(entry, separators=(",", ":")).encode()
        head = hashlib.sha256(line).hexdigest()
        fresh = self._headfile.with_name(self._headfile.name + ".new")
        try:
            # Unbuffered: a buffer would be written out once more on closing, after the truncation below.
            with open(self.path, "ab", buffering=0) as file, open(fresh, "wb", buffering=0) as new:
                file.truncate(self._offset)  # drops a torn tail
                try:
                    _write(file, line + b"\n")
                    if not number:  # the new file's name must outlive a power failure too
                        _sync(self.path.parent)
                    _write(new, f"{number + 1} {head}\n".encode())
                    fresh.replace(self._headfile)
                except OSError:
                    os.ftruncate(
                        file.fileno(), self._offset
                    )  # the caller hears of it and reads nothing, so nothing is charged
                    raise
        except OSError as error:
            raise LedgerError(
                f"{self.path}: the ledger cannot be written ({error.strerror}); no record is read without it"
            ) from None
        self._entries.append(entry)
        self._head = head
        self._offset = self._offset + len(line) + 1
        return number


def _write(file: IO[bytes], data: bytes) -> None:
    """All of it, and the disk has said so."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)
