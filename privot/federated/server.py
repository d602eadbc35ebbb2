"""The server of a federation: a generator, a public schedule, and no trust in the clients.

The server never receives a record, the weights of a critic or a loss. A round is `pack_requests`,
then `receive` for every message that arrives, then `end_round`, which takes one optimizer step with
the answers that arrived in time. All clients have the same weight. The first invalid message
excludes a client from the rest of the run. A client that is silent or late is passed over.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from privot.components.server_generator import ServerGenerator
from privot.errors import MessageError, PlanError, ReleaseError, SettingError, reraise_as
from privot.federated.messages import (
    Answer,
    Message,
    Refusal,
    Terms,
    pack_message,
    unpack_message,
)
from privot.federated.participants import CONSENT_GIVEN, CONSENT_PENDING, Offense, Participants
from privot.federated.server_release import build_federated_release
from privot.federated.server_round import OpenRound
from privot.federated.transcript import TranscriptWriter
from privot.federated.validation import compute_max_message_bytes, validate_gradients
from privot.release import Release
from privot.runtime import Progress, Streams, ignore_progress


class Server:
    """Runs the rounds of one federation.

    With a folder, a new process resumes after a crash in the same round.

    Args:
        terms: The terms of the run.
        client_names: The clients, in their public order.
        streams: The public random streams, and where to compute.
        folder: Folder of the server's state; None to store nothing.
        transcript_path: File to which every sent and received message is written.
        progress: Receives the progress of the work before the first message.

    Attributes:
        terms: The terms of the run.
        round: Number of completed rounds.
        num_answers: Number of answers that contributed to a step.
    """

    def __init__(
        self,
        terms: Terms,
        client_names: Sequence[str],
        streams: Streams,
        folder: Path | None = None,
        transcript_path: Path | None = None,
        progress: Progress = ignore_progress,
    ):
        num_names = len(set(client_names))
        if num_names != len(client_names) or len(client_names) != terms.num_clients:
            raise SettingError(
                f"The terms are for {terms.num_clients} clients with different names; "
                f"{num_names} different names were given."
            )
        self.terms = terms
        self.round = 0
        self.num_answers = 0
        self._participants = Participants.invite(client_names)
        self._packed_terms = pack_message(terms)
        self._terms_digest = hashlib.sha256(self._packed_terms).hexdigest()
        self._folder = folder
        self._max_message_bytes = compute_max_message_bytes(terms)
        self._streams = dataclasses.replace(streams, run_folder=folder)
        self._open_round = OpenRound()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._server_generator = ServerGenerator(
            terms.settings, terms.spec, self._streams, progress
        )
        if folder is not None:
            self._load_state(folder)
        self._transcript = (
            TranscriptWriter(transcript_path) if transcript_path is not None else None
        )
        self._release: Release | None = None

    @property
    def client_names(self) -> tuple[str, ...]:
        """All clients, in their public order."""
        return self._participants.client_names

    @property
    def offenses(self) -> list[Offense]:
        """All offenses against the protocol so far."""
        return self._participants.offenses

    @property
    def active(self) -> list[str]:
        """Clients that agreed and have not left."""
        return self._participants.active

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are over, or no client remains that could answer."""
        return self.round >= self.terms.settings.rounds or all(
            self._participants.has_left(name) for name in self.client_names
        )

    # Consent

    def pack_offers(self) -> dict[str, bytes]:
        """Return the packed terms for every client whose consent is pending."""
        states = self._participants.states.items()
        return self._record_outgoing(
            {name: self._packed_terms for name, state in states if state == CONSENT_PENDING}
        )

    def receive_consent(self, client_name: str, raw: bytes) -> Offense | None:
        """Process a client's reply to the terms, and return its offense if there is one."""
        return self._process_message(client_name, raw, -1, self._process_consent)

    def _process_consent(self, client_name: str, raw: bytes, message: Message) -> None:
        if isinstance(message, Refusal):
            self._participants.mark_left(client_name)
            raise _IgnoredMessage(f"refused the terms: {message.reason}")
        if not isinstance(message, Terms) or raw != self._packed_terms:
            raise MessageError("agreed to something other than the terms")
        self._participants.states[client_name] = CONSENT_GIVEN

    # Rounds

    def pack_requests(self) -> dict[str, bytes]:
        """Return this round's requests for the active clients that have not answered yet.

        A second call in the same round returns the same bytes.
        """
        if self.is_finished:
            raise PlanError("The run is over. No round is left.")
        if not self._open_round.client_rows:
            self._generate_images()
        waiting = [
            name for name in self._open_round.missing_clients if self._participants.is_active(name)
        ]
        return self._record_outgoing(
            {
                name: self._open_round.pack_request(name, self.terms.run_id, self.round)
                for name in waiting
            }
        )

    def receive(self, client_name: str, raw: bytes) -> Offense | None:
        """Process bytes that arrived from a client in a round.

        Args:
            client_name: The client.
            raw: What arrived.

        Returns:
            The offense, which is also appended to `offenses`, or None for a valid answer.
        """
        return self._process_message(client_name, raw, self.round, self._process_answer)

    def end_round(self) -> None:
        """Take one optimizer step with the answers of this round, and open the next round."""
        for name in self._open_round.missing_clients:
            if self._participants.is_active(name):
                self._participants.report_missed_round(name, self.round)
        if self._open_round.answers:
            gradients, answer_mask = self._open_round.stack_gradients()
            device = self._streams.runtime.torch_device
            self._server_generator.apply_gradients(gradients.to(device), answer_mask)
            self.num_answers += int(answer_mask.sum())
        self.round += 1
        self._open_round = OpenRound()
        self._save_round()

    def build_release(self, delta: float = 1e-5) -> Release:
        """Build the release: the generator with the guarantee that holds for each client.

        Args:
            delta: Delta at which the guarantee is stated.

        Returns:
            The release.

        Raises:
            PlanError: The run is not over.
            ReleaseError: No client answered, or the training diverged.
        """
        if not self.is_finished:
            raise PlanError(
                f"The run is in round {self.round} of {self.terms.settings.rounds}. "
                "Complete the other rounds first."
            )
        if not self.num_answers:
            raise ReleaseError("No client answered in any round, so there is nothing to release.")
        if self._release is not None:
            return self._release
        if self._transcript:
            self._transcript.close()
            self._transcript = None
        self._release = build_federated_release(
            self._server_generator.export_artifact(),
            self.terms,
            delta,
            {
                "seed": self._streams.seed,
                "rounds": self.round,
                "num_answers": self.num_answers,
            },
        )
        return self._release

    # Incoming messages

    def _process_message(
        self,
        client_name: str,
        raw: bytes,
        round_number: int,
        handler: Callable[[str, bytes, Message], None],
    ) -> Offense | None:
        """Decode and handle a message from anybody.

        The first invalid message excludes a client; its further messages are not decoded.

        Args:
            client_name: The client that sent the message.
            raw: What arrived.
            round_number: The round for which an offense is reported.
            handler: Handles a decoded message of this run, and raises if something is wrong.

        Returns:
            The offense, or None.
        """
        if self._transcript and isinstance(raw, bytes):
            # An oversized message is recorded without its bytes, so that it cannot fill the disk.
            recorded = raw if len(raw) <= self._max_message_bytes else b""
            self._transcript.record_received(client_name, recorded)
        if self._participants.has_left(client_name):
            return Offense(client_name, round_number, "takes no part in this run")
        try:
            message = unpack_message(raw, self._max_message_bytes)
            is_anonymous_refusal = isinstance(message, Refusal) and set(message.run_id) == {"0"}
            if message.run_id != self.terms.run_id and not is_anonymous_refusal:
                raise MessageError("sent a message of another run")
            handler(client_name, raw, message)
        except _IgnoredMessage as ignored:
            offense = Offense(client_name, round_number, str(ignored), disqualifying=False)
        except MessageError as error:
            offense = Offense(client_name, round_number, str(error))
            self._participants.mark_left(client_name)
            self._open_round.answers.pop(
                client_name, None
            )  # an answer of this round does not count either
        else:
            return None
        self.offenses.append(offense)
        if self._participants.has_left(client_name):
            self._save_participants()  # after a crash the client receives no further request
        return offense

    def _process_answer(self, client_name: str, raw: bytes, message: Message) -> None:
        """Accept an answer of the open round, or raise.

        Args:
            client_name: The client that sent the message.
            raw: The packed message.
            message: The decoded message.
        """
        if isinstance(message, Refusal):
            self._participants.count_refusal(client_name)
            raise _IgnoredMessage(f"refused: {message.reason}")
        if not isinstance(message, Answer):
            raise MessageError(f"sent {message.kind} instead of an answer")
        if message.round != self.round or client_name not in self._open_round.client_rows:
            missed = (client_name, message.round)
            if missed in self._participants.missed_rounds:
                self._participants.missed_rounds.discard(missed)
                raise _IgnoredMessage(f"answered round {message.round} too late")
            raise MessageError(f"sent an answer to round {message.round} without a request")
        answers = self._open_round.answers
        if client_name in answers:
            if answers[client_name][0] == raw:
                raise _IgnoredMessage("sent its answer twice; it counts once")
            raise MessageError("sent two different answers in one round")
        answers[client_name] = raw, validate_gradients(message.gradients, self.terms)

    # Outgoing messages and stored state

    def _generate_images(self) -> None:
        """Generate the images of this round and store them before they are sent.

        A resumed server must send the same images, because no client answers a round twice.
        """
        checkpoint = self._streams.load_checkpoint("requests")
        if checkpoint is None or int(checkpoint["round"]) != self.round:
            scheduled = self.terms.settings.schedule_clients(self.round, len(self.client_names))
            client_indices = [
                index
                for index in scheduled
                if self._participants.is_active(self.client_names[index])
            ]
            if not client_indices:
                return
            checkpoint = {
                "images": self._server_generator.generate_images(self.round, client_indices),
                "round": torch.tensor(self.round),
                "client_indices": torch.tensor(client_indices),
            }
            self._streams.save_checkpoint("requests", checkpoint)
        else:
            # This restores the generator's latents. A GPU may round the images differently, so the
            # stored images are the ones that are sent.
            client_indices = checkpoint["client_indices"].tolist()
            self._server_generator.generate_images(self.round, client_indices)
        client_rows = {self.client_names[index]: row for row, index in enumerate(client_indices)}
        self._open_round = OpenRound(checkpoint["images"].cpu(), client_rows)

    def _record_outgoing(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        if self._transcript:
            for name, raw in messages.items():
                self._transcript.record_sent(name, raw)
        return messages

    def _save_round(self) -> None:
        """Store the generator, then the participants; a crash in between loses no step."""
        if self._folder is None:
            return
        progress_counts = {
            "round": torch.tensor(self.round),
            "num_answers": torch.tensor(self.num_answers),
        }
        self._streams.save_checkpoint(
            "generator", self._server_generator.state_dict() | progress_counts
        )
        self._save_participants()

    def _save_participants(self) -> None:
        if self._folder is not None:
            self._participants.save(self._folder / "server.json", self._terms_digest)

    def _load_state(self, folder: Path) -> None:
        """Restore the state of an unfinished run, or store the state of a new one."""
        file = folder / "server.json"
        if not file.exists():
            self._save_round()
            return
        altered = (
            f"{file}: the stored state of an unfinished run was altered. Start a new run; "
            "every client is charged again."
        )
        with reraise_as(ReleaseError, altered):
            self._participants = Participants.load(file, self._terms_digest, self.client_names)
            checkpoint = self._streams.load_checkpoint("generator")
            if checkpoint is not None:
                self.round = int(checkpoint.pop("round"))
                self.num_answers = int(checkpoint.pop("num_answers"))
                self._server_generator.restore(checkpoint)


class _IgnoredMessage(Exception):  # noqa: N818 (it ends the processing of one message)
    """The message is of no use, but it is no violation of the protocol either."""
