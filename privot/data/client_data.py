"""The data of one client of a federation, read from a file of its own."""

from __future__ import annotations

from pathlib import Path

from privot.data.catalog import require_existing_path
from privot.data.dataset import Sensitive
from privot.data.images import DatasetArrays
from privot.data.loading import align_class_names, check_arrays
from privot.data.readers import read_arrays
from privot.data.spec import Spec
from privot.errors import DataError, SettingError


def load_client_data(
    source: str | Path,
    *,
    shape: tuple[int, int, int] | None = None,
    num_classes: int | None = None,
    label_column: str = "label",
    resize: int | None = None,
    repair: bool = False,
    class_names: tuple[str, ...] | None = None,
) -> Sensitive:
    """Read a path as `load_dataset` does, for a client that need not have records of every class.

    privacy: shape and classes are declared, never read off the records. A server learns them from
    the terms that a client refuses, so they must be facts that the client chose to make public.

    Args:
        source: The path.
        shape: Channels, height and width of an image.
        num_classes: The number of classes.
        label_column: The column of a parquet file that has the labels.
        resize: Height and width to which encoded images are resized.
        repair: Whether to repair records instead of refusing them; see `Sensitive`.
        class_names: The classes in the order that the clients agreed on. A class folder gets the
            number of its name among them; folders may be missing.

    Returns:
        The records, sealed, of secret number.

    Raises:
        SettingError: If the shape or the classes are not declared.
        DataError: If the records do not fit what is declared.
    """
    path = require_existing_path(str(source))
    if shape is None or (num_classes is None and class_names is None):
        raise SettingError(
            f"{source}: declare --shape (such as 1x28x28) and --classes or --class-names, as all "
            "clients agreed. A server can learn them from the terms that are refused, so they are "
            "not read off the records."
        )
    if num_classes is None:
        num_classes = len(class_names or ())
    arrays = read_arrays(path, label_column=label_column, resize=resize)
    check_arrays(arrays, source, repair)
    arrays = _check_class_folders(arrays, class_names, num_classes, str(source))
    try:
        return Sensitive(
            arrays.images,
            arrays.labels,
            Spec(shape, num_classes),
            repair=repair,
            name=str(Path(source).resolve()),
        )
    except DataError as error:
        raise DataError(f"{source}: {error}") from None


def _check_class_folders(
    arrays: DatasetArrays, class_names: tuple[str, ...] | None, num_classes: int, source: str
) -> DatasetArrays:
    """Number class folders by the agreed names; refuse folders that cannot be numbered.

    Args:
        arrays: What was read.
        class_names: The agreed names, if any.
        num_classes: The declared number of classes.
        source: The path, for errors.

    Returns:
        The arrays with the agreed labels.
    """
    if class_names is not None:
        if arrays.class_names is None:
            raise DataError(
                f"{source}: no class folders, so --class-names does not apply to its labels. "
                "Declare --classes instead."
            )
        arrays = align_class_names(arrays, class_names, num_classes, source)
        arrays = arrays._replace(class_names=class_names)
    if arrays.class_names and len(arrays.class_names) != num_classes:
        # Folders are numbered in their order, so a missing one would shift the numbers of others.
        raise DataError(
            f"{source}: {len(arrays.class_names)} classes by their folders, and {num_classes} are "
            "declared. If some folders are missing, give --class-names."
        )
    return arrays
