"""Recognize that memory ran out."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the CPU or the GPU has not enough memory.

    PyTorch raises a plain RuntimeError where the CPU, or CUDA outside its allocator, has no memory
    left. Only its text says so, and this is the only place that reads the text of an error.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "memory" in str(error)
