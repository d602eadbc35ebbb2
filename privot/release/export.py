"""Write samples to files.

Images: .npz (arrays x and y), .png (a grid, one row a class), .parquet (encoded images), or a
folder of PNG files with a folder for each class. Rows of a table: .npz (array x, and each column by
its name), .csv or .parquet, on the scale of the columns.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from privot.errors import ReleaseError
from privot.io import check_writable
from privot.release.table_columns import Column
from privot.runtime.preview import render_image_grid, to_uint8_images

IMAGE_SUFFIXES = ("", ".npz", ".png", ".parquet")
TABLE_SUFFIXES = (".npz", ".csv", ".parquet")
MAX_GRID_COLUMNS = 20
# A class name that can name a folder: no dots or slashes, and no blanks at its ends.
FOLDER_NAME_PATTERN = re.compile(r"[^\W_]([\w ()+-]{0,98}[\w)])?")


def check_output_path(out: Path, is_table: bool = False) -> None:
    """Refuse a path that cannot be written, before anything is sampled.

    Args:
        out: The file or folder to write.
        is_table: Whether the samples are rows of a table.

    Raises:
        ReleaseError: If the path exists, has an unknown ending or cannot be written.
    """
    if os.path.lexists(out):
        raise ReleaseError(f"{out} already exists. Choose another name or remove it.")
    if is_table and out.suffix not in TABLE_SUFFIXES:
        raise ReleaseError(
            f"{out}: this release is of a table, so its samples are not images. "
            "Name a .csv, .npz or .parquet file."
        )
    if not is_table and out.suffix not in IMAGE_SUFFIXES:
        raise ReleaseError(
            f"{out}: samples can be written as .npz, .png (a grid), .parquet, or a folder of PNG "
            "files."
        )
    if out.suffix == ".parquet":
        _import_pyarrow()
    check_writable(out)


def write_samples(
    images: Tensor,
    labels: Tensor,
    out: Path,
    num_classes: int,
    class_names: tuple[str, ...] | None = None,
) -> Path:
    """Write images in the format that the ending of the path names. Never overwrite a file.

    Args:
        images: Values in [0, 1], [count, channels, height, width].
        labels: The class of each image, int64 [count].
        out: The file or folder to write.
        num_classes: Number of classes.
        class_names: Names of the class folders, where all of them can name a folder; else, or if
            None, the folders have numbers.

    Returns:
        ``out``.

    Raises:
        ReleaseError: If `check_output_path` refuses the path.
    """
    check_output_path(out)
    with _replace_when_complete(out) as part:
        if out.suffix == ".npz":
            np.savez_compressed(part, x=to_uint8_images(images), y=labels.numpy().astype(np.int64))
        elif out.suffix == ".png":
            images_per_row = (
                max(1, min(MAX_GRID_COLUMNS, len(labels) // num_classes))
                if num_classes <= len(labels)
                else len(labels)
            )
            by_class = labels.argsort(stable=True)
            render_image_grid(images[by_class], images_per_row).save(part)
        elif out.suffix == ".parquet":
            _write_parquet(images, labels, part)
        else:
            folder_names = _choose_folder_names(num_classes, class_names)
            _write_class_folders(images, labels, part, folder_names)
    return out


def write_table(rows: Tensor, columns: Sequence[Column], out: Path) -> Path:
    """Write rows of a table in the format that the ending of the path names.

    Args:
        rows: The samples, [count, ...], with as many numbers a row as there are columns.
        columns: Names, ranges and kinds of the columns.
        out: The file to write. A .npz file has the array ``x`` [count, columns] and each column by
            its name; a .csv file has a line of names; a .parquet file has typed columns.

    Returns:
        ``out``.

    Raises:
        ReleaseError: If `check_output_path` refuses the path.
    """
    check_output_path(out, is_table=True)
    numbers = rows.flatten(1).cpu().numpy()
    arrays: dict[str, Any] = {
        column.name: column.cast_values(numbers[:, index]) for index, column in enumerate(columns)
    }
    with _replace_when_complete(out) as part:
        if out.suffix == ".npz":
            np.savez_compressed(part, **arrays, x=np.stack(list(arrays.values()), 1))
        elif out.suffix == ".csv":
            csv_rows = zip(*(array.tolist() for array in arrays.values()), strict=True)
            lines = (",".join(map(repr, row)) for row in csv_rows)
            part.write_text("\n".join([",".join(arrays), *lines]) + "\n")
        else:
            arrow, parquet = _import_pyarrow()
            parquet.write_table(arrow.table(arrays), part)
    return out


@contextmanager
def _replace_when_complete(out: Path) -> Iterator[Path]:
    """Give a path to write to, which becomes ``out`` once all is written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.stem}.part{out.suffix}")
    _remove_path(part)  # files of a crashed run must not get among these samples
    try:
        yield part
        part.replace(out)
    finally:
        _remove_path(part)


def _remove_path(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _encode_png(pixels: np.ndarray) -> bytes:
    """Encode an image, uint8 [height, width, channels]."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _import_pyarrow() -> tuple[Any, Any]:
    """Import pyarrow, which an extra installs."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise ReleaseError(
            "Writing parquet needs an extra package: pip install 'privot[parquet]'"
        ) from None
    return arrow, parquet


def _write_parquet(images: Tensor, labels: Tensor, out: Path) -> None:
    """Write encoded images and labels, in the layout of the ``datasets`` library."""
    arrow, parquet = _import_pyarrow()
    encoded = [{"bytes": _encode_png(pixels), "path": None} for pixels in to_uint8_images(images)]
    image_type = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    columns = {
        "image": arrow.array(encoded, image_type),
        "label": labels.numpy().astype(np.int64),
    }
    parquet.write_table(arrow.table(columns), out)


def _choose_folder_names(num_classes: int, class_names: tuple[str, ...] | None) -> list[str]:
    """Choose a folder name for each class.

    Class names are used if every file system accepts them and if sorting the folders gives the
    classes in their own order, so that a reader numbers the classes in the same way.
    """
    numbers = [f"{label:0{len(str(num_classes - 1))}d}" for label in range(num_classes)]
    if not class_names or not all(FOLDER_NAME_PATTERN.fullmatch(name) for name in class_names):
        return numbers
    if len({name.casefold() for name in class_names}) != num_classes:
        return numbers
    all_decimal = all(name.isdecimal() for name in class_names)
    in_reading_order = sorted(class_names, key=lambda name: (int(name) if all_decimal else 0, name))
    return list(class_names) if list(class_names) == in_reading_order else numbers


def _write_class_folders(
    images: Tensor, labels: Tensor, out: Path, folder_names: list[str]
) -> None:
    """Write each image as a PNG file in the folder of its class.

    Args:
        images: Values in [0, 1], [count, channels, height, width].
        labels: The class of each image, [count].
        out: The folder that holds the class folders.
        folder_names: The name of each class folder, by class.
    """
    pairs = zip(to_uint8_images(images), labels.tolist(), strict=True)
    for index, (pixels, label) in enumerate(pairs):
        folder = out / folder_names[label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:06d}.png").write_bytes(_encode_png(pixels))
