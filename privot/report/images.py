"""Samples as small PNGs inside the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from privot.release import Release
from privot.release.export import table_columns, to_bytes
from privot.report.formatting import clean

CLASSES = 20
COLUMNS = 10
STRIP = "strip"  # what a flow's release keeps for this page: [times, particles, channels, height, width]
# shown of a table
TABLE_ROWS = 10
TABLE_COLUMNS = 12
SIDE = 96  # pixels; larger images are shown reduced
BYTES = 1_400_000  # of raw pixels in a grid, so that a page stays under 3 MB even where PNG saves nothing


def uri(image: Tensor) -> str:
    """An image [channels, height, width] in [0, 1] as a data URI."""
    if max(image.shape[1:]) > SIDE:
        scale = SIDE / max(image.shape[1:])
        size = [max(1, round(side * scale)) for side in image.shape[1:]]
        image = functional.interpolate(image[None], size=size, mode="area")[0]
    pixels = to_bytes(image[None])[0]
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(
        buffer, "PNG", optimize=True
    )
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def labelled(names: tuple[str, ...] | None, label: int) -> str:
    """The name of a class, fit to be shown."""
    return clean(names[label], 40) if names else f"class {label}"


def columns(shape: tuple[int, ...], rows: int, budget: int = BYTES) -> int:
    """How many images of a shape fit in each of ``rows`` rows.

    >>> columns((1, 28, 28), 10), columns((3, 64, 64), 20)
    (10, 5)
    """
    channels, height, width = shape
    scale = min(1.0, SIDE / max(height, width))
    return max(1, min(COLUMNS, int(budget / (rows * channels * height * width * scale**2))))


def sample_table(release: Release) -> dict[str, Any] | None:
    """Samples of a release of a table: names of its first columns and rows of their values; None for images."""
    columns = table_columns(release)
    if columns is None:
        return None
    numbers = release.sample(TABLE_ROWS)[0].flatten(1).numpy()
    values = [
        each.values(numbers[:, place]).tolist()
        for place, each in enumerate(columns[:TABLE_COLUMNS])
    ]
    return {
        "names": [each.name for each in columns[:TABLE_COLUMNS]],
        "rows": list(map(list, zip(*values, strict=True))),
    }


def grid(release: Release) -> list[dict[str, Any]]:
    """Rows of samples, one a class: ``{"name", "images"}``; a class of which a set holds nothing has an empty row."""
    if table_columns(release) is not None:
        return []
    rows = min(CLASSES, release.spec.classes)
    across = columns(release.spec.shape, rows)
    shown = list(range(rows))
    if release.product.kind == "set":
        held = set(release.product.tensors["labels"].tolist())
        shown = [label for label in shown if label in held]
    pictures: dict[int, list[str]] = {}
    if shown:
        images, labels = release.sample(
            across * len(shown), torch.tensor(shown).repeat_interleave(across)
        )
        pictures = {label: [uri(image) for image in images[labels == label]] for label in shown}
    return [
        {"name": labelled(release.spec.class_names, label), "images": pictures.get(label, [])}
        for label in range(rows)
    ]


def film(release: Release) -> list[dict[str, Any]]:
    """Rows of pictures of one particle each, at several times of a flow, if the release kept a strip: ``{"name", "images"}``.

    The file may be anyone's: what is no strip of images of this release's shape is left out.
    """
    found = release.product.kept.get(STRIP) if release.product.kind == "set" else None
    if (
        found is None
        or found.ndim != 5
        or tuple(found.shape[2:]) != release.spec.shape
        or not found.shape[1]
    ):
        return []
    most = columns(release.spec.shape, rows := min(CLASSES, release.spec.classes, found.shape[1]))
    if not 2 <= len(found) <= COLUMNS or not found.isfinite().all():
        return []
    places = torch.linspace(0, len(found) - 1, min(most, len(found))).round().long()
    shown = found.float().clamp(0, 1)[places]  # [times, particles, ...]
    names = [labelled(release.spec.class_names, label) for label in range(rows)]
    return [
        {"name": name, "images": [uri(image) for image in shown[:, row]]}
        for row, name in enumerate(names)
    ]
