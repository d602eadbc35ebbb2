"""From facts to one HTML page: no script, no request, one style whose digest the page's own policy names."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from privot.report import charts
from privot.report.data_card import PRICE
from privot.report.formatting import clean, measured, number, percent, up

POLICY = (
    "default-src 'none'; img-src data:; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'"
)
NAMES = {
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


@cache
def environment() -> Environment:
    """Templates of this folder, escaping always on."""
    made = Environment(
        loader=PackageLoader("privot.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    made.filters |= {
        "number": number,
        "percent": percent,
        "up": up,
        "short": short,
        "plain": plain,
        "reading": reading,
        "sampler": sampler,
    }
    made.globals |= {
        "price": PRICE,
        "figure": lambda name, value: "–" if value is None else measured(name, value),
    }
    return made


def render(template: str, title: str, **values: Any) -> bytes:
    """A whole page."""
    style = (Path(__file__).with_name("templates") / "style.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    made = environment().get_template(template)
    return made.render(
        title=title, style=Markup(style), policy=Markup(POLICY.format(digest)), **values
    ).encode()


def page(
    facts: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    pairs: Sequence[dict[str, Any]] = (),
    film: Sequence[dict[str, Any]] = (),
    table: dict[str, Any] | None = None,
) -> bytes:
    """The page of one face; ``rows`` are the samples by class, ``pairs`` samples beside real records, ``film`` particles on their way.

    ``table`` (``{"names", "rows"}``) are samples of a release of a table, which has no images.
    """
    steps = facts["epsilon_by_step"]
    return render(
        "page.html.j2",
        f"{facts['name']}: privacy report",
        f=facts,
        rows=rows,
        pairs=pairs,
        film=film,
        table=table,
        internal=facts["privot"]["face"] == "internal",
        near=facts.get("nearest"),
        history=facts.get("history"),
        sandwich=charts.sandwich(facts["curve"], facts["attacks"]),
        growth=charts.growth(steps)
        if steps and math.isfinite(float(steps[-1]["epsilon"])) and steps[-1]["steps"] < 1e15
        else None,
        strongest=[(each, strongest(each)) for each in facts["attacks"] if each["fpr"]],
    )


def strongest(attack: dict[str, Any]) -> int:
    """The point of an attack that comes closest to the certificate, or goes furthest beyond it."""
    limits = attack["certified"] or attack["fpr"]
    return max(
        range(len(limits)),
        key=lambda at: (attack["above"][at], attack["lower"][at] / max(limits[at], 1e-12)),
    )


def plain(name: str) -> str:
    """The name of a measure as people say it.

    >>> plain("cnn_accuracy"), plain("my_measure")
    ('CNN accuracy', 'my measure')
    """
    return NAMES.get(name, name.replace("_", " "))


def reading(each: dict[str, Any]) -> str:
    """Value and error of a reading's facts."""
    return measured(each["name"], float(each["value"]), float(each["error"]))


def short(value: Any) -> str:
    """A number that may have been written as text, rounded up.

    >>> short("1.00004"), short("inf")
    ('1.001', 'infinite')
    """
    try:
        return up(float(value))
    except OverflowError:  # of a whole number
        return number(value)
    except (TypeError, ValueError):
        return clean(value, 30)


def sampler(sampling: dict[str, Any]) -> str:
    """How records are drawn, in words.

    >>> sampler({"kind": "poisson", "rate": 0.01}), sampler({"kind": "full"})
    ('each with probability 0.01', 'all')
    """
    match sampling:
        case {"kind": "full"}:
            return "all"
        case {"kind": "poisson", "rate": rate}:
            return f"each with probability {number(rate)}"
        case {"kind": "fixed", "drawn": drawn, "size": size}:
            return f"{number(drawn)} of {number(size)}, without replacement"
        case {"kind": "shards", "count": count}:
            return f"one secret shard of {number(count)}"
    return clean(sampling)
