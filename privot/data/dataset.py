"""Sensitive and Public: a box of labelled images, sealed or open."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from privot.data.spec import Spec
from privot.errors import DataError

NOBODY = -1  # the index of no record
CHECKED = 8192  # records looked at in one go, so that a memory-mapped file never comes in whole


class Records(NamedTuple):
    """``images`` float32 in [0, 1], [count, channels, height, width]; ``labels`` int64, [count]."""

    images: Tensor
    labels: Tensor


class _Box:
    """Every record is checked on the way in: shape, finite, in range, label in range.

    ``repair=True`` mends instead of refusing, record by record: non-finite records become black, values are clipped into range.
    Images are uint8 (0 to 255) or float (0 to 1), [count, channels, height, width]; they may be memory-mapped. ``name`` is the
    owner's name for the data, by which its ledger is found. ``owners`` [count] says whose a record is, 0 to ``spec.owners`` - 1; where
    that is not said, the gate deals records to so many owners by its secret order (`_owners_by`).
    """

    __slots__ = ("_images", "_labels", "_owners", "name", "spec")

    def __init__(
        self,
        images: Any,
        labels: Any,
        spec: Spec,
        *,
        repair: bool = False,
        name: str = "",
        owners: Any = None,
    ):
        images = np.asarray(images)
        labels = np.asarray(labels)
        if images.shape[1:] != spec.shape or len(images) == 0:
            raise DataError(
                f"images have shape {list(images.shape)}, but [count, {', '.join(map(str, spec.shape))}] was declared"
            )
        if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
            raise DataError(
                f"labels: one whole number for each of the images is needed, not {labels.dtype} {list(labels.shape)}"
            )
        if images.dtype != np.uint8 and images.dtype.kind != "f":
            raise DataError(
                f"images are {images.dtype}: uint8 (0 to 255) or float (0 to 1) is needed"
            )
        if labels.min() < 0 or labels.max() >= spec.classes:
            raise DataError(
                f"labels go outside 0 to {spec.classes - 1}: number them from 0 without gaps, or declare as many classes as there are"
            )
        labels = labels.astype(np.int64)
        if spec.size not in (None, len(images)):
            raise DataError("the number of records is not the declared size")
        if spec.class_sizes is not None and not np.array_equal(
            np.bincount(labels, minlength=spec.classes), spec.class_sizes
        ):
            raise DataError("the records of the classes are not as many as declared in class_sizes")
        if images.dtype.kind == "f":
            images = _bounded(images, repair)
        self.spec = spec
        self.name = name
        self._images = images
        self._labels = labels
        self._owners = _held(owners, len(images), spec.owners)

    def _count(self) -> int:
        return len(self._images)

    def _owners_by(self, order: np.ndarray) -> np.ndarray:
        """Assign every record to an owner.

        Args:
            order: A permutation of the records, int64 [count]. It matters only where the owners are
                not known: the record at position p of it then belongs to owner p mod ``spec.owners``.

        Returns:
            The owner of each record, in the order of the file: int64 [count].
        """
        if self._owners is not None:
            return self._owners
        owners = np.empty(self._count(), np.int64)
        owners[order] = np.arange(self._count()) % (self.spec.owners or 1)
        return owners

    def _laid(self, shards: Tensor, parts: int, most: int, order: np.ndarray) -> Tensor:
        """Lay out the records of each shard: shard s has part s mod ``parts`` of what owner s // ``parts`` holds.

        privacy: all shapes are public, and a row depends on what its owner holds alone: of more than ``most`` records some are left out,
        evenly, and fewer come several times. Which of them, and which part has them, follows the secret order.

        Args:
            shards: The shards to lay out, int64 [shards].
            parts: Shards of an owner.
            most: Records that a shard shows.
            order: The secret permutation of the records, int64 [count].

        Returns:
            Indices of records, int64 [shards, most]; NOBODY where a part has no record.
        """
        owners = self._owners_by(order)
        found = []
        grouped = order[np.argsort(owners[order], kind="stable")]
        ends = np.cumsum(np.bincount(owners, minlength=self.spec.owners or 1))
        for shard in shards.tolist():
            owner, part = divmod(shard, parts)
            own = grouped[ends[owner - 1] if owner else 0 : ends[owner]][part::parts]
            # privacy: that an owner has fewer records than parts must not show, so a part without any has none at its places.
            found.append(
                own[np.arange(most) * len(own) // most] if len(own) else np.full(most, NOBODY)
            )
        return torch.from_numpy(np.stack(found))

    def _take(self, where: slice | Tensor, device: str | torch.device = "cpu") -> Records:
        """Secret side only: the gate, and the owner's own measurements and attacks."""
        index = where if isinstance(where, slice) else where.numpy()
        kind = (
            np.uint8 if self._images.dtype == np.uint8 else np.float32
        )  # torch knows neither big-endian nor long floats
        images = torch.from_numpy(np.array(self._images[index], kind)).to(device)
        scaled = images / 255 if kind is np.uint8 else images
        return Records(scaled, torch.from_numpy(self._labels[index].copy()).to(device))

    def _near(self, device: torch.device, order: np.ndarray) -> list[Tensor]:
        """Images, as stored, and labels, in this order, on a GPU if they fit into a quarter of what is free there; else nothing."""
        kind = np.uint8 if self._images.dtype == np.uint8 else np.float32
        if self._images.size * np.dtype(kind).itemsize > torch.cuda.mem_get_info(device)[0] / 4:
            return []
        stored = (self._images, kind), (self._labels, np.int64)
        return [
            torch.from_numpy(np.ascontiguousarray(each[order], own)).to(device)
            for each, own in stored
        ]

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} data is sealed: hand a query to the gate instead")

    __reduce_ex__ = __getstate__ = _refuse

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec})"


def _held(owners: Any, count: int, declared: int | None) -> np.ndarray | None:
    """Whose each record is, [count], if that is known."""
    several = declared or 1
    if owners is None:
        if several > count:
            raise DataError(
                f"owners: every one of 0 to {several - 1} must have a record, and no other"
            )
        return None
    held = np.asarray(owners)
    if held.shape != (count,) or held.dtype.kind not in "iu" or declared is None:
        raise DataError(
            "owners: one whole number for each of the images is needed, and how many owners there are"
        )
    if held.min() < 0 or held.max() >= several or not np.bincount(held, minlength=several).all():
        raise DataError(f"owners: every one of 0 to {several - 1} must have a record, and no other")
    return held.astype(np.int64)


def _bounded(images: np.ndarray, repair: bool) -> np.ndarray:
    fixed = np.empty(images.shape, np.float32) if repair else images
    for start in range(0, len(images), CHECKED):
        part = images[start : start + CHECKED]
        finite = np.isfinite(part).all(axis=(1, 2, 3))
        if repair:
            with np.errstate(invalid="ignore", over="ignore"):
                fixed[start : start + CHECKED] = np.where(
                    finite[:, None, None, None], np.clip(part, 0, 1), 0
                )
        elif not finite.all():
            raise DataError(
                f"record {start + int(np.argmin(finite))} holds NaN or infinite values: remove it, or load with --repair"
            )
        elif part.min() < 0 or part.max() > 1:
            raise DataError(
                "images go outside 0 to 1: divide by 255 if they go to 255, or save them as uint8; --repair clips the few that stray"
            )
    return fixed


class Sensitive(_Box):
    """A sealed box of records: no length, no indexing, no iteration, no pickling, and a repr of public facts alone.

    >>> box = Sensitive(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1]), Spec((1, 8, 8), 2))
    >>> len(box)
    Traceback (most recent call last):
    TypeError: Sensitive data is sealed: hand a query to the gate instead
    """

    __slots__ = ()
    __len__ = __getitem__ = __iter__ = __bool__ = __array__ = _Box._refuse


class Public(_Box):
    """Records that anyone may see: a public test set, data to pre-train on."""

    __slots__ = ()

    def __len__(self) -> int:
        return self._count()

    def records(self, device: str | torch.device = "cpu") -> Records:
        """All of them."""
        return self._take(slice(None), device)
