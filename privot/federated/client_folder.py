"""The files of one run at a client: agreed terms, answers, and how far the run has come."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from privot.errors import MessageError, PrivotError
from privot.federated.messages import Terms, unpack_message
from privot.io import write_atomically

ANSWER_DIGEST_BYTES = hashlib.sha256().digest_size


class ClientFolder:
    """Reads and writes the folder of one client's run.

    Every file is written completely or not at all, and is on the disk when a method returns. The
    folder has the files ``terms``, ``answer-ROUND``, ``warmed-up`` and ``left``.

    Args:
        path: The folder; it is created when it is needed.
    """

    def __init__(self, path: Path):
        self.path = path

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let only one process at a time work on a message."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "a") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            yield

    def load_terms(self) -> Terms | None:
        """Load the terms that the client agreed to, if there are any."""
        file = self.path / "terms"
        if not file.exists():
            return None
        terms = unpack_message(file.read_bytes())
        assert isinstance(terms, Terms)
        return terms

    def store_terms(self, raw_terms: bytes) -> None:
        """Store the terms that the client agrees to."""
        self._write_file("terms", raw_terms)

    @property
    def has_left(self) -> bool:
        """Whether the client left the run before its end."""
        return (self.path / "left").exists()

    def mark_left(self) -> None:
        """Record that the client leaves the run."""
        self._write_file("left", b"")

    @property
    def is_warmed_up(self) -> bool:
        """Whether the warm-up of the client's critics is complete."""
        return (self.path / "warmed-up").exists()

    def mark_warmed_up(self) -> None:
        """Record that the warm-up of the client's critics is complete."""
        self._write_file("warmed-up", b"")

    @property
    def last_round(self) -> int:
        """The last round that the client answered, or -1."""
        files = self.path.glob("answer-*[0-9]")
        return max((int(file.name.removeprefix("answer-")) for file in files), default=-1)

    def has_answer(self, round_number: int) -> bool:
        """Return whether an answer to this round is stored."""
        return (self.path / f"answer-{round_number}").exists()

    def store_answer(self, round_number: int, request_digest: bytes, answer: bytes) -> None:
        """Store an answer before it is sent.

        Args:
            round_number: The round.
            request_digest: SHA-256 of the request.
            answer: The packed answer.
        """
        content = request_digest + hashlib.sha256(answer).digest() + answer
        self._write_file(f"answer-{round_number}", content)

    def load_answer(self, round_number: int, request_digest: bytes) -> bytes:
        """Load the answer to a round.

        Args:
            round_number: The round.
            request_digest: SHA-256 of the request that asks for it.

        Returns:
            The packed answer.

        Raises:
            MessageError: The round was answered to another request.
            PrivotError: The file was altered.
        """
        file = self.path / f"answer-{round_number}"
        content = file.read_bytes()
        stored_request_digest = content[:ANSWER_DIGEST_BYTES]
        answer_digest = content[ANSWER_DIGEST_BYTES : 2 * ANSWER_DIGEST_BYTES]
        answer = content[2 * ANSWER_DIGEST_BYTES :]
        if stored_request_digest != request_digest:
            raise MessageError(
                "This round was answered to another request; no round is answered twice."
            )
        if hashlib.sha256(answer).digest() != answer_digest:
            raise PrivotError(f"{file}: this stored answer was altered.")
        return answer

    def _write_file(self, file_name: str, content: bytes) -> None:
        write_atomically(self.path / file_name, content)
        # The file's name must survive a power failure too, so the folder itself is synchronized.
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
