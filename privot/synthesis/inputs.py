"""Any box by name or path: records, sealed or open, or what clients privatized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from privot.data import load as records
from privot.data.dataset import Public, Sensitive
from privot.errors import SettingError
from privot.local.dataset import Privatized, is_privatized


def load(
    source: str | Path, split: str = "train", **declared: Any
) -> Sensitive | Public | Privatized:
    """Records (see `privot.data.load`), or a file or folder of files that ``privot privatize`` wrote, which need no declaration.

    >>> load("digits").spec.shape
    (1, 8, 8)
    """
    if not is_privatized(source):
        return records(source, split, **declared)
    if said := [
        key
        for key, value in declared.items()
        if value not in (None, False) and (key, value) != ("label", "label")
    ]:
        raise SettingError(
            f"{said[0]}: a privatized file says itself what it holds; leave --{said[0].replace('_', '-')} out"
        )
    return Privatized.load(source)
