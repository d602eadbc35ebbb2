"""Reading a .parquet of encoded images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from privot.data.images import DatasetArrays, decode_image, stack_images
from privot.errors import DataError, reraise_as

BATCH_SIZE = 1024  # rows decoded at a time


def read_parquet(
    path: Path,
    label_column: str = "label",
    row_filter: tuple[str, Any] | None = None,
    resize: int | None = None,
) -> DatasetArrays:
    """Read a .parquet of encoded images.

    Args:
        path: The file. Its column ``image`` has bytes, or a struct with ``bytes``.
        label_column: The column of integer labels.
        row_filter: A column, and the value that the rows to read have in it.
        resize: Height and width to resize to; None: all images must have one size.

    Returns:
        The arrays.

    Raises:
        DataError: If a column is missing or an image cannot be read.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path}: reading parquet needs an extra. Run pip install 'privot[parquet]'."
        ) from None
    images: list[np.ndarray] = []
    labels: list[int] = []
    peaks: list[int] = []
    with (
        reraise_as(DataError, f"{path}: cannot be read as a parquet of images; is the file whole?"),
        parquet.ParquetFile(path) as file,
    ):
        columns = ["image", label_column, *([row_filter[0]] if row_filter else [])]
        _require_columns(path, columns, file.schema_arrow.names, label_column)
        for batch in file.iter_batches(BATCH_SIZE, columns=columns):
            for row in batch.to_pylist():
                if row_filter is None or row[row_filter[0]] == row_filter[1]:
                    name = f"{path} row {len(images)}"
                    images.append(
                        decode_image(_read_encoded(row["image"], name), name, resize, peaks)
                    )
                    labels.append(row[label_column])
    return DatasetArrays(stack_images(images, path, peaks), np.array(labels))


def _require_columns(path: Path, columns: list[str], present: list[str], label_column: str) -> None:
    """Check that a .parquet has its columns.

    Args:
        path: The file.
        columns: The columns that are needed.
        present: The columns that it has.
        label_column: The column of labels.
    """
    missing = [column for column in columns if column not in present]
    if missing:
        hint = " Name the column of labels with --label." if missing[0] == label_column else ""
        raise DataError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(present)[:200]}.{hint}"
        )


def _read_encoded(cell: Any, name: str) -> bytes:
    """Give the encoded image in a cell. A text is refused: it would be taken for a file name."""
    content = cell["bytes"] if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise DataError(
            f"{name}: image holds {type(content).__name__}. Encoded images (bytes) are needed."
        )
    return content
