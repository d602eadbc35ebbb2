"""Watch everything that a run shows to the outside: files, streams, logs, warnings, processes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OUTGOING_EVENTS = (
    "socket.connect",
    "socket.sendto",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
)
_watchers: list[list[tuple[str, str]]] = []
_hook_is_installed = False


def _handle_audit_event(event: str, args: tuple) -> None:
    """Note one event of the interpreter, if anybody watches."""
    if not _watchers:
        return
    if event == "open":
        path, mode, flags = args
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else flags & _WRITE_FLAGS
        if not writes or not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path))
        if "__pycache__" not in name:
            _watchers[-1].append(("write", name))
    elif event in _OUTGOING_EVENTS:
        _watchers[-1].append((event, ""))


@contextlib.contextmanager
def watch_system_calls() -> Iterator[list[tuple[str, str]]]:
    """Collect which files are opened for writing, and what is sent or started.

    Yields:
        A list that grows: (event, path).
    """
    global _hook_is_installed
    if not _hook_is_installed:
        sys.addaudithook(_handle_audit_event)
        _hook_is_installed = True
    events: list[tuple[str, str]] = []
    _watchers.append(events)
    try:
        yield events
    finally:
        _watchers.remove(events)


class _ListHandler(logging.Handler):
    """Append every log message to a list."""

    def __init__(self, events: list[Any]) -> None:
        """Keep the list."""
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Append the text of one record."""
        self._events.append(("log", record.getMessage()))


@contextlib.contextmanager
def capture_output(events: list[Any]) -> Iterator[None]:
    """Collect all that goes to the standard streams, to loggers and to warnings.

    Args:
        events: Receives the texts, also those that are written to the file descriptors directly.
    """
    root = logging.getLogger()
    level = root.level
    handler = _ListHandler(events)
    text = io.StringIO()
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in saved:
            os.dup2(file.fileno(), number)
        root.addHandler(handler)
        root.setLevel(0)
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                yield
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            for stream in (sys.__stdout__, sys.__stderr__):
                if stream is not None:
                    stream.flush()
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            events.append(("printed", text.getvalue(), file.read()))
            events.extend(("warned", str(warning.message)) for warning in caught)


@contextlib.contextmanager
def restore_environment(events: list[Any]) -> Iterator[None]:
    """Restore the environment variables, and note the names of those that were changed."""
    before = dict(os.environ)
    try:
        yield
    finally:
        names = {*before, *os.environ}
        changed = sorted(name for name in names if before.get(name) != os.environ.get(name))
        for name in changed:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        events.append(("environment", changed))


def digest_files(root: Path, secret_folder: Path) -> tuple[tuple[str, str], ...]:
    """List every file under a folder with the digest of its bytes.

    Args:
        root: The folder.
        secret_folder: Where the ledger lies. Of the checkpoints of shards there, which are
            secret, only the names are listed, if nobody else can read them.

    Returns:
        Pairs (path from the root, SHA-256; empty for a secret file).
    """
    entries = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        is_secret = ".vault" in path.name and path.parent == secret_folder
        if is_secret and not path.stat().st_mode & 0o077:
            digest = ""
        else:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append((str(path.relative_to(root)), digest))
    return tuple(entries)
