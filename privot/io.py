"""Where data sets and metric weights lie (a folder of the user or the system, or a verified download), and how files are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from privot.errors import DataError, ReleaseError


def folders() -> list[Path]:
    """Where files are looked for, in order."""
    named = os.environ.get("PRIVOT_DATA")
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return [*([Path(named)] if named else []), cache_home / "privot", Path("/usr/share/dataset")]


def home(what: str) -> Path:
    """Where files of this name belong, by hand or by download."""
    return folders()[0] / what


def find(*names: str) -> Path | None:
    """The first folder's file of this name."""
    places = (folder.joinpath(*names) for folder in folders())
    return next((place for place in places if place.exists()), None)


def vacant(out: Path) -> None:
    """Nothing is there yet, and something can be written: said before the work, not after it."""
    if os.path.lexists(out):
        raise ReleaseError(f"{out} is there already: name another folder, or remove it")
    writable(out)


def writable(out: Path) -> None:
    """A file or folder of this name can be made; nothing is, not even the folders on the way."""
    above = next(each for each in out.absolute().parents if os.path.lexists(each))
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ReleaseError(
            f"{out} cannot be written ({error.strerror or type(error).__name__}): name another place"
        ) from None


def put(path: Path, raw: bytes, mode: int = 0o666) -> None:
    """A file that is there whole or not at all, whatever happens meanwhile; what is there is on the disk."""
    part = path.with_name(
        f"{path.name}.{os.getpid()}.part"
    )  # a process whose run was killed may be at the same file
    with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
        stream.write(raw)
        stream.flush()  # or the disk is asked to keep what has not left this process
        os.fsync(stream.fileno())
    part.replace(path)


def fetch(what: str, url: str, wanted: dict[str, str]) -> Path:
    """Download files (name -> SHA-256) into the folder ``what``; a file with another digest is refused. Returns the last one's path."""
    import pooch

    folder = home(what)
    try:
        for name, digest in wanted.items():
            pooch.retrieve(url + name, known_hash=f"sha256:{digest}", fname=name, path=folder)
    except Exception as error:  # whatever the network does, the user needs one line
        raise DataError(
            f"{what}: the download failed ({type(error).__name__}); put the files into {folder} by hand"
        ) from None
    return folder / list(wanted)[-1]
