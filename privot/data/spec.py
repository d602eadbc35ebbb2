"""What the data owner declares about a data set. Declared means public."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import index
from typing import Any

from privot.errors import DataError, reraise_as

MAX_IMAGE_SIDE = 4096  # pixels; bounds what a hostile header can make us allocate
MAX_CLASSES = 100_000
MAX_CLIENTS = 10**9  # where the number of records is not declared


@dataclass(frozen=True)
class Spec:
    """Public facts of a data set.

    Attributes:
        shape: Channels, height and width of an image.
        num_classes: The number of classes.
        size: The number of records, if declared.
        class_sizes: The number of records of each class, if declared.
        class_names: The names of the classes, if known.
        flip_invariant: Whether a mirrored image has the same class; None: if it has colours.
        num_clients: How many clients have the records between them; None: one has them all. Which
            client has which record stays secret.

    Raises:
        DataError: If a fact is out of range or two facts disagree.

    >>> Spec((1, 28, 28), 10).num_features
    784
    """

    shape: tuple[int, int, int]
    num_classes: int
    size: int | None = None
    class_sizes: tuple[int, ...] | None = None
    class_names: tuple[str, ...] | None = None
    flip_invariant: bool | None = None
    num_clients: int | None = None

    def __post_init__(self) -> None:
        with reraise_as(
            DataError,
            "A spec needs a shape of three integers (channels, height, width) and integer counts.",
        ):
            self._convert_integers()
        channels, height, width = self.shape
        is_supported_side = 0 < height <= MAX_IMAGE_SIDE and 0 < width <= MAX_IMAGE_SIDE
        if channels not in (1, 3) or not is_supported_side:
            raise DataError(
                f"shape={self.shape}: images need 1 or 3 channels, and sides of 1 to "
                f"{MAX_IMAGE_SIDE} pixels."
            )
        if not 1 <= self.num_classes <= MAX_CLASSES:
            raise DataError(f"classes={self.num_classes}: give a number from 1 to {MAX_CLASSES}.")
        if self.size is not None and self.size < 1:
            raise DataError(f"size={self.size}: a data set needs at least one record.")
        if self.class_sizes is not None and (
            len(self.class_sizes) != self.num_classes or min(self.class_sizes) < 0
        ):
            raise DataError(f"class_sizes: give {self.num_classes} counts, one per class.")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise DataError(f"class_names: give {self.num_classes} names, one per class.")
        if self.num_clients is not None and not 1 <= self.num_clients <= (self.size or MAX_CLIENTS):
            raise DataError(
                f"clients={self.num_clients}: there must be at least one client, and a record for "
                "each."
            )

    def _convert_integers(self) -> None:
        """Convert NumPy integers to Python integers, which JSON can store."""
        channels, height, width = map(index, self.shape)
        vars(self).update(
            shape=(channels, height, width),
            num_classes=index(self.num_classes),
            class_sizes=None if self.class_sizes is None else tuple(map(index, self.class_sizes)),
            size=self.size and index(self.size),
            num_clients=None if self.num_clients is None else index(self.num_clients),
        )

    @property
    def num_features(self) -> int:
        """Numbers in an image."""
        return math.prod(self.shape)

    @property
    def is_flip_invariant(self) -> bool:
        """Whether a mirrored image has the same class."""
        return self.shape[0] > 1 if self.flip_invariant is None else self.flip_invariant

    def to_json(self) -> dict[str, Any]:
        """Give plain data; `from_json` gives the same spec back."""
        facts = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }
        if not self.num_clients:
            del facts["num_clients"]
        return facts

    @classmethod
    def from_json(cls, value: Any) -> Spec:
        """Read what `to_json` gave.

        Raises:
            DataError: If the value is not a spec.
        """
        with reraise_as(DataError, "This is not a spec."):
            facts: dict[str, Any] = {
                name: tuple(fact) if isinstance(fact, list) else fact
                for name, fact in value.items()
            }
            return cls(**facts)
