"""Ctrl-C during a query: the first interrupt waits until the result is stored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPT_NOTICE = (
    b"\nprivot: stopping as soon as the query result that is paid for is stored. "
    b"Press Ctrl-C again to stop now and lose it.\n"
)
RESULT_LOST = "The query result that was paid for is lost. Start a new run, which is charged again."


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Delay a `KeyboardInterrupt` until the end of the block; a second one is raised at once.

    This works only in the main thread, and only where no other handler is installed.

    >>> with defer_sigint():
    ...     pass
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    is_interrupted = False

    def handle_sigint(signal_number: int, frame: Any) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt(RESULT_LOST)
        is_interrupted = True
        # Not through a buffer of sys.stderr, which the interrupted code may be writing to.
        os.write(2, INTERRUPT_NOTICE)

    signal.signal(signal.SIGINT, handle_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_interrupted:
        raise KeyboardInterrupt
