"""The transcript of a server: every message that it sent or received, in one file.

The file starts with `TRANSCRIPT_MAGIC`. Then each message has a direction (1 byte, ">" sent or "<"
received), the length of the client's name (2 bytes), the length of the message (4 bytes,
big-endian), the name and the message. Reading the file runs no code.

A message is written before it is checked, so the transcript also contains invalid messages. Of a
message longer than the limit only the fact that it arrived is written. The `Answer` messages in a
transcript are outputs of the clients' privacy gates.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from privot.errors import DataError

TRANSCRIPT_MAGIC = b"privot wire record 1\n"
ENTRY_HEADER = struct.Struct(">cHI")
MAX_NAME_BYTES = 0xFFFF
SENT_TO_CLIENT = ">"
RECEIVED_FROM_CLIENT = "<"


@dataclass(frozen=True)
class TranscriptEntry:
    """One message of a transcript.

    Attributes:
        direction: `SENT_TO_CLIENT` or `RECEIVED_FROM_CLIENT`.
        client_name: The client that received or sent the message.
        message: The bytes of the message.
    """

    direction: str
    client_name: str
    message: bytes


class TranscriptWriter:
    """Appends messages to a transcript.

    If the file exists, the writer continues it and first removes an incomplete message that a crash
    may have left at its end.

    Args:
        path: The file of the transcript.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "transcript"
    >>> with TranscriptWriter(path) as transcript:
    ...     transcript.record_sent("ward 3", b"images")
    ...     transcript.record_received("ward 3", b"gradients")
    >>> [(entry.direction, entry.client_name, entry.message) for entry in read_transcript(path)]
    [('>', 'ward 3', b'images'), ('<', 'ward 3', b'gradients')]
    """

    def __init__(self, path: Path):
        complete_bytes = 0
        if path.exists():
            with path.open("rb") as file:
                _check_magic(file, path)
                complete_bytes = file.tell()
                for _ in _read_entries(file, path, allow_truncated=True):
                    complete_bytes = file.tell()
        # The answers are private outputs, but the list of participants concerns the server alone.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        self._file.truncate(complete_bytes)
        self._file.seek(complete_bytes)
        if not complete_bytes:
            self._file.write(TRANSCRIPT_MAGIC)
            self._file.flush()

    def record_sent(self, client_name: str, message: bytes) -> None:
        """Append a message that the server sends to a client."""
        self._write_entry(SENT_TO_CLIENT, client_name, message)

    def record_received(self, client_name: str, message: bytes) -> None:
        """Append bytes that arrived from a client, valid or not."""
        self._write_entry(RECEIVED_FROM_CLIENT, client_name, message)

    def _write_entry(self, direction: str, client_name: str, message: bytes) -> None:
        name = client_name.encode()[:MAX_NAME_BYTES]
        header = ENTRY_HEADER.pack(direction.encode(), len(name), len(message))
        self._file.write(header + name + message)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TranscriptWriter:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_transcript(path: Path) -> Iterator[TranscriptEntry]:
    """Yield all messages of a transcript in their order.

    Args:
        path: The file that a server wrote.

    Yields:
        The messages.

    Raises:
        DataError: The file cannot be read, is no transcript, is damaged or is cut off.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}). "
            "Give the file that a server wrote with --transcript."
        ) from None
    with file:
        _check_magic(file, path)
        yield from _read_entries(file, path)


def _check_magic(file: BinaryIO, path: Path) -> None:
    """Read the first line, and raise unless it is the one of a transcript."""
    if file.read(len(TRANSCRIPT_MAGIC)) != TRANSCRIPT_MAGIC:
        raise DataError(f"{path} is no transcript in a supported version.")


def _read_entries(
    file: BinaryIO, path: Path, allow_truncated: bool = False
) -> Iterator[TranscriptEntry]:
    """Yield the messages from the current position to the end.

    Args:
        file: The open transcript.
        path: Its path, for error messages.
        allow_truncated: Stop at an incomplete last message instead of raising an error.

    Yields:
        The complete messages.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    num_entries = 0
    while header := file.read(ENTRY_HEADER.size):
        is_complete = len(header) == ENTRY_HEADER.size
        direction, name_bytes, message_bytes = (
            ENTRY_HEADER.unpack(header) if is_complete else (b"", 0, file_bytes)
        )
        # The lengths are compared with the file before reading, so a forged length costs no memory.
        if file.tell() + name_bytes + message_bytes > file_bytes:
            if allow_truncated:
                return
            raise DataError(
                f"{path} is cut off after {num_entries} complete messages. "
                "Resume the server, or copy the file again."
            )
        try:
            entry = TranscriptEntry(
                direction.decode("ascii"), file.read(name_bytes).decode(), file.read(message_bytes)
            )
        except UnicodeDecodeError:
            entry = TranscriptEntry("", "", b"")
        if entry.direction not in (SENT_TO_CLIENT, RECEIVED_FROM_CLIENT):
            raise DataError(f"{path}: message {num_entries + 1} of the transcript is damaged.")
        num_entries += 1
        yield entry
