"""Text and numbers as shown in a report.

Names come from outside. Here they lose every character that could distort a page.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any

from privot.progress import round_down, round_up

ZERO_WIDTH_JOINERS = "\u200c\u200d"  # part of the ordinary spelling of some languages
LINE_BREAKS = "\n\r\t\u2028\u2029"
# Control characters, direction marks, surrogates, unassigned characters, line separators.
INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
MAX_ACCENTS = 2  # per letter; more of them would cover the lines around
MAX_SHOWN_NUMBER = 1e300  # integers have no limit, floats have


def clean_text(text: Any, max_length: int = 80) -> str:
    """Make one short line of visible characters.

    Args:
        text: Any value. What is not text is shown as JSON.
        max_length: Longest result; a longer text is cut and ends in an ellipsis.

    Returns:
        The text without control characters, direction marks and piled-up accents, or "(none)".

    >>> clean_text("cat\\u202e\\x00\\n gnp.exe")
    'cat gnp.exe'
    >>> clean_text("a" * 99, max_length=6), clean_text(None), clean_text(" ")
    ('aaaaa…', '(none)', '(none)')
    """
    value = text if isinstance(text, str) else json.dumps(text, default=str)
    value = "" if text is None else value[: 20 * max_length]
    value = "".join(" " if char in LINE_BREAKS else char for char in value)
    value = "".join(
        char
        for char in value
        if char in ZERO_WIDTH_JOINERS or unicodedata.category(char) not in INVISIBLE_CATEGORIES
    )
    value = re.sub(r"\s+", " ", _limit_accents(value)).strip()
    if len(value) > max_length:
        value = value[: max_length - 1] + "…"
    return value or "(none)"


def _limit_accents(text: str) -> str:
    """Drop all but the first accents of each letter."""
    allowed = []
    num_accents = 0
    for char in text:
        num_accents = num_accents + 1 if unicodedata.category(char) in ("Mn", "Me") else 0
        if num_accents <= MAX_ACCENTS:
            allowed.append(char)
    return "".join(allowed)


def clean_lines(text: str, max_length: int = 4000) -> str:
    """Clean each line of a text, with up to 8 spaces of its indentation; empty lines are dropped.

    >>> clean_lines("@book{x,\\n  year = {2021}\\n}")
    '@book{x,\\n  year = {2021}\\n}'
    """
    lines = [line for line in text[:max_length].splitlines() if line.strip()]
    return "\n".join(
        " " * min(len(line) - len(line.lstrip()), 8) + clean_text(line, 300) for line in lines
    )


def format_number(value: Any, digits: int = 4) -> str:
    """Format a number with few significant digits.

    >>> format_number(1e-05), format_number(0.90512), format_number(60000)
    ('1e-5', '0.9051', '60,000')
    >>> format_number(float("nan")), format_number(10**400)
    ('unknown', 'more than 1e300')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return clean_text(value, 30)
    if isinstance(value, float) and not math.isfinite(value):
        return "unknown" if math.isnan(value) else "infinite"
    if abs(value) > MAX_SHOWN_NUMBER:
        return "more than 1e300" if value > 0 else "less than -1e300"
    if abs(value) < 1e15 and float(value).is_integer():
        return f"{int(value):,}"
    return re.sub(
        r"e([-+])0*(\d)", lambda match: f"e{match[1].strip('+')}{match[2]}", f"{value:.{digits}g}"
    )


def format_rounded_up(value: float, digits: int = 4) -> str:
    """Format a claimed number, rounded up so that it never exceeds what was proven.

    >>> format_rounded_up(0.72604), format_rounded_up(0.9999999)
    ('0.7261', '1')
    >>> format_rounded_up(1.00001), format_rounded_up(1e-05)
    ('1.001', '1e-5')
    """
    if abs(value) > MAX_SHOWN_NUMBER:
        return format_number(value)
    return format_number(float(round_up(value, digits)), digits)


def format_rounded_down(value: float, digits: int = 4) -> str:
    """Format a measured number, rounded down so that it never exceeds what was measured.

    >>> format_rounded_down(0.72609), format_rounded_down(0.99999)
    ('0.726', '0.9999')
    >>> format_rounded_down(0.29), format_rounded_down(1.0)
    ('0.29', '1')
    """
    if abs(value) > MAX_SHOWN_NUMBER:
        return format_number(value)
    return format_number(float(round_down(value, digits)), digits)


FORMATTERS = {"up": format_rounded_up, "down": format_rounded_down, "nearest": format_number}


def format_percent(value: float, digits: int = 3, rounding: str = "up") -> str:
    """Format a probability as a percentage.

    Args:
        value: The probability.
        digits: Significant digits.
        rounding: "up" for certified rates, "down" for lower bounds and confidence levels,
            "nearest" for measured rates.

    Returns:
        The percentage with its sign.

    >>> format_percent(0.0241), format_percent(1.0), format_percent(0.0000123)
    ('2.41 %', '100 %', '0.00123 %')
    >>> format_percent(0.9999), format_percent(0.9999, rounding="down")
    ('100 %', '99.9 %')
    >>> format_percent(0.12341, rounding="nearest")
    '12.3 %'
    """
    text = FORMATTERS[rounding](100 * value, digits)
    if "e" in text and value > 1e-9:
        text = f"{float(text):.12f}".rstrip("0")
    return f"{text} %"


def format_odds(value: float) -> str:
    """Format a small probability as "1 in n", rounded up.

    >>> format_odds(1e-5), format_odds(0.3)
    ('1 in 100,000', '0.3')
    """
    if 1e-300 < value <= 0.1:
        return f"1 in {format_number(math.floor(1 / value + 1e-6))}"
    return format_rounded_up(value)


def format_measurement(name: str, value: float, standard_error: float = math.nan) -> str:
    """Format the value of a metric: accuracies in percent, everything else as a number.

    Args:
        name: Name of the metric.
        value: Its value.
        standard_error: Its standard error; NaN to leave it out.

    Returns:
        The value with its error.

    >>> format_measurement("cnn_accuracy", 0.905, 0.003), format_measurement("fid", 61.34)
    ('90.5 ± 0.3 %', '61.34')
    """
    has_error = math.isfinite(standard_error)
    if name.endswith("accuracy") and 0 <= value <= 1:
        error = f" ± {100 * standard_error:.1f}" if has_error else ""
        return f"{100 * value:.1f}{error} %"
    error = f" ± {format_number(standard_error, 2)}" if has_error else ""
    return format_number(value) + error
