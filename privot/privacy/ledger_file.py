"""The file of a ledger: append-only, chained by SHA-256, locked, durable before a call returns.

Lines are JSON objects with ``n`` (the number of the line), ``kind`` and ``prev`` (the digest of the
line before). Beside the file, ``<ledger>.head`` has the number of lines and the last digest, so
that a ledger that was cut short is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from privot.errors import LedgerError

LINE_START = b'{"n":'  # of every line
GENESIS_DIGEST = hashlib.sha256(b"privot ledger 2").hexdigest()  # ``prev`` of the first line


class LedgerFile:
    """A chained, locked, append-only file of entries. Processes and threads may share it.

    Args:
        path: The file. It is created by the first entry.

    Raises:
        LedgerError: If the file cannot be opened, or its chain is broken.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.name:  # "." or "/"
            raise LedgerError(f"{path}: a folder cannot be a ledger. Name a file with --ledger.")
        self._head_path = self.path.with_name(self.path.name + ".head")
        self._entries: list[dict[str, Any]] = []
        self._head = GENESIS_DIGEST
        self._offset = 0  # bytes of the file that were read
        self._mutex = threading.RLock()
        self._is_locked = False
        self._can_write = False

    @property
    def head(self) -> str:
        """The digest of the last line."""
        with self._hold_lock():
            return self._head

    def entries(self) -> list[dict[str, Any]]:
        """Check the chain and give all entries, oldest first; none if there is no file."""
        with contextlib.suppress(OSError):  # `_hold_lock` reports it
            if not (self._entries or self.path.exists() or self._head_path.exists()):
                return []
        with self._hold_lock():
            return list(self._entries)

    def require_writable(self) -> None:
        """Check, before the work of a run, that the run could be charged here.

        Raises:
            LedgerError: If the ledger cannot be written.
        """
        with self._hold_lock():
            self._check_lock()

    def _select_entries(self, **fields: Any) -> list[dict[str, Any]]:
        """Give the entries that have these fields."""
        return [entry for entry in self._entries if fields.items() <= entry.items()]

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Lock the file and read what others appended. May be nested."""
        with self._mutex, contextlib.ExitStack() as stack:
            if self._is_locked:
                yield
                return
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._can_write = self._acquire_file_lock(stack)
                self._read_new_entries()
            except OSError as error:
                raise LedgerError(
                    f"{self.path}: the ledger cannot be opened ({error.strerror}). "
                    "Name another file with --ledger."
                ) from None
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    def _acquire_file_lock(self, stack: contextlib.ExitStack) -> bool:
        """Lock the file until ``stack`` closes.

        Returns:
            Whether this process may write. One that may only read gets no lock; a partly written
            last line is left out.
        """
        lock_path = self.path.with_name(self.path.name + ".lock")
        try:
            lock = stack.enter_context(open(lock_path, "a"))  # noqa: SIM115
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and self.path.exists():
                return False
            raise
        fcntl.flock(lock, fcntl.LOCK_EX)
        return True

    def _read_new_entries(self) -> None:
        """Read what other processes appended; refuse a broken chain."""
        # The head comes first: a process that reads without the lock may find more lines than the
        # head counts, never fewer.
        head = None
        with contextlib.suppress(FileNotFoundError):
            head = self._head_path.read_text(errors="replace")
        size = 0
        content = b""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(self._offset)
            content = file.read()
        if size < self._offset:
            raise LedgerError(f"{self.path}: the ledger was cut short. Restore it from its backup.")
        *lines, partial_line = content.split(b"\n")
        for line in lines:
            self._read_line(line)
        # What follows the last newline is from a call that crashed and never returned: the
        # beginning of a line, or zeros of a disk that lost power. Anything else is another file.
        is_line_start = partial_line[: len(LINE_START)] == LINE_START[: len(partial_line)]
        if partial_line.strip(b"\0") and not is_line_start:
            raise LedgerError(f"{self.path} is not a ledger. Name another file with --ledger.")
        # Only the very first line can be older than its head.
        if head is None and len(self._entries) > 1:
            raise LedgerError(f"{self._head_path} is missing. Restore it from its backup.")
        self._check_head(f"0 {GENESIS_DIGEST}" if head is None else head)

    def _read_line(self, line: bytes) -> None:
        """Check that a line continues the chain, and add its entry."""
        number = len(self._entries)
        try:
            entry = json.loads(line)
            is_valid = (
                entry["n"] == number
                and entry["prev"] == self._head
                and isinstance(entry["kind"], str)
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            is_valid = False
        if not is_valid:
            raise LedgerError(
                f"{self.path}: line {number + 1} was altered. Restore the ledger from its backup."
            )
        self._entries.append(entry)
        self._head = hashlib.sha256(line).hexdigest()
        self._offset += len(line) + 1

    def _check_head(self, head: str) -> None:
        """Check that the chain reaches, and contains, its recorded head."""
        try:
            count, digest = head.split()
            is_last = int(count) == len(self._entries)
            own_digest = self._head if is_last else self._entries[int(count)]["prev"]
        except (ValueError, IndexError):
            raise LedgerError(
                f"{self.path}: the ledger does not reach its recorded head. "
                "Restore it from its backup."
            ) from None
        if own_digest != digest:
            raise LedgerError(
                f"{self.path}: the ledger does not match its recorded head. "
                "Restore it from its backup."
            )

    def _check_lock(self) -> None:
        if not self._can_write:
            raise LedgerError(
                f"{self.path}: the ledger can be read here, but not written. "
                "No record is read without a ledger."
            )

    def _append(self, kind: str, **fields: Any) -> int:
        """Append an entry. It is on the disk when this returns.

        Args:
            kind: The kind of the entry.
            **fields: Its further fields.

        Returns:
            The number of the entry.

        Raises:
            LedgerError: If it cannot be written. The ledger is then as it was.
        """
        self._check_lock()
        number = len(self._entries)
        entry = {"n": number, "kind": kind, **fields, "prev": self._head}
        line = json.dumps(entry, separators=(",", ":")).encode()
        head = hashlib.sha256(line).hexdigest()
        new_head = self._head_path.with_name(self._head_path.name + ".new")
        try:
            # Unbuffered: a buffer would be written again on closing, after the truncation below.
            with (
                open(self.path, "ab", buffering=0) as file,
                open(new_head, "wb", buffering=0) as head_file,
            ):
                file.truncate(self._offset)  # drops a partly written last line
                try:
                    _write_synced(file, line + b"\n")
                    if not number:  # the name of a new file must survive a power failure too
                        _sync_folder(self.path.parent)
                    _write_synced(head_file, f"{number + 1} {head}\n".encode())
                    new_head.replace(self._head_path)
                except OSError:
                    # The caller gets the error and reads no record, so nothing is charged.
                    os.ftruncate(file.fileno(), self._offset)
                    raise
        except OSError as error:
            raise LedgerError(
                f"{self.path}: the ledger cannot be written ({error.strerror}). "
                "No record is read without a ledger."
            ) from None
        self._entries.append(entry)
        self._head = head
        self._offset += len(line) + 1
        return number


def _write_synced(file: IO[bytes], content: bytes) -> None:
    """Write all of the content and wait until it is on the disk."""
    if file.write(content) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
