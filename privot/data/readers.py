"""One reader a format. Each returns uint8 or float images [count, channels, height, width], labels, and class names if it knows them.

What a file claims is checked against what it could hold before anything is allocated; nothing is ever unpickled or extracted.
"""

from __future__ import annotations

import gzip
import io
import math
import unicodedata
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from privot.data.spec import LARGEST
from privot.errors import DataError, refusing

PICTURES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif")
# Words about pictures, which may lie beside them.
BESIDE = ("", ".txt", ".md", ".csv", ".tsv", ".json", ".xml", ".yaml", ".yml", ".ini", ".db")
MISSING = ("", "na", "n/a", "null", "none", "?", "-")  # of a value that a record does not have
SCANNED = 16  # of 256: what scanners of 12 bits stay below in files of 16
# what is larger than 256 MiB unpacked and shrank by more is a bomb, not data
SMALL = 1 << 28
RATIO = 200


class Arrays(NamedTuple):
    """What a reader found."""

    images: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...] | None = None
    owners: np.ndarray | None = None  # whose each is, by numbers from 0


def read_idx(path: Path) -> np.ndarray:
    """An IDX file of bytes, plain or gzipped: [count, ...]."""
    packed = path.suffix == ".gz"
    held = path.stat().st_size
    with (
        refusing(DataError, f"{path}: cannot be read as IDX; is it whole?"),
        gzip.open(path) if packed else open(path, "rb") as file,
    ):
        head = file.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 3:
            raise DataError(f"{path}: not an IDX file of bytes")
        sides = np.frombuffer(file.read(4 * head[3]), ">u4").tolist()
        count = math.prod(sides)
        if len(sides) != head[3] or count > (max(SMALL, held * RATIO) if packed else held):
            raise DataError(f"{path}: its header claims more than the file can hold; is it whole?")
        data = file.read(count + 1)
    if len(data) != count:
        raise DataError(
            f"{path}: {'cut short' if len(data) < count else 'longer than its header says'}; fetch it again"
        )
    return np.frombuffer(data, np.uint8).reshape(sides)


def labels_beside(images: str) -> str:
    """The labels file of an IDX images file, named as MNIST names it."""
    return images.replace("images", "labels").replace("idx3", "idx1")


def read_idx_pair(images: Path) -> Arrays:
    """Images and, beside them, their labels."""
    labels = images.with_name(labels_beside(images.name))
    if labels == images or not labels.exists():
        raise DataError(f"{images}: its labels file {labels.name} is not beside it")
    return Arrays(channels_first(read_idx(images), images), read_idx(labels))


def read_npz(
    path: Path, where: tuple[str, Any] | None = None, owner: str = "", whole: str = ""
) -> Arrays:
    """``x`` and ``y`` (or ``images`` and ``labels``) of an .npz, only rows ``where`` a column has a value; no object arrays, no pickles.

    ``owner`` names the column that says whose a record is; those that are there are numbered from 0 in its order. ``whole`` names an array
    that has a mark for each owner: of those without one nothing is read.
    """
    with (
        refusing(DataError, f"{path}: cannot be read as .npz; is it whole?"),
        zipfile.ZipFile(path) as archive,
    ):
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise DataError(f"{path}: two of its arrays have the same name: save each once")
        keys = next(
            (pair for pair in (("x", "y"), ("images", "labels")) if {*pair} <= members.keys()), None
        )
        if keys is None:
            raise DataError(f"{path}: the arrays x and y (or images and labels) are not in it")
        found = [
            _member(archive, members[key], path) for key in (*keys, *([owner] if owner else []))
        ]
        if where:
            rows = _member(archive, members[where[0]], path) == where[1]
            found = [each[rows] for each in found]
        if whole:
            marked = _member(archive, members[whole], path, "b")[found[2]]
            found = [each[marked] for each in found]
    return Arrays(
        channels_first(found[0], path),
        found[1],
        owners=np.unique(found[2], return_inverse=True)[1] if owner else None,
    )


def read_rows(path: Path, header: bool = True) -> np.ndarray:
    """Read a table of numbers.

    Args:
        path: An .npz with an array ``x`` [rows, columns], or a .csv.
        header: Whether the first line of a .csv holds the names of its columns. If it does not, a
            first line of numbers is a record and would be lost, so that it is refused.

    Returns:
        The numbers, [rows, columns].
    """
    with refusing(DataError, f"{path}: cannot be read as a table of numbers; is it whole?"):
        if path.suffix == ".csv":
            if header:
                _refuse_numbers_as_names(path)
            # A line that begins with "#" is refused, too: nothing is left out as a comment.
            return np.loadtxt(
                path,
                delimiter=",",
                skiprows=int(header),
                ndmin=2,
                comments=None,
                encoding="utf-8-sig",
            )
        with zipfile.ZipFile(path) as archive:
            if "x.npy" not in archive.namelist():
                raise DataError(f"{path}: the array x is not in it")
            return _member(archive, archive.getinfo("x.npy"), path)


def _refuse_numbers_as_names(path: Path) -> None:
    """Refuse a .csv whose first line is a record, by its numbers."""
    with open(path, encoding="utf-8-sig") as file:
        fields = [each.strip().strip("\"'").strip().lower() for each in file.readline().split(",")]
    named = [each for each in fields if each not in MISSING and not _is_number(each)]
    if not named and any(map(_is_number, fields)):
        raise DataError(
            f"{path}: its first line holds numbers, not names, and would be lost: add a line of names above it, "
            "or pass --no-header if it is the first record"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, kinds: str = "uif"
) -> np.ndarray:
    if info.file_size > max(SMALL, RATIO * min(info.compress_size, path.stat().st_size)):
        raise DataError(
            f"{path}: {info.filename} claims more than the file can hold; save it without compression"
        )
    with archive.open(info) as file:
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, fortran, dtype = header[np.lib.format.read_magic(file)](file)
        if dtype.hasobject or dtype.kind not in kinds:
            raise DataError(
                f"{path}: {info.filename} holds {dtype}, which is not read; save plain numbers"
            )
        wanted = math.prod(shape) * dtype.itemsize
        data = file.read(max(0, min(wanted, info.file_size)))
        if len(data) != wanted or file.read(
            1
        ):  # reading to the end also checks the archive's own sum
            raise DataError(
                f"{path}: {info.filename} is shorter or longer than its header says; save it again"
            )
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def check_folder(path: Path) -> None:
    """Refuse a folder of class folders in which a record could be lost, or could count twice.

    Refused are links (also hard links to one file), class folders whose names differ only in case
    or in leading zeros, files of a class whose names differ only in case, and pictures that lie
    beside the class folders. The contents of the files are not read.

    Args:
        path: The folder.

    Raises:
        DataError: One line that names what is wrong, and the mend.
    """
    seen: dict[tuple[int, int], Path] = {}
    there = list_folder(path)
    for each in there:
        _refuse_link(each)
    folders = [each for each in there if each.is_dir()]
    if folders and (loose := [each for each in there if _is_picture(each)]):
        raise DataError(
            f"{loose[0]}: a picture beside the class folders, of no class: move it into one, or away"
        )
    mend = "could be one class to another file system or tool: rename one, or merge them"
    _refuse_same_names(
        folders,
        _class_key,
        f"these two class folders differ only in case or leading zeros, and {mend}",
    )
    for folder in folders:
        files = [each for each in list_folder(folder) if _is_picture(each)]
        for file in files:
            _refuse_link(file)
            facts = file.stat()
            if facts.st_nlink > 1 and file.is_file():
                first = seen.setdefault((facts.st_dev, facts.st_ino), file)
                if first != file:
                    raise DataError(
                        f"{file}: a hard link to {first}, so one record would count twice: remove one of them"
                    )
        _refuse_same_names(
            files,
            _case_key,
            "these two names differ only in case: rename one, or remove it if it is a copy",
        )


def list_folder(folder: Path) -> list[Path]:
    """The entries of a folder in the order of their names, without hidden ones."""
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be listed ({error.strerror}): check its permissions"
        ) from None


def open_readable(file: Path) -> IO[bytes]:
    """Open a file for reading, or refuse it by name."""
    try:
        return open(file, "rb")
    except OSError as error:
        raise DataError(
            f"{file}: cannot be opened ({error.strerror}): check its permissions, or remove it"
        ) from None


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise DataError(
            f"{path}: a link, not a plain file or folder; links are not followed: put a copy there, or remove it"
        )


def _refuse_same_names(paths: Sequence[Path], key: Callable[[str], str], text: str) -> None:
    """Refuse the first two paths whose names have the same key."""
    known: dict[str, Path] = {}
    for path in paths:
        first = known.setdefault(key(path.name), path)
        if first != path:
            raise DataError(f"{first} and {path.name}: {text}")


def _case_key(name: str) -> str:
    """What two names share that a file system without case, or with another Unicode form, takes for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _class_key(name: str) -> str:
    """The same for class folders, of which numbers are known by their value: 01 is 1."""
    return str(int(name)) if name.isdecimal() else _case_key(name)


def read_folder(path: Path, resize: int | None = None) -> Arrays:
    """A folder with one folder of PNG or JPEG images per class; class names are the folder names in order, of numbers in theirs."""
    check_folder(path)
    classes = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")]
    if not classes:
        raise DataError(
            f"{path}: no class folders in it; put the images of each class into a folder of their own"
        )
    numbered = all(each.name.isdecimal() for each in classes)
    classes.sort(
        key=lambda each: (int(each.name) if numbered else 0, each.name)
    )  # 10 comes after 9
    images, labels, peaks = [], [], []  # type: tuple[list[np.ndarray], list[int], list[int]]
    for label, folder in enumerate(classes):
        there = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
        files = [each for each in there if each.suffix.lower() in PICTURES]
        rest = [each for each in there if each.suffix.lower() not in PICTURES]
        if other := [each for each in rest if each.is_dir() or each.suffix.lower() not in BESIDE]:
            raise DataError(
                f"{other[0]}: a class folder holds PNG and JPEG images, and nothing is left out unsaid: convert it, or move it away"
            )
        if not files:
            raise DataError(f"{folder}: this class has no PNG or JPEG images")
        for file in files:
            if not file.is_file() or path.resolve() not in file.resolve().parents:
                raise DataError(
                    f"{file}: not a plain file inside the data folder (links that leave it are not followed); remove it"
                )
            with open_readable(file) as stream:
                images.append(decode(stream, file, resize, peaks))
            labels.append(label)
    return Arrays(
        stack(images, path, peaks), np.array(labels), tuple(each.name for each in classes)
    )


def read_parquet(
    path: Path,
    label: str = "label",
    where: tuple[str, Any] | None = None,
    resize: int | None = None,
) -> Arrays:
    """Encoded images in a column ``image`` (bytes, or a struct with ``bytes``) and a whole-number label column."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path}: reading parquet needs an extra: pip install 'privot[parquet]'"
        ) from None
    images: list[np.ndarray] = []
    labels: list[int] = []
    peaks: list[int] = []
    with (
        refusing(DataError, f"{path}: cannot be read as a parquet of images; is it whole?"),
        parquet.ParquetFile(path) as file,
    ):
        columns = ["image", label, *([where[0]] if where else [])]
        if missing := [each for each in columns if each not in file.schema_arrow.names]:
            hint = "; name the labels' column with --label" if missing[0] == label else ""
            raise DataError(
                f"{path}: no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)[:200]}{hint}"
            )
        for batch in file.iter_batches(1024, columns=columns):
            for row in batch.to_pylist():
                if where is None or row[where[0]] == where[1]:
                    raw = row["image"]["bytes"] if isinstance(row["image"], dict) else row["image"]
                    if not isinstance(raw, bytes):  # a text would be taken for the name of a file
                        raise DataError(
                            f"{path} row {len(images)}: image holds {type(raw).__name__}; encoded images (bytes) are needed"
                        )
                    images.append(decode(raw, f"{path} row {len(images)}", resize, peaks))
                    labels.append(row[label])
    return Arrays(stack(images, path, peaks), np.array(labels))


def decode(
    source: Any, name: Any, resize: int | None = None, peaks: list[int] | None = None
) -> np.ndarray:
    """One PNG or JPEG as uint8 [channels, height, width]; its size is checked before it is decoded.

    The largest of these of an image that had 16 bits is added to ``peaks``.
    """
    with refusing(DataError, f"{name}: cannot be read as PNG or JPEG; is it whole?"):
        with Image.open(
            io.BytesIO(source) if isinstance(source, bytes) else source, formats=("PNG", "JPEG")
        ) as image:
            if max(image.size) > LARGEST:
                raise DataError(
                    f"{name}: {image.size[0]}x{image.size[1]} pixels; the limit is {LARGEST} a side"
                )
            wide = "16B" in str(image.tile)  # 16 bits, of which Pillow takes the upper 8
            deep = image.mode.startswith("I")  # but not of grey ones, which it would clip
            grey = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if deep else image
            plain = grey.convert("L" if grey.mode in ("1", "L", "LA") else "RGB")
            if wide and peaks is not None:
                peaks.append(int(np.asarray(plain).max()))
            pixels = np.asarray(
                plain.resize((resize, resize), Image.Resampling.BILINEAR) if resize else plain
            )
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def stack(images: list[np.ndarray], name: Any, peaks: list[int]) -> np.ndarray:
    """Images of one shape as one array; ``peaks`` are the largest values of those that had 16 bits."""
    if 0 < len(images) == len(peaks) and max(peaks) < SCANNED:
        few = f"images of 16 bits whose values all lie below {SCANNED << 8} would be nearly black"
        raise DataError(f"{name}: {few}: multiply all by one factor, such as 16")
    shapes = {each.shape for each in images}
    if not images:
        raise DataError(f"{name}: there are no images in it")
    if len(shapes) != 1:
        mend = (
            "some are grey and some in colour: convert all to one"
            if len({each[1:] for each in shapes}) == 1
            else "give one size with --resize"
        )
        raise DataError(
            f"{name}: images of {len(shapes)} different shapes, such as {sorted(shapes)[:2]}; {mend}"
        )
    return np.stack(images)


def channels_first(images: np.ndarray, name: Any) -> np.ndarray:
    """[count, height, width] or [count, height, width, channels] brought to [count, channels, height, width]."""
    if images.ndim not in (3, 4):
        raise DataError(
            f"{name}: images of shape {list(images.shape)}; [count, height, width] with or without channels is needed"
        )
    if images.ndim == 3:
        return images[:, None]
    return (
        images.transpose(0, 3, 1, 2)
        if images.shape[1] not in (1, 3) and images.shape[3] in (1, 3)
        else images
    )
