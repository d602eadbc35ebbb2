"""Whether the package's own GPU kernels can be used."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def kernels_available() -> bool:
    """Return whether Triton is installed.

    The `kernels` packages of `privot` import Triton, so they may be imported only where this
    is true.
    """
    return find_spec("triton") is not None
