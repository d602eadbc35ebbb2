"""Rendering of HTML pages: no scripts, no requests, and one style whose digest the page names."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from privot.report import charts
from privot.report.data_card import PRIVATE_MEASUREMENT_NOTICE
from privot.report.formatting import (
    clean_text,
    format_measurement,
    format_number,
    format_percent,
    format_rounded_up,
)

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'"
)
MAX_CHART_STEPS = 1e15  # more steps cannot be counted exactly in a float
METRIC_TITLES = {
    "is": "Inception score",
    "fid": "FID",
    "kid": "KID",
    "precision": "Precision",
    "recall": "Recall",
    "mlp_accuracy": "MLP accuracy",
    "cnn_accuracy": "CNN accuracy",
    "logistic_accuracy": "Logistic regression accuracy",
    "avg_accuracy": "Average accuracy",
    "calibrated_accuracy": "Calibrated accuracy",
}


@dataclass(frozen=True)
class PageImages:
    """The samples on a page, which are not part of its facts.

    Attributes:
        sample_rows: Samples by class, see `sample_grid`.
        frame_rows: Frames of a flow, see `flow_frames`.
        table_sample: Samples of a table, see `sample_table`; None for images.
    """

    sample_rows: Sequence[dict[str, Any]]
    frame_rows: Sequence[dict[str, Any]] = ()
    table_sample: dict[str, Any] | None = None


@cache
def build_template_environment() -> Environment:
    """Build the environment of the templates, in which every value is escaped."""
    environment = Environment(
        loader=PackageLoader("privot.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "format_number": format_number,
        "format_percent": format_percent,
        "format_rounded_up": format_rounded_up,
        "format_number_or_text": format_number_or_text,
        "format_metric_name": format_metric_name,
        "format_metric_result": format_metric_result,
        "describe_sampling": describe_sampling,
    }
    environment.globals |= {
        "private_measurement_notice": PRIVATE_MEASUREMENT_NOTICE,
        "format_measurement_or_dash": format_measurement_or_dash,
    }
    return environment


def render_template(template: str, title: str, **values: Any) -> bytes:
    """Render a page.

    Args:
        template: File name of the template.
        title: Title of the page.
        **values: Variables of the template.

    Returns:
        The HTML.
    """
    style = (Path(__file__).with_name("templates") / "style.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        build_template_environment()
        .get_template(template)
        .render(
            title=title,
            style=Markup(style),
            policy=Markup(CONTENT_SECURITY_POLICY.format(digest)),
            **values,
        )
        .encode()
    )


def render_report_page(
    context: dict[str, Any], images: PageImages, nearest_pairs: Sequence[dict[str, Any]] = ()
) -> bytes:
    """Render the page of the public or the internal report.

    Args:
        context: The facts, see `context.view`.
        images: The samples.
        nearest_pairs: Samples beside their nearest real records, see `compare_nearest_records`.

    Returns:
        The HTML.
    """
    epsilon_by_step = context["epsilon_by_step"]
    epsilon_chart = None
    if epsilon_by_step:
        last = epsilon_by_step[-1]
        if math.isfinite(float(last["epsilon"])) and last["steps"] < MAX_CHART_STEPS:
            epsilon_chart = charts.epsilon_chart(epsilon_by_step)
    return render_template(
        "page.html.j2",
        f"{context['name']}: privacy report",
        context=context,
        sample_rows=images.sample_rows,
        frame_rows=images.frame_rows,
        table_sample=images.table_sample,
        nearest_pairs=nearest_pairs,
        internal=context["privot"]["view"] == "internal",
        nearest=context.get("nearest"),
        history=context.get("history"),
        attack_power_chart=charts.attack_power_chart(context["max_tpr_curve"], context["attacks"]),
        epsilon_chart=epsilon_chart,
        strongest_points=[
            (attack, find_strongest_point(attack)) for attack in context["attacks"] if attack["fpr"]
        ],
    )


def find_strongest_point(attack: dict[str, Any]) -> int:
    """Find the point of an attack that is closest to the certificate, or furthest above it."""
    limits = attack["max_tpr"] or attack["fpr"]
    return max(
        range(len(limits)),
        key=lambda point: (
            attack["exceeds_max_tpr"][point],
            attack["tpr_lower"][point] / max(limits[point], 1e-12),
        ),
    )


def format_metric_name(name: str) -> str:
    """Format the name of a metric for readers.

    >>> format_metric_name("cnn_accuracy"), format_metric_name("my_measure")
    ('CNN accuracy', 'my measure')
    """
    return METRIC_TITLES.get(name, name.replace("_", " "))


def format_metric_result(result: dict[str, Any]) -> str:
    """Format value and error of a metric result."""
    return format_measurement(
        result["name"], float(result["value"]), float(result["standard_error"])
    )


def format_measurement_or_dash(name: str, value: float | None) -> str:
    """Format the value of a metric, or a dash for None."""
    return "–" if value is None else format_measurement(name, value)


def format_number_or_text(value: Any) -> str:
    """Format a number that may be stored as text, rounded up.

    >>> format_number_or_text("1.00004"), format_number_or_text("inf")
    ('1.001', 'infinite')
    """
    try:
        return format_rounded_up(float(value))
    except OverflowError:  # an integer that is too large for a float
        return format_number(value)
    except (TypeError, ValueError):
        return clean_text(value, 30)


def describe_sampling(sampling: dict[str, Any]) -> str:
    """Describe how the records of a step are sampled.

    >>> describe_sampling({"kind": "poisson", "sample_rate": 0.01})
    'each with probability 0.01'
    >>> describe_sampling({"kind": "full"})
    'all'
    """
    match sampling:
        case {"kind": "full"}:
            return "all"
        case {"kind": "poisson", "sample_rate": rate}:
            return f"each with probability {format_number(rate)}"
        case {"kind": "fixed", "sample_size": size, "dataset_size": dataset_size}:
            return f"{format_number(size)} of {format_number(dataset_size)}, without replacement"
        case {"kind": "shards", "num_shards": num_shards}:
            return f"one secret shard of {format_number(num_shards)}"
    return clean_text(sampling)
