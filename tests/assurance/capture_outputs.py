"""All that a call lets out: bytes of files (also of such that are gone again), what is printed, logged or warned of, and what is sent."""

import contextlib
import os
import sys
from pathlib import Path

from privot.testing.outside_view import capture_output

_tap = None


class Tap:
    """``pieces`` [(where, bytes)], "(shut)" of folders that only their owner can read; ``elsewhere``: paths outside of
    the folder that were opened for writing; ``sent``: events of the net.
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
        for each in (
            [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        ):
            if each.is_relative_to(self.root):
                where = each.relative_to(self.root)
                shut = any(
                    not folder.stat().st_mode & 0o077
                    for folder in each.parents
                    if self.root in folder.parents
                )
                self.pieces.append(
                    (
                        f"{where}{' (shut)' if shut else ''}",
                        each.name.encode() + b"\n" + each.read_bytes(),
                    )
                )

    def heard(self, event, args):
        if event.startswith("socket.") and event in (
            "socket.connect",
            "socket.sendto",
            "socket.sendmsg",
        ):
            self.sent.append(event)
        elif event in ("os.remove", "shutil.rmtree", "os.truncate"):
            if not isinstance(args[0], int):
                self.keep(args[0])
        elif event == "os.rename":
            self.keep(args[0])
            self.keep(args[1])
        elif event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            path, mode, flags = args
            writes = (
                any(letter in mode for letter in "wax+")
                if isinstance(mode, str)
                else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            where = Path(os.path.abspath(os.fsdecode(path)))
            if writes and where.is_relative_to(self.root):
                self.keep(where)  # before it is overwritten
            elif (
                writes
                and not str(where).startswith(("/dev/", "/proc/"))
                and "__pycache__" not in str(where)
            ):
                self.elsewhere.append(str(where))


def _hook(event, args):
    tap = _tap
    if tap is None or tap.busy:
        return
    tap.busy = True
    try:
        with contextlib.suppress(OSError, ValueError):
            tap.heard(event, args)
    finally:
        tap.busy = False


sys.addaudithook(_hook)


@contextlib.contextmanager
def tapped(root):
    """A `Tap` on all that goes on meanwhile, and on the folder ``root`` as it is in the end."""
    global _tap
    seen = []
    tap = Tap(root)
    with capture_output(seen):
        _tap = tap
        try:
            yield tap
        finally:
            _tap = None
    for kind, *said in seen:
        for each in said:
            tap.pieces.append((kind, each if isinstance(each, bytes) else each.encode()))
    tap.keep(tap.root)
