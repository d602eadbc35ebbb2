"""Text and numbers as a reader sees them. Names come from outside: here they lose whatever could disturb a page."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable
from typing import Any

JOINERS = "\u200c\u200d"  # part of ordinary spelling in some languages
UNSEEN = (
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
    "Zl",
    "Zp",
)  # controls, direction marks, lone surrogates, unassigned, line separators


def clean(text: Any, most: int = 80) -> str:
    """One line of at most ``most`` characters, without controls, direction marks or towers of accents.

    >>> clean("cat\\u202e\\x00\\n gnp.exe")
    'cat gnp.exe'
    >>> clean("a" * 99, most=6), clean(None), clean(" ")
    ('aaaaa…', '(none)', '(none)')
    """
    said = "" if text is None else text if isinstance(text, str) else json.dumps(text, default=str)
    said = said[: 20 * most]
    said = "".join(" " if each in "\n\r\t\u2028\u2029" else each for each in said)
    said = "".join(
        each for each in said if each in JOINERS or unicodedata.category(each) not in UNSEEN
    )
    said = re.sub(r"\s+", " ", _shallow(said)).strip()
    return (said if len(said) <= most else said[: most - 1] + "…") or "(none)"


def _shallow(text: str) -> str:
    """At most two accents on a letter: more of them climb over the lines around."""
    kept = []
    run = 0
    for each in text:
        run = run + 1 if unicodedata.category(each) in ("Mn", "Me") else 0
        if run <= 2:
            kept.append(each)
    return "".join(kept)


def block(text: str, most: int = 4000) -> str:
    """Several lines of text, each of them cleaned; spaces at the front stay.

    >>> block("@book{x,\\n  year = {2021}\\n}")
    '@book{x,\\n  year = {2021}\\n}'
    """
    lines = [line for line in text[:most].splitlines() if line.strip()]
    return "\n".join(
        " " * min(len(line) - len(line.lstrip()), 8) + clean(line, 300) for line in lines
    )


def number(value: Any, digits: int = 4) -> str:
    """A number in few digits.

    >>> number(1e-05), number(0.90512), number(60000), number(float("nan")), number(10**400)
    ('1e-5', '0.9051', '60,000', 'unknown', 'more than 1e300')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return clean(value, 30)
    if isinstance(value, float) and not math.isfinite(value):
        return "unknown" if math.isnan(value) else "infinite"
    if abs(value) > 1e300:  # whole numbers have no end, floats have
        return f"{'more' if value > 0 else 'less'} than {'' if value > 0 else '-'}1e300"
    if abs(value) < 1e15 and float(value).is_integer():
        return f"{int(value):,}"
    return re.sub(
        r"e([-+])0*(\d)", lambda found: f"e{found[1].strip('+')}{found[2]}", f"{value:.{digits}g}"
    )


def up(value: float, digits: int = 4) -> str:
    """The same, rounded up: what is claimed is never more than what was proved.

    >>> up(0.72604), up(0.9999999), up(1.00001), up(1e-05)
    ('0.7261', '1', '1.001', '1e-5')
    """
    return _stepped(value, digits, lambda steps: math.ceil(steps - 1e-6))


def down(value: float, digits: int = 4) -> str:
    """The same, rounded down: what was measured is never more than what was seen.

    >>> down(0.72609), down(0.99999), down(0.29), down(1.0)
    ('0.726', '0.9999', '0.29', '1')
    """
    return _stepped(value, digits, lambda steps: math.floor(steps + 1e-9))


def _stepped(value: float, digits: int, whole: Callable[[float], int]) -> str:
    if not 1e-290 < abs(value) < 1e300:
        return number(value)
    step = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
    return number(float(f"{whole(value / step) * step:.{digits}g}"), digits)


def percent(value: float, digits: int = 3, way: str = "up") -> str:
    """A probability as a percentage: what is certified ``up``, lower bounds and confidence ``down``, measured rates to the ``nearest``.

    >>> percent(0.0241), percent(1.0), percent(0.0000123)
    ('2.41 %', '100 %', '0.00123 %')
    >>> percent(0.9999), percent(0.9999, way="down"), percent(0.12341, way="nearest")
    ('100 %', '99.9 %', '12.3 %')
    """
    shown = {"up": up, "down": down, "nearest": number}[way](100 * value, digits)
    if "e" in shown and value > 1e-9:
        shown = f"{float(shown):.12f}".rstrip("0")
    return f"{shown} %"


def share(value: float) -> str:
    """A probability as one in so many, rounded up.

    >>> share(1e-5), share(0.3)
    ('1 in 100,000', '0.3')
    """
    return f"1 in {number(math.floor(1 / value + 1e-6))}" if 1e-300 < value <= 0.1 else up(value)


def measured(name: str, value: float, error: float = math.nan) -> str:
    """A reading: accuracies in per cent, all else as it is.

    >>> measured("cnn_accuracy", 0.905, 0.003), measured("fid", 61.34)
    ('90.5 ± 0.3 %', '61.34')
    """
    if name.endswith("accuracy") and 0 <= value <= 1:
        plus = f" ± {100 * error:.1f}" if math.isfinite(error) else ""
        return f"{100 * value:.1f}{plus} %"
    return number(value) + (f" ± {number(error, 2)}" if math.isfinite(error) else "")
