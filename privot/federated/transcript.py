"""The wire record: every message that a server sent or saw, whole, one after another in one file; reading it runs no code.

    MAGIC, then for each message:  way (1 byte, ">" sent or "<" seen), length of the name (2), of the message (4, big-endian), name, message

What came is written before it is looked at, so a lie is in the record too; only of one longer than any message can be stands that it came,
without its bytes. `Answer`s in it are what gates released.
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

MAGIC = b"privot wire record 1\n"
HEAD = struct.Struct(">cHI")
SENT = ">"
SEEN = "<"


@dataclass(frozen=True)
class Entry:
    """One message: ``way`` is ``SENT`` (to the owner ``name``) or ``SEEN`` (from it)."""

    way: str
    name: str
    message: bytes


class Recorder:
    """Writes a record; one that is there already goes on, less the half message that a crash may have left at its end.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "wire"
    >>> with Recorder(path) as record:
    ...     record.sent("ward 3", b"images")
    ...     record.seen("ward 3", b"slopes")
    >>> [(each.way, each.name, each.message) for each in read(path)]
    [('>', 'ward 3', b'images'), ('<', 'ward 3', b'slopes')]
    """

    def __init__(self, path: Path):
        whole = 0
        if path.exists():
            with path.open("rb") as file:
                whole = _begun(file, path)
                for _ in _entries(file, path, torn_is_the_end=True):
                    whole = file.tell()
        # What crossed is sanitized, but who took part is the server's own matter.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._file.write(MAGIC)
            self._file.flush()

    def sent(self, name: str, message: bytes) -> None:
        """The server sends ``message`` to ``name``."""
        self._write(SENT, name, message)

    def seen(self, name: str, message: bytes) -> None:
        """``message`` came from ``name``, whatever it may be."""
        self._write(SEEN, name, message)

    def _write(self, way: str, name: str, message: bytes) -> None:
        called = name.encode()[:0xFFFF]
        self._file.write(HEAD.pack(way.encode(), len(called), len(message)) + called + message)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read(path: Path) -> Iterator[Entry]:
    """All messages in their order; a file that is no record, or is cut off, is refused when its end is reached."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({type(error).__name__}); name the file that a server wrote with record="
        ) from None
    with file:
        _begun(file, path)
        yield from _entries(file, path)


def _begun(file: BinaryIO, path: Path) -> int:
    """Past the first line."""
    if file.read(len(MAGIC)) != MAGIC:
        raise DataError(f"{path}: this is no wire record of a version that is known here")
    return len(MAGIC)


def _entries(file: BinaryIO, path: Path, torn_is_the_end: bool = False) -> Iterator[Entry]:
    size = os.fstat(file.fileno()).st_size
    count = 0
    while head := file.read(HEAD.size):
        way, named, length = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, size)
        # Lengths are compared with the file before anything is read, so a forged one takes no memory.
        if file.tell() + named + length > size:
            if torn_is_the_end:
                return
            raise DataError(
                f"{path}: cut off after {count} whole messages; let the server go on, or copy the file again"
            )
        try:
            entry = Entry(way.decode("ascii"), file.read(named).decode(), file.read(length))
        except UnicodeDecodeError:
            entry = Entry("", "", b"")
        if entry.way not in (SENT, SEEN):
            raise DataError(f"{path}: message {count + 1} of the record is damaged")
        count += 1
        yield entry
