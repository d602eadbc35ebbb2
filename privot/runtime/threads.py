"""The number of threads that torch uses on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_threads(num_threads: int | None) -> Iterator[None]:
    """Compute with a number of threads inside the block; None leaves the number unchanged.

    Small networks gain nothing from a second thread: it spins between operations that take
    microseconds.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
