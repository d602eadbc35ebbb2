"""What can be said of a channel before anything is learned from it: whether so many records can tell, and what would do."""

from __future__ import annotations

import math

from privot.errors import SettingError
from privot.local.channels import Channel
from privot.local.channels.composite import Mixed


def too_little(channel: Channel, count: int) -> str | None:
    """One sentence where ``count`` records are predicted to show nothing through the noise, with what would do; None where they may.

    >>> from privot.local.channels import RandomizedResponse
    >>> too_little(RandomizedResponse.calibrated(1.0, categories=8), 10000) is None
    True
    >>> too_little(RandomizedResponse.calibrated(0.01, categories=8), 1000).partition("noise; ")[2]
    '4,500,000 records would do, or epsilon 0.55'
    """
    ratio = channel.signal(count)
    if ratio >= 1:
        return None
    worst = (
        min(channel.parts, key=lambda each: each.signal(count))
        if isinstance(channel, Mixed)
        else channel
    )
    # every ratio grows as the square root of the number of records
    enough = _epsilon(worst, count)
    which = f"{worst.name}, epsilon {_three_digits_up(worst.epsilon)}, {count:,} records"
    return (
        f"signal to noise is predicted at {ratio:.2g}, under 1 ({which}): expect mostly "
        f"noise; {_up(count / ratio**2):,} records would do"
        + (f", or epsilon {_three_digits_up(enough)}" if enough < math.inf else "")
    )


def _epsilon(channel: Channel, count: int) -> float:
    """The least epsilon, to two digits and from above, at which ``count`` records show something."""
    inside = channel.epsilon
    try:
        while channel.at(inside).signal(count) < 1:
            inside *= 2
    except SettingError:  # so much has no proof any more
        return math.inf
    outside = inside / 2
    while inside / outside > 1.01:
        middle = math.sqrt(inside * outside)
        inside, outside = (
            (middle, outside) if channel.at(middle).signal(count) >= 1 else (inside, middle)
        )
    return inside


def _up(value: float) -> int:
    """Two digits, rounded up: what is said to do must do."""
    step = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / step) * step


def _three_digits_up(value: float) -> str:
    """An epsilon in three digits, rounded up."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step - 1e-6) * step:.3g}"
