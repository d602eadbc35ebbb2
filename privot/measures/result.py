"""A measured number and what it rests on."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError, refusing
from privot.release import Release, refuse_other


@dataclass(frozen=True)
class Reading:
    """``value`` with its standard ``error``, of ``samples`` released images against ``count`` records of ``reference``.

    ``ruler`` names all that two readings must share to be compared: network, weights, protocol. ``publishable`` is False when a
    sensitive record had a part in the number: then it is itself an unprotected release, for the owner alone.

    >>> Reading("cnn_accuracy", 0.905, 0.003, 60000, "mnist/test", 10000, True, "LeNet, 50 epochs").better
    'higher'
    """

    name: str
    value: float
    error: float  # NaN where none is known
    samples: int
    reference: str
    count: int
    publishable: bool
    ruler: str = ""
    better: str = "higher"  # or "lower"
    warning: str = ""
    seconds: float = 0.0

    @classmethod
    def from_json(cls, value: Any) -> Reading:
        """The inverse of ``dataclasses.asdict``; fields of the wrong kind are refused."""
        with refusing(ReleaseError, "not a reading"):
            wanted = {each.name: str(each.type) for each in dataclasses.fields(cls)}
            fields: dict[str, Any] = {
                key: _number(each) if wanted[key] == "float" else each
                for key, each in value.items()
            }
            if any(type(each).__name__ != wanted[key] for key, each in fields.items()):
                raise TypeError
            return cls(**fields)


def _number(value: Any) -> float:
    if type(value) not in (int, float) and value not in (
        "nan",
        "inf",
        "-inf",
    ):  # these come as text: JSON has none
        raise TypeError
    return float(value)


def read(path: Path, release: Release | None = None) -> list[Reading]:
    """Readings that ``privot measure --out`` wrote; if of another than a given ``release``, refused."""
    wrong = f"{path}: not a file of readings; name one that `privot measure --out` wrote"
    with refusing(ReleaseError, wrong):
        said = json.loads(path.read_text())
        found = said["readings"]
    if release:
        refuse_other(release, said, path)
    try:
        return [Reading.from_json(each) for each in found]
    except (ReleaseError, TypeError):  # of one of them, or of no list at all
        raise ReleaseError(wrong) from None
