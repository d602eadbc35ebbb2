"""Load any data set by name or path: records, or what clients privatized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from privot.data import load_dataset
from privot.data.dataset import Public, Sensitive
from privot.errors import SettingError
from privot.local.dataset import PrivatizedDataset, is_privatized

# Declarations whose option on the command line has another name.
OPTION_NAMES = {"num_classes": "classes", "num_clients": "clients", "label_column": "label"}


def load(
    source: str | Path, split: str = "train", **declared: Any
) -> Sensitive | Public | PrivatizedDataset:
    """Load a data set.

    >>> load("digits").spec.shape
    (1, 8, 8)

    Args:
        source: The name of a built-in data set; the path of records; or the path of a file, or
            folder of files, that ``privot privatize`` wrote.
        split: ``train`` or ``test``, of a built-in data set.
        declared: Declarations about records; see `privot.data.load_dataset`. Privatized files need
            none.

    Returns:
        The data set.

    Raises:
        DataError: If the data cannot be read or does not match the declarations.
        SettingError: If something is declared about a privatized file.
    """
    if not is_privatized(source):
        return load_dataset(source, split, **declared)
    for key, value in declared.items():
        is_default = value in (None, False) or (key, value) == ("label_column", "label")
        if not is_default:
            raise SettingError(
                f"{key}: a privatized file describes itself. "
                f"Leave --{OPTION_NAMES.get(key, key).replace('_', '-')} out."
            )
    return PrivatizedDataset.load(source)
