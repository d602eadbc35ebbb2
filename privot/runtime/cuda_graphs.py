"""CUDA graphs are captured here."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def uncollected() -> Iterator[None]:
    """Rubbish is collected before and not inside: an old graph or kernel that is thrown away in the midst of a capture ends that capture.

    >>> with uncollected(): gc.isenabled()
    False
    """
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def capture(graph: Any, **how: Any) -> Iterator[None]:
    """What is launched inside is written down in ``graph`` (a ``torch.cuda.CUDAGraph``), not done; ``how`` as for ``torch.cuda.graph``."""
    with uncollected(), torch.cuda.graph(graph, **how):
        yield
