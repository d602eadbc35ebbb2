"""Samples of a release as small PNG images inside the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from privot.release import Release
from privot.release.table_columns import infer_table_columns
from privot.report.formatting import clean_text
from privot.runtime.preview import to_uint8_images

MAX_SHOWN_CLASSES = 20
MAX_GRID_COLUMNS = 10
# The tensor in which the release of a flow stores its frames: [times, particles, channels, height,
# width].
SNAPSHOTS_TENSOR = "snapshots"
MAX_TABLE_ROWS = 10
MAX_TABLE_COLUMNS = 12
MAX_SHOWN_SIDE = 96  # pixels; larger images are reduced
# Of uncompressed pixels in a grid, so that a page stays under 3 MB even if PNG saves nothing.
MAX_GRID_BYTES = 1_400_000


def encode_data_uri(image: Tensor) -> str:
    """Encode an image [channels, height, width] in [0, 1] as a PNG data URI."""
    max_side = max(image.shape[1:])
    if max_side > MAX_SHOWN_SIDE:
        scale = MAX_SHOWN_SIDE / max_side
        size = [max(1, round(side * scale)) for side in image.shape[1:]]
        image = functional.interpolate(image[None], size=size, mode="area")[0]
    pixels = to_uint8_images(image[None])[0]
    if pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def format_class_name(class_names: tuple[str, ...] | None, label: int) -> str:
    """Format the name of a class for the page."""
    return clean_text(class_names[label], 40) if class_names else f"class {label}"


def count_images_per_row(
    shape: tuple[int, ...], num_rows: int, max_bytes: int = MAX_GRID_BYTES
) -> int:
    """Compute how many images fit in each row of a grid.

    Args:
        shape: Channels, height and width of an image.
        num_rows: Number of rows.
        max_bytes: Limit of the uncompressed pixels of the grid.

    Returns:
        From 1 to 10 images.

    >>> count_images_per_row((1, 28, 28), 10), count_images_per_row((3, 64, 64), 20)
    (10, 5)
    """
    channels, height, width = shape
    scale = min(1.0, MAX_SHOWN_SIDE / max(height, width))
    num_columns = int(max_bytes / (num_rows * channels * height * width * scale**2))
    return max(1, min(MAX_GRID_COLUMNS, num_columns))


def sample_table(release: Release) -> dict[str, Any] | None:
    """Sample rows of a table.

    Returns:
        ``names`` of the first columns and ``rows`` of values; None for a release of images.
    """
    columns = infer_table_columns(release)
    if columns is None:
        return None
    shown_columns = columns[:MAX_TABLE_COLUMNS]
    values = release.sample(MAX_TABLE_ROWS)[0].flatten(1).numpy()
    column_values = [
        column.cast_values(values[:, index]).tolist() for index, column in enumerate(shown_columns)
    ]
    return {
        "names": [column.name for column in shown_columns],
        "rows": list(map(list, zip(*column_values, strict=True))),
    }


def sample_grid(release: Release) -> list[dict[str, Any]]:
    """Sample images of each class.

    Returns:
        One row per class, with ``name`` and ``images`` (data URIs). A class that a released set
        does not contain has no images. A table has no rows.
    """
    if infer_table_columns(release) is not None:
        return []
    num_rows = min(MAX_SHOWN_CLASSES, release.spec.num_classes)
    num_columns = count_images_per_row(release.spec.shape, num_rows)
    labels_to_sample = list(range(num_rows))
    if release.artifact.kind == "set":
        present_labels = set(release.artifact.tensors["labels"].tolist())
        labels_to_sample = [label for label in labels_to_sample if label in present_labels]
    encoded: dict[int, list[str]] = {}
    if labels_to_sample:
        images, labels = release.sample(
            num_columns * len(labels_to_sample),
            torch.tensor(labels_to_sample).repeat_interleave(num_columns),
        )
        encoded = {
            label: [encode_data_uri(image) for image in images[labels == label]]
            for label in labels_to_sample
        }
    return [
        {
            "name": format_class_name(release.spec.class_names, label),
            "images": encoded.get(label, []),
        }
        for label in range(num_rows)
    ]


def flow_frames(release: Release) -> list[dict[str, Any]]:
    """Encode the frames of a flow: how particles move from their start to the result.

    The release may come from anyone, so frames of an unexpected shape are ignored.

    Returns:
        One row per particle, with ``name`` of its class and ``images`` (data URIs) at several
        times; no rows if the release has no frames.
    """
    if release.artifact.kind != "set":
        return []
    snapshots = release.artifact.resize_state.get(SNAPSHOTS_TENSOR)
    if (
        snapshots is None
        or snapshots.ndim != 5
        or tuple(snapshots.shape[2:]) != release.spec.shape
        or not snapshots.shape[1]
    ):
        return []
    if not 2 <= len(snapshots) <= MAX_GRID_COLUMNS or not snapshots.isfinite().all():
        return []
    num_rows = min(MAX_SHOWN_CLASSES, release.spec.num_classes, snapshots.shape[1])
    num_columns = min(count_images_per_row(release.spec.shape, num_rows), len(snapshots))
    times = torch.linspace(0, len(snapshots) - 1, num_columns).round().long()
    frames = snapshots.float().clamp(0, 1)[times]
    return [
        {
            "name": format_class_name(release.spec.class_names, row),
            "images": [encode_data_uri(image) for image in frames[:, row]],
        }
        for row in range(num_rows)
    ]
