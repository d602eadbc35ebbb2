"""A folder of files, written whole or not at all; only an earlier one of the same kind is replaced."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from privot.errors import ReleaseError


def replace(
    out: Path,
    files: Mapping[str, bytes],
    allowed: frozenset[str],
    mark: str,
    *,
    private: bool = False,
) -> list[Path]:
    """Write ``files`` (name -> content) as the folder ``out``; a folder that is there must hold ``mark`` and nothing but ``allowed``.

    ``private``: for the user alone, whatever the umask (modes 0700 and 0600).
    """
    out = check(out, allowed, mark)
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(
        tempfile.mkdtemp(prefix=".privot-", dir=out.parent)
    )  # a new name: nothing of a neighbour's is touched
    part = beside / "part"
    old = beside / "old"
    try:
        part.mkdir(0o700 if private else 0o777)
        for name, content in files.items():
            (part / name).touch(0o600 if private else 0o666)
            (part / name).write_bytes(content)
        if out.exists():
            out.replace(old)
        try:
            part.replace(out)
        except OSError:
            if old.exists():
                old.replace(out)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return [out / name for name in files]


def remove(out: Path, allowed: frozenset[str], mark: str) -> None:
    """Take away an earlier folder that `replace` would replace; it goes whole."""
    out = check(out, allowed, mark)
    if out.exists():
        beside = Path(tempfile.mkdtemp(prefix=".privot-", dir=out.parent))
        try:
            out.replace(beside / "old")
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def check(out: Path, allowed: frozenset[str], mark: str) -> Path:
    """The whole path of a folder that `replace` would write; raises where it would refuse."""
    out = Path(os.path.abspath(out))  # "." has no name of its own
    if os.path.lexists(out) and not _ours(out, allowed, mark):
        raise ReleaseError(f"{out} holds something else: name another folder, or remove it")
    return out


def _ours(out: Path, allowed: frozenset[str], mark: str) -> bool:
    """Whether all in it was written here before: known names, plain files, and a mark that says what they are."""
    if out.is_symlink() or not out.is_dir():
        return False
    found = list(out.iterdir())
    if not found:
        return True
    if any(each.name not in allowed or each.is_symlink() or not each.is_file() for each in found):
        return False
    try:
        return "privot" in json.loads((out / mark).read_text())
    except (OSError, ValueError, RecursionError):
        return False
