"""A channel for a table from a few words a column."""

from __future__ import annotations

from collections.abc import Sequence

from privot.errors import SettingError
from privot.local.channels import Channel, Mixed, Space, known

HOW = "write it as COLUMNS=laplace:EPSILON:LOW:HIGH or COLUMN=randomized-response:EPSILON:CATEGORIES, such as 0-1=laplace:4:-1:1"


def channel_of(texts: Sequence[str], columns: int, delta: float = 1e-5) -> Channel:
    """The channel of a table with so many columns; every one of them has its own channel and epsilon, from left to right.

    >>> channel = channel_of(["0-1=laplace:4:-1:1", "2=unary:1:5"], 3)
    >>> channel.columns, channel.width, round(channel.epsilon, 9)
    (3, 7, 5.0)
    """
    parts: list[Channel] = []
    at = 0
    for text in texts:
        first, last, part = _part(text, delta)
        if first != at or last < first:
            raise SettingError(
                f"--column {text!r}: column {at} is next; name each of the {columns} columns once, from left to right"
            )
        parts.append(part)
        at = last + 1
    if at != columns:
        raise SettingError(
            f"the table has {columns} columns and channels were given for {at}: none may leave as it is"
        )
    return parts[0] if len(parts) == 1 else Mixed(parts=tuple(parts))


def _part(text: str, delta: float) -> tuple[int, int, Channel]:
    """Columns from and to, and their channel."""
    place, _, rest = text.partition("=")
    name, *numbers = rest.split(":")
    try:
        first, last = (int(each) for each in (place.split("-") if "-" in place else (place, place)))
        epsilon, *domain = map(float, numbers)
    except ValueError:
        raise SettingError(f"--column {text!r}: {HOW}") from None
    kind = known(name)
    if not 0 < epsilon < float("inf"):
        raise SettingError(
            f"--column {text!r}: epsilon {epsilon:g}: give a number above 0, such as 1"
        )
    if kind.name in ("laplace", "gaussian") and len(domain) == 2 and last >= first:
        return (
            first,
            last,
            kind.calibrated(
                epsilon,
                delta,
                space=Space(shape=(last - first + 1,)),
                low=domain[0],
                high=domain[1],
            ),
        )
    if (
        kind.name not in ("laplace", "gaussian", "mixed")
        and len(domain) == 1
        and domain[0].is_integer()
        and first == last
    ):
        return first, last, kind.calibrated(epsilon, categories=int(domain[0]))
    raise SettingError(f"--column {text!r}: {HOW}")
