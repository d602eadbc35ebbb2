"""A folder of files that is written whole or not at all.

Only an earlier folder of the same kind is replaced. `privot.io` writes single files; this module
replaces all files of a folder in one step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from privot.errors import ReleaseError


@dataclass(frozen=True)
class FolderFormat:
    """What a folder of this program contains.

    Attributes:
        file_names: Names of all files that may be in it.
        marker_name: The JSON file whose key "privot" shows that this program wrote the folder.
    """

    file_names: frozenset[str]
    marker_name: str


def replace_directory(
    out: Path, files: Mapping[str, bytes], folder_format: FolderFormat, *, private: bool = False
) -> list[Path]:
    """Write files as a folder, in place of an earlier folder of the same format.

    Args:
        out: The folder.
        files: Name -> content.
        folder_format: What an earlier folder must contain.
        private: Whether only the user may read the folder, whatever the umask (modes 0700, 0600).

    Returns:
        The paths of the files.

    Raises:
        ReleaseError: The folder contains something else.
    """
    out = check_replaceable_directory(out, folder_format)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_sibling(out) as scratch:
        new = scratch / "new"
        old = scratch / "old"
        new.mkdir(0o700 if private else 0o777)
        for name, content in files.items():
            (new / name).touch(0o600 if private else 0o666)
            (new / name).write_bytes(content)
        if out.exists():
            out.replace(old)
        try:
            new.replace(out)
        except OSError:
            if old.exists():
                old.replace(out)
            raise
    return [out / name for name in files]


def remove_directory(out: Path, folder_format: FolderFormat) -> None:
    """Remove an earlier folder of this format in one step, if there is one.

    Raises:
        ReleaseError: The folder contains something else.
    """
    out = check_replaceable_directory(out, folder_format)
    if out.exists():
        with _temporary_sibling(out) as scratch:
            out.replace(scratch / "old")


def check_replaceable_directory(out: Path, folder_format: FolderFormat) -> Path:
    """Check that a folder may be written or replaced, and make its path absolute.

    Raises:
        ReleaseError: The folder contains something else.
    """
    out = Path(os.path.abspath(out))  # "." has no name
    if os.path.lexists(out) and not _matches_format(out, folder_format):
        raise ReleaseError(f"{out} contains other files. Choose another folder or remove it.")
    return out


@contextlib.contextmanager
def _temporary_sibling(out: Path) -> Iterator[Path]:
    """Create a folder with a new name next to ``out``, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix=".privot-", dir=out.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _matches_format(out: Path, folder_format: FolderFormat) -> bool:
    """Check that a folder is empty, or has only plain files of the format and its marker."""
    if out.is_symlink() or not out.is_dir():
        return False
    paths = list(out.iterdir())
    if not paths:
        return True
    if any(
        path.name not in folder_format.file_names or path.is_symlink() or not path.is_file()
        for path in paths
    ):
        return False
    try:
        return "privot" in json.loads((out / folder_format.marker_name).read_text())
    except (OSError, ValueError, RecursionError):
        return False
