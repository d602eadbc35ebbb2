"""An owner: its records behind its own gate, its own ledger, its own critic. It answers messages, and trusts nobody who sends them.

What it is asked follows from terms that it has agreed to and written down; their plan it computes itself, and charges to its ledger before
the first record is read. Whatever comes, `reply` gives bytes back: what was agreed to, an answer through the gate, or a refusal in words
that tell nothing of records, files or of what was spent before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from privot.components.client_critics import Owners
from privot.data.dataset import Sensitive
from privot.errors import BudgetError, DataError, LedgerError, MessageError, PrivotError, QueryError
from privot.federated.client_policy import Policy
from privot.federated.messages import Answer, Refusal, Request, Terms, pack, unpack
from privot.io import put
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import open_ledger
from privot.privacy.plan import Wall
from privot.privacy.shard_checkpoint import vaults
from privot.runtime import Runtime, Streams
from privot.runtime.interrupts import unbroken

NOBODY = "0" * 32  # the run of a refusal to what is no message
DIGEST = hashlib.sha256().digest_size
# What a stranger hears. An error's own words may name files, or what other runs have spent, so they stay with the owner.
REASONS: dict[type[Exception], str] = {
    BudgetError: "the budget of this owner does not cover it",
    LedgerError: "the ledger of this owner cannot be used",
    QueryError: "this owner has stopped for good",
}
FAILED = "this owner cannot answer"


class Owner:
    """Answers the messages of one run, whose traces lie in ``folder``; what its critic knows lies beside the ledger, in the vault.

    ``wall`` is what this run may cost; the ledger may have a wall of its own, for all runs. The process may end between any two messages:
    another one with the same folder and ledger goes on. ``notice`` hears, on the owner's side, why something was refused.
    """

    def __init__(
        self,
        data: Sensitive,
        wall: Wall,
        ledger: Ledger,
        folder: Path,
        runtime: Runtime | None = None,
        policy: Policy | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ):
        if data.spec.owners not in (None, 1):
            raise DataError("an owner has records of its own alone, and these are of several")
        self._data = data
        self._wall = wall
        self._folder = Path(folder)
        self._notice = notice
        self._ledger = open_ledger(
            data.name, ledger
        )  # the limit of the data set's own ledger binds, whatever ledger is given
        self._runtime = runtime or Runtime()
        self._policy = policy or Policy()
        self._working: tuple[Gate, Owners, int] | None = (
            None  # and the last round that this process answered
        )

    def reply(self, message: bytes) -> bytes:
        """The answer to any message; a hostile one gets a refusal."""
        run = NOBODY
        number = -1
        try:
            said = unpack(message)
            run = said.run
            number = getattr(said, "round", -1)
            with self._alone():
                if isinstance(said, Terms):
                    return self._considered(said, message)
                if isinstance(said, Request):
                    return self._answered(said, message)
            raise MessageError("an owner hears terms and requests alone")
        except MessageError as error:  # our own words on what the sender itself said
            reason = str(error)
            told = str(error)
        except Exception as error:
            reason = next(
                (text for kind, text in REASONS.items() if isinstance(error, kind)), FAILED
            )
            told = (
                str(error)
                if isinstance(error, PrivotError)
                else f"{FAILED} ({type(error).__name__})"
            )
            self._working = None  # what lies on disk is what counts
            if isinstance(error, QueryError):
                # privacy: that a query failed may say something of the records; it is said once, by whatever process.
                with contextlib.suppress(OSError, PrivotError):
                    self.leave()
        self._notice(told)
        return pack(
            Refusal(
                run, number, "".join(each for each in reason if " " <= each <= "~")[:200] or FAILED
            )
        )

    def leave(self) -> None:
        """End this owner's part before the run is over: it answers nothing new, and what its critic knows is removed. The charge stays."""
        with self._alone():
            self._write("closed", b"")
            if (agreed := self.terms) is not None:
                self._gate(agreed).forget()
            self._working = None

    @property
    def terms(self) -> Terms | None:
        """Those that were agreed to."""
        file = self._folder / "terms"
        if not file.exists():
            return None
        agreed = unpack(file.read_bytes())
        assert isinstance(agreed, Terms)
        return agreed

    @property
    def left(self) -> bool:
        """Whether this owner's part ended before the run was over (`leave`)."""
        return (self._folder / "closed").exists()

    def _considered(self, terms: Terms, raw: bytes) -> bytes:
        """Agree, by the very bytes that came, or refuse. Nothing is charged or read yet."""
        agreed = self.terms
        if agreed is None:
            self._fitting(terms)
            self._alone_in(terms, None)
            plan = terms.plan()
            if not self._wall.allows(plan.cost()):
                raise BudgetError("these terms cost more than this owner allows for a run")
            self._ledger.ready()
            self._ledger.check(plan, method=_called(terms))
            self._write("terms", raw)
        elif pack(agreed) != raw:
            same = agreed.run == terms.run
            raise MessageError(
                "other terms were agreed to under this run"
                if same
                else "this owner takes part in another run"
            )
        return raw

    def _answered(self, request: Request, raw: bytes) -> bytes:
        """What was answered before, to the byte, or a fresh answer that is marked in the ledger, kept, and only then sent."""
        terms = self.terms
        if terms is None or terms.run != request.run:
            raise MessageError("no terms were agreed to under this run")
        if request.round >= terms.settings.rounds:
            raise MessageError(f"the terms have {terms.settings.rounds} rounds, counted from 0")
        wanted = [terms.classes, terms.settings.rows, *terms.shape]
        if list(request.images.shape) != wanted:
            raise MessageError(
                f"the terms ask about images {wanted}, and not {list(request.images.shape)}"
            )
        digest = hashlib.sha256(raw).digest()
        file = f"answer-{request.round}"
        if (self._folder / file).exists():
            return self._kept(file, digest)
        if (last := self.last) > request.round:
            raise MessageError(f"rounds do not go back: round {last} was answered")
        between = terms.settings.groups(
            terms.owners
        )  # rounds from one turn of an owner to its next
        if last >= 0 and (request.round - last) % between:
            raise MessageError(
                f"this owner was asked in round {last}, so its next turn is round {last + between}"
            )
        if self.left:
            raise QueryError("a query has failed before: this run is over for this owner")
        gate, owners = self._opened(terms, last)
        rows = terms.classes * terms.settings.rows
        stage = terms.settings.stage
        done = gate.plan.stages[0].steps - gate.left(stage)
        # privacy: float32 and the order of bytes are post-processing; what is sent is what is kept, and the ledger knows its digest.
        with unbroken():  # what is paid for is kept before an interrupt is heard
            values = owners.answers([0], request.images[None].to(self._runtime.target))[0].float()
            answer = pack(Answer(request.run, request.round, values))
            assert gate.ticket is not None
            # privacy: by now the ledger knows of these slopes, so of two folders that were asked at once one is found not to be the first.
            self._alone_in(terms, gate)
            self._ledger.commit(gate.ticket, stage, done, hashlib.sha256(answer).hexdigest())
            gate.store()
            self._write(file, digest + hashlib.sha256(answer).digest() + answer)
            self._working = gate, owners, request.round
            if (
                gate.left(stage) < rows or request.round + between >= terms.settings.rounds
            ):  # nothing can be asked after it
                gate.forget()
                self._working = None
        return answer

    def _kept(self, file: str, digest: bytes) -> bytes:
        raw = (self._folder / file).read_bytes()
        asked = raw[:DIGEST]
        own = raw[DIGEST : 2 * DIGEST]
        answer = raw[2 * DIGEST :]
        if asked != digest:
            raise MessageError(
                "this round was answered, and to another request: no round is answered twice"
            )
        if hashlib.sha256(answer).digest() != own:
            raise PrivotError(f"{self._folder / file}: this kept answer was altered")
        return answer

    def _opened(self, terms: Terms, last: int) -> tuple[Gate, Owners]:
        """The gate of this run with its critic; another process may have answered meanwhile, and then its word counts."""
        working = self._working if self._working is not None and self._working[2] == last else None
        gate = working[0] if working else self._gate(terms)
        self._alone_in(terms, gate)
        if gate.left(terms.settings.stage) < terms.classes * terms.settings.rows:
            gate.forget()
            raise MessageError("all that the terms allow to be asked was asked")
        if working:
            return gate, working[1]
        # What the critic is shown, and in which order, nobody outside needs to know.
        streams = Streams(secrets.randbits(48), self._runtime)
        warm = (self._folder / "warm").exists()
        if warm and gate.ticket not in vaults(self._ledger):
            raise QueryError(
                "what this owner's critic knew was removed: this run is over for this owner"
            )
        owners = Owners(gate, terms.settings, streams, begun=warm)  # charges the ledger, then reads
        if not warm:
            gate.store()
            self._write("warm", b"")
        return gate, owners

    def _gate(self, terms: Terms) -> Gate:
        self._fitting(terms)
        plan = terms.plan()
        name = _called(terms)
        return Gate(
            self._data,
            plan,
            self._ledger,
            self._wall,
            method=name,
            runtime=self._runtime,
            folder=self._folder,
        )

    def _alone_in(self, terms: Terms, gate: Gate | None) -> None:
        """Refuse a run of which slopes were marked under another charge than this gate's: what was sent lies in another folder, or nowhere.

        privacy: it would answer the same rounds anew: charged twice, but more than a release says of the run.
        """
        lines = self._ledger.entries()
        ticket = gate.ticket if gate else None
        charged = {
            each["n"]
            for each in lines
            if each["kind"] == "reserve" and each["method"] == _called(terms)
        }
        first = next(
            (
                each["ticket"]
                for each in lines
                if each["kind"] == "ask" and each["ticket"] in charged
            ),
            ticket,
        )
        if first != ticket:
            if gate:
                gate.forget()
            raise MessageError(
                "this owner was in this run before, and what it answered is not here"
            )

    def _fitting(self, terms: Terms) -> None:
        if (terms.shape, terms.classes) != (self._data.spec.shape, self._data.spec.classes):
            # privacy: both were declared before a record was read (`load_own`), so that a refusal tells what is public already.
            self._notice(
                f"this owner has declared images {list(self._data.spec.shape)} of {self._data.spec.classes} classes"
            )
            raise MessageError(
                "these terms are for other images or classes than this owner has declared"
            )
        self._policy.check(terms)

    @property
    def last(self) -> int:
        """The last round that was answered, or -1."""
        return max(
            (int(each.name.removeprefix("answer-")) for each in self._folder.glob("answer-*[0-9]")),
            default=-1,
        )

    def _write(self, name: str, raw: bytes) -> None:
        """Whole or not at all, and the disk has said so."""
        put(self._folder / name, raw)
        place = os.open(
            self._folder, os.O_RDONLY
        )  # the name must outlive a power failure too: an answer is kept before it is sent
        try:
            os.fsync(place)
        finally:
            os.close(place)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One message at a time, whatever the number of processes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _called(terms: Terms) -> str:
    """What a ledger calls a run."""
    return f"{terms.settings.name} {terms.run[:8]}"
