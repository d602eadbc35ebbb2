"""What a server received from one client, read from the transcript of a federated run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from privot.errors import DataError, MessageError
from privot.federated.messages import Answer, Request, Terms, unpack_message
from privot.federated.transcript import SENT_TO_CLIENT, TranscriptEntry, read_transcript
from privot.federated.validation import get_answer_shape

MAX_MESSAGE_BYTES = 1 << 28  # answers that are stored; of a longer transcript the first rounds
MAX_NAMES_IN_MESSAGE = 5


@dataclass(frozen=True)
class ClientTranscript:
    """What one client received and sent in a federated run.

    Attributes:
        client_name: Name of the client.
        terms: Terms of the run.
        images: That the client received, uint8 [rounds, classes, rows, c, h, w].
        values: Noisy gradients that it sent, float32 [rounds, classes, rows, c, h', w'].
        traffic_bytes: Total bytes to the client, and from it.
    """

    client_name: str
    terms: Terms
    images: Tensor
    values: Tensor
    traffic_bytes: tuple[int, int]


def read_client_transcript(path: Path, client_name: str | None = None) -> ClientTranscript:
    """Read all rounds that a client answered.

    Invalid messages and messages of another run are skipped.

    Args:
        path: The transcript.
        client_name: Name of the client. None: the first client that answered.

    Returns:
        What the client received and sent.

    Raises:
        DataError: The transcript has no answer of this client.
    """
    reader = _ClientReader(client_name)
    names = set()
    for entry in read_transcript(path):
        names.add(entry.client_name)
        if reader.client_name in (None, entry.client_name):
            reader.read_entry(entry)
    if reader.terms is None or reader.client_name is None or not reader.answers:
        known_names = ", ".join(sorted(names)[:MAX_NAMES_IN_MESSAGE]) or "no client"
        raise DataError(
            f"{path} contains no answer of {reader.client_name or 'any client'}. It has messages "
            f"of {known_names}."
        )
    rounds = sorted(reader.answers)
    return ClientTranscript(
        reader.client_name,
        reader.terms,
        torch.stack([reader.requests[reader.client_name, number] for number in rounds]),
        torch.stack([reader.answers[number] for number in rounds]),
        (reader.bytes_down, reader.bytes_up),
    )


class _ClientReader:
    """Collects the messages of one client.

    Args:
        client_name: Name of the client. None: the first client that answers.
    """

    def __init__(self, client_name: str | None):
        self.client_name = client_name
        self.terms: Terms | None = None
        self.requests: dict[tuple[str, int], Tensor] = {}  # by client and round
        self.answers: dict[int, Tensor] = {}  # by round
        self.bytes_down = 0
        self.bytes_up = 0
        self.num_stored_bytes = 0

    def read_entry(self, entry: TranscriptEntry) -> None:
        """Store a message, if it belongs to the run."""
        try:
            message = unpack_message(entry.message)
        except MessageError:
            return
        is_to_client = entry.direction == SENT_TO_CLIENT
        self.bytes_down += len(entry.message) * is_to_client
        self.bytes_up += len(entry.message) * (not is_to_client)
        if isinstance(message, Terms) and is_to_client:
            self.terms = message
            return
        if self.terms is None or message.run_id != self.terms.run_id:
            return
        if self.num_stored_bytes > MAX_MESSAGE_BYTES:
            return
        if isinstance(message, Request) and is_to_client:
            self.requests[entry.client_name, message.round] = message.images
        elif (
            isinstance(message, Answer)
            and (entry.client_name, message.round) in self.requests
            and _is_valid_answer(self.terms, message.gradients)
        ):
            # A client that is queried again repeats its answer, so the first answer counts.
            self.client_name = entry.client_name
            self.answers.setdefault(message.round, message.gradients)
            self.num_stored_bytes += len(entry.message)


def _is_valid_answer(terms: Terms, values: Tensor) -> bool:
    return list(values.shape) == get_answer_shape(terms) and bool(values.isfinite().all())
