"""The built-in data sets: where their files are, and what is publicly known about them."""

from __future__ import annotations

import difflib
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from privot.data.images import DatasetArrays
from privot.data.readers import labels_file_name, read_arrays
from privot.data.spec import Spec
from privot.errors import DataError, SettingError
from privot.io import default_data_folder, download_files, find_data_file

DIGITS_TEST_INTERVAL = 5  # every fifth record of the embedded digits is in the test split


@cache
def load_catalog() -> dict[str, Any]:
    """Load what ``catalogue.toml`` says of each built-in data set, by name."""
    return tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())


def describe_dataset(
    source: str,
    split: str = "train",
    *,
    shape: tuple[int, int, int] | None = None,
    num_classes: int | None = None,
    num_clients: int | None = None,
    size: int | None = None,
    class_sizes: tuple[int, ...] | None = None,
) -> Spec:
    """Give what is public about a data set, without reading a record of it.

    Args:
        source: The name of a built-in data set, or a path.
        split: ``train`` or ``test``, of a built-in data set.
        shape: The shape of an image. A path needs it.
        num_classes: The number of classes. A path needs it.
        num_clients: Clients that the records are divided among; see `load_dataset`.
        size: The number of records, if declared.
        class_sizes: The number of records of each class, if declared.

    Returns:
        The public facts.

    Raises:
        SettingError: If a declaration is missing, or contradicts a built-in data set.
        DataError: If the path does not exist.

    >>> describe_dataset("mnist").size
    60000
    """
    if class_sizes:
        size = size or sum(class_sizes)
        num_classes = len(class_sizes) if num_classes is None else num_classes
    entry = load_catalog().get(source)
    if entry:
        _check_declarations(source, split, shape, num_classes)
        split_entry = entry[split]
        present_file: dict[str, Any] = next(
            (file for file in split_entry.get("files", []) if find_data_file(source, file["path"])),
            {},
        )
        names = ("shape", "num_classes", "class_names", "flip_invariant")
        facts = {name: entry.get(name) for name in names}
        counts = {
            "size": size or present_file.get("size", split_entry["size"]),
            "class_sizes": class_sizes,
            "num_clients": num_clients or split_entry.get("num_clients"),
        }
        return Spec.from_json(facts | counts)
    require_existing_path(source)
    if shape is None or num_classes is None:
        raise SettingError(
            f"{source}: no record is read here, so declare --shape (such as 1x28x28) and --classes."
        )
    return Spec(shape, num_classes, size, class_sizes, num_clients=num_clients)


def _check_declarations(
    source: str, split: str, shape: tuple[int, int, int] | None, num_classes: int | None
) -> None:
    """Check that declarations do not contradict a built-in data set.

    Args:
        source: The name of the data set.
        split: The split.
        shape: The declared shape, if any.
        num_classes: The declared number of classes, if any.
    """
    if split not in ("train", "test"):
        raise SettingError(f"split={split!r}: use train or test.")
    entry = load_catalog()[source]
    if shape not in (None, tuple(entry["shape"])) or num_classes not in (
        None,
        entry["num_classes"],
    ):
        pixels = "x".join(map(str, entry["shape"]))
        raise SettingError(
            f"{source} has {pixels} pixels and {entry['num_classes']} classes, not those declared. "
            "Declare these, or none."
        )


def require_existing_path(source: str) -> Path:
    """Check that a path exists.

    Raises:
        DataError: If it does not; the message suggests the nearest built-in data set.
    """
    # The functions of pathlib raise an error if a name is too long.
    if not (os.path.isfile(source) or os.path.isdir(source)):
        nearest = difflib.get_close_matches(source, load_catalog(), 1)
        hint = (
            f"; did you mean {nearest[0]!r}?"
            if nearest
            else f" and no built-in data set ({', '.join(load_catalog())})."
        )
        raise DataError(f"{source}: no such file or folder{hint}")
    return Path(source)


def load_builtin(source: str, split: str, download: bool) -> DatasetArrays:
    """Read a built-in data set from the data folders.

    Args:
        source: Its name.
        split: ``train`` or ``test``.
        download: Whether to download its files if they are not there.

    Returns:
        The arrays.

    Raises:
        DataError: If its files are not there.
    """
    if source == "digits":
        return _load_digits(split)
    entry = load_catalog()[source]
    files = entry[split]["files"]
    for file in files:
        path = find_data_file(source, file["path"])
        if not path and download and "sha256" in file:
            labels_name = labels_file_name(file["path"])
            digests = {labels_name: file["labels"], file["path"]: file["sha256"]}
            path = download_files(source, entry["url"], digests)
        if path:
            client_arrays = {
                name: file[name] for name in ("client_array", "client_mask_array") if name in file
            }
            arrays = read_arrays(
                path,
                file.get("label_column", "label"),
                tuple(file["row_filter"]) if "row_filter" in file else None,
                **client_arrays,
            )
            return arrays._replace(images=255 - arrays.images) if file.get("invert") else arrays
    hint = "Pass --download to fetch it, or put" if "sha256" in files[0] else "Put"
    raise DataError(
        f"{source}: not found. {hint} {files[0]['path']} into {default_data_folder(source)} "
        "(PRIVOT_DATA names the folder)."
    )


def _load_digits(split: str) -> DatasetArrays:
    """Load the 8x8 digits that scikit-learn contains."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    is_test = np.arange(len(labels)) % DIGITS_TEST_INTERVAL == DIGITS_TEST_INTERVAL - 1
    selected = is_test == (split == "test")
    return DatasetArrays(
        (images[selected] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[selected]
    )
