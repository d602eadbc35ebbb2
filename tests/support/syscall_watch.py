"""Watch a piece of code for what hostile input must never bring about: foreign code, other processes, the network, writes elsewhere."""

import contextlib
import os
import signal
import sys
from pathlib import Path

CODE = {
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "subprocess.Popen",
    "pty.spawn",
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
    "webbrowser.open",
    "urllib.Request",
    "ctypes.dlopen",
}
CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
}
LONGEST = 30  # seconds that one input may take; a loaded machine is slow, a hang is for ever

_inside: tuple[Path, list] | None = None


def _hook(event, args):
    if _inside is None:
        return
    target, seen = _inside
    if event in CODE:
        if event != "ctypes.dlopen" or (
            args[0] and "site-packages" not in str(args[0])
        ):  # libraries that are imported late
            seen.append((event, str(args)[:200]))
    elif event in CHANGES or (event == "open" and _writes(*args)):
        path = args[0]
        if isinstance(path, (str, bytes, os.PathLike)) and not _harmless(
            Path(os.path.realpath(os.fsdecode(path))), target
        ):
            seen.append((event, os.fsdecode(path)[:200]))


def _writes(path, mode, flags):
    return (
        any(letter in mode for letter in "wax+")
        if isinstance(mode, str)
        else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    )


def _harmless(path, target):
    return path.is_relative_to(target) or "__pycache__" in path.parts or path == Path(os.devnull)


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched(target):
    """Collect what is done that must not be: (event, what) each. ``target`` is the folder in which files may be written."""
    global _inside
    _inside = Path(target).resolve(), []
    try:
        yield _inside[1]
    finally:
        _inside = None


class Hangs(BaseException):
    """An input took too long."""


@contextlib.contextmanager
def hurried(seconds=LONGEST):
    """Whatever takes longer is stopped, and fails."""

    def late(*_):
        raise Hangs(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
