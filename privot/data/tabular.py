"""A sealed table: rows of plain numbers, which may leave through a channel and no other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from privot.data import readers
from privot.data.dataset import Sensitive
from privot.data.loading import existing
from privot.data.spec import Spec
from privot.errors import DataError


class Table(Sensitive):
    """Rows [count, columns] of finite numbers; a category is the whole number of it. The number of rows is declared public.

    No range is asked for here: the channel clips each value to the domain that was declared to it.

    >>> Table(np.zeros((5, 3))).spec.shape
    (1, 1, 3)
    """

    __slots__ = ()

    def __init__(self, rows: Any, *, name: str = ""):
        rows = np.asarray(rows)
        if rows.ndim != 2 or rows.dtype.kind not in "uif" or not rows.size:
            raise DataError(
                f"a table is numbers of shape [rows, columns], not {rows.dtype} {list(rows.shape)}"
            )
        if not (sound := np.isfinite(rows).all(1)).all():
            raise DataError(f"row {int(np.argmin(sound))} holds NaN or infinite values: remove it")
        spec = Spec((1, 1, rows.shape[1]), 1, len(rows))
        self.spec = spec
        self.name = name
        self._images = rows[:, None, None, :]
        self._labels = np.zeros(len(rows), np.int64)
        self._owners = None


def read_table(source: str | Path, header: bool = True) -> Table:
    """The array ``x`` [rows, columns] of an ``.npz``, or a ``.csv`` of numbers.

    Args:
        source: The path.
        header: Whether a .csv has one line of names above its numbers.

    Returns:
        The sealed table.
    """
    path = existing(str(source))
    if path.suffix not in (".npz", ".csv"):
        raise DataError(f"{path}: a table is an .npz with an array x, or a .csv of numbers")
    rows = readers.read_rows(path, header)
    try:
        return Table(rows, name=str(path.resolve()))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
