"""Charts as inline SVG: no style but classes, so that the page's colours, light or dark, are theirs too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from privot.report.formatting import number, percent, up

WIDTH = 440
HEIGHT = 330
LEFT = 58
RIGHT = 22
TOP = 14
BOTTOM = 44


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis from ``low`` to ``high``, drawn between ``start`` and ``end``; values outside are put on its edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        value, low, high = (
            math.log(each) if self.log else each for each in (value, self.low, self.high)
        )
        part = (value - low) / (high - low)
        return round(self.start + part * (self.end - self.start), 1)


def across(low: float, high: float, log: bool = False) -> Axis:
    """The horizontal axis."""
    return Axis(low, high, LEFT, WIDTH - RIGHT, log)


def upward(low: float, high: float, log: bool = False) -> Axis:
    """The vertical axis."""
    return Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def _frame(
    x: Axis,
    y: Axis,
    ticks: Sequence[tuple[float, str]],
    rungs: Sequence[tuple[float, str]],
    names: tuple[str, str],
) -> Markup:
    parts = []
    for value, text in ticks:
        parts.append(
            Markup('<line class="rule" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>').format(
                x(value), y.start, y.end
            )
        )
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                x(value), y.start + 16, text
            )
        )
    for value, text in rungs:
        parts.append(
            Markup('<line class="rule" x1="{1}" x2="{2}" y1="{0}" y2="{0}"/>').format(
                y(value), x.start, x.end
            )
        )
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
                x.start - 6, y(value) + 4, text
            )
        )
    middle = (x.start + x.end) / 2, (y.start + y.end) / 2
    parts.append(
        Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            middle[0], HEIGHT - 6, names[0]
        )
    )
    parts.append(
        Markup(
            '<text class="axis" transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>'
        ).format(middle[1], names[1])
    )
    return Markup("").join(parts)


def _svg(title: str, inside: Markup) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(WIDTH, HEIGHT, title, inside)


def _path(kind: str, points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> Markup:
    return Markup('<path class="{}" d="M{}"/>').format(
        kind, " L".join(f"{x(one)} {y(two)}" for one, two in points)
    )


def sandwich(curve: dict[str, list[float]] | None, attacks: Sequence[dict[str, Any]]) -> Markup:
    """What is certified, what chance gives, and what attacks reached: log axes, false against true positives."""
    decades = [10.0**power for power in range(-4, 1)]
    marks = [(value, percent(value)) for value in decades]
    x = across(1e-4, 1, log=True)
    y = upward(1e-4, 1, log=True)
    parts = [_frame(x, y, marks, marks, ("false-positive rate", "true-positive rate"))]
    if curve:
        points = list(zip(curve["fpr"], curve["tpr"], strict=True))
        parts.append(_path("beyond", [(1e-4, 1), *points, (1, 1)], x, y))
        parts.append(_path("certified", points, x, y))
    parts.append(_path("chance", [(1e-4, 1e-4), (1, 1)], x, y))
    for place, attack in enumerate(attacks):
        colour = f"c{place % 5}"
        points = sorted(
            zip(
                *(attack["curve"] if attack["curve"][0] else (attack["fpr"], attack["tpr"])),
                strict=True,
            )
        )
        if len(points) > 1:
            parts.append(_path(f"attack {colour}", points, x, y))
        for fpr, tpr, low, above in zip(
            attack["fpr"], attack["tpr"], attack["lower"], attack["above"], strict=True
        ):
            kind = "over" if above else colour
            parts.append(
                Markup('<line class="bar {0}" x1="{1}" x2="{1}" y1="{2}" y2="{3}"/>').format(
                    kind, x(fpr), y(low), y(tpr)
                )
            )
            foot = Markup('<line class="bar {0}" x1="{1}" x2="{2}" y1="{3}" y2="{3}"/>')
            parts.append(foot.format(kind, x(fpr) - 4, x(fpr) + 4, y(low)))
            parts.append(
                Markup('<circle class="dot {}" cx="{}" cy="{}" r="3"/>').format(
                    kind, x(fpr), y(tpr)
                )
            )
    return _svg(
        "Attack power: true-positive rate against false-positive rate", Markup("").join(parts)
    )


def growth(steps: Sequence[dict[str, Any]]) -> Markup:
    """Epsilon after so many steps; a dot at each account, a larger one where a stage ends."""
    total = steps[-1]["steps"]
    most = max(each["epsilon"] for each in steps)
    x = across(0, total)
    y = upward(0, most * 1.1 or 1)
    ticks, rungs = (
        [(value, number(value)) for value in _round(high)] for high in (total, most * 1.1 or 1)
    )
    parts = [_frame(x, y, ticks, rungs, ("steps", "epsilon"))]
    parts.append(
        _path("certified", [(0, 0), *((each["steps"], each["epsilon"]) for each in steps)], x, y)
    )
    for place, each in enumerate(steps):
        ends = place == len(steps) - 1 or steps[place + 1]["stage"] != each["stage"]
        mark = Markup('<circle class="mark" cx="{}" cy="{}" r="{}"><title>{}</title></circle>')
        said = f"{each['stage']}: epsilon {up(each['epsilon'])} after {each['steps']:,} steps"
        parts.append(mark.format(x(each["steps"]), y(each["epsilon"]), 4.5 if ends else 2.5, said))
    return _svg("Epsilon as it grows with the steps", Markup("").join(parts))


def scatter(points: Sequence[tuple[float, float]], label: Callable[[float], str]) -> Markup:
    """Privacy against use: (epsilon, value) with epsilon on a log axis; points are numbered from 1, for a legend beside them."""
    low = min(each[0] for each in points)
    high = max(each[0] for each in points)
    bottom = 10.0 ** math.floor(math.log10(low) - 0.01)
    top = 10.0 ** math.ceil(math.log10(high) + 0.01)
    x = across(bottom, top, log=True)
    y = upward(0, 1)
    decades = [
        10.0**power for power in range(round(math.log10(bottom)), round(math.log10(top)) + 1)
    ]
    decades = decades[:: -(-len(decades) // 7)]
    rungs = [(value / 5, label(value / 5)) for value in range(6)]
    parts = [
        _frame(
            x, y, [(value, number(value)) for value in decades], rungs, ("epsilon", "CNN accuracy")
        )
    ]
    for place, (epsilon, value) in enumerate(points):
        parts.append(
            Markup('<circle class="dot c{}" cx="{}" cy="{}" r="5"/>').format(
                place % 5, x(epsilon), y(value)
            )
        )
        mark = Markup('<text class="name" x="{}" y="{}" text-anchor="middle">{}</text>')
        parts.append(
            mark.format(x(epsilon), y(value) + (17 if place % 2 or value > 0.95 else -9), place + 1)
        )
    return _svg("CNN accuracy against epsilon", Markup("").join(parts))


def _round(high: float) -> list[float]:
    """About five round values from 0 to ``high``."""
    step = 10.0 ** math.floor(math.log10(high / 4))
    step = next(step * times for times in (1, 2, 5, 10) if high / (step * times) <= 5)
    return [float(f"{turn * step:.6g}") for turn in range(int(high / step + 1e-9) + 1)]
