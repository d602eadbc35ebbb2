"""Charts as inline SVG. They have classes but no colours, so that the style of the page applies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from privot.report.formatting import format_number, format_percent, format_rounded_up

CHART_WIDTH = 440
CHART_HEIGHT = 330
MARGIN_LEFT = 58
MARGIN_RIGHT = 22
MARGIN_TOP = 14
MARGIN_BOTTOM = 44
MIN_RATE = 1e-4  # lower end of the axes of attack power
NUM_COLORS = 5  # CSS classes c0 to c4

Point = tuple[float, float]
Tick = tuple[float, str]


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis. Values outside are drawn at its ends.

    Attributes:
        low: Lowest value.
        high: Highest value.
        pixel_start: Position of the lowest value.
        pixel_end: Position of the highest value.
        is_log: Whether the axis is logarithmic.
    """

    low: float
    high: float
    pixel_start: float
    pixel_end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Compute the position of a value in pixels."""
        value = min(max(value, self.low), self.high)
        value, low, high = (
            math.log(number) if self.is_log else number for number in (value, self.low, self.high)
        )
        fraction = (value - low) / (high - low)
        return round(self.pixel_start + fraction * (self.pixel_end - self.pixel_start), 1)


def build_horizontal_axis(low: float, high: float, is_log: bool = False) -> Axis:
    """Build the horizontal axis.

    Args:
        low: Lowest value.
        high: Highest value.
        is_log: Whether the axis is logarithmic.

    Returns:
        The axis.
    """
    return Axis(low, high, MARGIN_LEFT, CHART_WIDTH - MARGIN_RIGHT, is_log)


def build_vertical_axis(low: float, high: float, is_log: bool = False) -> Axis:
    """Build the vertical axis.

    Args:
        low: Lowest value.
        high: Highest value.
        is_log: Whether the axis is logarithmic.

    Returns:
        The axis.
    """
    return Axis(low, high, CHART_HEIGHT - MARGIN_BOTTOM, MARGIN_TOP, is_log)


def _draw_line(css_class: str, start: Point, end: Point) -> Markup:
    """Draw a line between two positions in pixels."""
    return Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
        css_class, start[0], end[0], start[1], end[1]
    )


def _draw_text(css_class: str, position: Point, anchor: str, text: object) -> Markup:
    """Draw a text at a position in pixels; ``anchor`` is "middle" or "end"."""
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(
        css_class, position[0], position[1], anchor, text
    )


def _draw_axes(
    x: Axis,
    y: Axis,
    x_ticks: Sequence[Tick],
    y_ticks: Sequence[Tick],
    axis_labels: tuple[str, str],
) -> Markup:
    """Draw grid lines, tick labels and axis labels.

    Args:
        x: Horizontal axis.
        y: Vertical axis.
        x_ticks: Values and labels.
        y_ticks: Values and labels.
        axis_labels: Labels of the horizontal and the vertical axis.

    Returns:
        The SVG elements.
    """
    elements = []
    for value, label in x_ticks:
        position = x(value)
        elements.append(_draw_line("rule", (position, y.pixel_start), (position, y.pixel_end)))
        elements.append(_draw_text("tick", (position, y.pixel_start + 16), "middle", label))
    for value, label in y_ticks:
        position = y(value)
        elements.append(_draw_line("rule", (x.pixel_start, position), (x.pixel_end, position)))
        elements.append(_draw_text("tick", (x.pixel_start - 6, position + 4), "end", label))
    middle_x = (x.pixel_start + x.pixel_end) / 2
    middle_y = (y.pixel_start + y.pixel_end) / 2
    elements.append(_draw_text("axis", (middle_x, CHART_HEIGHT - 6), "middle", axis_labels[0]))
    elements.append(
        Markup(
            '<text class="axis" transform="translate(12 {}) rotate(-90)" '
            'text-anchor="middle">{}</text>'
        ).format(middle_y, axis_labels[1])
    )
    return Markup("").join(elements)


def _wrap_svg(title: str, elements: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(CHART_WIDTH, CHART_HEIGHT, title, Markup("").join(elements))


def _draw_path(css_class: str, points: Sequence[Point], x: Axis, y: Axis) -> Markup:
    """Draw lines between points.

    Args:
        css_class: Class of the path.
        points: Values on both axes.
        x: Horizontal axis.
        y: Vertical axis.

    Returns:
        The SVG element.
    """
    return Markup('<path class="{}" d="M{}"/>').format(
        css_class, " L".join(f"{x(x_value)} {y(y_value)}" for x_value, y_value in points)
    )


def attack_power_chart(
    max_tpr_curve: dict[str, list[float]] | None, attacks: Sequence[dict[str, Any]]
) -> Markup:
    """Draw true-positive against false-positive rates: certified, by chance, and measured.

    Args:
        max_tpr_curve: The certified ``fpr`` and ``tpr``; None without a guarantee.
        attacks: Attacks as facts.

    Returns:
        The SVG, with logarithmic axes.
    """
    ticks = [(10.0**power, format_percent(10.0**power)) for power in range(-4, 1)]
    x = build_horizontal_axis(MIN_RATE, 1, is_log=True)
    y = build_vertical_axis(MIN_RATE, 1, is_log=True)
    elements = [_draw_axes(x, y, ticks, ticks, ("false-positive rate", "true-positive rate"))]
    if max_tpr_curve:
        points = list(zip(max_tpr_curve["fpr"], max_tpr_curve["tpr"], strict=True))
        elements.append(_draw_path("beyond", [(MIN_RATE, 1), *points, (1, 1)], x, y))
        elements.append(_draw_path("certified", points, x, y))
    elements.append(_draw_path("chance", [(MIN_RATE, MIN_RATE), (1, 1)], x, y))
    for index, attack in enumerate(attacks):
        elements += _draw_attack(attack, f"c{index % NUM_COLORS}", x, y)
    return _wrap_svg("Attack power: true-positive rate against false-positive rate", elements)


def _draw_attack(attack: dict[str, Any], color_class: str, x: Axis, y: Axis) -> list[Markup]:
    """Draw the curve of an attack, and its points with their lower bounds.

    Args:
        attack: An attack as facts.
        color_class: CSS class of its colour.
        x: Axis of false-positive rates.
        y: Axis of true-positive rates.

    Returns:
        The SVG elements.
    """
    elements = []
    has_curve = bool(attack["roc_curve"][0])
    fpr, tpr = attack["roc_curve"] if has_curve else (attack["fpr"], attack["tpr"])
    curve = sorted(zip(fpr, tpr, strict=True))
    if len(curve) > 1:
        elements.append(_draw_path(f"attack {color_class}", curve, x, y))
    for rate, true_rate, lower_bound, is_above in zip(
        attack["fpr"], attack["tpr"], attack["tpr_lower"], attack["exceeds_max_tpr"], strict=True
    ):
        css_class = "over" if is_above else color_class
        center = x(rate)
        bottom = y(lower_bound)
        elements.append(_draw_line(f"bar {css_class}", (center, bottom), (center, y(true_rate))))
        elements.append(_draw_line(f"bar {css_class}", (center - 4, bottom), (center + 4, bottom)))
        elements.append(
            Markup('<circle class="dot {}" cx="{}" cy="{}" r="3"/>').format(
                css_class, center, y(true_rate)
            )
        )
    return elements


def epsilon_chart(epsilon_by_step: Sequence[dict[str, Any]]) -> Markup:
    """Draw epsilon by step, with a dot at each computed point and a larger one at stage ends."""
    num_steps = epsilon_by_step[-1]["steps"]
    max_epsilon = max(point["epsilon"] for point in epsilon_by_step)
    top = max_epsilon * 1.1 or 1
    x = build_horizontal_axis(0, num_steps)
    y = build_vertical_axis(0, top)
    x_ticks, y_ticks = (
        [(value, format_number(value)) for value in _choose_ticks(high)]
        for high in (num_steps, top)
    )
    points = [(0, 0), *((point["steps"], point["epsilon"]) for point in epsilon_by_step)]
    elements = [
        _draw_axes(x, y, x_ticks, y_ticks, ("steps", "epsilon")),
        _draw_path("certified", points, x, y),
    ]
    next_stages = [point["stage"] for point in epsilon_by_step[1:]] + [None]
    for point, next_stage in zip(epsilon_by_step, next_stages, strict=True):
        radius = 2.5 if next_stage == point["stage"] else 4.5
        title = (
            f"{point['stage']}: epsilon {format_rounded_up(point['epsilon'])} "
            f"after {point['steps']:,} steps"
        )
        elements.append(
            Markup('<circle class="mark" cx="{}" cy="{}" r="{}"><title>{}</title></circle>').format(
                x(point["steps"]), y(point["epsilon"]), radius, title
            )
        )
    return _wrap_svg("Epsilon by step", elements)


def privacy_utility_chart(points: Sequence[Point], format_value: Callable[[float], str]) -> Markup:
    """Draw utility against privacy, with numbered points for a legend beside the chart.

    Args:
        points: Epsilon (on a logarithmic axis) and accuracy of each output.
        format_value: Formats an accuracy.

    Returns:
        The SVG.
    """
    low = min(epsilon for epsilon, _ in points)
    high = max(epsilon for epsilon, _ in points)
    left = 10.0 ** math.floor(math.log10(low) - 0.01)
    right = 10.0 ** math.ceil(math.log10(high) + 0.01)
    x = build_horizontal_axis(left, right, is_log=True)
    y = build_vertical_axis(0, 1)
    decades = [
        10.0**power for power in range(round(math.log10(left)), round(math.log10(right)) + 1)
    ]
    decades = decades[:: -(-len(decades) // 7)]
    x_ticks = [(value, format_number(value)) for value in decades]
    y_ticks = [(fifth / 5, format_value(fifth / 5)) for fifth in range(6)]
    elements = [_draw_axes(x, y, x_ticks, y_ticks, ("epsilon", "CNN accuracy"))]
    for index, (epsilon, accuracy) in enumerate(points):
        elements.append(
            Markup('<circle class="dot c{}" cx="{}" cy="{}" r="5"/>').format(
                index % NUM_COLORS, x(epsilon), y(accuracy)
            )
        )
        label_offset = 17 if index % 2 or accuracy > 0.95 else -9
        label_position = (x(epsilon), y(accuracy) + label_offset)
        elements.append(_draw_text("name", label_position, "middle", index + 1))
    return _wrap_svg("CNN accuracy against epsilon", elements)


def _choose_ticks(high: float) -> list[float]:
    """Choose about five round values from 0 to ``high``."""
    step = 10.0 ** math.floor(math.log10(high / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if high / (step * factor) <= 5)
    num_ticks = int(high / step + 1e-9) + 1
    return [float(f"{index * step:.6g}") for index in range(num_ticks)]
