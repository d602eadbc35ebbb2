"""The result of a metric, and how it is read from a file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError, reraise_as
from privot.release import Release
from privot.release.verify import refuse_mismatched_release


@dataclass(frozen=True)
class MetricResult:
    """The value of a metric, with everything that two results must share to be comparable.

    Attributes:
        name: Name of the metric, such as "cnn_accuracy".
        value: The measured value.
        standard_error: Standard error of the value; NaN if unknown.
        num_samples: Number of synthetic images.
        reference: Name of the real data.
        reference_size: Number of real records.
        publishable: False if a sensitive record contributed to the value. Such a value is itself
            an unprotected release, and only the data owner may read it.
        protocol: Network, weights and settings. Only results with the same protocol are comparable.
        better: "higher" or "lower".
        warning: What may make the value misleading, or "".
        seconds: Wall time of the measurement.

    >>> result = MetricResult(
    ...     "cnn_accuracy", 0.905, 0.003, 60000, "mnist/test", 10000, True, "LeNet, 50 epochs"
    ... )
    >>> result.better
    'higher'
    """

    name: str
    value: float
    standard_error: float
    num_samples: int
    reference: str
    reference_size: int
    publishable: bool
    protocol: str = ""
    better: str = "higher"
    warning: str = ""
    seconds: float = 0.0

    @classmethod
    def from_json(cls, value: Any) -> MetricResult:
        """Build a result from the JSON form of ``dataclasses.asdict``.

        Raises:
            ReleaseError: A field is missing, unknown or of the wrong type.
        """
        with reraise_as(ReleaseError, "This is not the result of a metric"):
            field_types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
            fields: dict[str, Any] = {
                key: _parse_float(entry) if field_types[key] == "float" else entry
                for key, entry in value.items()
            }
            if any(type(entry).__name__ != field_types[key] for key, entry in fields.items()):
                raise TypeError
            return cls(**fields)


def _parse_float(value: Any) -> float:
    # JSON has no infinite numbers, so they are stored as text.
    if type(value) not in (int, float) and value not in ("nan", "inf", "-inf"):
        raise TypeError
    return float(value)


def load_metric_results(path: Path, release: Release | None = None) -> list[MetricResult]:
    """Load the results that ``privot measure --out`` wrote.

    Args:
        path: The JSON file.
        release: If given, the results must be of this release.

    Returns:
        The results, in the order of the file.

    Raises:
        ReleaseError: The file has another format, or it is about another release.
    """
    message = (
        f"{path} is not a file of metric results. Name a file that `privot measure --out` wrote."
    )
    with reraise_as(ReleaseError, message):
        content = json.loads(path.read_text())
        results = content["results"]
    if release:
        refuse_mismatched_release(release, content, path)
    try:
        return [MetricResult.from_json(result) for result in results]
    except (ReleaseError, TypeError):  # TypeError: "results" is not a list
        raise ReleaseError(message) from None
