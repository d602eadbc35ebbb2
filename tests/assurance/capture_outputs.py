"""All that a call lets out: bytes of files (also of deleted ones), output, logs, warnings, network."""

import contextlib
import os
import sys
from pathlib import Path

from privot.testing.outside_view import capture_output

NETWORK = ("socket.connect", "socket.sendto", "socket.sendmsg")
_tap = None


class Tap:
    """``pieces`` [(where, bytes)], "(shut)" of folders that only their owner can read; ``elsewhere``:
    paths outside of the folder that were opened for writing; ``sent``: events of the network.
    """

    def __init__(self, root):
        self.root = Path(root)
        self.pieces = []
        self.elsewhere = []
        self.sent = []
        self.busy = False

    def keep(self, path):
        """The content of a file, or of all files of a folder, as it is now."""
        path = Path(os.path.abspath(os.fsdecode(path)))
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and file.is_relative_to(self.root):
                folders = [folder for folder in file.parents if self.root in folder.parents]
                is_shut = any(not folder.stat().st_mode & 0o077 for folder in folders)
                where = f"{file.relative_to(self.root)}{' (shut)' if is_shut else ''}"
                self.pieces.append((where, file.name.encode() + b"\n" + file.read_bytes()))

    def record_event(self, event, args):
        if event in NETWORK:
            self.sent.append(event)
        elif event in ("os.remove", "shutil.rmtree", "os.truncate"):
            if not isinstance(args[0], int):
                self.keep(args[0])
        elif event == "os.rename":
            self.keep(args[0])
            self.keep(args[1])
        elif event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            self.record_open(*args)

    def record_open(self, path, mode, flags):
        if isinstance(mode, str):
            writes = any(letter in mode for letter in "wax+")
        else:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        where = os.path.abspath(os.fsdecode(path))
        if writes and Path(where).is_relative_to(self.root):
            self.keep(where)  # before it is overwritten
        elif writes and not where.startswith(("/dev/", "/proc/")) and "__pycache__" not in where:
            self.elsewhere.append(where)


def _hook(event, args):
    tap = _tap
    if tap is None or tap.busy:
        return
    tap.busy = True
    try:
        with contextlib.suppress(OSError, ValueError):
            tap.record_event(event, args)
    finally:
        tap.busy = False


sys.addaudithook(_hook)


@contextlib.contextmanager
def tap_outputs(root):
    """A `Tap` on all that goes on meanwhile, and on the folder ``root`` as it is in the end."""
    global _tap
    outputs = []
    tap = Tap(root)
    with capture_output(outputs):
        _tap = tap
        try:
            yield tap
        finally:
            _tap = None
    for kind, *parts in outputs:
        for part in parts:
            tap.pieces.append((kind, part if isinstance(part, bytes) else part.encode()))
    tap.keep(tap.root)
