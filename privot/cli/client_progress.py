"""Shows the progress of a client of a federated run on the client's own terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privot.cli.console import err_console, print_line
from privot.progress import Progress, round_up

if TYPE_CHECKING:
    from privot.federated import Answer, Client, Refusal, Terms

CLIENT_STOPPED_MESSAGE = "This client has left the run for good and sends no further answer."


class ClientMonitor:
    """Passes messages to a client, and prints what the client agreed to and answered.

    Args:
        client: The client.
        progress: Receives the number of answered rounds.
        delta: Delta at which the cost of the terms is printed.

    Attributes:
        num_answered_rounds: Number of rounds answered since the start of this process.
        end_reason: Why the client ended before the run did, or an empty text.
        awaits_resend: Whether the client has no turn left, but its last answer may be requested
            again because it did not arrive.
    """

    def __init__(self, client: Client, progress: Progress, delta: float):
        self.client = client
        self.progress = progress
        self.delta = delta
        self.num_answered_rounds = 0
        self.last_round = client.last_round
        self.end_reason = CLIENT_STOPPED_MESSAGE if client.has_left else ""
        self.awaits_resend = not self.end_reason and not self._has_turns_left()

    def reply(self, message: bytes) -> bytes:
        """Return the client's reply to a message, and print what it means."""
        from privot.federated import Answer, Refusal, Terms, unpack_message

        raw = self.client.reply(message)
        reply = unpack_message(raw)
        if self.client.has_left:
            self.end_reason = CLIENT_STOPPED_MESSAGE
        elif isinstance(reply, Refusal) and self._refuses_terms(reply):
            self.end_reason = f"The terms of run {reply.run_id[:8]} were refused: {reply.reason}"
        if isinstance(reply, Terms):
            self._print_agreement(reply)
        elif isinstance(reply, Answer):
            self._count_answer(reply)
        return raw

    def _refuses_terms(self, refusal: Refusal) -> bool:
        """Return whether a refusal is one of terms, and not of bytes that are no message."""
        has_run_id = bool(refusal.run_id.strip("0"))
        return self.client.agreed_terms is None and refusal.round < 0 and has_run_id

    def _print_agreement(self, terms: Terms) -> None:
        epsilon = round_up(float(terms.plan().cost().epsilon(self.delta)))
        print_line(
            f"agreed     to run {terms.run_id[:8]}: {terms.settings.rounds} rounds, "
            f"epsilon {epsilon}, {terms.settings.unit}",
            err_console,
        )

    def _count_answer(self, answer: Answer) -> None:
        terms = self.client.agreed_terms
        assert terms is not None
        self.num_answered_rounds += answer.round != self.last_round
        self.last_round = answer.round
        self.awaits_resend = False
        self.progress("answers", answer.round + 1, terms.settings.rounds)

    def is_needed(self) -> bool:
        """Return whether the client has a turn left, or may have to resend its last answer."""
        return not self.end_reason and (self.awaits_resend or self._has_turns_left())

    def _has_turns_left(self) -> bool:
        terms = self.client.agreed_terms
        if self.last_round < 0 or terms is None:
            return True
        next_turn = self.last_round + terms.settings.count_groups(terms.num_clients)
        return bool(next_turn < terms.settings.rounds)
