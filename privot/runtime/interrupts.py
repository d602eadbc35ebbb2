"""Ctrl-C and an answer that is paid for: the first one waits until the answer is kept, the second one gives it up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WAITING = b"\nprivot: stopping once the answer that is paid for is kept; Ctrl-C again gives it up\n"
GIVEN_UP = "the answer that was paid for is lost: start anew, at a new charge"


@contextmanager
def unbroken() -> Iterator[None]:
    """What lies within ends before a `KeyboardInterrupt` that comes meanwhile; a second interrupt is raised at once.

    Only in the main thread, and only where nobody else looks after interrupts.

    >>> with unbroken():
    ...     pass
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    came = False

    def wait(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt(GIVEN_UP)
        came = True
        os.write(2, WAITING)  # not through a buffer that the interrupted code may be writing to

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
