"""Reading a folder that has one folder of images per class."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from privot.data.images import IMAGE_SUFFIXES, DatasetArrays, decode_image, stack_images
from privot.errors import DataError

# Files that describe images may be beside them.
IGNORED_SUFFIXES = (
    "",
    ".txt",
    ".md",
    ".csv",
    ".tsv",
    ".json",
    ".xml",
    ".yaml",
    ".yml",
    ".ini",
    ".db",
)


def read_folder(path: Path, resize: int | None = None) -> DatasetArrays:
    """Read a folder with one folder of PNG or JPEG images per class.

    Args:
        path: The folder.
        resize: Height and width to resize to; None: all images must have one size.

    Returns:
        Images, labels, and the names of the class folders in order; names that are numbers are in
        the order of their values.

    Raises:
        DataError: If a record could be lost or count twice, or an image cannot be read.
    """
    check_folder(path)
    classes = [
        entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    ]
    if not classes:
        raise DataError(
            f"{path}: no class folders in it. Put the images of each class into a folder of their "
            "own."
        )
    has_numbers = all(folder.name.isdecimal() for folder in classes)
    # 10 comes after 9.
    classes.sort(key=lambda folder: (int(folder.name) if has_numbers else 0, folder.name))
    images: list[np.ndarray] = []
    labels: list[int] = []
    peaks: list[int] = []
    for label, folder in enumerate(classes):
        for file in _list_class_images(folder):
            if not file.is_file() or path.resolve() not in file.resolve().parents:
                raise DataError(
                    f"{file}: not a plain file inside the data folder; links that leave it are not "
                    "followed. Remove it."
                )
            with open_readable(file) as stream:
                images.append(decode_image(stream, file, resize, peaks))
            labels.append(label)
    class_names = tuple(folder.name for folder in classes)
    return DatasetArrays(stack_images(images, path, peaks), np.array(labels), class_names)


def _list_class_images(folder: Path) -> list[Path]:
    """List the images of a class folder; refuse a folder that has none, or anything else."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    for entry in entries:
        suffix = entry.suffix.lower()
        if suffix not in IMAGE_SUFFIXES and (entry.is_dir() or suffix not in IGNORED_SUFFIXES):
            raise DataError(
                f"{entry}: a class folder holds PNG and JPEG images only, and nothing is left out "
                "silently. Convert it, or move it away."
            )
    files = [entry for entry in entries if _is_image_file(entry)]
    if not files:
        raise DataError(f"{folder}: this class has no PNG or JPEG images.")
    return files


def check_folder(path: Path) -> None:
    """Refuse a folder of class folders in which a record could be lost, or could count twice.

    Refused are links (also hard links to one file), class folders whose names differ only in case
    or in leading zeros, files of a class whose names differ only in case, and images beside the
    class folders. The contents of the files are not read.

    Args:
        path: The folder.

    Raises:
        DataError: One line that says what is wrong and how to fix it.
    """
    entries = list_folder(path)
    for entry in entries:
        _refuse_link(entry)
    folders = [entry for entry in entries if entry.is_dir()]
    loose_images = [entry for entry in entries if _is_image_file(entry)]
    if folders and loose_images:
        raise DataError(
            f"{loose_images[0]}: an image beside the class folders has no class. "
            "Move it into a class folder, or away."
        )
    _refuse_same_names(
        folders,
        _class_key,
        "these two class folders differ only in case or leading zeros, and could be one class to "
        "another file system or tool. Rename one, or merge them.",
    )
    first_files: dict[tuple[int, int], Path] = {}  # by device and inode
    for folder in folders:
        files = [entry for entry in list_folder(folder) if _is_image_file(entry)]
        for file in files:
            _refuse_link(file)
            _refuse_hard_link(file, first_files)
        _refuse_same_names(
            files,
            _case_key,
            "these two names differ only in case. Rename one, or remove it if it is a copy.",
        )


def list_folder(folder: Path) -> list[Path]:
    """List the entries of a folder by name, without hidden ones.

    Raises:
        DataError: If the folder cannot be listed.
    """
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be listed ({error.strerror}). Check its permissions."
        ) from None


def open_readable(file: Path) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        DataError: If it cannot be opened.
    """
    try:
        return open(file, "rb")
    except OSError as error:
        raise DataError(
            f"{file}: cannot be opened ({error.strerror}). Check its permissions, or remove it."
        ) from None


def _is_image_file(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise DataError(
            f"{path}: a link, not a plain file or folder; links are not followed. "
            "Put a copy there, or remove it."
        )


def _refuse_hard_link(file: Path, first_files: dict[tuple[int, int], Path]) -> None:
    """Refuse a file that is a second name of an earlier one; note it otherwise."""
    facts = file.stat()
    if facts.st_nlink > 1 and file.is_file():
        first = first_files.setdefault((facts.st_dev, facts.st_ino), file)
        if first != file:
            raise DataError(
                f"{file}: a hard link to {first}, so one record would count twice. "
                "Remove one of them."
            )


def _refuse_same_names(paths: Sequence[Path], key: Callable[[str], str], message: str) -> None:
    """Refuse the first two paths whose names have the same key.

    Args:
        paths: The paths.
        key: Maps a name to its key.
        message: What the error says after the two names.
    """
    first_paths: dict[str, Path] = {}
    for path in paths:
        first = first_paths.setdefault(key(path.name), path)
        if first != path:
            raise DataError(f"{first} and {path.name}: {message}")


def _case_key(name: str) -> str:
    """Give what equal names share on a file system without case, or with another Unicode form."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _class_key(name: str) -> str:
    """Give the same for class folders; numbers are equal by their value: 01 is 1."""
    return str(int(name)) if name.isdecimal() else _case_key(name)
