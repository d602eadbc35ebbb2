"""A client of a federation: its records behind its own gate, with its own ledger and critics.

Every query of a run follows from terms that the client agreed to and stored. The client computes
its plan from the terms itself, and charges the plan to its ledger before it reads the first record.
`Client.reply` returns bytes for every input: the agreed terms, an answer that went through the
gate, or a refusal that says nothing about records, files or other runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from privot.components.client_critics import ClientCritics
from privot.data.dataset import Sensitive
from privot.errors import BudgetError, DataError, LedgerError, MessageError, PrivotError, QueryError
from privot.federated.client_checks import (
    check_request,
    check_turn,
    count_rows,
    find_first_asked_ticket,
    format_run_name,
)
from privot.federated.client_folder import ClientFolder
from privot.federated.client_policy import ClientPolicy
from privot.federated.messages import Answer, Refusal, Request, Terms, pack_message, unpack_message
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import open_ledger
from privot.privacy.plan import PrivacyTarget
from privot.privacy.shard_checkpoint import list_shard_checkpoints
from privot.runtime import Runtime, Streams
from privot.runtime.interrupts import defer_sigint

UNKNOWN_RUN_ID = "0" * 32  # the run id in a refusal of bytes that are no message
MAX_REASON_LENGTH = 200
# The text that the server receives. The text of an error can name files or the cost of other runs,
# so it stays at the client.
REFUSAL_REASONS: dict[type[Exception], str] = {
    BudgetError: "The budget of this client does not cover the run.",
    LedgerError: "The ledger of this client cannot be used.",
    QueryError: "This client has left the run for good.",
}
FAILURE_REASON = "This client cannot answer."


@dataclass(frozen=True)
class _ActiveRun:
    """What one process holds in memory between two rounds."""

    gate: Gate
    critics: ClientCritics
    last_round: int  # the last round that this process answered


class Client:
    """Answers the messages of one run.

    The process may end between any two messages; another one with the same folder and ledger
    resumes. The state of the critics is in a checkpoint beside the ledger.

    Args:
        dataset: The records of this client alone.
        budget: The largest cost of this run. The ledger can have a limit for all runs besides.
        ledger: The ledger that is charged. The limit of the dataset's own ledger binds as well.
        folder: Folder of the run's files.
        runtime: Where to compute.
        policy: Which terms the client accepts.
        on_warning: Receives, on the client's side, why a message was refused.
    """

    def __init__(
        self,
        dataset: Sensitive,
        budget: PrivacyTarget,
        ledger: Ledger,
        folder: Path,
        runtime: Runtime | None = None,
        policy: ClientPolicy | None = None,
        on_warning: Callable[[str], None] = lambda text: None,
    ):
        if dataset.spec.num_clients not in (None, 1):
            raise DataError("These records belong to several clients. Give the data of one client.")
        self._dataset = dataset
        self._budget = budget
        self._folder = ClientFolder(Path(folder))
        self._on_warning = on_warning
        self._ledger = open_ledger(dataset.name, ledger)
        self._runtime = runtime or Runtime()
        self._policy = policy or ClientPolicy()
        self._active_run: _ActiveRun | None = None

    def reply(self, message: bytes) -> bytes:
        """Return the packed reply to a message; an invalid or hostile message gets a refusal."""
        run_id = UNKNOWN_RUN_ID
        round_number = -1
        try:
            received = unpack_message(message)
            run_id = received.run_id
            round_number = getattr(received, "round", -1)
            with self._folder.lock():
                if isinstance(received, Terms):
                    return self._consider_terms(received, message)
                if isinstance(received, Request):
                    return self._answer_request(received, message)
            raise MessageError("A client accepts only terms and requests.")
        except MessageError as error:  # its text is about the sender's own message
            reason = str(error)
            self._on_warning(reason)
        except Exception as error:
            reason = self._handle_failure(error)
        printable = "".join(letter for letter in reason if " " <= letter <= "~")
        return pack_message(
            Refusal(run_id, round_number, printable[:MAX_REASON_LENGTH] or FAILURE_REASON)
        )

    def _handle_failure(self, error: Exception) -> str:
        """Warn on the client's side about an error, and return the reason for the server."""
        self._active_run = None  # the files on the disk decide from here on
        if isinstance(error, QueryError):
            # privacy: The failure of a query may depend on the records. This client leaves the run,
            # so every process together reports such a failure once.
            with contextlib.suppress(OSError, PrivotError):
                self.leave()
        if isinstance(error, PrivotError):
            self._on_warning(str(error))
        else:
            self._on_warning(f"{FAILURE_REASON} ({type(error).__name__})")
        matches = (
            text for error_type, text in REFUSAL_REASONS.items() if isinstance(error, error_type)
        )
        return next(matches, FAILURE_REASON)

    def leave(self) -> None:
        """Leave the run before its end, and remove the state of the critics.

        The client sends no new answer. It stays charged for the whole plan.
        """
        with self._folder.lock():
            self._folder.mark_left()
            if (terms := self.agreed_terms) is not None:
                self._build_gate(terms).delete_shard_states()
            self._active_run = None

    @property
    def agreed_terms(self) -> Terms | None:
        """The terms that this client agreed to, if any."""
        return self._folder.load_terms()

    @property
    def has_left(self) -> bool:
        """Whether this client left the run before its end, see `leave`."""
        return self._folder.has_left

    @property
    def last_round(self) -> int:
        """The last round that was answered, or -1."""
        return self._folder.last_round

    def _consider_terms(self, terms: Terms, raw: bytes) -> bytes:
        """Agree by returning the same bytes, or raise. Nothing is charged or read."""
        agreed = self.agreed_terms
        if agreed is None:
            self._check_terms(terms)
            self._check_single_participation(terms, None)
            plan = terms.plan()
            if not self._budget.allows(plan.cost()):
                raise BudgetError("These terms cost more than this client allows for a run.")
            self._ledger.require_writable()
            self._ledger.check_limit(plan, method=format_run_name(terms))
            self._folder.store_terms(raw)
        elif pack_message(agreed) != raw:
            raise MessageError(
                "This client agreed to other terms of this run."
                if agreed.run_id == terms.run_id
                else "This client takes part in another run."
            )
        return raw

    def _answer_request(self, request: Request, raw: bytes) -> bytes:
        """Return the stored answer to this request, or compute, mark and store a new one."""
        terms = self.agreed_terms
        if terms is None or terms.run_id != request.run_id:
            raise MessageError("This client agreed to no terms of this run.")
        check_request(request, terms)
        request_digest = hashlib.sha256(raw).digest()
        if self._folder.has_answer(request.round):
            return self._folder.load_answer(request.round, request_digest)
        last_round = self.last_round
        check_turn(request.round, last_round, terms)
        if self.has_left:
            raise QueryError("A query has failed before. This client has left the run.")
        gate, critics = self._open_run(terms, last_round)
        return self._compute_answer(request, request_digest, terms, gate, critics)

    def _compute_answer(
        self,
        request: Request,
        request_digest: bytes,
        terms: Terms,
        gate: Gate,
        critics: ClientCritics,
    ) -> bytes:
        """Query the private gradients, then mark and store the answer.

        Args:
            request: The request.
            request_digest: SHA-256 of the packed request.
            terms: The agreed terms.
            gate: The gate of this run.
            critics: The critics behind the gate.

        Returns:
            The packed answer.
        """
        settings = terms.settings
        step = gate.plan.stages[0].steps - gate.count_remaining_queries(settings.stage)
        images = request.images[None].to(self._runtime.torch_device)
        # privacy: The conversion to float32 and the encoding as bytes are post-processing. The
        # stored bytes are the sent bytes, and the ledger has their digest.
        with defer_sigint():  # a charged answer is stored before an interrupt ends the process
            gradients = critics.query_gradients([0], images)[0].float()
            answer = pack_message(Answer(request.run_id, request.round, gradients))
            assert gate.ticket is not None
            # privacy: The ledger now counts these gradients. If two folders received requests of
            # this run at the same time, this check finds that one of them is not the first.
            self._check_single_participation(terms, gate)
            answer_digest = hashlib.sha256(answer).hexdigest()
            self._ledger.commit(gate.ticket, settings.stage, step, answer_digest)
            gate.save_shard_states()
            self._folder.store_answer(request.round, request_digest, answer)
            self._active_run = _ActiveRun(gate, critics, request.round)
            next_turn = request.round + settings.count_groups(terms.num_clients)
            if (
                gate.count_remaining_queries(settings.stage) < count_rows(terms)
                or next_turn >= settings.rounds
            ):  # this client has no further turn
                gate.delete_shard_states()
                self._active_run = None
        return answer

    def _open_run(self, terms: Terms, last_round: int) -> tuple[Gate, ClientCritics]:
        """Open the gate of this run with its critics.

        If another process has answered meanwhile, its stored state is loaded.

        Args:
            terms: The agreed terms.
            last_round: The last answered round on the disk.

        Returns:
            The gate and the critics.
        """
        active_run = self._active_run
        if active_run is not None and active_run.last_round != last_round:
            active_run = None
        gate = active_run.gate if active_run else self._build_gate(terms)
        self._check_single_participation(terms, gate)
        if gate.count_remaining_queries(terms.settings.stage) < count_rows(terms):
            gate.delete_shard_states()
            raise MessageError("All queries that the terms allow are used up.")
        if active_run:
            return gate, active_run.critics
        # Nobody outside needs to know the batches on which the critics train.
        streams = Streams(secrets.randbits(48), self._runtime)
        is_warmed_up = self._folder.is_warmed_up
        if is_warmed_up and gate.ticket not in list_shard_checkpoints(self._ledger):
            raise QueryError(
                "The checkpoint of this client's critics was removed. This client has left the run."
            )
        # The constructor charges the ledger, then reads records.
        critics = ClientCritics(gate, terms.settings, streams, is_warmed_up=is_warmed_up)
        if not is_warmed_up:
            gate.save_shard_states()
            self._folder.mark_warmed_up()
        return gate, critics

    def _build_gate(self, terms: Terms) -> Gate:
        self._check_terms(terms)
        return Gate(
            self._dataset,
            terms.plan(),
            self._ledger,
            self._budget,
            method=format_run_name(terms),
            runtime=self._runtime,
            folder=self._folder.path,
        )

    def _check_single_participation(self, terms: Terms, gate: Gate | None) -> None:
        """Raise if gradients of this run were marked under another charge than the gate's.

        privacy: The answers of that charge are in another folder, or lost. A second participation
        would answer the same rounds again. Both are charged, but the guarantee in the release
        counts each client once.
        """
        ticket = gate.ticket if gate else None
        first_ticket = find_first_asked_ticket(self._ledger, format_run_name(terms))
        if first_ticket not in (None, ticket):
            if gate:
                gate.delete_shard_states()
            raise MessageError("This client was in this run before, and its answers are not here.")

    def _check_terms(self, terms: Terms) -> None:
        spec = self._dataset.spec
        if (terms.shape, terms.num_classes) != (spec.shape, spec.num_classes):
            # privacy: Both were declared before a record was read (`load_client_data`), so the
            # refusal reveals only public facts.
            self._on_warning(
                f"This client declared images of shape {list(spec.shape)} in {spec.num_classes} "
                "classes."
            )
            raise MessageError("The terms have other images or classes than this client declared.")
        self._policy.check(terms)
