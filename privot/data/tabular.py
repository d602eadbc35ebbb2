"""Sealed tables: rows of numbers, which can leave only through a local channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from privot.data.catalog import require_existing_path
from privot.data.dataset import Sensitive
from privot.data.readers import read_number_table
from privot.data.spec import Spec
from privot.errors import DataError


class SensitiveTable(Sensitive):
    """A sealed table. The number of rows is declared public.

    Values are in no fixed range: the channel clips each one to the domain declared to it.

    Args:
        rows: Finite numbers, [rows, columns]; a category is an integer.
        name: The data owner's name for the data, which locates its ledger.

    Raises:
        DataError: If the rows are not such numbers.

    >>> SensitiveTable(np.zeros((5, 3))).spec.shape
    (1, 1, 3)
    """

    __slots__ = ()

    def __init__(self, rows: Any, *, name: str = ""):
        rows = np.asarray(rows)
        if rows.ndim != 2 or rows.dtype.kind not in "uif" or not rows.size:
            raise DataError(
                f"a table is numbers of shape [rows, columns], not {rows.dtype} {list(rows.shape)}."
            )
        is_finite = np.isfinite(rows).all(1)
        if not is_finite.all():
            raise DataError(
                f"row {int(np.argmin(is_finite))} has NaN or infinite values. Remove it."
            )
        self.spec = Spec((1, 1, rows.shape[1]), 1, len(rows))
        self.name = name
        self._images = rows[:, None, None, :]
        self._labels = np.zeros(len(rows), np.int64)
        self._client_ids = None


def read_table(source: str | Path, has_header: bool = True) -> SensitiveTable:
    """Read the array ``x`` [rows, columns] of an .npz, or a .csv of numbers.

    Args:
        source: The path.
        has_header: Whether a .csv has one line of names above its numbers.

    Returns:
        The sealed table.

    Raises:
        DataError: If the path is not such a file.
    """
    path = require_existing_path(str(source))
    if path.suffix not in (".npz", ".csv"):
        raise DataError(f"{path}: a table is an .npz with an array x, or a .csv of numbers.")
    rows = read_number_table(path, has_header)
    try:
        return SensitiveTable(rows, name=str(path.resolve()))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
