"""Progress for people: a bar on a terminal, a few plain lines in a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    return f"{whole // 60} min {whole % 60} s" if value < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A progress that draws itself on this console."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, bars.TimeRemainingColumn(), bars.TextColumn("{task.fields[facts]}"), console=console) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, step: int, of: int, **facts: Any) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=of, facts="")
            bar.update(tasks[stage], completed=step, total=of, facts=_words(facts))

        yield show


def _words(facts: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items())


def _lines(console: Console) -> Progress:
    """A line when a stage begins, at each tenth of it, and after half a minute without one."""
    shown: dict[str, int] = {}
    last = time.monotonic()

    def show(stage: str, step: int, of: int, **facts: Any) -> None:
        nonlocal last
        tenth, now = 10 * step // max(of, 1), time.monotonic()
        if step <= 1 and shown.get(stage, 0) > 1:
            shown.pop(stage)  # the same stage again, of another output
        if shown.get(stage, -1) < tenth or now - last > QUIET:
            shown[stage], last = tenth, now
            console.print(f"{stage}: {step} of {of}  {_words(facts)}", markup=False, highlight=False)

    return show
