"""The page of an inversion: did updates leak, by which tier, and pictures of the search on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from privot.report.html import render
from privot.report.images import uri


def page(facts: dict[str, Any], strip: Tensor, heads: Sequence[str]) -> bytes:
    """One HTML page. ``facts`` are those of `Inverted.to_json`, ``strip`` [columns, rows, c, h, w] has ``heads`` of its columns."""
    rows = [[uri(image) for image in row] for row in strip.transpose(0, 1).cpu()]
    tiers = [(name, each) for name, each in facts["tiers"].items() if name != "labels"]
    return render(
        "inversion.html.j2",
        "Does this gradient leak the image?",
        f=facts,
        tiers=tiers,
        rows=rows,
        heads=list(heads),
    )
