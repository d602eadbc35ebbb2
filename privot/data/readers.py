"""One reader a format. Each returns uint8 or float images [count, channels, height, width], labels, and class names if it knows them.

What a file claims is checked against what it could hold before anything is allocated; nothing is ever unpickled or extracted.
"""

from __future__ import annotations

import gzip
import io
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from privot.data.spec import LARGEST
from privot.errors import DataError

MOST_BYTES = 64 << 30
DEFLATE = 1100  # no deflate stream expands by more (1032 in theory)


class Arrays(NamedTuple):
    """What a reader found."""

    images: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...] | None = None


def read_idx(path: Path) -> np.ndarray:
    """An IDX file of bytes, plain or gzipped: [count, ...]."""
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path) if packed else open(path, "rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 3:
                raise DataError(f"{path}: not an IDX file of bytes")
            sides = np.frombuffer(file.read(4 * head[3]), ">u4")
            count = math.prod(int(side) for side in sides)
            if len(sides) != head[3] or count > path.stat().st_size * (DEFLATE if packed else 1):
                raise DataError(f"{path}: its header claims more than the file can hold")
            data = file.read(count + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({type(error).__name__}); is it whole?") from None
    if len(data) != count:
        raise DataError(f"{path}: {'cut short' if len(data) < count else 'longer than its header says'}")
    return np.frombuffer(data, np.uint8).reshape([int(side) for side in sides])


def read_idx_pair(images: Path) -> Arrays:
    """Images and, beside them, the labels file named as MNIST names it."""
    labels = images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))
    if labels == images or not labels.exists():
        raise DataError(f"{images}: its labels file {labels.name} is not beside it")
    return Arrays(channels_first(read_idx(images), images), read_idx(labels))


def read_npz(path: Path, where: tuple[str, Any] | None = None) -> Arrays:
    """``x`` and ``y`` (or ``images`` and ``labels``) of an .npz, only rows ``where`` a column has a value; no object arrays, no pickles."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            keys = next((pair for pair in (("x", "y"), ("images", "labels")) if {*pair} <= members.keys()), None)
            if keys is None:
                raise DataError(f"{path}: the arrays x and y (or images and labels) are not in it")
            found = [_member(archive, members[key], path) for key in keys]
            if where:
                rows = _member(archive, members[where[0]], path) == where[1]
                found = [each[rows] for each in found]
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        IndexError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise DataError(f"{path}: not a sound .npz ({type(error).__name__})") from None
    return Arrays(channels_first(found[0], path), found[1])


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> np.ndarray:
    if info.file_size > min(MOST_BYTES, info.compress_size * DEFLATE + 4096):
        raise DataError(f"{path}: {info.filename} claims more than the file can hold")
    with archive.open(info) as file:
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = header[np.lib.format.read_magic(file)](file)
        if dtype.hasobject or dtype.kind not in "uif":
            raise DataError(f"{path}: {info.filename} holds {dtype}, which is not read; save plain numbers")
        count = math.prod(shape)
        if count * dtype.itemsize > info.file_size:
            raise DataError(f"{path}: {info.filename} is cut short")
        data = np.frombuffer(file.read(count * dtype.itemsize), dtype)
    return data.reshape(shape, order="F" if fortran else "C")


def read_folder(path: Path, resize: int | None = None) -> Arrays:
    """A folder with one folder of PNG or JPEG images per class; class names are the folder names in order."""
    classes = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not classes:
        raise DataError(f"{path}: no class folders in it; put the images of each class into a folder of their own")
    images, labels = [], []
    for label, folder in enumerate(classes):
        files = sorted(each for each in folder.iterdir() if each.suffix.lower() in (".png", ".jpg", ".jpeg"))
        if not files:
            raise DataError(f"{folder}: this class has no PNG or JPEG images")
        for file in files:
            if path.resolve() not in file.resolve().parents:
                raise DataError(f"{file}: a link that leaves the data folder is not followed")
            images.append(decode(file, file, resize))
            labels.append(label)
    return Arrays(stack(images, path), np.array(labels), tuple(each.name for each in classes))


def read_parquet(path: Path, label: str = "label", where: tuple[str, Any] | None = None, resize: int | None = None) -> Arrays:
    """Encoded images in a column ``image`` (bytes, or a struct with ``bytes``) and a whole-number label column."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: reading parquet needs an extra: pip install 'privot[parquet]'") from None
    images: list[np.ndarray] = []
    labels: list[int] = []
    try:
        file = parquet.ParquetFile(path)
        columns = ["image", label, *([where[0]] if where else [])]
        if missing := [each for each in columns if each not in file.schema_arrow.names]:
            raise DataError(f"{path}: no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)[:200]}")
        for batch in file.iter_batches(1024, columns=columns):
            for row in batch.to_pylist():
                if where is None or row[where[0]] == where[1]:
                    raw = row["image"]["bytes"] if isinstance(row["image"], dict) else row["image"]
                    images.append(decode(raw, f"{path} row {len(images)}", resize))
                    labels.append(row[label])
    except (arrow.ArrowException, OSError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not a sound parquet of images ({type(error).__name__})") from None
    return Arrays(stack(images, path), np.array(labels))


def decode(source: Any, name: Any, resize: int | None = None) -> np.ndarray:
    """One PNG or JPEG as uint8 [channels, height, width]; its size is checked before it is decoded."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=("PNG", "JPEG")) as image:
            if max(image.size) > LARGEST:
                raise DataError(f"{name}: {image.size[0]}x{image.size[1]} pixels; the limit is {LARGEST} a side")
            plain = image.convert("L" if image.mode in ("1", "L", "LA", "I;16", "I") else "RGB")
            pixels = np.asarray(plain.resize((resize, resize), Image.Resampling.BILINEAR) if resize else plain)
    except (OSError, ValueError, SyntaxError, TypeError, AttributeError, Image.DecompressionBombError) as error:
        raise DataError(f"{name}: not a readable PNG or JPEG ({type(error).__name__})") from None
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def stack(images: list[np.ndarray], name: Any) -> np.ndarray:
    """Images of one shape as one array."""
    shapes = {each.shape for each in images}
    if len(shapes) != 1:
        raise DataError(f"{name}: images of {len(shapes)} different shapes, such as {sorted(shapes)[:2]}; give one size with resize")
    return np.stack(images)


def channels_first(images: np.ndarray, name: Any) -> np.ndarray:
    """[count, height, width] or [count, height, width, channels] brought to [count, channels, height, width]."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        return images.transpose(0, 3, 1, 2)
    if images.ndim != 4:
        raise DataError(f"{name}: images of shape {list(images.shape)}; [count, height, width] with or without channels is needed")
    return images
