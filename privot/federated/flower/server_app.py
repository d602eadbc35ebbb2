"""Runs a `Server` over Flower's grid: sends messages to clients and collects replies in time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from privot.errors import ReleaseError
from privot.federated.flower.codec import unwrap_reply, wrap_message
from privot.federated.server import Server
from privot.runtime import Progress, ignore_progress

# The shortest time between two polls for replies, and the same as a multiple of a poll's duration.
MIN_POLL_SECONDS = 0.1
POLL_BACKOFF = 4.0
PROGRESS_INTERVAL_SECONDS = 5.0  # a longer round reports the number of its answers
MESSAGE_TTL_MARGIN_SECONDS = 3600.0  # Flower stores an unfetched message this long after a timeout
OFFLINE_WAIT_SECONDS = 10.0  # how long a round waits for nodes that are offline
MAX_UNANSWERED_TRIES = 3  # a round without any answer is repeated until this many tries


class ClientMessenger:
    """Sends messages to clients by name and collects their replies.

    Args:
        grid: Flower's grid of this run.
        node_ids: Client name -> id of its Flower node.
        should_stop: Returns whether the user wants to stop the run.
    """

    def __init__(
        self, grid: Grid, node_ids: dict[str, int], should_stop: Callable[[], bool] = lambda: False
    ):
        self.grid = grid
        self.node_ids = node_ids
        self.should_stop = should_stop

    def exchange_messages(
        self, messages: dict[str, bytes], timeout: float, offline_timeout: float | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Send packed messages and yield the replies as they arrive.

        Args:
            messages: Client name -> packed message.
            timeout: Seconds to wait for replies.
            offline_timeout: Seconds to wait while all missing clients are offline; None: `timeout`.

        Yields:
            Client name and packed reply; nothing for a client that failed or was late.
        """
        records = {name: wrap_message(raw) for name, raw in messages.items()}
        for name, message in self.exchange_records(records, "query", timeout, offline_timeout):
            if (raw := unwrap_reply(message)) is not None:
                yield name, raw

    def exchange_records(
        self,
        records: dict[str, RecordDict],
        message_type: str,
        timeout: float,
        offline_timeout: float | None = None,
    ) -> Iterator[tuple[str, Message]]:
        """Send Flower records and yield the replies as they arrive.

        Args:
            records: Client name -> content of its message.
            message_type: Flower's type of the messages.
            timeout: Seconds to wait for replies.
            offline_timeout: Seconds to wait while all missing clients are offline; None: `timeout`.

        Yields:
            Client name and Flower's reply.

        Raises:
            ReleaseError: The user stopped the run.
        """
        pending: dict[str, str] = {}  # id of the sent message -> client name
        unsent = dict(records)
        start = time.monotonic()
        while unsent or pending:
            if self.should_stop():
                raise ReleaseError(
                    "The run was stopped. The clients' answers are stored; resume with --resume."
                )
            pending |= self._send_to_online_nodes(unsent, message_type, timeout)
            poll_start = time.monotonic()
            replies = self.grid.pull_messages(list(pending)) if pending else ()
            poll_seconds = time.monotonic() - poll_start
            for message in replies:
                if name := pending.pop(message.metadata.reply_to_message_id, ""):
                    yield name, message
            elapsed = time.monotonic() - start
            if elapsed > timeout or (
                not pending and offline_timeout is not None and elapsed > offline_timeout
            ):
                return
            if unsent or pending:
                time.sleep(max(MIN_POLL_SECONDS, POLL_BACKOFF * poll_seconds))

    def _send_to_online_nodes(
        self, unsent: dict[str, RecordDict], message_type: str, timeout: float
    ) -> dict[str, str]:
        """Send records to the nodes that are online; Flower takes no message for other nodes.

        Args:
            unsent: Client name -> content; sent ones are removed.
            message_type: Flower's type of the messages.
            timeout: Seconds for which the sender waits for replies.

        Returns:
            Id of the sent message -> client name.
        """
        sent: dict[str, str] = {}
        online = set(self.grid.get_node_ids()) if unsent else set()
        for name in [name for name in unsent if self.node_ids[name] in online]:
            # A node may reply to any message whose id it knows, and that id is a digest of the
            # message. The random group id keeps one client from replying in place of another.
            message = Message(
                unsent[name],
                self.node_ids[name],
                message_type,
                group_id=secrets.token_hex(16),
                ttl=timeout + MESSAGE_TTL_MARGIN_SECONDS,
            )
            if message_id := next(iter(self.grid.push_messages([message])), None):
                sent[message_id] = name
                del unsent[name]
        return sent


@dataclass
class Traffic:
    """Counts what a run exchanged with all clients together.

    Attributes:
        bytes_sent: Bytes of the requests that were answered.
        bytes_received: Bytes of the replies.
        num_answers: Number of valid answers.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    num_answers: int = 0

    @property
    def bytes_per_answer(self) -> float:
        """Bytes for one client in one round, in both directions."""
        return (self.bytes_sent + self.bytes_received) / max(self.num_answers, 1)


class NoConsentError(ReleaseError):
    """No client agreed to the terms of a new run, so no client was charged."""


def run_federation(
    server: Server,
    messenger: ClientMessenger,
    *,
    join_timeout: float,
    round_timeout: float,
    progress: Progress = ignore_progress,
) -> Traffic:
    """Run a whole federation: consent first, then all rounds with the clients that are there.

    Flower ends a run in which every client failed without an error. Here a round without any
    answer is repeated a few times, and then the run stops; it can be resumed later.

    Args:
        server: The server.
        messenger: Reaches the clients.
        join_timeout: Seconds in which clients can connect and agree.
        round_timeout: Largest duration of a round in seconds.
        progress: Receives the progress.

    Returns:
        The traffic of the run.

    Raises:
        NoConsentError: No client agreed to a new run.
        ReleaseError: No client answers any more, or the user stopped the run.
    """
    for name, raw in messenger.exchange_messages(server.pack_offers(), join_timeout):
        server.receive_consent(name, raw)
        progress("consent", len(server.active), len(server.client_names))
    if not server.active:
        error_type = NoConsentError if server.round == 0 else ReleaseError
        raise error_type(_append_reasons(server, "No client agreed to the terms."))
    num_tries = 0
    traffic = Traffic()
    # After a restart of the server its nodes need a while to reconnect.
    offline_timeout = join_timeout
    while not server.is_finished:
        num_requests, num_answers = _run_round(
            server, messenger, (round_timeout, offline_timeout), traffic, progress
        )
        num_tries = 0 if num_answers else num_tries + 1
        offline_timeout = OFFLINE_WAIT_SECONDS
        if num_requests and not num_answers:
            if server.active and num_tries < MAX_UNANSWERED_TRIES:
                continue
            message = f"No client answered in round {server.round}. Resume later with --resume."
            raise ReleaseError(_append_reasons(server, message))
        server.end_round()
        progress(
            "rounds",
            server.round,
            server.terms.settings.rounds,
            clients=len(server.active),
            answered=num_answers,
        )
    return traffic


def _run_round(
    server: Server,
    messenger: ClientMessenger,
    timeouts: tuple[float, float],
    traffic: Traffic,
    progress: Progress,
) -> tuple[int, int]:
    """Send the requests of a round and process the replies.

    Args:
        server: The server.
        messenger: Reaches the clients.
        timeouts: Seconds to wait for replies, and while all missing clients are offline.
        traffic: The counts of the run; they are increased.
        progress: Receives the progress of a long round.

    Returns:
        The numbers of requests and of valid answers.
    """
    requests = server.pack_requests()
    num_answers = 0
    start = time.monotonic()
    last_report = start
    for name, raw in messenger.exchange_messages(requests, *timeouts):
        is_valid = server.receive(name, raw) is None
        num_answers += is_valid
        traffic.num_answers += is_valid
        traffic.bytes_sent += len(requests[name])
        traffic.bytes_received += len(raw)
        if time.monotonic() - last_report > PROGRESS_INTERVAL_SECONDS:
            last_report = time.monotonic()
            progress("answers in this round", num_answers, len(requests))
    if last_report > start:
        progress("answers in this round", num_answers, len(requests))
    return len(requests), num_answers


def _append_reasons(server: Server, message: str) -> str:
    """Append the first three reasons that the clients gave."""
    reasons = dict.fromkeys(
        f"{offense.client_name}: {offense.reason}" for offense in server.offenses
    )
    return message + (f" ({'; '.join(list(reasons)[:3])})" if reasons else "")
