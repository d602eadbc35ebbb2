"""A measured number and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """``value`` with its standard ``error`` from ``count`` cases of ``reference``.

    ``publishable`` is False when the reference is sensitive: then the number itself is an unprotected release, for the owner alone.
    """

    name: str
    value: float
    error: float
    count: int
    reference: str
    publishable: bool
    seconds: float = 0.0
