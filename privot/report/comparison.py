"""A page that compares several outputs: privacy guarantee, utility and samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError
from privot.io import to_jsonable
from privot.measures.result import MetricResult
from privot.measures.samples import Samples
from privot.privacy.guarantee import Guarantee
from privot.report import charts, output_folder
from privot.report.formatting import clean_text, format_measurement, format_number
from privot.report.html import render_template
from privot.report.images import (
    MAX_GRID_BYTES,
    MAX_SHOWN_CLASSES,
    count_images_per_row,
    encode_data_uri,
    format_class_name,
)
from privot.report.output_folder import FolderFormat
from privot.report.privacy_curves import verify_recorded_plan
from privot.report.statement import format_guarantee
from privot.report.utility import describe_metric_result

COMPARISON_FORMAT = FolderFormat(
    frozenset({"comparison.html", "comparison.json"}), "comparison.json"
)
NO_CERTIFICATE_VERDICT = "foreign: no certificate"
MAX_SAMPLE_COLUMNS = 5

MeasuredSamples = tuple[Samples, Sequence[MetricResult]]


def compare(outputs: Sequence[MeasuredSamples], out: Path) -> Path:
    """Write comparison.html and comparison.json.

    Args:
        outputs: Samples of each output and their metric results.
        out: The folder. Only the user can read it if a result is not publishable.

    Returns:
        The path of the page.

    Raises:
        ReleaseError: There is no output, a guarantee is not proven, or the folder contains other
            files.
    """
    if not outputs:
        raise ReleaseError("There is nothing to compare. Name at least one output.")
    context = _build_comparison(outputs)
    points = [
        (output["name"], float(output["epsilon"]), output["accuracy"])
        for output in context["outputs"]
        if output["epsilon"] is not None
        and output["accuracy"] is not None
        and 0 < float(output["epsilon"]) < math.inf
    ]
    chart = None
    if points:
        chart = charts.privacy_utility_chart(
            [(epsilon, accuracy) for _, epsilon, accuracy in points],
            lambda value: f"{100 * value:.0f} %",
        )
    max_bytes = MAX_GRID_BYTES // len(outputs)
    html = render_template(
        "comparison.html.j2",
        "Comparison",
        context=context,
        grids=[_build_sample_rows(samples, max_bytes) for samples, _ in outputs],
        chart=chart,
        points=points,
    )
    text = json.dumps(context, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    return output_folder.replace_directory(
        out,
        {"comparison.html": html, "comparison.json": text},
        COMPARISON_FORMAT,
        private=context["internal"],
    )[0]


def _build_comparison(outputs: Sequence[MeasuredSamples]) -> dict[str, Any]:
    """Collect the facts of the page."""
    described_outputs = [_describe_output(samples, results) for samples, results in outputs]
    all_results = [result for _, results in outputs for result in results]
    neighbours = {output["neighbours"] for output in described_outputs if output["neighbours"]}
    deltas = {output["delta"] for output in described_outputs if output["delta"] is not None}
    return to_jsonable(
        {
            "privot": {"comparison": 1},
            "internal": any(not result.publishable for result in all_results),
            "relations": sorted(neighbours),
            "deltas": sorted(deltas),
            "outputs": described_outputs,
            "measures": [
                _compare_metric(name, outputs)
                for name in dict.fromkeys(result.name for result in all_results)
            ],
        }
    )


def _describe_output(samples: Samples, results: Sequence[MetricResult]) -> dict[str, Any]:
    """Describe an output. Raises a ReleaseError if its guarantee is not proven."""
    guarantee = samples.guarantee
    is_guaranteed = isinstance(guarantee, Guarantee)
    if samples.release and is_guaranteed:
        verify_recorded_plan(samples.release, clean_text(samples.name, 60))
    return {
        "name": clean_text(samples.name, 60),
        "verdict": format_guarantee(guarantee) if guarantee else NO_CERTIFICATE_VERDICT,
        "kind": type(guarantee).__name__ if guarantee else "foreign",
        "neighbours": guarantee.neighbours if isinstance(guarantee, Guarantee) else "",
        "epsilon": guarantee.epsilon if isinstance(guarantee, Guarantee) else None,
        "delta": guarantee.delta if isinstance(guarantee, Guarantee) else None,
        "accuracy": next(
            (result.value for result in results if result.name == "cnn_accuracy"), None
        ),
        "num_samples": len(samples.labels),
        "results": [describe_metric_result(result) for result in results],
    }


def _compare_metric(name: str, outputs: Sequence[MeasuredSamples]) -> dict[str, Any]:
    """Compare one metric over all outputs.

    Args:
        name: Name of the metric.
        outputs: The outputs.

    Returns:
        A row with one cell per output (None if not measured), and whether the values are
        comparable: measured with the same protocol on the same numbers of images and records.
    """
    cells = [
        next((result for result in results if result.name == name), None) for _, results in outputs
    ]
    measured = [result for result in cells if result is not None]
    protocols = {(result.protocol, result.reference, result.better) for result in measured}
    sizes = {(result.num_samples, result.reference_size) for result in measured}
    is_comparable = len(protocols) == 1 and len(sizes) == 1
    difference = ""
    if len(protocols) > 1:
        difference = "with different protocols"
    elif len(sizes) > 1:
        difference = "on different numbers of images or records"
    sign = -1 if measured[0].better == "lower" else 1
    finite_values = [sign * result.value for result in measured if math.isfinite(result.value)]
    best = None
    if is_comparable and len(measured) > 1 and finite_values:
        best = max(finite_values)
    return {
        "name": clean_text(name, 60),
        "better": clean_text(measured[0].better, 20),
        "comparable": is_comparable,
        "difference": difference,
        "cells": [
            result and _describe_cell(result, best is not None and sign * result.value == best)
            for result in cells
        ],
    }


def _describe_cell(result: MetricResult, is_best: bool) -> dict[str, Any]:
    facts = describe_metric_result(result)
    num_images = format_number(result.num_samples)
    num_records = format_number(result.reference_size)
    return {
        "text": format_measurement(result.name, result.value, result.standard_error),
        "best": is_best,
        "internal": not result.publishable,
        "protocol": facts["protocol"],
        "sizes": f"{num_images} images, {num_records} records",
        "warning": facts["warning"],
        "privately_measured": facts["privately_measured"],
    }


def _build_sample_rows(samples: Samples, max_bytes: int) -> list[dict[str, Any]]:
    """Encode the first images of each class as rows with ``name`` and ``images``."""
    labels = samples.labels.unique().tolist()[:MAX_SHOWN_CLASSES]
    shape = tuple(samples.images.shape[1:])
    num_columns = min(
        MAX_SAMPLE_COLUMNS, count_images_per_row(shape, max(1, len(labels)), max_bytes)
    )
    class_names = None
    if samples.class_names and labels and len(samples.class_names) > max(labels):
        class_names = samples.class_names
    rows = []
    for label in labels:
        indices = (samples.labels == label).nonzero().flatten()[:num_columns]
        rows.append(
            {
                "name": format_class_name(class_names, int(label)),
                "images": [encode_data_uri(image) for image in samples.images[indices].float()],
            }
        )
    return rows
