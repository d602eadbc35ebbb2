"""Files: where data sets and metric weights are found, and how files are written atomically."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from privot.errors import DataError, ReleaseError

PRIVATE_MODE = 0o600  # permissions of a file that only its owner may read


def list_data_folders() -> list[Path]:
    """List the folders that are searched for files, in the order of the search."""
    named_folder = os.environ.get("PRIVOT_DATA")
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return [
        *([Path(named_folder)] if named_folder else []),
        cache_home / "privot",
        Path("/usr/share/dataset"),
    ]


def default_data_folder(name: str) -> Path:
    """Give the folder for files of a data set or network, whether copied there or downloaded."""
    return list_data_folders()[0] / name


def find_data_file(*names: str) -> Path | None:
    """Find a file below the data folders.

    Args:
        *names: The path of the file below a data folder, one part each.

    Returns:
        Its path in the first folder that has it; None if no folder has it.
    """
    candidates = (folder.joinpath(*names) for folder in list_data_folders())
    return next((path for path in candidates if path.exists()), None)


def check_vacant(path: Path) -> None:
    """Check before a long computation that its output can be written.

    Raises:
        ReleaseError: If the path exists, or if nothing can be written there.
    """
    if os.path.lexists(path):
        raise ReleaseError(f"{path} already exists. Choose another path or remove it.")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Check that a file or folder can be created at a path. Creates nothing, not even parents.

    Raises:
        ReleaseError: If nothing can be created there.
    """
    nearest_parent = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    try:
        with tempfile.TemporaryFile(dir=nearest_parent):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ReleaseError(f"{path} cannot be written ({reason}). Choose another path.") from None


def write_atomically(
    path: Path, content: bytes, *, private: bool = False, fsync: bool = True
) -> None:
    """Write a file so that it has either its old content or its new content, never a part of it.

    Args:
        path: The file.
        content: All of its new content.
        private: Whether only the user who runs this process may read it.
        fsync: Whether to wait until the disk has stored the content, which then survives a power
            failure.
    """
    part = partial_path(path)
    _write_file(part, content, PRIVATE_MODE if private else 0o666, fsync)
    part.replace(path)


def _write_file(path: Path, content: bytes, mode: int, fsync: bool) -> None:
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
        stream.write(content)
        if fsync:
            stream.flush()  # fsync stores only what has left this process
            os.fsync(stream.fileno())


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Give a path for a new file that replaces another one when the block ends without an error.

    Args:
        path: The file to replace.

    Yields:
        A path in the same folder with the same suffix.
    """
    part = partial_path(path).with_suffix(f".part{path.suffix}")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def partial_path(path: Path) -> Path:
    """Name the file that holds the new content of another file until it is complete.

    The name has the number of this process: after a crash, the process of a killed run and that of
    a resumed run may write the same file.
    """
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def download_files(folder_name: str, url: str, sha256_by_name: dict[str, str]) -> Path:
    """Download files into a data folder and check their digests.

    Args:
        folder_name: The name of the folder below the first data folder.
        url: The address of the folder that has the files.
        sha256_by_name: The SHA-256 of each file by its name.

    Returns:
        The path of the last file.

    Raises:
        DataError: If a download fails or a file has another digest.
    """
    import pooch

    folder = default_data_folder(folder_name)
    try:
        for name, digest in sha256_by_name.items():
            pooch.retrieve(url + name, known_hash=f"sha256:{digest}", fname=name, path=folder)
    except Exception as error:  # a network fails in many ways; the user needs one line
        raise DataError(
            f"{folder_name}: the download failed ({type(error).__name__}). "
            f"Copy the files into {folder} by hand."
        ) from None
    return folder / list(sha256_by_name)[-1]


def to_jsonable(value: Any) -> Any:
    """Convert a value to what JSON gives back: lists for tuples, text for infinite numbers.

    >>> to_jsonable({"epsilon": float("inf")})
    {'epsilon': 'inf'}
    """
    if isinstance(value, dict):
        return {key: to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
