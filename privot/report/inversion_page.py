"""The page of a gradient inversion: whether updates leak images, and frames of the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from privot.report.html import render_template
from privot.report.images import encode_data_uri


def render_inversion_page(
    context: dict[str, Any], snapshots: Tensor, column_titles: Sequence[str]
) -> bytes:
    """Render the page of an inversion.

    Args:
        context: The JSON form of an inversion result.
        snapshots: Images of the search [columns, rows, channels, height, width] in [0, 1].
        column_titles: Title of each column, such as the step.

    Returns:
        The HTML.
    """
    image_rows = [
        [encode_data_uri(image) for image in row] for row in snapshots.transpose(0, 1).cpu()
    ]
    tiers = [(name, tier) for name, tier in context["tiers"].items() if name != "labels"]
    return render_template(
        "inversion.html.j2",
        "Does this gradient leak the image?",
        context=context,
        tiers=tiers,
        image_rows=image_rows,
        column_titles=list(column_titles),
    )
