"""From a name or a path to a data set."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from privot.data.catalog import (
    describe_dataset,
    load_builtin,
    load_catalog,
    require_existing_path,
)
from privot.data.dataset import CHECK_CHUNK_SIZE, Public, Sensitive
from privot.data.images import DatasetArrays
from privot.data.readers import read_arrays
from privot.data.spec import MAX_IMAGE_SIDE, Spec
from privot.errors import DataError, SettingError


class Declarations(TypedDict, total=False):
    """What the data owner declares public about a data set; see `Spec` for what is not said here.

    Attributes:
        num_clients: The gate divides the records among so many clients, in a secret order. The
            writers of femnist are known.
        class_names: The classes in order, if their numbers are given by other data. A class folder
            gets the number of its name. Empty: the numbers are the names.
        public_size: Whether the number of records is public.
        public_classes: Whether the number of records of each class is public.
    """

    shape: tuple[int, int, int] | None
    num_classes: int | None
    num_clients: int | None
    class_names: tuple[str, ...] | None
    flip_invariant: bool | None
    public_size: bool
    public_classes: bool


def load_dataset(
    source: str | Path,
    split: str = "train",
    *,
    public: bool = False,
    label_column: str = "label",
    resize: int | None = None,
    repair: bool = False,
    download: bool = False,
    **declared: Unpack[Declarations],
) -> Sensitive | Public:
    """Read a built-in data set (``digits``, ``mnist``, ...), or a path.

    A path is an IDX file of images, an .npz, a .parquet or a folder of class folders. The shape and
    the number of classes become public; where they are declared, the records must agree.

    Args:
        source: The name or the path.
        split: ``train`` or ``test``, of a built-in data set.
        public: Whether anyone may read the records.
        label_column: The column of a .parquet that has the labels.
        resize: Height and width to which the encoded images of a path are resized.
        repair: Whether to repair records instead of refusing them; see `Sensitive`.
        download: Whether to download a built-in data set that is not there.
        **declared: See `Declarations`.

    Returns:
        The data set.

    Raises:
        DataError: If the records cannot be read, or do not fit what is declared.
        SettingError: If a declaration is not possible.

    >>> load_dataset("digits").spec.shape
    (1, 8, 8)
    """
    unknown_names = declared.keys() - Declarations.__annotations__.keys()
    if unknown_names:
        raise TypeError(f"load_dataset has no parameter {min(unknown_names)!r}")
    source = str(source)
    builtin_spec = _describe_builtin(source, split, declared)
    if resize is not None and (builtin_spec or not 1 <= resize <= MAX_IMAGE_SIDE):
        raise SettingError(
            f"resize={resize}: give 1 to {MAX_IMAGE_SIDE} pixels per side. Built-in data sets are "
            "not resized."
        )
    if builtin_spec:
        name = source if split == "train" else f"{source}/{split}"
        arrays = load_builtin(source, split, download)
    else:
        name = str(require_existing_path(source).resolve())
        arrays = read_arrays(Path(source), label_column=label_column, resize=resize)
        class_names = declared.get("class_names")
        arrays = align_class_names(arrays, class_names, declared.get("num_classes"), source)
    check_arrays(arrays, source, repair)
    try:
        spec = _complete_spec(arrays, builtin_spec, declared)
        dataset = (Public if public else Sensitive)(
            arrays.images,
            arrays.labels,
            spec,
            repair=repair,
            name=name,
            client_ids=None if declared.get("num_clients") else arrays.client_ids,
        )
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    _refuse_empty_classes(dataset, source)
    return dataset


def _describe_builtin(source: str, split: str, declared: Declarations) -> Spec | None:
    """Give the public facts of a built-in data set; None for a path.

    Args:
        source: The name or path.
        split: The split.
        declared: What is declared.

    Returns:
        The facts.
    """
    if source not in load_catalog():
        return None
    return describe_dataset(
        source,
        split,
        shape=declared.get("shape"),
        num_classes=declared.get("num_classes"),
        num_clients=declared.get("num_clients"),
    )


def _complete_spec(
    arrays: DatasetArrays, builtin_spec: Spec | None, declared: Declarations
) -> Spec:
    """Give the public facts of a data set that was read.

    Args:
        arrays: What was read.
        builtin_spec: The facts of a built-in data set.
        declared: What is declared.

    Returns:
        The facts.
    """
    num_classes = declared.get("num_classes")
    if num_classes is None:
        num_classes = len(arrays.class_names or ()) or int(arrays.labels.max()) + 1
    spec = builtin_spec or Spec(
        declared.get("shape") or arrays.images.shape[1:],
        num_classes,
        len(arrays.images) if declared.get("public_size") else None,
        class_names=arrays.class_names,
        flip_invariant=declared.get("flip_invariant"),
        num_clients=declared.get("num_clients"),
    )
    if not declared.get("public_classes"):
        return spec
    class_sizes = tuple(np.bincount(arrays.labels, minlength=spec.num_classes).tolist())
    return dataclasses.replace(spec, size=len(arrays.images), class_sizes=class_sizes)


def _refuse_empty_classes(dataset: Sensitive | Public, source: str) -> None:
    """Refuse a data set with a class that has no records."""
    spec = dataset.spec
    missing = np.flatnonzero(np.bincount(dataset._labels, minlength=spec.num_classes) == 0)
    if not len(missing):
        return
    if spec.class_names:
        raise DataError(f"{source}: class {spec.class_names[missing[0]]!r} has no records.")
    raise DataError(
        f"{source}: class {missing[0]} has no records. Number the classes from 0 without gaps "
        "(numpy.unique(labels, return_inverse=True)[1]), or leave out empty classes."
    )


def align_class_names(
    arrays: DatasetArrays,
    class_names: tuple[str, ...] | None,
    num_classes: int | None,
    source: str,
) -> DatasetArrays:
    """Number class folders by given names, not by their index among the folders that exist.

    Folders that are named 0, 1, 2, ... count as having no names.

    Args:
        arrays: What was read.
        class_names: The names in order; empty: the numbers are the names; None: none are given.
        num_classes: The declared number of classes.
        source: The path, for errors.

    Returns:
        The arrays with new labels and class names.

    Raises:
        DataError: If a folder has none of the names.
    """
    folder_names = arrays.class_names
    if not folder_names:
        return arrays
    are_numbers = all(name.isdecimal() for name in folder_names)
    are_consecutive = are_numbers and [int(name) for name in folder_names] == list(
        range(len(folder_names))
    )
    has_other_names = bool(class_names) and not any(name.isdecimal() for name in class_names or ())
    if class_names is None or (are_consecutive and has_other_names):
        return arrays._replace(class_names=None) if are_consecutive else arrays
    if not class_names:
        if not are_numbers:  # there is nothing to compare the names with
            return arrays
        class_names = tuple(map(str, range(num_classes or len(folder_names))))
        folder_names = tuple(str(int(name)) for name in folder_names)
    unknown = [name for name in folder_names if name not in class_names]
    if unknown:
        raise DataError(
            f"{source}: class {unknown[0]!r} is not one of the known classes: "
            f"{', '.join(class_names)[:200]}."
        )
    labels = np.array([class_names.index(name) for name in folder_names])[arrays.labels]
    names_are_numbers = class_names == tuple(map(str, range(len(class_names))))
    return arrays._replace(labels=labels, class_names=None if names_are_numbers else class_names)


def check_arrays(arrays: DatasetArrays, source: Any, repair: bool) -> None:
    """Refuse arrays that no declaration can fix.

    Args:
        arrays: What was read.
        source: The name or path, for errors.
        repair: Whether records are to be repaired.

    Raises:
        DataError: If labels are not integers, or if a repair would clip most images.
    """
    labels = arrays.labels
    if labels.size == 0:
        raise DataError(f"{source}: there are no labels in it.")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        advice = "Number the classes 0, 1, 2, ... (numpy.unique(labels, return_inverse=True)[1])."
        if labels.ndim == 2 and labels.shape[1] > 1:
            advice = "If each row has one number per class (one-hot), take labels.argmax(1)."
        elif labels.ndim == 2:
            advice = "Take the only column: labels[:, 0]."
        raise DataError(
            f"{source}: labels are {labels.dtype} {list(labels.shape)}, and one integer per image "
            f"is needed. {advice}"
        )
    if repair and not _is_mostly_in_range(arrays.images):
        raise DataError(
            f"{source}: most images go outside 0 to 1, so they are of another scale, and --repair "
            "would spoil them. Divide them by 255 if they go to 255, or save them as uint8."
        )


def _is_mostly_in_range(images: np.ndarray) -> bool:
    """Whether a repair would clip no more than half of the images."""
    num_clipped = 0
    for start in range(0, len(images) if images.dtype.kind == "f" else 0, CHECK_CHUNK_SIZE):
        chunk = images[start : start + CHECK_CHUNK_SIZE]
        is_outside = (chunk < 0) | (chunk > 1)
        num_clipped += int(is_outside.any(axis=tuple(range(1, chunk.ndim))).sum())
    return 2 * num_clipped <= len(images)
