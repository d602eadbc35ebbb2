"""Several outputs side by side, ours or foreign: what is promised, how they look, what they are good for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError
from privot.measures.result import Reading
from privot.measures.samples import Subject
from privot.progress import jsonable
from privot.release import Guarantee
from privot.report import charts, output_folder
from privot.report.formatting import clean, measured, number
from privot.report.html import render
from privot.report.images import BYTES, CLASSES, columns, labelled, uri
from privot.report.privacy_curves import recorded
from privot.report.statement import verdict
from privot.report.utility import row

FILES = frozenset({"comparison.html", "comparison.json"})
FOREIGN = "foreign: no certificate"


Measured = tuple[Subject, Sequence[Reading]]


def compare(subjects: Sequence[Measured], out: Path) -> Path:
    """Write comparison.html and comparison.json for outputs with their readings into the folder ``out``; returns the page's path."""
    if not subjects:
        raise ReleaseError("nothing to compare: name at least one output")
    facts = _facts(subjects)
    points = [
        (each["name"], float(each["epsilon"]), each["accuracy"])
        for each in facts["subjects"]
        if each["epsilon"] is not None
        and each["accuracy"] is not None
        and 0 < float(each["epsilon"]) < math.inf
    ]
    chart = (
        charts.scatter([each[1:] for each in points], lambda value: f"{100 * value:.0f} %")
        if points
        else None
    )
    grids = [_grid(each, BYTES // len(subjects)) for each, _ in subjects]
    html = render(
        "comparison.html.j2", "Comparison", f=facts, grids=grids, chart=chart, points=points
    )
    text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    private = not all(each.publishable for _, readings in subjects for each in readings)
    return output_folder.replace(
        out,
        {"comparison.html": html, "comparison.json": text},
        FILES,
        "comparison.json",
        private=private,
    )[0]


def _facts(subjects: Sequence[Measured]) -> dict[str, Any]:
    held = []
    for each, readings in subjects:
        claim = each.guarantee
        if each.release and isinstance(claim, Guarantee):
            recorded(
                each.release, clean(each.name, 60)
            )  # a promise that nothing proves is not shown beside others
        power = next(
            (reading.value for reading in readings if reading.name == "cnn_accuracy"), None
        )
        held.append(
            {
                "name": clean(each.name, 60),
                "verdict": verdict(claim) if claim else FOREIGN,
                "kind": type(claim).__name__ if claim else "foreign",
                "neighbours": claim.neighbours if isinstance(claim, Guarantee) else "",
                "epsilon": claim.epsilon if isinstance(claim, Guarantee) else None,
                "delta": claim.delta if isinstance(claim, Guarantee) else None,
                "accuracy": power,
                "count": len(each.labels),
                "readings": [row(reading) for reading in readings],
            }
        )
    relations = {each["neighbours"] for each in held if each["neighbours"]}
    return jsonable(
        {
            "privot": {"comparison": 1},
            "internal": any(
                not reading.publishable for _, readings in subjects for reading in readings
            ),
            "relations": sorted(relations),
            "deltas": sorted({each["delta"] for each in held if each["delta"] is not None}),
            "subjects": held,
            "measures": [
                _measure(name, subjects)
                for name in dict.fromkeys(
                    each.name for _, readings in subjects for each in readings
                )
            ],
        }
    )


def _measure(name: str, subjects: Sequence[Measured]) -> dict[str, Any]:
    """A row: one cell a subject, the best of them by the readings' own word, and whether all were measured alike."""
    found = [
        next((each for each in readings if each.name == name), None) for _, readings in subjects
    ]
    there = [each for each in found if each is not None]
    same = len({(each.ruler, each.reference, each.better) for each in there}) == 1
    alike = same and len({(each.samples, each.count) for each in there}) == 1
    sign = -1 if there[0].better == "lower" else 1
    values = [sign * each.value for each in there if math.isfinite(each.value)]
    best = max(values) if alike and len(there) > 1 and values else None
    cells: list[dict[str, Any] | None] = [
        {
            "text": measured(each.name, each.value, each.error),
            "best": best is not None and sign * each.value == best,
            "internal": not each.publishable,
            "ruler": row(each)["ruler"],
            "sizes": f"{number(each.samples)} images, {number(each.count)} records",
            "warning": row(each)["warning"],
            "paid": row(each)["paid"],
        }
        if each
        else None
        for each in found
    ]
    apart = (
        ""
        if alike
        else "on different numbers of images or records"
        if same
        else "with different rulers"
    )
    return {
        "name": clean(name, 60),
        "better": clean(there[0].better, 20),
        "comparable": alike,
        "apart": apart,
        "cells": cells,
    }


def _grid(subject: Subject, budget: int) -> list[dict[str, Any]]:
    labels = subject.labels.unique().tolist()[:CLASSES]
    across = min(5, columns(tuple(subject.images.shape[1:]), max(1, len(labels)), budget))
    names = (
        subject.class_names
        if subject.class_names and labels and len(subject.class_names) > max(labels)
        else None
    )
    rows = []
    for label in labels:
        chosen = (subject.labels == label).nonzero().flatten()[:across]
        rows.append(
            {
                "name": labelled(names, int(label)),
                "images": [uri(image) for image in subject.images[chosen].float()],
            }
        )
    return rows
