"""Progress for people: a bar on a terminal, a few plain lines in a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Protocol

from rich import progress as bars
from rich.console import Console

QUIET = 30.0  # seconds that a pipe may stay without a line


class Progress(Protocol):
    """Sees public facts alone: a stage's name, a step, how many there are, and facts such as epsilon so far."""

    def __call__(self, stage: str, step: int, of: int, **facts: Any) -> None: ...


def silent(stage: str, step: int, of: int, **facts: Any) -> None:
    """A progress that shows nothing."""


def jsonable(value: Any) -> Any:
    """As JSON will give it back: lists for tuples, and text for infinite numbers, of which JSON has none.

    >>> jsonable({"epsilon": float("inf")})
    {'epsilon': 'inf'}
    """
    if isinstance(value, dict):
        return {key: jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def round_up(value: float, digits: int = 4) -> str:
    """Format an upper bound: so many significant digits, never below the value.

    Args:
        value: The bound. What lies within 1e-9 of a shorter number counts as that number, since
            sums of floating-point numbers are not closer than this to the number that was meant.
        digits: Significant digits of the text.

    Returns:
        The text.

    >>> round_up(0.37225, 3), round_up(1.00001), round_up(5.000000000000001), round_up(1e-05), round_up(math.inf)
    ('0.373', '1.001', '5', '1e-05', 'inf')
    """
    return _format_bound(value, digits, ROUND_CEILING, 1 - 1e-9)


def round_down(value: float, digits: int = 4) -> str:
    """Format a lower bound: so many significant digits, never above the value; see `round_up`.

    >>> round_down(0.37279, 3), round_down(0.2999999999999), round_down(0.0)
    ('0.372', '0.3', '0')
    """
    return _format_bound(value, digits, ROUND_FLOOR, 1 + 1e-9)


def _format_bound(value: float, digits: int, rounding: str, tolerance: float) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(value * tolerance))
    return f"{float(rounded):.{digits}g}"


def seconds(value: float) -> str:
    """A duration as people say it.

    >>> seconds(0.02), seconds(3.21), seconds(95), seconds(9000)
    ('under a second', '3.2 s', '1 min 35 s', '2 h 30 min')
    """
    whole = int(value)
    if value < 1:
        return "under a second"
    if value < 60:
        return f"{value:.1f} s"
    return (
        f"{whole // 60} min {whole % 60} s"
        if value < 3600
        else f"{whole // 3600} h {whole % 3600 // 60} min"
    )


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A progress that draws itself on this console."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(
        *columns,
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[facts]}"),
        console=console,
    ) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, step: int, of: int, **facts: Any) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=of, facts="")
            bar.update(tasks[stage], completed=step, total=of, facts=_words(facts))

        yield show


def _words(facts: dict[str, Any]) -> str:
    return "  ".join(f"{key} {_format_fact(key, value)}" for key, value in facts.items())


def _format_fact(key: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return round_up(value, 3) if key == "epsilon" else f"{value:.3g}"


def _lines(console: Console) -> Progress:
    """A line when a stage begins, at each tenth of it, and after half a minute without one."""
    shown: dict[str, int] = {}
    last = time.monotonic()

    def show(stage: str, step: int, of: int, **facts: Any) -> None:
        nonlocal last
        tenth = 10 * step // max(of, 1)
        now = time.monotonic()
        if step <= 1 and shown.get(stage, 0) > 1:
            shown.pop(stage)  # the same stage again, of another output
        if shown.get(stage, -1) < tenth or now - last > QUIET:
            shown[stage] = tenth
            last = now
            console.print(
                f"{stage}: {step} of {of}  {_words(facts)}", markup=False, highlight=False
            )

    return show
