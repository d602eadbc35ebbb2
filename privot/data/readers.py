"""Readers of data files, one per format.

What a file claims about its size is checked against what it could hold before anything is
allocated. Nothing is ever unpickled or extracted.
"""

from __future__ import annotations

import gzip
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from privot.data.image_folder import read_folder
from privot.data.images import DatasetArrays, to_channels_first
from privot.data.parquet import read_parquet
from privot.errors import DataError, SettingError, reraise_as

# Values of a table that a record does not have.
MISSING_VALUES = ("", "na", "n/a", "null", "none", "?", "-")
# A file that is larger when unpacked, and was compressed more than this, is an attack, not data.
MAX_UNCHECKED_BYTES = 1 << 28
MAX_COMPRESSION_RATIO = 200


def read_arrays(
    path: Path,
    label_column: str = "label",
    row_filter: tuple[str, Any] | None = None,
    resize: int | None = None,
    **client_arrays: str,
) -> DatasetArrays:
    """Read images and labels from a path, by its ending.

    Args:
        path: A folder of class folders, a .parquet, an .npz or an IDX file of images.
        label_column: The column of a .parquet that has the labels.
        row_filter: A column or array, and the value that the rows to read have in it.
        resize: Height and width to which encoded images are resized.
        **client_arrays: ``client_array`` and ``client_mask_array`` of `read_npz`.

    Returns:
        The arrays.

    Raises:
        DataError: If the format is unknown or the file cannot be read.
        SettingError: If the images are not encoded and so are not resized.
    """
    if path.is_dir():
        return read_folder(path, resize)
    if path.suffix == ".parquet":
        return read_parquet(path, label_column, row_filter, resize)
    if resize:
        raise SettingError(
            f"resize={resize}: only images of a folder or a parquet are resized, not {path.name}."
        )
    if path.suffix == ".npz":
        return read_npz(path, row_filter, **client_arrays)
    if path.suffix == ".safetensors":
        raise DataError(
            f"{path}: privatized records, not images. privot synthesize trains on them."
        )
    if "idx3" in path.name:
        return read_idx_pair(path)
    raise DataError(
        f"{path}: unknown format. Give an IDX file of images, .npz, .parquet or a folder of class "
        "folders."
    )


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of bytes, plain or gzipped: uint8 [count, ...].

    Raises:
        DataError: If it is not such a file, or is damaged.
    """
    is_compressed = path.suffix == ".gz"
    file_size = path.stat().st_size
    with (
        reraise_as(DataError, f"{path}: cannot be read as IDX; is the file whole?"),
        gzip.open(path) if is_compressed else open(path, "rb") as file,
    ):
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08" or not 1 <= magic[3] <= 3:
            raise DataError(f"{path}: not an IDX file of bytes.")
        shape = np.frombuffer(file.read(4 * magic[3]), ">u4").tolist()
        count = math.prod(shape)
        max_count = (
            max(MAX_UNCHECKED_BYTES, file_size * MAX_COMPRESSION_RATIO)
            if is_compressed
            else file_size
        )
        if len(shape) != magic[3] or count > max_count:
            raise DataError(
                f"{path}: its header claims more than the file can hold; is the file whole?"
            )
        content = file.read(count + 1)
    if len(content) != count:
        problem = "cut short" if len(content) < count else "longer than its header says"
        raise DataError(f"{path}: {problem}. Download it again.")
    return np.frombuffer(content, np.uint8).reshape(shape)


def labels_file_name(images_name: str) -> str:
    """Name the labels file of an IDX file of images, as MNIST does."""
    return images_name.replace("images", "labels").replace("idx3", "idx1")


def read_idx_pair(images_path: Path) -> DatasetArrays:
    """Read IDX images and the labels file beside them.

    Raises:
        DataError: If a file is missing or damaged.
    """
    labels_path = images_path.with_name(labels_file_name(images_path.name))
    if labels_path == images_path or not labels_path.exists():
        raise DataError(
            f"{images_path}: its labels file {labels_path.name} is not beside it. Put it there."
        )
    return DatasetArrays(
        to_channels_first(read_idx(images_path), images_path), read_idx(labels_path)
    )


def read_npz(
    path: Path,
    row_filter: tuple[str, Any] | None = None,
    client_array: str = "",
    client_mask_array: str = "",
) -> DatasetArrays:
    """Read the arrays ``x`` and ``y`` (or ``images`` and ``labels``) of an .npz, without pickles.

    Args:
        path: The file.
        row_filter: An array, and the value that the rows to read have in it.
        client_array: The array that has the client of each record. Clients are numbered from 0 in
            the order of its values.
        client_mask_array: The array that has a mark for each client; records of clients without one
            are left out.

    Returns:
        The arrays.

    Raises:
        DataError: If an array is missing, holds objects, or is damaged.
    """
    with (
        reraise_as(DataError, f"{path}: cannot be read as .npz; is the file whole?"),
        zipfile.ZipFile(path) as archive,
    ):
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise DataError(f"{path}: two of its arrays have the same name. Save each once.")
        pairs = (("x", "y"), ("images", "labels"))
        names = next((pair for pair in pairs if {*pair} <= members.keys()), None)
        if names is None:
            raise DataError(f"{path}: the arrays x and y (or images and labels) are not in it.")
        columns = [
            _read_npz_array(archive, members[name], path)
            for name in (*names, *([client_array] if client_array else []))
        ]
        if row_filter:
            selected = _read_npz_array(archive, members[row_filter[0]], path) == row_filter[1]
            columns = [column[selected] for column in columns]
        if client_mask_array:
            mask = _read_npz_array(archive, members[client_mask_array], path, "b")
            selected = mask[columns[2]]
            columns = [column[selected] for column in columns]
    client_ids = np.unique(columns[2], return_inverse=True)[1] if client_array else None
    return DatasetArrays(to_channels_first(columns[0], path), columns[1], client_ids=client_ids)


def _read_npz_array(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, dtype_kinds: str = "uif"
) -> np.ndarray:
    """Read one array of an .npz.

    Args:
        archive: The open file.
        info: The member of the array.
        path: The path of the file, for errors.
        dtype_kinds: The kinds of numbers that are allowed.

    Returns:
        The array.
    """
    compressed_size = min(info.compress_size, path.stat().st_size)
    if info.file_size > max(MAX_UNCHECKED_BYTES, MAX_COMPRESSION_RATIO * compressed_size):
        raise DataError(
            f"{path}: {info.filename} claims more than the file can hold. "
            "Save it without compression."
        )
    with archive.open(info) as file:
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[np.lib.format.read_magic(file)]
        shape, is_fortran, dtype = read_header(file)
        if dtype.hasobject or dtype.kind not in dtype_kinds:
            raise DataError(
                f"{path}: {info.filename} holds {dtype}, which is not read. Save plain numbers."
            )
        num_bytes = math.prod(shape) * dtype.itemsize
        content = file.read(max(0, min(num_bytes, info.file_size)))
        # Reading to the end also checks the checksum of the archive.
        if len(content) != num_bytes or file.read(1):
            raise DataError(
                f"{path}: {info.filename} is shorter or longer than its header says. Save it again."
            )
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")


def read_number_table(path: Path, has_header: bool = True) -> np.ndarray:
    """Read a table of numbers.

    Args:
        path: An .npz with an array ``x`` [rows, columns], or a .csv.
        has_header: Whether the first line of a .csv has the names of its columns. If it has not, a
            first line of numbers is a record and would be lost, so it is refused.

    Returns:
        The numbers, [rows, columns].

    Raises:
        DataError: If the file is not such a table.
    """
    with reraise_as(DataError, f"{path}: cannot be read as a table of numbers; is the file whole?"):
        if path.suffix == ".csv":
            if has_header:
                _refuse_numbers_as_names(path)
            # A line that starts with "#" is refused too: no line is skipped as a comment.
            return np.loadtxt(
                path,
                delimiter=",",
                skiprows=int(has_header),
                ndmin=2,
                comments=None,
                encoding="utf-8-sig",
            )
        with zipfile.ZipFile(path) as archive:
            if "x.npy" not in archive.namelist():
                raise DataError(f"{path}: the array x is not in it.")
            return _read_npz_array(archive, archive.getinfo("x.npy"), path)


def _refuse_numbers_as_names(path: Path) -> None:
    """Refuse a .csv whose first line is a record, as its numbers show."""
    with open(path, encoding="utf-8-sig") as file:
        line = file.readline()
    fields = [field.strip().strip("\"'").strip().lower() for field in line.split(",")]
    names = [field for field in fields if field not in MISSING_VALUES and not _is_number(field)]
    if not names and any(map(_is_number, fields)):
        raise DataError(
            f"{path}: its first line holds numbers, not names, and would be lost. Add a line of "
            "names above it, or pass --no-header if it is the first record."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
