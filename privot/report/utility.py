"""Metric results as a table, beside the results that papers report on the same data."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from privot.measures.result import MetricResult
from privot.report.formatting import clean_text

# The protocol of a private measurement contains this phrase, see `private_accuracy`.
PRIVATE_MEASUREMENT_MARKER = "through the gate at epsilon"


@cache
def load_published_results() -> dict[str, list[dict[str, Any]]]:
    """Load published results: ``real`` (real training data) and ``figures`` (private methods)."""
    return tomllib.loads(Path(__file__).with_name("published_results.toml").read_text())


def find_published_results(
    dataset_name: str, epsilon: float | None, metrics: Sequence[str]
) -> list[dict[str, Any]]:
    """Find results of private methods on the same data, at the published epsilon closest to ours.

    Args:
        dataset_name: Name of the dataset.
        epsilon: Our epsilon; infinite to find results without noise. None finds nothing.
        metrics: The metrics to look for.

    Returns:
        One row per method, with ``figures`` by metric. The distance of epsilons is their ratio.

    >>> [row["method"] for row in find_published_results("mnist", 0.9, ["is"])]
    ['DPGAN', 'GS-WGAN', 'DP-MERF', 'DP-Sinkhorn']
    """
    if epsilon is None:
        return []
    rows = [
        row
        for row in load_published_results()["figures"]
        if row["data"] == dataset_name and any(name in row["figures"] for name in metrics)
    ]
    epsilons = {row["epsilon"] for row in rows if math.isinf(row["epsilon"]) == math.isinf(epsilon)}
    if not epsilons:
        return []
    closest = epsilon
    if math.isfinite(epsilon):
        positive_epsilon = max(epsilon, 1e-9)
        closest = min(epsilons, key=lambda level: (abs(math.log(level / positive_epsilon)), level))
    return [
        {
            **row,
            "figures": {name: value for name, value in row["figures"].items() if name in metrics},
        }
        for row in rows
        if row["epsilon"] == closest
    ]


def find_real_data_results(dataset_name: str) -> dict[str, Any]:
    """Find results of real training data, with their source; empty if there are none."""
    return next(
        (row for row in load_published_results()["real"] if row["data"] == dataset_name), {}
    )


def strip_folders(reference: str) -> str:
    """Remove the folders from a path; they say something about the machine.

    >>> strip_folders("/home/ann/test.npz"), strip_folders("mnist/test")
    ('test.npz', 'mnist/test')
    """
    if not re.match(r"[/\\~]|[A-Za-z]:[/\\]", reference):
        return reference
    return re.split(r"[/\\]+", reference.rstrip("/\\"))[-1]


def describe_metric_result(result: MetricResult) -> dict[str, Any]:
    """Convert a result to facts with clean text.

    Returns:
        The fields except ``seconds``, and ``privately_measured``: whether the value was measured
        on sensitive data with an epsilon that its protocol names.
    """
    facts = {
        key: clean_text(value, 400) if isinstance(value, str) and value else value
        for key, value in dataclasses.asdict(result).items()
    }
    del facts["seconds"]  # depends on the machine, not on the release
    return {
        **facts,
        "name": clean_text(result.name, 60),
        "reference": clean_text(strip_folders(result.reference), 60),
        "privately_measured": PRIVATE_MEASUREMENT_MARKER in result.protocol,
    }


def summarize_utility(
    results: Sequence[MetricResult], dataset_name: str, epsilon: float | None
) -> dict[str, Any]:
    """Collect what the page says about utility.

    Args:
        results: Results of metrics.
        dataset_name: Name of the dataset the release was made from.
        epsilon: Epsilon of the release; None if unknown.

    Returns:
        ``results``, each with the value of real data; ``published`` rows with their
        ``published_measures``; ``real_data_source``.
    """
    names = list(dict.fromkeys(result.name for result in results))
    real_data = find_real_data_results(dataset_name)
    rows = [
        {
            **describe_metric_result(result),
            "real_data": real_data.get("figures", {}).get(result.name),
        }
        for result in results
    ]
    published = find_published_results(dataset_name, epsilon, names)
    return {
        "results": rows,
        "published": published,
        "published_measures": [
            name for name in names if any(name in row["figures"] for row in published)
        ],
        "real_data_source": real_data.get("source", ""),
    }
