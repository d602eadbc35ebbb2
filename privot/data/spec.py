"""Spec: what the data owner declares about a data set. Declared means public."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import index
from typing import Any

from privot.errors import DataError, refusing

LARGEST = 4096  # pixels a side; what a hostile header can make us allocate is bounded by this


@dataclass(frozen=True)
class Spec:
    """Public facts: image ``shape`` (channels, height, width), number of ``classes``, and, only if declared, counts.

    ``owners`` is how many people or houses hold the records between them; whose a record is stays secret.

    >>> Spec((1, 28, 28), 10).pixels
    784
    """

    shape: tuple[int, int, int]
    classes: int
    size: int | None = None
    class_sizes: tuple[int, ...] | None = None
    class_names: tuple[str, ...] | None = None
    mirror: bool | None = (
        None  # whether a mirrored image is of the same class; None: if it has colours
    )
    owners: int | None = None  # None: one owner has them all

    def __post_init__(self) -> None:
        with refusing(
            DataError,
            "spec: shape is three whole numbers (channels, height, width), and counts are whole numbers",
        ):
            # Whole numbers of Python's own kind, since NumPy's do not go into JSON.
            channels, height, width = shape = tuple(map(index, self.shape))
            sizes = (
                self.class_sizes
                if self.class_sizes is None
                else tuple(map(index, self.class_sizes))
            )
            vars(self).update(
                shape=shape,
                classes=index(self.classes),
                class_sizes=sizes,
                size=self.size and index(self.size),
            )
            vars(self).update(owners=self.owners if self.owners is None else index(self.owners))
        if channels not in (1, 3) or not (0 < height <= LARGEST and 0 < width <= LARGEST):
            raise DataError(
                f"shape={self.shape}: 1 or 3 channels and sides of 1 to {LARGEST} pixels are supported"
            )
        if not 1 <= self.classes <= 100_000:
            raise DataError(f"classes={self.classes}: a number from 1 to 100000 is needed")
        if self.size is not None and self.size < 1:
            raise DataError("the data set has no records")
        if self.class_sizes is not None and (
            len(self.class_sizes) != self.classes or min(self.class_sizes) < 0
        ):
            raise DataError(f"class_sizes: {self.classes} counts are needed, one a class")
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise DataError(f"class_names: {self.classes} names are needed, one a class")

        if self.owners is not None and not 1 <= self.owners <= (self.size or 10**9):
            raise DataError(f"owners={self.owners}: at least one is needed, and a record for each")

    @property
    def pixels(self) -> int:
        return math.prod(self.shape)

    @property
    def mirrored(self) -> bool:
        return self.shape[0] > 1 if self.mirror is None else self.mirror

    def to_json(self) -> dict[str, Any]:
        facts = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
        }
        return (
            facts
            if self.owners
            else {key: value for key, value in facts.items() if key != "owners"}
        )  # older files say nothing of them

    @classmethod
    def from_json(cls, value: Any) -> Spec:
        with refusing(DataError, "not a spec"):
            return cls(
                **{  # type: ignore[arg-type]
                    key: tuple(each) if isinstance(each, list) else each
                    for key, each in value.items()
                }
            )
