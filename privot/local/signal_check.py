"""Whether so many privatized records can show anything through the noise, and what would."""

from __future__ import annotations

import math

from privot.errors import SettingError
from privot.local.channels import Channel
from privot.local.channels.composite import Composite


def warn_if_too_noisy(channel: Channel, num_records: int) -> str | None:
    """Warn if so many records are predicted to show nothing through the noise.

    >>> from privot.local.channels import RandomizedResponse
    >>> weak = RandomizedResponse.calibrate(1.0, num_categories=8)
    >>> warn_if_too_noisy(weak, 10000) is None
    True
    >>> weaker = RandomizedResponse.calibrate(0.01, num_categories=8)
    >>> warn_if_too_noisy(weaker, 1000).partition("Use at least ")[2]
    '4,500,000 records, or epsilon 0.55.'

    Args:
        channel: The channel of the records.
        num_records: Number of records.

    Returns:
        The warning, with the number of records and the epsilon that would be enough; None where the
        predicted signal-to-noise ratio is 1 or more.
    """
    ratio = channel.predict_signal_to_noise(num_records)
    if ratio >= 1:
        return None
    noisiest = channel
    if isinstance(channel, Composite):
        noisiest = min(channel.parts, key=lambda part: part.predict_signal_to_noise(num_records))
    # Every ratio grows with the square root of the number of records.
    sufficient_records = _round_up_to_two_digits(num_records / ratio**2)
    sufficient_epsilon = _find_sufficient_epsilon(noisiest, num_records)
    text = (
        f"the predicted signal-to-noise ratio is {ratio:.2g}, below 1 ({noisiest.name}, epsilon "
        f"{_format_three_digits_up(noisiest.epsilon)}, {num_records:,} records). Expect mostly "
        f"noise. Use at least {sufficient_records:,} records"
    )
    if sufficient_epsilon < math.inf:
        text += f", or epsilon {_format_three_digits_up(sufficient_epsilon)}"
    return f"{text}."


def _find_sufficient_epsilon(channel: Channel, num_records: int) -> float:
    """Find the least epsilon at which so many records show something.

    Args:
        channel: The channel of the records.
        num_records: Number of records.

    Returns:
        The epsilon within 1 %, from above; infinity where so large an epsilon has no proof.
    """
    upper = channel.epsilon
    try:
        while channel.with_epsilon(upper).predict_signal_to_noise(num_records) < 1:
            upper *= 2
    except SettingError:  # the channel has no proof at this epsilon
        return math.inf
    lower = upper / 2
    while upper / lower > 1.01:
        middle = math.sqrt(upper * lower)
        if channel.with_epsilon(middle).predict_signal_to_noise(num_records) >= 1:
            upper = middle
        else:
            lower = middle
    return upper


def _round_up_to_two_digits(value: float) -> int:
    """Round up to two significant digits, so that the stated number is enough."""
    unit = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def _format_three_digits_up(value: float) -> str:
    """Format an epsilon with three significant digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-6) * unit:.3g}"
