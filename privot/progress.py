"""Progress of a run: a bar on a terminal, a few plain lines in a pipe; numbers for people."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Protocol

from rich import progress as rich_progress
from rich.console import Console

MAX_QUIET_SECONDS = 30.0  # a pipe gets a line at least this often


class Progress(Protocol):
    """Reports the progress of a stage. It is given public facts only.

    A call has the name of the stage, the steps that are done, the number of all steps, and facts
    such as the epsilon that the run has cost so far.
    """

    def __call__(self, stage: str, step: int, total: int, **facts: Any) -> None: ...


def ignore_progress(stage: str, step: int, total: int, **facts: Any) -> None:
    """Report nothing.

    Args:
        stage: The name of the stage, see `Progress`.
        step: Steps that are done.
        total: All steps.
        **facts: Further public facts.
    """


def round_up(value: float, digits: int = 4) -> str:
    """Format an upper bound with a number of significant digits, never below the value.

    Args:
        value: The bound. A value within 1e-9 of a shorter number counts as that number, because a
            sum of floating-point numbers can be that far from the number that is meant.
        digits: Significant digits.

    Returns:
        The text.

    >>> round_up(0.37225, 3), round_up(1.00001), round_up(5.000000000000001)
    ('0.373', '1.001', '5')
    >>> round_up(1e-05), round_up(math.inf)
    ('1e-05', 'inf')
    """
    return _format_bound(value, digits, ROUND_CEILING, 1 - 1e-9)


def round_down(value: float, digits: int = 4) -> str:
    """Format a lower bound with a number of significant digits, never above the value.

    See `round_up`.

    >>> round_down(0.37279, 3), round_down(0.2999999999999), round_down(0.0)
    ('0.372', '0.3', '0')
    """
    return _format_bound(value, digits, ROUND_FLOOR, 1 + 1e-9)


def _format_bound(value: float, digits: int, rounding: str, tolerance: float) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(value * tolerance))
    return f"{float(rounded):.{digits}g}"


def format_duration(seconds: float) -> str:
    """Format a duration for people.

    >>> format_duration(0.02), format_duration(3.21), format_duration(95), format_duration(9000)
    ('under a second', '3.2 s', '1 min 35 s', '2 h 30 min')
    """
    whole = int(seconds)
    if seconds < 1:
        return "under a second"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def show_progress_bar(console: Console) -> Iterator[Progress]:
    """Give a progress that shows itself on a console: bars on a terminal, else lines."""
    if not console.is_terminal:
        yield _print_progress_lines(console)
        return
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(
        *columns,
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[facts]}"),
        console=console,
    ) as bar:
        tasks: dict[str, Any] = {}

        def update_bar(stage: str, step: int, total: int, **facts: Any) -> None:
            """Update the bar of a stage.

            Args:
                stage: The name of the stage, see `Progress`.
                step: Steps that are done.
                total: All steps.
                **facts: Further public facts.
            """
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, facts="")
            bar.update(tasks[stage], completed=step, total=total, facts=_join_facts(facts))

        yield update_bar


def _join_facts(facts: dict[str, Any]) -> str:
    return "  ".join(f"{key} {_format_fact(key, value)}" for key, value in facts.items())


def _format_fact(key: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return round_up(value, 3) if key == "epsilon" else f"{value:.3g}"


def _print_progress_lines(console: Console) -> Progress:
    """Print a line when a stage starts, at each tenth of it, and after half a minute."""
    printed_tenths: dict[str, int] = {}
    last_line = time.monotonic()

    def print_line(stage: str, step: int, total: int, **facts: Any) -> None:
        """Print a line if one is due.

        Args:
            stage: The name of the stage, see `Progress`.
            step: Steps that are done.
            total: All steps.
            **facts: Further public facts.
        """
        nonlocal last_line
        tenth = 10 * step // max(total, 1)
        now = time.monotonic()
        if step <= 1 and printed_tenths.get(stage, 0) > 1:
            printed_tenths.pop(stage)  # the same stage of another output
        if printed_tenths.get(stage, -1) < tenth or now - last_line > MAX_QUIET_SECONDS:
            printed_tenths[stage] = tenth
            last_line = now
            console.print(
                f"{stage}: {step} of {total}  {_join_facts(facts)}", markup=False, highlight=False
            )

    return print_line
