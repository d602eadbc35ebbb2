"""Data sets of labelled images: `Sensitive`, whose records only the gate can read, and `Public`."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from privot.data.spec import Spec
from privot.errors import DataError

NO_RECORD = -1  # the index of no record
CHECK_CHUNK_SIZE = 8192  # records checked at a time, so that a memory-mapped file stays on the disk


class Records(NamedTuple):
    """Labelled images.

    Attributes:
        images: float32 in [0, 1], [count, channels, height, width].
        labels: int64, [count].
    """

    images: Tensor
    labels: Tensor


class _Dataset:
    """Labelled images. Every record is checked: shape, finite, in range, label in range.

    Args:
        images: uint8 (0 to 255) or float (0 to 1), [count, channels, height, width]. They may be
            memory-mapped.
        labels: Integers from 0, [count].
        spec: What is declared.
        repair: Whether to repair records instead of refusing them, each on its own: a record that
            is not finite becomes black, and values are clipped into the range.
        name: The data owner's name for the data, which locates its ledger.
        client_ids: The client of each record, 0 to ``spec.num_clients`` - 1, [count]. If they are
            not given, the gate divides the records among the clients by its secret order.

    Raises:
        DataError: If the records do not fit what is declared.
    """

    __slots__ = ("_client_ids", "_images", "_labels", "name", "spec")

    def __init__(
        self,
        images: Any,
        labels: Any,
        spec: Spec,
        *,
        repair: bool = False,
        name: str = "",
        client_ids: Any = None,
    ):
        images = np.asarray(images)
        labels = np.asarray(labels)
        _check_array_types(images, labels, spec)
        labels = labels.astype(np.int64)
        if spec.size not in (None, len(images)):
            raise DataError("The number of records is not the declared size.")
        if spec.class_sizes is not None and not np.array_equal(
            np.bincount(labels, minlength=spec.num_classes), spec.class_sizes
        ):
            raise DataError("The classes do not have as many records as declared in class_sizes.")
        if images.dtype.kind == "f":
            images = _check_range(images, repair)
        self.spec = spec
        self.name = name
        self._images = images
        self._labels = labels
        self._client_ids = _check_client_ids(client_ids, len(images), spec.num_clients)

    def _count_records(self) -> int:
        return len(self._images)

    def _assign_clients(self, order: np.ndarray) -> np.ndarray:
        """Assign every record to a client.

        Args:
            order: A permutation of the records, int64 [count]. It matters only if the clients of
                the records are not known: the record at position p of it then belongs to client
                p mod ``spec.num_clients``.

        Returns:
            The client of each record, in the order of the file: int64 [count].
        """
        if self._client_ids is not None:
            return self._client_ids
        client_ids = np.empty(self._count_records(), np.int64)
        client_ids[order] = np.arange(self._count_records()) % (self.spec.num_clients or 1)
        return client_ids

    def _shard_record_indices(
        self,
        shard_indices: Tensor,
        shards_per_client: int,
        records_per_shard: int,
        order: np.ndarray,
    ) -> Tensor:
        """Choose the records that each shard shows.

        Shard s has part s mod ``shards_per_client`` of the records of client
        s // ``shards_per_client``.

        privacy: all shapes are public, and a row depends only on what its client has. If a shard
        has more than ``records_per_shard`` records, some are left out, evenly; if it has fewer,
        some come several times. Which ones, and which shard has them, follows the secret order.

        Args:
            shard_indices: The shards, int64 [shards].
            shards_per_client: Shards of a client.
            records_per_shard: Records that a shard shows.
            order: The secret permutation of the records, int64 [count].

        Returns:
            Indices of records, int64 [shards, records_per_shard]; `NO_RECORD` where a shard has
            none.
        """
        client_ids = self._assign_clients(order)
        by_client = order[np.argsort(client_ids[order], kind="stable")]
        ends = np.cumsum(np.bincount(client_ids, minlength=self.spec.num_clients or 1))
        slots = np.arange(records_per_shard)
        rows = []
        for shard_index in shard_indices.tolist():
            client, part = divmod(shard_index, shards_per_client)
            start = ends[client - 1] if client else 0
            own = by_client[start : ends[client]][part::shards_per_client]
            # privacy: it must not show that a client has fewer records than shards, so a shard
            # without any has no record in its slots.
            if len(own):
                rows.append(own[slots * len(own) // records_per_shard])
            else:
                rows.append(np.full(records_per_shard, NO_RECORD))
        return torch.from_numpy(np.stack(rows))

    def _read_records(self, indices: slice | Tensor, device: str | torch.device = "cpu") -> Records:
        """Read records. Only for the gate, and for the data owner's own measurements and attacks.

        Args:
            indices: Indices in the order of the file, [count].
            device: Where to put them.

        Returns:
            A copy of the records.
        """
        index = indices if isinstance(indices, slice) else indices.numpy()
        dtype = self._torch_readable_dtype()
        images = torch.from_numpy(np.array(self._images[index], dtype)).to(device)
        scaled = images / 255 if dtype is np.uint8 else images
        return Records(scaled, torch.from_numpy(self._labels[index].copy()).to(device))

    def _copy_to_gpu(self, device: torch.device, order: np.ndarray) -> list[Tensor]:
        """Copy all records to a GPU if they fit into a quarter of its free memory.

        Args:
            device: The GPU.
            order: The order of the copy, int64 [count].

        Returns:
            Images, as they are stored, and labels; nothing if they do not fit.
        """
        dtype = self._torch_readable_dtype()
        num_bytes = self._images.size * np.dtype(dtype).itemsize
        if num_bytes > torch.cuda.mem_get_info(device)[0] / 4:
            return []
        return [
            torch.from_numpy(np.ascontiguousarray(values[order], value_dtype)).to(device)
            for values, value_dtype in ((self._images, dtype), (self._labels, np.int64))
        ]

    def _torch_readable_dtype(self) -> type[np.uint8 | np.float32]:
        """Give a type for images that torch can read: neither big-endian nor long floats."""
        return np.uint8 if self._images.dtype == np.uint8 else np.float32

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} data is sealed: pass a query to the gate instead")

    __reduce_ex__ = __getstate__ = _refuse

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec})"


def _check_array_types(images: np.ndarray, labels: np.ndarray, spec: Spec) -> None:
    """Check shapes, types and the range of the labels."""
    if images.shape[1:] != spec.shape or len(images) == 0:
        declared = ", ".join(map(str, spec.shape))
        raise DataError(
            f"images have shape {list(images.shape)}, but [count, {declared}] was declared."
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype} {list(labels.shape)}: one integer per image is needed."
        )
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise DataError(f"images are {images.dtype}: uint8 (0 to 255) or float (0 to 1) is needed.")
    if labels.min() < 0 or labels.max() >= spec.num_classes:
        raise DataError(
            f"labels go outside 0 to {spec.num_classes - 1}. Number them from 0 without gaps, or "
            "declare as many classes as there are."
        )


def _check_client_ids(client_ids: Any, count: int, num_clients: int | None) -> np.ndarray | None:
    """Check the client of each record.

    Args:
        client_ids: The clients, [count], or None if they are not known.
        count: The number of records.
        num_clients: The declared number of clients.

    Returns:
        The clients, int64 [count], or None.
    """
    num_declared = num_clients or 1
    message = f"clients: each of 0 to {num_declared - 1} must have a record, and no other may."
    if client_ids is None:
        if num_declared > count:
            raise DataError(message)
        return None
    ids = np.asarray(client_ids)
    if ids.shape != (count,) or ids.dtype.kind not in "iu" or num_clients is None:
        raise DataError("clients: give one integer per image, and the number of clients.")
    is_in_range = ids.min() >= 0 and ids.max() < num_declared
    if not is_in_range or not np.bincount(ids, minlength=num_declared).all():
        raise DataError(message)
    return ids.astype(np.int64)


def _check_range(images: np.ndarray, repair: bool) -> np.ndarray:
    """Check that float images are finite and in [0, 1], or repair them.

    Args:
        images: float [count, channels, height, width].
        repair: Whether to repair them.

    Returns:
        The images, or repaired copies.
    """
    result = np.empty(images.shape, np.float32) if repair else images
    for start in range(0, len(images), CHECK_CHUNK_SIZE):
        chunk = images[start : start + CHECK_CHUNK_SIZE]
        is_finite = np.isfinite(chunk).all(axis=(1, 2, 3))
        if repair:
            with np.errstate(invalid="ignore", over="ignore"):
                clipped = np.clip(chunk, 0, 1)
                result[start : start + CHECK_CHUNK_SIZE] = np.where(
                    is_finite[:, None, None, None], clipped, 0
                )
        elif not is_finite.all():
            raise DataError(
                f"record {start + int(np.argmin(is_finite))} has NaN or infinite values. "
                "Remove it, or load with --repair."
            )
        elif chunk.min() < 0 or chunk.max() > 1:
            raise DataError(
                "images go outside 0 to 1. Divide them by 255 if they go to 255, or save them as "
                "uint8. If only a few values stray, --repair clips them."
            )
    return result


class Sensitive(_Dataset):
    """Sealed records: no length, indexing, iteration or pickling, and a repr of public facts only.

    See `_Dataset` for the arguments: images, labels, spec, repair, name and client_ids.

    >>> data = Sensitive(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1]), Spec((1, 8, 8), 2))
    >>> len(data)
    Traceback (most recent call last):
    TypeError: Sensitive data is sealed: pass a query to the gate instead
    """

    __slots__ = ()
    __len__ = __getitem__ = __iter__ = __bool__ = __array__ = _Dataset._refuse


class Public(_Dataset):
    """Records that anyone may read: a public test set, data to pretrain on."""

    __slots__ = ()

    def __len__(self) -> int:
        return self._count_records()

    def records(self, device: str | torch.device = "cpu") -> Records:
        """Give all records."""
        return self._read_records(slice(None), device)
