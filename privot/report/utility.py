"""Readings as a table, with what papers report on the same data beside them."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from privot.measures.result import Reading
from privot.report.formatting import clean

PAID = "through the gate at epsilon"  # so a ruler says that its number was bought


@cache
def published() -> dict[str, list[dict[str, Any]]]:
    """Known figures: ``real`` (trained on real data) and ``figures`` (private methods)."""
    return tomllib.loads(Path(__file__).with_name("published_results.toml").read_text())


def beside(data: str, epsilon: float | None, names: Sequence[str]) -> list[dict[str, Any]]:
    """Figures of private methods on the same data, at the published epsilon closest to ours (by ratio), for these measures.

    Without noise (infinite) stands beside without noise; where our own epsilon is unknown (None), nothing does.

    >>> [row["method"] for row in beside("mnist", 0.9, ["is"])]
    ['DPGAN', 'GS-WGAN', 'DP-MERF', 'DP-Sinkhorn']
    """
    if epsilon is None:
        return []
    rows = [
        row
        for row in published()["figures"]
        if row["data"] == data and any(name in row["figures"] for name in names)
    ]
    levels = {row["epsilon"] for row in rows if math.isinf(row["epsilon"]) == math.isinf(epsilon)}
    if not levels:
        return []
    level = (
        epsilon
        if math.isinf(epsilon)
        else min(levels, key=lambda each: (abs(math.log(each / max(epsilon, 1e-9))), each))
    )
    kept = [row for row in rows if row["epsilon"] == level]
    return [
        {**row, "figures": {name: value for name, value in row["figures"].items() if name in names}}
        for row in kept
    ]


def ceiling(data: str) -> dict[str, Any]:
    """Figures for real data itself, and where they come from; empty where none are known."""
    return next((row for row in published()["real"] if row["data"] == data), {})


def placeless(reference: str) -> str:
    """A reference without the folders of the machine on which it lies.

    >>> placeless("/home/ann/test.npz"), placeless("mnist/test")
    ('test.npz', 'mnist/test')
    """
    if not re.match(r"[/\\~]|[A-Za-z]:[/\\]", reference):
        return reference
    return re.split(r"[/\\]+", reference.rstrip("/\\"))[-1]


def row(reading: Reading) -> dict[str, Any]:
    """A reading as facts: text that can be shown, and ``paid``: bought on sensitive data, at the price that its ruler names."""
    held = {
        key: clean(value, 400) if isinstance(value, str) and value else value
        for key, value in dataclasses.asdict(reading).items()
    }
    del held["seconds"]  # says something of the machine, nothing of the release
    return {
        **held,
        "name": clean(reading.name, 60),
        "reference": clean(placeless(reading.reference), 60),
        "paid": PAID in reading.ruler,
    }


def utility(readings: Sequence[Reading], data: str, epsilon: float | None) -> dict[str, Any]:
    """All that the page says about use."""
    names = list(dict.fromkeys(reading.name for reading in readings))
    top = ceiling(data)
    rows = [
        {**row(reading), "real_data": top.get("figures", {}).get(reading.name)}
        for reading in readings
    ]
    others = beside(data, epsilon, names)
    columns = [name for name in names if any(name in row["figures"] for row in others)]
    return {
        "readings": rows,
        "published": others,
        "published_measures": columns,
        "real_data_source": top.get("source", ""),
    }
